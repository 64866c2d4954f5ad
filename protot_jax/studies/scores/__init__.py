"""Compares a judge's scores of prototypes between models, such as of 16, 32 and 64 prototypes.

    iaj protot scores --report=runs/a --report=runs/b --workdir=runs/scores
    iaj protot scores --report=R=16=runs/r16 --report=R=32=runs/r32 --report=full=runs/full_rank \\
        --workdir=runs/scores

After Prototype Transformer, Figs. 2 and 19 to 24: histograms of disentanglement, coverage and
number of themes, side by side for numbers of prototypes, seeds, a model without low rank, and
LLaMA's heads. A report is a run, its folder `concepts`, or a summary there, with labels of a judge
(`iaj protot concepts --judge=...`), `NAME=` before it names the model in the comparison. The heads,
features and random texts of a report are groups of their own.

Every group is compared with the first: difference of the means with Welch's 95 % interval, and p
of a permutation of labels between both, corrected for the number of groups by Holm's method. Both
take the prototypes of a model for independent and hold for these models alone; other seeds may
differ by more. Labels of different judges are not compared.
"""

from lm_jax.study import Study
from protot_jax.studies.scores.results import ScoreComparison
from protot_jax.studies.scores.settings import ScoresConfig, smoke

STUDY = Study(
    command="protot scores",
    config=ScoresConfig,
    modes={"smoke": smoke},
    summary=ScoreComparison,
)
