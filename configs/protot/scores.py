"""A judge's scores of the prototypes of several models.

    iaj protot scores --config=protot/scores --report=runs/a --report=runs/b --workdir=runs/scores

Every setting is a flag of its own; the reports are the user's. Mode `:smoke` has few permutations.
"""

from ml_collections import ConfigDict

from protot_jax.studies.scores import STUDY


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.studies.scores.settings.ScoresConfig`."""
    return STUDY.settings(mode)
