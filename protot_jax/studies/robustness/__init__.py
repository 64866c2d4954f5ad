"""Robustness: how far predictions move when a sentence is perturbed, and what routing does to it.

Prototype Transformer, section 5.2 and appendix A.5. The command is `iaj protot robustness`.

    from protot_jax.studies import robustness

    robustness.jensen_shannon(logits_a, logits_b)     # nats, over the last axis, at most ln 2
    robustness.pmr(js_base, js_clamped)               # mean of ratios, ratio of means, median
"""

from protot_jax.studies.robustness.alignment import Alignment, align
from protot_jax.studies.robustness.divergence import (
    Agreement,
    agreement,
    arithmetic_geometric,
    jensen_shannon,
)
from protot_jax.studies.robustness.lists import WordNet
from protot_jax.studies.robustness.mediation import FLOOR, PMR, pmr
from protot_jax.studies.robustness.perturb import Perturbation, slices

__all__ = [
    "FLOOR",
    "PMR",
    "Agreement",
    "Alignment",
    "Perturbation",
    "WordNet",
    "agreement",
    "align",
    "arithmetic_geometric",
    "jensen_shannon",
    "pmr",
    "slices",
]
