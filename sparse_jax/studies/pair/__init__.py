"""Trains a dense model, and from it a sparse one and a control, all on the same kind of text.

    iaj sparse pair --config=sparse/pair --workdir=runs/pair
    iaj sparse pair --config=sparse/pair:quickstart --workdir=runs/pair_quickstart

1. Two texts are written: introductions of Wikipedia articles and prompts of the circuit tasks.
2. The dense model is trained on one of them until its held-out loss has reached a plateau: else
   post-training would improve it beside making it sparse, and "equal loss" would mean nothing.
3. The control and the sparse models are trained from it on the other text (`iaj sparse posttrain`).
4. All of them answer prompts of the tasks that no text has.

`run.py` lists the files of the work folder. The same command resumes a killed run, which ends with
the same parameters.
"""

from lm_jax.study import Study
from sparse_jax.studies.pair.results import PairSummary
from sparse_jax.studies.pair.settings import PairConfig, quickstart, small, smoke

STUDY = Study(
    command="sparse pair",
    config=PairConfig,
    modes={"small": small, "quickstart": quickstart, "smoke": smoke},
    summary=PairSummary,
    inputs="run:inputs",
    run="run:train_all",
    report="report:build",
)
