"""Finds circuits of dense and sparse models: heads and token edges that explain a task.

    iaj sparse circuits --dense=smollm2 --task=ioi
    iaj sparse circuits --dense=path/to/folder --task=mine.jsonl
    iaj sparse circuits --pair=runs/pair --task=copy,docstring
    iaj sparse circuits --dense=smollm2 --task=ioi --patch=resid_pre,attn_out,mlp_out
    iaj sparse circuits --dense=smollm2 --control=runs/sparse/seed_234/control/model \\
        --sparse="$(echo runs/sparse/seed_234/target_*/model)" --task=ioi,copy \\
        --workdir=runs/circuits --config.ablations="('counterfactual','zero')"

After section 4.2 of "Sparse Attention Post-Training". Only --dense is required. A task is a name
(copy, ioi, ioi_long, greater_than, docstring and others) or a .jsonl file with one object per line:

    {"clean": "...", "corrupt": "...", "answers": [" yes"], "wrong_answers": [" no"]}

A row of MIB's data sets of multiple choice is such an object, too. Both prompts must have as many
tokens, and every continuation is written with its leading space. One of several tokens is measured
by its log-probability as a whole, and a wrong one as far as the token with which it leaves the
right one. A clean prompt may come again with another corrupt one. --pair names a folder of `iaj
sparse pair`: it sets all three models, and leaves out the prompts of their training text. `run.py`
lists the files of the work folder. A line of progress names each part that is measured; the same
command resumes a stopped or killed study after the last part that was stored, and ends with the
same numbers.
"""

from lm_jax.study import Study
from sparse_jax.studies.circuits.results import CircuitSummary
from sparse_jax.studies.circuits.settings import CircuitConfig, quickstart, smoke

STUDY = Study(
    command="sparse circuits",
    config=CircuitConfig,
    modes={"smoke": smoke, "quickstart": quickstart},
    summary=CircuitSummary,
    inputs="inputs:open_inputs",
    run="run:measure",
    report="report:build",
)
