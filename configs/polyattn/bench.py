"""Decoding of SmolLM2-135M with a window, and with Hedgehog outside it, against softmax.

    iaj polyattn bench --config=polyattn/bench --workdir=runs/bench
    iaj polyattn bench --config=polyattn/bench --config.lengths="(1024,)" --workdir=runs/short

Mode: `:smoke`.
"""

from ml_collections import ConfigDict

from polyattn_jax.studies.bench import STUDY


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `polyattn_jax.studies.bench.settings.BenchConfig`."""
    return STUDY.settings(mode)
