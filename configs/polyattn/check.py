"""The check of one recipe in every head of a model, with 120 needle prompts of 256 tokens.

    iaj polyattn check --config=polyattn/check --model=smollm2 --recipe=relu:p=4,b=auto

Every setting is a flag too. Mode: `:smoke`, of two prompts.
"""

from ml_collections import ConfigDict

from polyattn_jax.studies.check import STUDY


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `polyattn_jax.studies.check.settings.CheckConfig`."""
    return STUDY.settings(mode)
