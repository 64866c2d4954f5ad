"""Multiple choice: SmolLM2 dense, and the sparse models that are named on the command line.

    python -m sparse_jax.choices --config=configs/sparse/choices.py --workdir=runs/choices \\
        --config.sparse="('runs/sparse/seed_234/target_3.7009/model',)"

The questions come from `python -m tools.fetch mc`.
"""

from ml_collections import ConfigDict

from sparse_jax.choices import experiment


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.choices.ChoicesConfig`."""
    return experiment(mode)
