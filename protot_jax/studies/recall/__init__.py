"""Trains mixers of equal memory to recall, and measures them by length and number of pairs.

    iaj protot recall --config=protot/recall:quickstart --workdir=runs/recall_quickstart
    iaj protot recall --config=protot/recall --workdir=runs/recall

MQAR, induction and a needle in noise; the Prototype Transformer's paper reports none. `run.py`
lists the files of the work folder. The same command resumes a suite that was killed, which ends
with the same numbers.
"""

from lm_jax.study import Study
from protot_jax.studies.recall.results import RecallSummary
from protot_jax.studies.recall.settings import RecallConfig, quickstart, small, smoke

STUDY = Study(
    command="protot recall",
    config=RecallConfig,
    modes={"smoke": smoke, "quickstart": quickstart, "small": small},
    summary=RecallSummary,
)
