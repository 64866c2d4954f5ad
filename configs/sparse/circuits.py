"""Circuits of a dense, a control and a sparse model on the same prompts.

    iaj sparse circuits --config=sparse/circuits --dense=smollm2 --task=ioi,copy
    iaj sparse circuits --config=sparse/circuits:quickstart --dense=smollm2 --task=mine.jsonl

`:quickstart` takes minutes on two cores, `:smoke` only tests that it runs.
"""

from ml_collections import ConfigDict

from sparse_jax.studies.circuits import STUDY


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.studies.circuits.settings.CircuitConfig`."""
    return STUDY.settings(mode)
