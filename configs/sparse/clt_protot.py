"""A cross-layer transcoder of a Prototype Transformer of the paper's size, on two CPU cores.

iaj sparse transcoder --config=sparse/clt_protot --config.model=runs/speeches --workdir=runs/clt

Six layers of width 256 with 1,536 features each, 10.6 M weights. The model is a run of `iaj protot
pretrain` (its first seed, or the folder of a seed), and so the command is `iaj`: the module alone
cannot read the run of another library.
"""

from ml_collections import ConfigDict

from sparse_jax.studies.transcoders import STUDY


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.studies.transcoders.settings.TranscoderTraining`."""
    return STUDY.settings(mode, features=1_536)
