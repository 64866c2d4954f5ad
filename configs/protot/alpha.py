"""Table 17 of the Prototype Transformer's paper: the factor on the mixer's output at the start.

iaj protot study --config=protot/alpha --workdir=runs/alpha
"""

from ml_collections import ConfigDict

from protot_jax.training.study_config import PAPER_PROTOCOL, Variant, study

RATES = (1e-3, 2e-3, 3e-3)


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.training.study_config.StudyConfig`."""
    variants = (
        Variant(f"alpha_{alpha}", (f"prototypes.alpha={alpha}",), RATES, perplexity)
        for alpha, perplexity in ((0.0, 99.2), (0.5, 97.9), (0.8, 97.0), (1.0, 97.1), (1.2, 98.7))
    )
    return study(
        mode,
        *variants,
        table="Table 17",
        **PAPER_PROTOCOL,
    )
