"""Trains the heads that a recipe replaces to match softmax, and measures what that repairs.

    iaj polyattn distill --config=polyattn/distill --workdir=runs/distill
    iaj polyattn distill --config=polyattn/distill --config.model=FOLDER \
        --config.recipe=performer:m=256 --config.hybrid=heads.json --workdir=runs/mine
    iaj polyattn distill --config=polyattn/distill --config.recipe=hedgehog \
        --config.logit_steps=300 --workdir=runs/logits

1. The corpus is tokenized with the model's tokenizer and split; b_auto is calibrated if the recipe
   asks for it.
2. Adapters of queries and keys, or the matrices of a feature map, are trained on the outputs of the
   frozen model's heads (`matching.py`), in `train/`, from the last checkpoint if there is one.
3. With `--config.logit_steps` all of that and adapters of q, k, v and o are then trained through
   the whole model on its distribution of the next token, in `train_logits/`.
4. On held-out windows, before and after: S of the rows of every head, the error of its output, and
   the loss of the frozen model and of the hybrid.
5. Does the safe share of a head before training predict what training repairs? A rank correlation
   over heads.

`run.py` lists the files of the work folder. The same command resumes a killed run, which ends with
the same parameters.
"""

from lm_jax.study import Study
from polyattn_jax.studies.distill.results import DistillSummary
from polyattn_jax.studies.distill.settings import DistillConfig, smoke

STUDY = Study(
    command="polyattn distill",
    config=DistillConfig,
    modes={"smoke": smoke},
    summary=DistillSummary,
    inputs="run:inputs",
    run="run:train_and_measure",
    report="report:build",
)
