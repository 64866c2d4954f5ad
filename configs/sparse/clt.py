"""The config `sparse/transcoder` under its earlier name.

iaj sparse transcoder --config=sparse/clt --config.model=runs/pair/dense/model --workdir=runs/clt
"""

from ml_collections import ConfigDict

from sparse_jax.studies.transcoders import STUDY


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.studies.transcoders.settings.TranscoderTraining`."""
    return STUDY.settings(mode)
