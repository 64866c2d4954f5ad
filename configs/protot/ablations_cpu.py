"""Tables 15 to 20 of the Prototype Transformer's paper in the protocol of `paper_cpu`, for a CPU.

    iaj protot study --config=protot/ablations_cpu:small --workdir=runs/ablations_small
    iaj protot study --config=protot/ablations_cpu:small --workdir=runs/ablations_small --only=none

One study, so that the default, which is a row of every one of those tables, is trained once. Each
row has the learning rate of its model in `paper_cpu` where the paper searched over three. The
paper's perplexity stands beside each row; those of Table 15 are of three epochs, the others of ten,
so compare ratios to the default of the same table.
"""

from ml_collections import ConfigDict

from protot_jax.training.study_config import Variant, cpu_study

ROUTING = "prototypes.shared_routing=false"
FLAT = "prototypes.first_temperature=1.0"
CONVOLUTION = "prototypes.conv_layers=0"
BASELINES = (
    ("llama", 1.6e-3, 84.8, 92.4),
    ("mamba", 3.8e-3, 91.1, 96.6),
    ("deltanet", 6.8e-3, 99.4, 103.5),
)


def prototypes(name: str, *changes: str, paper: float) -> Variant:
    """A ProtoT that differs from the default by `changes`."""
    return Variant(name, changes, (2e-3,), paper)


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.training.study_config.StudyConfig`."""
    dropouts = [
        Variant(f"{name}{suffix}", (f"model={name}", *changes), (rate,), paper)
        for name, rate, default, none in BASELINES
        for suffix, changes, paper in (("", (), default), ("_no_dropout", ("dropout=0.0",), none))
    ]
    return cpu_study(
        mode,
        prototypes("default", paper=97.1),
        # Table 15, whose default has 133.3.
        prototypes("no_shared_routing", ROUTING, paper=133.4),
        prototypes("temperature_1", FLAT, paper=133.6),
        prototypes("no_convolution", CONVOLUTION, paper=145.7),
        prototypes("none", ROUTING, FLAT, CONVOLUTION, paper=149.9),
        # Table 16.
        *(
            prototypes(f"taps_{taps}", f"prototypes.conv_kernel={taps}", paper=perplexity)
            for taps, perplexity in ((4, 98.3), (6, 96.9), (7, 97.5))
        ),
        # Table 17.
        *(
            prototypes(f"alpha_{alpha}", f"prototypes.alpha={alpha}", paper=perplexity)
            for alpha, perplexity in ((0.0, 99.2), (0.5, 97.9), (0.8, 97.0), (1.2, 98.7))
        ),
        # Table 18.
        prototypes("no_mass_normalisation", "prototypes.mass_normalisation=false", paper=101.8),
        prototypes("no_low_rank", "prototypes.low_rank=false", paper=97.3),
        # Table 19, whose default has 32; the default of `:small` has 16.
        prototypes("prototypes_16", "prototypes.num_prototypes=16", paper=98.5),
        prototypes("prototypes_32", "prototypes.num_prototypes=32", paper=97.1),
        prototypes("prototypes_64", "prototypes.num_prototypes=64", paper=97.3),
        # Table 20.
        prototypes("no_dropout", "dropout=0.0", paper=107.6),
        *dropouts,
        Variant(
            "llama_not_in_attention",
            ("model=llama", "attention_dropout=false"),
            (1.6e-3,),
            85.2,
        ),
        table="Tables 15 to 20",
    )
