"""Two-digit addition by a dense and a sparse model: minutes on two CPU cores.

    iaj sparse addition --config=sparse/addition --workdir=runs/addition
    iaj sparse addition --config=sparse/addition:bidirectional --workdir=runs/addition_bidirectional

Goal: both models answer at least 99 % of the held-out sums exactly. The sparse model of the mode
`bidirectional` starts from random weights, under a bound on its loss.
"""

from ml_collections import ConfigDict

from sparse_jax.studies.addition import STUDY


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.studies.addition.settings.AdditionConfig`."""
    return STUDY.settings(mode)
