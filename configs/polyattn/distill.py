"""Trains the heads of SmolLM2-135M under r^2 to match softmax, and measures what that repairs.

    iaj polyattn distill --config=polyattn/distill --workdir=runs/distill
    iaj polyattn distill --config=polyattn/distill --config.recipe=hedgehog --workdir=runs/hedgehog

Adapters on queries and keys of all heads, or the matrices of Hedgehog; `--config.hybrid=heads.json`
trains the heads that `iaj polyattn check --hybrid=heads.json` found. Mode: `:smoke`.
"""

from ml_collections import ConfigDict

from polyattn_jax.studies.distill import STUDY


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `polyattn_jax.studies.distill.settings.DistillConfig`."""
    return STUDY.settings(mode)
