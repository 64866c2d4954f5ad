"""Transcoders of a Boolean computation in two hops: a minute on two CPU cores.

iaj sparse two_hop --config=sparse/two_hop --workdir=runs/two_hop
"""

from ml_collections import ConfigDict

from sparse_jax.studies.two_hop import STUDY


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.studies.two_hop.settings.TwoHopConfig`."""
    return STUDY.settings(mode)
