"""The config `sparse/posttrain` under its earlier name, with the same modes.

iaj sparse posttrain --config=sparse/smollm2 --workdir=runs/sparse
"""

from ml_collections import ConfigDict

from lm_jax.console.config_files import load_config


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.studies.posttrain.settings.PosttrainConfig`."""
    return load_config(f"sparse/posttrain:{mode}")
