"""What every attention head of SmolLM2-135M does, on 64 texts of 64 tokens.

    iaj sparse heads --config=sparse/heads --workdir=runs/heads

Mode: `:smoke`.
"""

from ml_collections import ConfigDict

from sparse_jax.studies.heads import STUDY


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.studies.heads.settings.HeadsConfig`."""
    return STUDY.settings(mode)
