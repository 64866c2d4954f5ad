"""What the open edges of a sparse model lead to, by head: `kinds.parquet`.

An edge from query t to key j is of the first of these kinds that it fits:

    first       j = 0, the first token, a sink for what a head does not need
    self        j = t
    previous    j = t - 1
    repeated    the token at j is the one at t
    induction   the token at j - 1 is the one at t, so that j followed it before
    other       none of these
"""

import jax.numpy as jnp
import numpy as np
import pyarrow as pa

from lm_jax.parallel import sharding
from lm_jax.text.examples import Examples
from lm_jax.train.objective import ignore_index_batch
from sparse_jax.gates.model import SparseModel

KINDS = ("first", "self", "previous", "repeated", "induction", "other")
SCHEMA = pa.schema(
    {
        "layer": pa.int32(),
        "head": pa.int32(),
        "kind": pa.string(),
        "open": pa.int64(),
        "weight": pa.float64(),
    }
)
# Held-out windows that are looked at: tens of thousands of edges of a sparse model.
_WINDOWS = 16


def of_edges(tokens_T: np.ndarray, query_E: np.ndarray, key_E: np.ndarray) -> np.ndarray:
    """The index in `KINDS` of each edge of a row."""
    before_E = tokens_T[np.maximum(key_E - 1, 0)]
    fits = [
        key_E == 0,
        key_E == query_E,
        key_E == query_E - 1,
        tokens_T[key_E] == tokens_T[query_E],
        before_E == tokens_T[query_E],
    ]
    return np.select(fits, range(len(fits)), default=len(fits))


def edge_kinds(model: SparseModel, windows: Examples) -> pa.Table:
    """Open edges and their attention weight by layer, head and kind, over the first windows.

    Args:
      model: the sparse model.
      windows: the held-out windows.

    Returns:
      a table of `SCHEMA`, with a row for every kind of every head, where `weight` is the sum of the
      attention weights of its open edges.
    """
    shape = model.cfg.num_layers, model.cfg.num_heads, len(KINDS)
    count_LNK, weight_LNK = np.zeros(shape, np.int64), np.zeros(shape)
    for window in range(min(windows.count, _WINDOWS)):
        # Of one row, and the same on all processes.
        tokens_BS = windows.read(np.array([window]))["tokens"]
        batch = ignore_index_batch(jnp.asarray(tokens_BS))
        edges = model.open_edges(batch.input_BT, valid_BT=batch.input_mask_BT)
        columns = {name: edges[name].to_numpy() for name in edges.column_names}
        input_T = sharding.fetch(batch.input_BT)[0]
        kind_E = of_edges(input_T, columns["query"], columns["key"])
        place = columns["layer"], columns["head"], kind_E
        np.add.at(count_LNK, place, 1)
        np.add.at(weight_LNK, place, columns["weight"].astype(np.float64))
    layer, head, kind = np.indices(shape).reshape(3, -1)
    table = {
        "layer": layer,
        "head": head,
        "kind": np.take(KINDS, kind),
        "open": count_LNK.ravel(),
        "weight": weight_LNK.ravel(),
    }
    return pa.table(table).cast(SCHEMA)


def shares(kinds: pa.Table) -> dict[str, float]:
    """The share of each kind in all open edges; all are 0 where there is none."""
    kind, count = kinds["kind"].to_numpy(), kinds["open"].to_numpy()
    total = max(int(count.sum()), 1)
    return {name: int(count[kind == name].sum()) / total for name in KINDS}
