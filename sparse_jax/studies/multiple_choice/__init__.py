"""Multiple choice by a dense model, its controls and sparse versions, on the same questions.

    iaj sparse choices --config=sparse/choices --workdir=runs/multiple_choice
    iaj sparse choices --workdir=runs/multiple_choice \\
        --config.sparse="('$(echo runs/sparse/seed_234/target_*/model)',)" --config.limit=200

Sparse models answer with gates that are open where the logit is above 0. The same command resumes
a killed run, and scores nothing twice.
"""

from lm_jax.study import Study
from sparse_jax.studies.multiple_choice.results import ChoiceSummary
from sparse_jax.studies.multiple_choice.settings import MultipleChoiceConfig, smoke

STUDY = Study(
    command="sparse choices",
    config=MultipleChoiceConfig,
    modes={"smoke": smoke},
    summary=ChoiceSummary,
    inputs="run:inputs",
    run="run:measure",
    report="report:build",
)
