"""Measures whether transcoders merge two hops of a Boolean computation into one.

    iaj sparse two_hop --config=sparse/two_hop --workdir=runs/two_hop
    iaj sparse two_hop --config=sparse/two_hop:smoke --workdir=runs/two_hop_smoke

Cross-layer transcoders can write the result of a second hop from features of the first layer;
`numbers.py` defines how much they do. Transcoders of growing sparsity are trained on a model that
computes in two hops by construction (`sparse_jax.transcoders.two_hop_model`).
"""

from lm_jax.study import Study
from sparse_jax.studies.two_hop.results import TwoHopSummary
from sparse_jax.studies.two_hop.settings import TwoHopConfig, smoke

STUDY = Study(
    command="sparse two_hop",
    config=TwoHopConfig,
    modes={"smoke": smoke},
    summary=TwoHopSummary,
    inputs=None,
    run="run:measure",
    report="report:build",
)
