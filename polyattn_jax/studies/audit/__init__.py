"""Audits a pretrained language model: may its softmax be replaced by a polynomial map?

    iaj polyattn audit --config=polyattn/audit:quickstart --workdir=runs/quickstart
    iaj polyattn audit --config=polyattn/smollm2 --config.model=FOLDER --workdir=runs/mine

`polyattn_jax.audit.stages` lists the stages, `run.py` the files of the work folder.

The same command resumes a killed audit, which then ends with the same summary. Several processes
(`--coordinator`, `lm_jax.run.processes`) share out the prompts, each with a copy of the model on
devices of its own; process 0 writes the results, which are those of one process.
"""

from lm_jax.study import Study
from polyattn_jax.studies.audit.results import AuditSummary
from polyattn_jax.studies.audit.settings import AuditSettings, quickstart, smoke

STUDY = Study(
    command="polyattn audit",
    config=AuditSettings,
    modes={"quickstart": quickstart, "smoke": smoke},
    summary=AuditSummary,
    inputs="run:inputs",
    run="run:measure",
    report="report:build",
)
