"""Batch rows of an attention call in groups, one group after the other.

On a CPU a tile of scores that has left the cache is read from memory by every elementwise pass over
it. With short rows and many heads the batch alone makes tiles too large, and is cut here. On a mesh
that the compiler partitions the batch is the axis that it splits, and stays whole.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

# Elements of one tile of scores: some temporaries of that size stay in a CPU's cache.
CACHED_ELEMENTS = 1 << 18


def rows_within(B: int, elements: int) -> int:
    """The largest divisor of `B` of which so many batch rows have `CACHED_ELEMENTS`; at least 1.

    Args:
      B: batch rows.
      elements: elements in the smallest tile of one batch row.
    """
    most = max(CACHED_ELEMENTS // elements, 1)
    return max(rows for rows in range(1, B + 1) if B % rows == 0 and rows <= most)


def in_groups(run: Callable[[Any, jax.Array], Any], call: Any, rows: int) -> Any:
    """`run(call, 0)` of a call whose batch is cut into groups of `rows`.

    Args:
      run: function of the call of a group and the index of its first batch row; every array that it
        returns has the batch as first axis.
      call: a named tuple with `q_BTNH`, `k_BSKH`, `v_BSKH` and `visibility`; the other fields are
        those of every group.
      rows: a divisor of the batch.
    """
    B = call.q_BTNH.shape[0]
    mesh = jax.sharding.get_abstract_mesh()
    if rows == B or not (mesh.empty or mesh.are_all_axes_manual):
        return run(call, jnp.int32(0))
    visibility = call.visibility
    batched = (
        (call.q_BTNH, call.k_BSKH, call.v_BSKH),
        (visibility.start_B, visibility.query_segments_BT, visibility.key_segments_BS),
        jnp.arange(B, dtype=jnp.int32),
    )

    def of_group(group: Any) -> Any:
        (q_BTNH, k_BSKH, v_BSKH), (start_B, query_segments_BT, key_segments_BS), index_B = group
        own = dataclasses.replace(
            visibility,
            start_B=start_B,
            query_segments_BT=query_segments_BT,
            key_segments_BS=key_segments_BS,
        )
        arrays = {"q_BTNH": q_BTNH, "k_BSKH": k_BSKH, "v_BSKH": v_BSKH, "visibility": own}
        return run(call._replace(**arrays), index_B[0])

    cut = jax.tree.map(lambda x: x.reshape(B // rows, rows, *x.shape[1:]), batched)
    return jax.tree.map(lambda x: x.reshape(B, *x.shape[2:]), lax.map(of_group, cut))
