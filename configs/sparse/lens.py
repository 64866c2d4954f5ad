"""The Jacobian lens of SmolLM2-135M, from 200 texts of 128 tokens.

    iaj sparse lens --config=sparse/lens --workdir=runs/lens

Mode: `:smoke`.
"""

from ml_collections import ConfigDict

from sparse_jax.studies.lens import STUDY


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.studies.lens.settings.LensConfig`."""
    return STUDY.settings(mode)
