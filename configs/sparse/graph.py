"""Attribution graphs of prompts, with what heads and key-query pairs carry of each edge.

    iaj sparse graph --config=sparse/graph --model=runs/pair/dense/model \
        --transcoder=runs/clt/transcoder --prompt="When Mary and John went to the park" \
        --workdir=runs/graph

`:smoke` has few features and only tests that it runs.
"""

from ml_collections import ConfigDict

from sparse_jax.studies.graphs import STUDY


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.studies.graphs.settings.GraphConfig`."""
    return STUDY.settings(mode)
