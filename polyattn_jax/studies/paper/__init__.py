"""Puts every table and figure of the paper beside the same numbers of given models.

    iaj polyattn paper --models=smollm2,gemma3_270m --workdir=runs/paper
    iaj polyattn paper --models=smollm2 --config=polyattn/paper:quickstart --workdir=runs/quick

Each model is audited in a folder of its own (`iaj polyattn audit`), with the suites and recipes of
the paper; a model that is not here is said to be unavailable, and the others go on. `run.py` lists
the files of the work folder.

The same command resumes a killed run. `--resume=force` takes other models into the same folder, and
one that was not here before: finished audits are not done again.
"""

from lm_jax.study import Study
from polyattn_jax.studies.paper.results import PaperSummary
from polyattn_jax.studies.paper.settings import PaperConfig, quickstart, smoke

STUDY = Study(
    command="polyattn paper",
    config=PaperConfig,
    modes={"quickstart": quickstart, "smoke": smoke},
    summary=PaperSummary,
    inputs="run:inputs",
    run="run:measure",
    report="report:build",
)
