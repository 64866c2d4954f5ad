"""Table 18 of the Prototype Transformer's paper: mass normalisation and values of low rank.

iaj protot study --config=protot/mass_and_rank --workdir=runs/mass_and_rank
"""

from ml_collections import ConfigDict

from protot_jax.training.study_config import PAPER_PROTOCOL, Variant, study

RATES = (1e-3, 2e-3, 3e-3)


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.training.study_config.StudyConfig`."""
    return study(
        mode,
        Variant("default", (), RATES, 97.1),
        Variant("no_mass_normalisation", ("prototypes.mass_normalisation=false",), RATES, 101.8),
        Variant("no_low_rank", ("prototypes.low_rank=false",), RATES, 97.3),
        table="Table 18",
        **PAPER_PROTOCOL,
    )
