"""The effect of single prototypes on the words of a concept, after appendix A.3 of the paper.

    iaj protot intervene --config=protot/intervene --run=runs/speeches --concept=war
    iaj protot intervene --config=protot/intervene:smoke --run=runs/speeches --concept=war

The defaults: twenty random vectors for the prototype and five for every other one, the ranking by
512 rows of validation text. Mode `:smoke` has few draws, and other seeds are not searched.
"""

from ml_collections import ConfigDict

from protot_jax.studies.interventions import STUDY


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.studies.interventions.settings.InterventionConfig`."""
    return STUDY.settings(mode)
