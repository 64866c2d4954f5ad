"""A cross-layer transcoder of the pair's dense or sparse decoder, on two CPU cores.

    iaj sparse transcoder --config=sparse/clt_pair --config.model=runs/pair/dense/model \\
        --workdir=runs/clt_pair/dense
    iaj sparse transcoder --config=sparse/clt_pair --config.model=RUN/model \\
        --workdir=runs/clt_pair/sparse

Four layers of 2,048 features, 7.3 million parameters, on 2 million tokens: planned for 25 minutes
each, at 1,390 tokens per second (50 MFLOP per token at 70 GFLOP/s); it was not run. The control, a
per-layer transcoder of as many parameters, takes as long again; `--noconfig.control` omits it.
"""

from ml_collections import ConfigDict

from sparse_jax.transcoders.config import experiment


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.transcoders.config.TranscoderTraining`."""
    return experiment(
        mode,
        features=2_048,
        batch_size=16,
        steps=2_000,
        eval_every=200,
        scores_every=200,
        score_prompts=16,
        control=True,
    )
