"""Interventions on single prototypes: their effect on the probability of target words.

Prototype Transformer, appendix A.3. The command is `iaj protot intervene`.

    from protot_jax import load_run
    from protot_jax.studies import interventions

    model = load_run("runs/speeches")
    cases = interventions.shipped("war")
    measured = interventions.measure(model, cases, layer=2, prototype=5)
    measured.change("mask_write")[2, 5, 0]     # percent, one number per sentence
"""

from protot_jax.studies.interventions.effects import MODES, Measured, measure
from protot_jax.studies.interventions.gates import TextGates, over_text, sample
from protot_jax.studies.interventions.matching import Match, match, similarities
from protot_jax.studies.interventions.sentences import Cases, Sentence, locate, read, shipped

__all__ = [
    "MODES",
    "Cases",
    "Match",
    "Measured",
    "Sentence",
    "TextGates",
    "locate",
    "match",
    "measure",
    "over_text",
    "read",
    "sample",
    "shipped",
    "similarities",
]
