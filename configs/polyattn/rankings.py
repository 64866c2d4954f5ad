"""Which ranking of layers tells what a trained hybrid of SmolLM2-135M with Hedgehog loses.

    iaj polyattn rankings --config=polyattn/rankings --workdir=runs/rankings
    iaj polyattn rankings --config=polyattn/rankings --config.seeds="(0,)" --workdir=runs/one_seed

Three budgets, two seeds, eight statistics and five random sets. Mode: `:smoke`.
"""

from ml_collections import ConfigDict

from polyattn_jax.studies.rankings import STUDY


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `polyattn_jax.studies.rankings.settings.RankingsConfig`."""
    return STUDY.settings(mode)
