"""Multiple choice: SmolLM2 dense, and the sparse models that are named on the command line.

    python -m sparse_jax.multiple_choice --config=configs/sparse/multiple_choice.py \\
        --workdir=runs/multiple_choice \\
        --config.sparse="('runs/sparse/seed_234/target_3.7009/model',)"

The questions come from `python -m tools.fetch mc`.
"""

from ml_collections import ConfigDict

from sparse_jax.multiple_choice import experiment


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.multiple_choice.MultipleChoiceConfig`."""
    return experiment(mode)
