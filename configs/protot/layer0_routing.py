"""Table 15 of the Prototype Transformer's paper: what keeps the first layer's routing alive.

    iaj protot study --config=protot/layer0_routing --workdir=runs/routing

Three epochs, one seed, as in the paper. Its alpha, Gini and top-1 of the first layer, from all to
none: 0.672, 0.034, 0.079; 0.658, 0.064, 0.082; 0.653, 0.035, 0.088; 0.354, 0.097, 0.177; 0.261,
0.243, 0.373. Ours are printed below the table, and those of all layers are in each run's
evaluations.parquet.
"""

from ml_collections import ConfigDict

from protot_jax.training.study_config import PAPER_PROTOCOL, Variant, study

SHARED = "prototypes.shared_routing=false"
FLAT = "prototypes.first_temperature=1.0"
CONV = "prototypes.conv_layers=0"


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.training.study_config.StudyConfig`."""
    return study(
        mode,
        Variant("all", paper=133.3),
        Variant("no_shared_routing", (SHARED,), paper=133.4),
        Variant("temperature_1", (FLAT,), paper=133.6),
        Variant("no_convolution", (CONV,), paper=145.7),
        Variant("none", (SHARED, FLAT, CONV), paper=149.9),
        table="Table 15",
        epochs=3,
        seeds=(0,),
        **PAPER_PROTOCOL,
    )
