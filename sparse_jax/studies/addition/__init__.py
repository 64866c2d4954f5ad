"""Trains a dense and a sparse model to add, draws their attention graphs, and measures them.

    iaj sparse addition --config=sparse/addition --workdir=runs/addition
    iaj sparse addition --config=sparse/addition:smoke --workdir=runs/addition_smoke

The toy study of "Sparse Attention Post-Training" (Fig. 1, Fig. 9, Appendix A): how much of a simple
algorithm can be read off the open attention edges of a model?

`run.py` lists the files of the work folder. The same command resumes a killed study, which ends
with the same numbers.
"""

from lm_jax.study import Study
from sparse_jax.studies.addition.results import AdditionSummary
from sparse_jax.studies.addition.settings import AdditionConfig, bidirectional, smoke

STUDY = Study(
    command="sparse addition",
    config=AdditionConfig,
    modes={"bidirectional": bidirectional, "smoke": smoke},
    summary=AdditionSummary,
    inputs=None,
    run="run:measure_all",
    report="report:build",
)
