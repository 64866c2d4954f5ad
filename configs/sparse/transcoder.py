"""A cross-layer transcoder of a small decoder, with 2,048 features a layer, on two CPU cores.

    iaj sparse transcoder --config=sparse/transcoder --config.model=runs/pair/dense/model \\
        --workdir=runs/clt

Modes: `:quickstart` is a minute on a model of two layers, `:smoke` seconds.
"""

from ml_collections import ConfigDict

from sparse_jax.studies.transcoders import STUDY


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.studies.transcoders.settings.TranscoderTraining`."""
    return STUDY.settings(mode)
