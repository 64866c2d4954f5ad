"""Attribution graph of a prompt: `attribute(model, transcoder, tokens) -> Graph`.

One forward pass records what is frozen; one downward pass of cotangents for each chunk of targets
gives their rows (`linear.attribution_rows`). Positions, layers and features of targets are data:
prompts of one length compile once, but for the number of active features, which is rounded up.
"""

from collections.abc import Sequence
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa

from lm_jax.errors import UsageError
from lm_jax.model.layers import unembedding
from lm_jax.weights.load import Pretrained
from lm_jax.weights.runs import TrainedRun
from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.graphs import influence, linear
from sparse_jax.graphs.graph import BIAS, LOGIT, PRECISION, SCHEMA, Graph
from sparse_jax.graphs.influence import ERROR, FEATURE, TOKEN
from sparse_jax.graphs.linear import Targets
from sparse_jax.graphs.replacement import Replacement, check, check_ids, record
from sparse_jax.model import SparseModel
from sparse_jax.source_model import SourceModel
from sparse_jax.transcoders.transcoder import Transcoder

# Logit nodes: the most probable tokens until this share, at most so many (circuit-tracer).
SHARE, MOST_LOGITS = 0.95, 10
# Bytes for the arrays of one chunk of targets, and the most targets in it.
MEMORY, MOST_TARGETS = 256 * 2**20, 256


def attribute(
    model: CircuitModel | Pretrained | SparseModel | TrainedRun | str | os.PathLike[str],
    transcoder: Transcoder,
    tokens: Sequence[int] | np.ndarray,
    *,
    targets: Sequence[int] | None = None,
    max_features: int | None = None,
) -> Graph:
    """The attribution graph of a prompt's last logits (paper, section 4.3 and App. G).

    Everything is computed in float32 with the highest precision of matrix products, whatever the
    dtype of the parameters. All positions have nodes, the first too.

    Args:
      model: dense or sparse, or a trained run whose mixer can be frozen (`lm_jax.model.frozen`); or
        the folder of one, or the work folder of a training that exported one.
      transcoder: of the model's raw activations (`Transcoder.folded`).
      tokens: ids of the prompt, `[T]`.
      targets: ids of the logit nodes; None for the most probable tokens until .95 together, at
        most 10.
      max_features: how many features get a row, found greedily by influence; None for all. The
        others stay sources of those rows.

    Raises:
      UsageError: the model, transcoder and tokens do not go together, or no feature is active.
    """
    if isinstance(model, str | os.PathLike):
        model = SourceModel.load(os.fspath(model)).model
    if not isinstance(model, CircuitModel):
        model = CircuitModel.of(model)
    tokens = np.asarray(tokens)
    check(model, transcoder, tokens)
    if max_features is not None and max_features < 1:
        raise UsageError(f"max_features = {max_features} must be at least 1, or None for all")
    with jax.default_matmul_precision(PRECISION):
        replacement = _record(model, transcoder, jnp.asarray(tokens, jnp.int32))
        table = _ActiveFeatures(np.asarray(replacement.feature_LTF))
        ids = _logit_ids(np.asarray(replacement.probability_V), targets, model)
        directions_XD, demeaned_X = _directions(
            model.params, replacement, jnp.asarray(ids), model.cfg
        )
        rows = _RowFiller(replacement, transcoder, table)
        logits = linear.logit_targets(replacement, directions_XD)
        logit_rows, logit_bias = rows.of(logits)
        probabilities = np.asarray(replacement.probability_V)[ids]
        nodes = _nodes(table, tokens, ids, np.asarray(demeaned_X), *replacement.error_LTD.shape[:2])
        chosen, weights, biases = _feature_rows(
            rows, logit_rows, probabilities, nodes, max_features
        )
    first_logit = logit_rows.shape[1]
    pre_X = np.asarray(replacement.pre_LTF)[
        table.layer_X[chosen], table.position_X[chosen], table.feature_X[chosen]
    ]
    return Graph(
        nodes=nodes,
        adjacency=np.concatenate([weights, logit_rows]),
        bias=np.concatenate([biases, logit_bias]),
        row_nodes=np.concatenate([chosen, first_logit + np.arange(len(ids))]),
        readings=np.concatenate([pre_X, np.asarray(demeaned_X)]),
        probabilities=probabilities,
        directions=np.asarray(directions_XD),
        replacement=replacement,
        transcoder=transcoder,
    )


_record = jax.jit(record)


@functools.partial(jax.jit, static_argnums=3)
def _directions(params, replacement, ids_X, cfg):
    """Rows of the unembedding minus their mean, and logits minus theirs."""
    w_VD = unembedding(params, cfg).astype(jnp.float32)
    logits_V = replacement.logits_V
    return w_VD[ids_X] - w_VD.mean(0, keepdims=True), logits_V[ids_X] - logits_V.mean()


def _logit_ids(
    probability_V: np.ndarray, targets: Sequence[int] | None, model: CircuitModel
) -> np.ndarray:
    if targets is not None:
        ids = np.asarray(targets)
        if ids.ndim != 1 or not ids.size or len(np.unique(ids)) < len(ids):
            raise UsageError(f"targets: {list(targets)} must be different token ids, one at least")
        check_ids("targets", ids, model.cfg)
        return ids.astype(np.int32)
    order = np.argsort(-probability_V, kind="stable")[:MOST_LOGITS]
    count = int(np.searchsorted(np.cumsum(probability_V[order], dtype=np.float64), SHARE)) + 1
    return order[:count].astype(np.int32)


class _ActiveFeatures:
    """Active features of a prompt in order of layer, position and index, and by position.

    `layer_TZ`, `feature_TZ` and `activation_TZ` list those of each position, filled up with zeros;
    `slot_X` is the place in them of the features `[X]` of the graph.
    """

    def __init__(self, feature_LTF: np.ndarray) -> None:
        self.layer_X, self.position_X, self.feature_X = np.nonzero(feature_LTF)
        if not len(self.layer_X):
            raise UsageError(
                "transcoder: none of its features is active on these tokens; give a longer prompt "
                "or a transcoder with live features"
            )
        self.activation_X = feature_LTF[self.layer_X, self.position_X, self.feature_X]
        T = feature_LTF.shape[1]
        count_T = np.bincount(self.position_X, minlength=T)
        order = np.argsort(self.position_X, kind="stable")
        starts_T = np.concatenate([[0], np.cumsum(count_T)[:-1]])
        self.slot_X = np.empty(len(order), np.int64)
        self.slot_X[order] = np.arange(len(order)) - starts_T[self.position_X[order]]
        shape = (T, _rounded(int(count_T.max())))
        self.layer_TZ, self.feature_TZ = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        self.activation_TZ = np.zeros(shape, feature_LTF.dtype)
        at = self.position_X, self.slot_X
        self.layer_TZ[at], self.feature_TZ[at] = self.layer_X, self.feature_X
        self.activation_TZ[at] = self.activation_X


def _rounded(count: int) -> int:
    """`count` rounded up to one of four sizes per power of two, so that few sizes are compiled."""
    step = max(8, 1 << max(count.bit_length() - 3, 0))
    return -(-count // step) * step


class _RowFiller:
    """Rows of the adjacency matrix in the order of the graph's nodes, a chunk at a time."""

    def __init__(
        self, replacement: Replacement, transcoder: Transcoder, table: _ActiveFeatures
    ) -> None:
        self.replacement, self.transcoder, self.table = replacement, transcoder, table
        self.write_LTZD = _writes(transcoder, table.layer_TZ, table.feature_TZ, table.activation_TZ)
        L, T, D = replacement.error_LTD.shape
        width = replacement.layers.mixer.width
        floats = T * (6 * D + 4 * width + 2 * table.layer_TZ.shape[1] + L)
        within_memory = max(MEMORY // (4 * floats), 1)
        enough = 1 << (len(table.layer_X) - 1).bit_length()
        self.chunk = min(MOST_TARGETS, 1 << (within_memory.bit_length() - 1), enough)

    def of_features(self, index_X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows and biases of these features of the table."""
        # Targets of one layer together: a chunk begins at its highest.
        order = np.argsort(-self.table.layer_X[index_X], kind="stable")
        at = index_X[order]
        parts = []
        for start in range(0, len(at), self.chunk):
            some = at[start : start + self.chunk]
            padded = np.concatenate([some, np.full(self.chunk - len(some), some[0])])
            indices = (self.table.layer_X, self.table.position_X, self.table.feature_X)
            targets = _feature_targets(
                self.replacement,
                self.transcoder,
                *(x[padded].astype(np.int32) for x in indices),
            )
            parts.append([x[: len(some)] for x in self._rows(targets)])
        back = np.argsort(order)
        rows, biases = (np.concatenate(each)[back] for each in zip(*parts, strict=True))
        return rows, biases

    def of(self, targets: Targets) -> tuple[np.ndarray, np.ndarray]:
        """Rows and biases of a few targets, as many as logits may be."""
        count = len(targets.layer_X)
        missing = -count % MOST_LOGITS

        def padded(x: jax.Array, fill: int) -> jax.Array:
            return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1), constant_values=fill)

        filled = Targets(
            padded(targets.layer_X, -1),
            *(padded(x, 0) for x in (targets.position_X, targets.vector_XD, targets.constant_X)),
        )
        rows, biases = self._rows(filled)
        return rows[:count], biases[:count]

    def _rows(self, targets: Targets) -> tuple[np.ndarray, np.ndarray]:
        rows = _attribution_rows(self.replacement, self.write_LTZD, targets)
        X = len(rows.bias_X)
        features = np.asarray(rows.feature_XTZ)[:, self.table.position_X, self.table.slot_X]
        errors = np.asarray(rows.error_XLT).reshape(X, -1)
        row = np.concatenate([features, errors, np.asarray(rows.token_XT)], 1)
        return row, np.asarray(rows.bias_X)


_attribution_rows = jax.jit(linear.attribution_rows)
_feature_targets = jax.jit(linear.feature_targets)


@jax.jit
def _writes(transcoder, layer_TZ, feature_TZ, activation_TZ):
    flat = (x.reshape(-1) for x in (layer_TZ, feature_TZ, activation_TZ))
    write_LXD = linear.feature_writes(transcoder, *flat)
    return write_LXD.reshape(write_LXD.shape[0], *layer_TZ.shape, -1)


def _feature_rows(
    rows: _RowFiller,
    logit_rows: np.ndarray,
    probabilities: np.ndarray,
    nodes: pa.Table,
    max_features: int | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features that get a row, in the order of nodes, with rows and biases.

    With a maximum, those of most influence in the rows found so far are next, a chunk at a time.
    """
    total = len(rows.table.layer_X)
    if max_features is None or max_features >= total:
        every = np.arange(total)
        return every, *rows.of_features(every)
    kind_S = nodes["kind"].to_numpy(zero_copy_only=False)[: logit_rows.shape[1]]
    chosen = np.empty(0, np.int64)
    weights, biases = logit_rows[:0], np.empty(0, logit_rows.dtype)
    while len(chosen) < max_features:
        edges = influence.Edges(
            weight_RS=np.concatenate([logit_rows, weights]),
            node_R=np.concatenate([np.full(len(logit_rows), -1), chosen]),
            start_R=np.concatenate([probabilities, np.zeros(len(chosen))]),
            kind_S=kind_S,
            error_S=np.full(len(kind_S), -1),
        )
        of_features = influence.influence(edges)[:total]
        of_features[chosen] = -1.0
        count = min(rows.chunk, max_features - len(chosen))
        next_X = np.argsort(-of_features, kind="stable")[:count]
        new_weights, new_biases = rows.of_features(next_X)
        chosen = np.concatenate([chosen, next_X])
        weights = np.concatenate([weights, new_weights])
        biases = np.concatenate([biases, new_biases])
    order = np.argsort(chosen)
    return chosen[order], weights[order], biases[order]


def _nodes(
    table: _ActiveFeatures,
    tokens: np.ndarray,
    ids: np.ndarray,
    logits_X: np.ndarray,
    L: int,
    T: int,
) -> pa.Table:
    X, last = len(ids), T - 1
    parts = [
        (FEATURE, table.layer_X, table.position_X, table.feature_X, table.activation_X),
        (ERROR, np.repeat(np.arange(L), T), np.tile(np.arange(T), L), None, None),
        (TOKEN, None, np.arange(T), tokens, None),
        (LOGIT, np.full(X, L), np.full(X, last), ids, logits_X),
        (BIAS, None, None, None, None),
    ]
    tables = []
    for kind, *columns in parts:
        size = max((len(column) for column in columns if column is not None), default=1)
        arrays = [pa.array([kind] * size, pa.string())]
        for column, field in zip(columns, list(SCHEMA)[1:], strict=True):
            arrays.append(
                pa.nulls(size, field.type) if column is None else pa.array(column).cast(field.type)
            )
        tables.append(pa.Table.from_arrays(arrays, schema=SCHEMA))
    return pa.concat_tables(tables).combine_chunks()
