"""Newer relatives of the models of `paper_cpu` in the same protocol, on the same corpus.

    iaj protot study --config=protot/newer_cpu --workdir=runs/newer_cpu
    iaj protot study --config=protot/newer_cpu:small --workdir=runs/newer_small --only=raven

Gated DeltaNet, gated slot attention and Raven, which the paper does not compare with. No search has
chosen their learning rates: two are tried, around that of DeltaNet and from that of ProtoT up. Run
beyond its smoke mode for Gated DeltaNet at one rate alone (docs/protot/studies.md).
"""

from ml_collections import ConfigDict

from protot_jax.training.study_config import Variant, cpu_study

RATES = {
    "gated_deltanet": (3.4e-3, 6.8e-3),
    "gated_slots": (2e-3, 4e-3),
    "raven": (2e-3, 4e-3),
}


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.training.study_config.StudyConfig`."""
    variants = (Variant(name, (f"model={name}",), rates) for name, rates in RATES.items())
    return cpu_study(mode, *variants, table="Newer relatives")
