"""Table 16 of the Prototype Transformer's paper: taps of the local convolution.

iaj protot study --config=protot/kernel_size --workdir=runs/kernel_size
"""

from ml_collections import ConfigDict

from protot_jax.training.study_config import PAPER_PROTOCOL, Variant, study

RATES = (1e-3, 2e-3, 3e-3)


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.training.study_config.StudyConfig`."""
    variants = (
        Variant(f"taps_{taps}", (f"prototypes.conv_kernel={taps}",), RATES, perplexity)
        for taps, perplexity in ((4, 98.3), (5, 97.1), (6, 96.9), (7, 97.5))
    )
    return study(
        mode,
        *variants,
        table="Table 16",
        **PAPER_PROTOCOL,
    )
