"""Two-digit addition by a dense and a sparse model: minutes on two CPU cores.

    iaj sparse addition --config=sparse/addition --workdir=runs/addition
    iaj sparse addition --config=sparse/addition:bidirectional --workdir=runs/addition_bidirectional

Goal: both models answer at least 99 % of the held-out sums exactly. The mode `bidirectional`, whose
sparse model starts from random weights, does not reach it in its one run: 100 % dense, 10 % sparse.
"""

from ml_collections import ConfigDict

from sparse_jax.addition.config import experiment


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.addition.config.AdditionConfig`."""
    return experiment(mode)
