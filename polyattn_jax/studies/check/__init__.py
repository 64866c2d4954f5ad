"""May this recipe replace the softmax of this model? A verdict by the tasks that it must keep.

    iaj polyattn check --model=smollm2 --recipe=relu:p=4,b=auto
    iaj polyattn check --model=FOLDER --task=niah --task=prompts:mine.jsonl --workdir=runs/check
    iaj polyattn check --model=smollm2 --recipe=runs/distill/trained --task=mqar
    iaj polyattn check --model=smollm2 --text=FILE --diagnose
    iaj polyattn check --model=smollm2 --recipe=relu:p=2,b=auto --text=FILE --hybrid=heads.json

A negative screen, after "When Does Polynomial Attention Concentrate?", section 6, in the stages of
`polyattn_jax.audit.stages`:

1. calibrate b_auto, unless the recipe gives its own bias;
2. measure S_p on the rows that answer the first task and on induction prompts, where the recipe is
   a normalised power, or S_phi where it is a feature map, and S of softmax on the same rows;
   induction ranks the heads;
3. ask each task with softmax and with the recipe in every head, on the same prompts, and its
   control with softmax (`tasks.py`; the verdict of all is in `decisions.py`).

With `--text` the rows of the user's own texts are diagnosed too, and their language-modelling loss
is measured with softmax and with the recipe; `--diagnose` does the former alone (`diagnosis.py`),
and `--hybrid=FILE` looks for the heads that may have the recipe (`hybrid.py`).

The table goes to standard output, progress to standard error. The exit code is 0 for preserve, 10
for no-go and 11 for undecided (`polyattn_jax.audit.decision.verdict`). Without `--workdir` the
numbers are kept in a folder below `runs/check/`, which has the model, the recipe and a digest of
all settings and of your files in its name: the same command resumes a check that was killed, and
shows one that has finished.
"""

from lm_jax.study import Study
from polyattn_jax.studies.check.results import CheckSummary
from polyattn_jax.studies.check.settings import CheckConfig, smoke

STUDY = Study(
    command="polyattn check",
    config=CheckConfig,
    modes={"smoke": smoke},
    summary=CheckSummary,
    inputs="run:inputs",
    run="run:measure",
    report="report:build",
)
