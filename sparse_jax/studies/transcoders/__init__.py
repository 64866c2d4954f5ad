"""Trains a cross-layer transcoder of a dense or sparse model.

    iaj sparse transcoder --config=sparse/transcoder --config.model=runs/pair/dense/model \
        --workdir=runs/clt
    iaj sparse transcoder --config=sparse/transcoder --config.model=smollm2 --config.window=1 \
        --workdir=runs/per_layer

`run.py` lists the files of the work folder. The same command resumes a killed run, which ends with
the same parameters.
"""

from lm_jax.study import Study
from sparse_jax.studies.transcoders.results import TranscoderSummary
from sparse_jax.studies.transcoders.settings import TranscoderTraining, quickstart, smoke

STUDY = Study(
    command="sparse transcoder",
    config=TranscoderTraining,
    modes={"quickstart": quickstart, "smoke": smoke},
    summary=TranscoderSummary,
    inputs="run:inputs",
    run="run:train_and_measure",
    report="report:build",
)
