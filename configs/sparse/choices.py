"""Multiple choice by dense SmolLM2 and by the models of the command line.

    iaj sparse choices --config=sparse/choices \\
        --workdir=runs/multiple_choice \\
        --config.controls="('runs/sparse/seed_234/control/model',)" \\
        --config.sparse="('$(echo runs/sparse/seed_234/target_*/model)',)"

The questions come from `iaj fetch mc`.
"""

from ml_collections import ConfigDict

from sparse_jax.studies.multiple_choice import STUDY


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.studies.multiple_choice.settings.MultipleChoiceConfig`."""
    return STUDY.settings(mode)
