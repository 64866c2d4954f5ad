"""What the prototypes of a run respond to: a report with its defaults.

    iaj protot concepts --config=protot/concepts --run=runs/speeches

Every setting is a flag of its own; `--run` is the user's. Mode `:smoke` reads twelve texts.
"""

from ml_collections import ConfigDict

from protot_jax.studies.concepts import STUDY


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.studies.concepts.settings.ConceptConfig`."""
    return STUDY.settings(mode)
