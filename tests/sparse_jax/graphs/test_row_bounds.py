"""Rows and biases sum to readings within what rounding of float32 can do, from the weights on.

The whole computation is traced: the forward pass, what it freezes, cotangents, rows, sums. In
float64 sums and readings are equal; the bounds are of their difference in float32, with a term for
every operation (`kernels/iaj_kernels/rounding`), on any processor.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.model.layers import unembedding
from sparse_jax.graphs import linear
from sparse_jax.graphs.replacement import record
from sparse_jax.graphs.rows import ActiveFeatures
from tests.sparse_jax.circuits import oracle
from tests.sparse_jax.graphs.small_graphs import (
    EACH,
    active_writes,
    dense_features,
    small_graph,
    small_model,
    small_tokens,
    small_transcoder,
)


def sums_and_readings(model, transcoder, feature_LTF, ids):
    """Of features that are active in `feature_LTF`, then of the logits `ids`."""
    table = ActiveFeatures.of(feature_LTF)
    at = table.layer_X, table.position_X, table.feature_X
    replacement, own_LTF = record(model, transcoder, jnp.asarray(small_tokens(), jnp.int32))
    w_VD = unembedding(model.params, model.cfg)
    features = linear.feature_targets(replacement, transcoder, *map(jnp.asarray, at))
    logits = linear.logit_targets(replacement, w_VD[ids] - w_VD.mean(0, keepdims=True))
    targets = jax.tree.map(lambda *parts: jnp.concatenate(parts), features, logits)
    writes = active_writes(transcoder, table, own_LTF)
    rows = linear.attribution_rows(replacement, writes, targets)
    X = len(rows.bias_X)
    parts = rows.feature_XTZ.reshape(X, -1), rows.error_XLT.reshape(X, -1), rows.token_XT
    sum_X = jnp.concatenate(parts, 1).sum(1) + rows.bias_X
    logits_V = replacement.logits_V
    return sum_X, jnp.concatenate(
        [transcoder.pre_activations(replacement.input_LTD)[at], logits_V[ids] - logits_V.mean()]
    )


@pytest.mark.parametrize("each", EACH)
def test_sums_of_rows_are_readings_within_derived_bounds(each):
    graph = small_graph(*each)
    model, transcoder = small_model(*each[:2]), small_transcoder(each[2])
    feature_LTF = dense_features(graph)
    ids = np.asarray(graph.nodes.filter(graph.kinds == "logit")["feature"])

    def computed(model, transcoder):
        return sums_and_readings(model, transcoder, feature_LTF, ids)

    (sum_X, reading_X), bounds = oracle.expected(computed, model, transcoder)
    bound_X = bounds[0] + bounds[1]
    assert (np.abs(sum_X - reading_X) <= oracle.in_float64(bound_X)).all()
    got_X = graph.adjacency.astype(np.float64).sum(1) + graph.bias
    assert (np.abs(got_X - graph.readings) <= bound_X).all()
    assert (np.abs(got_X - sum_X) <= bounds[0]).all()
    # The bounds tell: a source of median size is far above them.
    size_X = np.abs(graph.adjacency).max(1)
    assert np.median(size_X / bound_X) > 100
