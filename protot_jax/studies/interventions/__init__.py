"""Intervenes on one prototype of a trained model and measures the effect on target words.

    iaj protot intervene --run=runs/speeches --concept=war
    iaj protot intervene --run=runs/speeches --concept=war,Congress,Treasury,Mexico
    iaj protot intervene --run=runs/speeches --sentences=mine.tsv --layer=2 --prototype=5

After Prototype Transformer, appendix A.3. Without `--layer` and `--prototype` the prototype is the
one that most specifically writes the words (`--words`, by default the targets of the sentences).
Every other prototype gets the same interventions as a control, and in other seeds of the run (or
in `--other_runs`) the matching prototype is tested as well. Without `--workdir` the results are in
a folder below `interventions` of the run; `run.py` lists its files. With several concepts at once,
each has a folder of its own in it, and the report compares their effects, with p corrected for
their number.

The concepts that come with sentences are women and girls, COVID, New Zealand, mental health (those
of the paper), war, Congress, Treasury, Mexico (for the messages of US presidents), and album,
species, season, County (for introductions of Wikipedia articles). A file of sentences is .jsonl or
.tsv, with concept, target and text.

In Python:

    from protot_jax import load_run
    from protot_jax.studies import interventions

    model = load_run("runs/speeches")
    cases = interventions.shipped("war")
    measured = interventions.measure(model, cases, layer=2, prototype=5)
    measured.change("mask_write")[2, 5, 0]     # percent, one number per sentence
"""

from lm_jax.study import Study
from protot_jax.studies.interventions.effects import MODES, Measured, measure
from protot_jax.studies.interventions.gates import TextGates, over_text, sample
from protot_jax.studies.interventions.matching import Match, match, similarities
from protot_jax.studies.interventions.results import Summary
from protot_jax.studies.interventions.sentences import Cases, Sentence, locate, read, shipped
from protot_jax.studies.interventions.settings import InterventionConfig, smoke

__all__ = [
    "MODES",
    "STUDY",
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

STUDY = Study(
    command="protot intervene",
    config=InterventionConfig,
    modes={"smoke": smoke},
    summary=Summary,
    run="run:perform",
)
