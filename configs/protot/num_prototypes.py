"""Table 19 of the Prototype Transformer's paper: how many prototypes.

iaj protot study --config=protot/num_prototypes --workdir=runs/num_prototypes
"""

from ml_collections import ConfigDict

from protot_jax.training.study_config import PAPER_PROTOCOL, Variant, study

RATES = (1e-3, 2e-3, 3e-3)


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.training.study_config.StudyConfig`."""
    variants = (
        Variant(f"prototypes_{count}", (f"prototypes.num_prototypes={count}",), RATES, perplexity)
        for count, perplexity in ((16, 98.5), (32, 97.1), (64, 97.3))
    )
    return study(
        mode,
        *variants,
        table="Table 19",
        **PAPER_PROTOCOL,
    )
