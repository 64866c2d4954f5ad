"""Gemma 3 270M with adapters: sliding windows in most layers, one key head for four queries.

    iaj fetch gemma3_270m --accept-terms
    iaj sparse posttrain --config=sparse/gemma3_270m --workdir=runs/gemma

Goal: at most 20 % of edges open, within 0.05 nats per token of the dense model. Pairs beyond a
window are no edges, and are not counted. Most of the time of a step goes to the vocabulary of
262,144. It was not run in full.
"""

from ml_collections import ConfigDict

from sparse_jax.studies.posttrain import STUDY
from sparse_jax.studies.posttrain.settings import SMALL_MODEL


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.studies.posttrain.settings.PosttrainConfig`."""
    return STUDY.settings(mode, **SMALL_MODEL, model="gemma3_270m")
