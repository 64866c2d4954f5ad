"""A cross-layer transcoder of a small decoder, with 2,048 features a layer, on two CPU cores.

iaj sparse transcoder --config=sparse/clt --config.model=runs/pair/dense/model --workdir=runs/clt
"""

from ml_collections import ConfigDict

from sparse_jax.studies.transcoders.config import experiment


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.studies.transcoders.config.TranscoderTraining`."""
    return experiment(mode)
