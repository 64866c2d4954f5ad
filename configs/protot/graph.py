"""A next word's logit attributed to prototypes.

    iaj protot graph --config=protot/graph --run=runs/speeches --prompt="the people of the united"

Every setting is a flag of its own; `--run` and `--prompt` are the user's. Mode `:smoke` attributes
one token.
"""

from ml_collections import ConfigDict

from protot_jax.studies.attribution import STUDY


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.studies.attribution.settings.AttributionConfig`."""
    return STUDY.settings(mode)
