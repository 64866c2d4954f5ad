"""A dense decoder of 7.4 M parameters, its sparse version and its control, on two CPU cores.

    iaj sparse pair --config=sparse/pair --workdir=runs/pair
    iaj sparse pair --config=sparse/pair:small --workdir=runs/pair_small

Introductions of Wikipedia articles and, as a third of the documents, prompts of the circuit tasks.
`:small` has three seeds and all ablations, with 0.5 M parameters and prompts as half of the
documents.
"""

from ml_collections import ConfigDict

from sparse_jax.studies.pair import STUDY


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.studies.pair.settings.PairConfig`."""
    return STUDY.settings(mode)
