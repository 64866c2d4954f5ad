"""The attends of the audit on `kernels`: no scores and no pattern of a whole sequence are formed.

Importing this registers, under the name "kernels", for `lm_jax.fused`:

    substitute.GlobalRowMap, PerHeadRowMap    iaj_kernels.row_map_attention
    probe.Probe                               the same for the output; the score rows of chosen
                                              queries are formed, and all reports read those
    head_probe.HeadProbe                      the same for the output; patterns are formed for a
                                              block of queries at a time
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from iaj_kernels.attention.visibility import Visibility
from iaj_kernels.row_map_attention.maps import SOFTMAX, RowMap
from lm_jax.errors import UsageError
from lm_jax.model.attention import (
    Fused,
    LayerAttend,
    PerLayer,
    by_row_map,
    fused,
    register_fused,
    softmax,
)
from lm_jax.model.layers import softcap
from lm_jax.model.precision import PRECISION
from polyattn_jax.recipes.field_maps import FieldMap
from polyattn_jax.recipes.head_probe import HeadProbe
from polyattn_jax.recipes.input_maps import InputMap
from polyattn_jax.recipes.probe import Probe, reports, score_rows
from polyattn_jax.recipes.row_maps import Map
from polyattn_jax.recipes.substitute import GlobalRowMap, PerHeadRowMap

NAME = "kernels"
_HEAD_PROBE_QUERIES = 64


def by_kernels(attend: Any) -> Any:
    """`attend`, to be computed by `kernels`.

    Raises:
      UsageError: for an attend that no kernel computes.
    """
    if isinstance(attend, Fused):
        attend = attend.attend
    own: Any = attend.fn if isinstance(attend, PerLayer) else attend
    if isinstance(own, GlobalRowMap | PerHeadRowMap):
        for row_map in own.maps if isinstance(own, PerHeadRowMap) else (own.map,):
            _of_kernels(row_map)
    return fused(attend, NAME)


def _of_kernels(row_map: Map) -> RowMap:
    if isinstance(row_map, FieldMap | InputMap):
        raise UsageError(f"attend: no kernel computes {row_map.kind}; pass the attend unfused")
    return row_map


def _global_row_map(
    attend: GlobalRowMap, q, k, v, *, visibility: Visibility, scale: float, cap: float | None
):
    kwargs = {"visibility": visibility, "scale": scale, "cap": cap}
    return by_row_map(_of_kernels(attend.map), q, k, v, bias=attend.bias, **kwargs).out_BTNH


def _per_head_row_map(
    attend: LayerAttend, q, k, v, *, visibility: Visibility, scale: float, cap: float | None
):
    data = attend.data
    if "valid_BT" in data:
        # Padding queries see nothing, so none of their rows counts as dead.
        of_query, of_key = visibility.query_segments_BT, visibility.key_segments_BS
        visibility = dataclasses.replace(
            visibility,
            query_segments_BT=jnp.where(data["valid_BT"], 0 if of_query is None else of_query, -1),
            key_segments_BS=jnp.zeros(k.shape[:2], jnp.int32) if of_key is None else of_key,
        )
    kwargs = {"visibility": visibility, "scale": scale, "cap": cap, "heads": data["heads_N"]}

    def branch(row_map: RowMap):
        def run(q, k, v, bias):
            return by_row_map(row_map, q, k, v, bias=bias, **kwargs)

        return run

    branches = [branch(row_map) for row_map in attend.fn.maps]
    result = jax.lax.switch(data["index"], branches, q, k, v, data["bias"])
    return result.out_BTNH, {"dead_rows_B": result.dead_rows_BN.sum(-1)}


def _probe(attend: Probe, q, k, v, *, visibility: Visibility, scale: float, cap: float | None):
    result = by_row_map(SOFTMAX, q, k, v, visibility=visibility, scale=scale, cap=cap)
    rows = jnp.arange(q.shape[0])[:, None]
    q_BQNH = q[rows, attend.queries_BQ]
    # S_p and its control, softmax's S, are compared row by row: both are of the same scores.
    scores_BNQS = _scores(attend.queries_BQ, q_BQNH, k, visibility, scale, cap)
    return result.out_BTNH, {
        "rows": score_rows(attend, scores_BNQS),
        **reports(attend, scores_BNQS, v),
    }


def _head_probe(
    attend: HeadProbe, q, k, v, *, visibility: Visibility, scale: float, cap: float | None
):
    result = by_row_map(SOFTMAX, q, k, v, visibility=visibility, scale=scale, cap=cap)
    B, T = q.shape[:2]
    block = min(_HEAD_PROBE_QUERIES, T)
    # The last block overlaps the one before it and does not count those queries again.
    firsts_I = np.minimum(np.arange(0, T, block), T - block).astype(np.int32)

    def one(first_and_new):
        first, new_Q = first_and_new
        queries_Q = first + jnp.arange(block, dtype=jnp.int32)
        queries_BQ = jnp.broadcast_to(queries_Q[None], (B, block))
        scores_BNQS = _scores(queries_BQ, q[:, queries_Q], k, visibility, scale, cap)
        return attend.sums(softmax(scores_BNQS), queries_Q, new_Q)

    new_IQ = firsts_I[:, None] + np.arange(block) >= np.arange(0, T, block)[:, None]
    sums_IBN = jax.lax.map(one, (jnp.asarray(firsts_I), jnp.asarray(new_IQ)))
    return result.out_BTNH, {name: x.sum(0) for name, x in sums_IBN.items()}


def _scores(queries_BQ, q_BQNH, k, visibility, scale, cap) -> jax.Array:
    """The masked score rows of the chosen queries, few enough to be formed."""
    B, Q, N, H = q_BQNH.shape
    S, K = k.shape[1:3]
    q_BQKGH = q_BQNH.reshape(B, Q, K, N // K, H)
    scores = jnp.einsum(
        "BQKGH,BSKH->BKGQS", q_BQKGH, k, precision=PRECISION, preferred_element_type=jnp.float32
    )
    scores_BNQS = softcap(scores.reshape(B, N, Q, S) * scale, cap)
    positions_BQ1 = (visibility.start_B[:, None] + queries_BQ)[:, :, None]
    keys_11S = jnp.arange(S, dtype=jnp.int32)[None, None, :]
    segments = ()
    if visibility.query_segments_BT is not None:
        of_query_BQ = jnp.take_along_axis(visibility.query_segments_BT, queries_BQ, 1)
        segments = (of_query_BQ[:, :, None], visibility.key_segments_BS[:, None])
    mask_BQS = visibility.tile(positions_BQ1, keys_11S, *segments)
    return jnp.where(mask_BQS[:, None], scores_BNQS, -jnp.inf)


register_fused(GlobalRowMap, NAME, _global_row_map)
register_fused(PerHeadRowMap, NAME, _per_head_row_map)
register_fused(Probe, NAME, _probe)
register_fused(HeadProbe, NAME, _head_probe)
