"""Open attention edges of a forward pass as a table, from the edge list of the attention kernel."""

import functools
from typing import Any

import jax
import numpy as np
import pyarrow as pa

from lm_jax.model.attention import PerLayer
from lm_jax.model.config import DecoderConfig
from lm_jax.model.decoder import forward
from lm_jax.model.precision import exact_jit
from lm_jax.parallel import sharding
from sparse_jax.gates.attend import EDGES, by_kernels, listing_edges

SCHEMA = pa.schema(
    [
        ("batch", pa.int32()),
        ("layer", pa.int32()),
        ("head", pa.int32()),
        ("query", pa.int32()),
        ("key", pa.int32()),
        ("weight", pa.float32()),
    ]
)


def open_edges(
    params: Any,
    tokens_BT: jax.Array,
    cfg: DecoderConfig,
    attend: PerLayer,
    *,
    valid_BT: jax.Array | None = None,
) -> pa.Table:
    """The open edges of gated attention, one row per edge.

    The first forward pass counts the edges of each layer and the second lists them, in lists of the
    next power of two, so that other tokens seldom compile again. Should rounding open more gates in
    the second program than in the first, the lists are doubled until they hold all edges.

    Args:
      params: parameters of the model.
      tokens_BT: ids.
      cfg: the model.
      attend: the gates, from `attend.gated`.
      valid_BT: false where a token is padding, as in the gates; None means none is.

    Returns:
      a table of `SCHEMA`, in order of row, layer, head, query and key. `query` and `key` are
      positions in the row, `head` a query head, and `weight` the attention weight that multiplies
      the value. Without the column `batch` where there is one row.
    """
    opened_LBN = sharding.fetch(_aux(params, tokens_BT, attend, valid_BT, cfg))["open_edges_BN"]
    largest = int(opened_LBN.sum((1, 2)).max())
    while True:
        capacity = 1 << (max(largest, 1) - 1).bit_length()
        listing = listing_edges(attend, capacity)
        aux = sharding.fetch(_aux(params, tokens_BT, listing, valid_BT, cfg))
        largest = int(aux[EDGES].count.max())
        if largest <= capacity:
            break
    edges, columns = aux[EDGES], SCHEMA.names
    parts = [
        {
            "layer": np.full(count, layer),
            **{
                name: np.asarray(getattr(edges, name))[layer, :count]
                for name in columns
                if name != "layer"
            },
        }
        for layer, count in enumerate(edges.count.tolist())
    ]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in columns}
    # Every list is in order already, so that only its layers have to be woven into the rows.
    order = np.argsort(joined["batch"], kind="stable")
    table = pa.table({name: values[order] for name, values in joined.items()}).cast(SCHEMA)
    return table if tokens_BT.shape[0] > 1 else table.drop_columns(["batch"])


@functools.partial(exact_jit, static_argnames="cfg")
def _aux(
    params: Any,
    tokens_BT: jax.Array,
    attend: PerLayer,
    valid_BT: jax.Array | None,
    cfg: DecoderConfig,
) -> Any:
    return forward(params, tokens_BT, cfg, attend=by_kernels(attend), valid_BT=valid_BT).aux
