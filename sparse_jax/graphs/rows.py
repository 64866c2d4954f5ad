"""Rows of an adjacency matrix, a chunk of targets at a time within a bound on memory.

Beside the chunk, what features write is stored for all layers where that is within the bound, too,
and is otherwise gathered for one layer at a time.
"""

from collections.abc import Iterator
import dataclasses
import os
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import UsageError
from lm_jax.model.precision import exact_jit
from sparse_jax.graphs import influence, linear
from sparse_jax.graphs.basis import Features, writes
from sparse_jax.graphs.linear import GatheredWrites, Targets, Writes, Written
from sparse_jax.graphs.replacement import Replacement

# Bytes for the arrays of one chunk of targets, and the most targets in it.
MEMORY, MOST_TARGETS = 256 * 2**20, 256
# On a CPU: floats of a chunk's cotangents that its caches hold, and so many targets at least, which
# read one pattern together: near the fastest on two cores at 16, 64 and 250 tokens.
_CACHED, _TOGETHER = 2**19, 32
# Each multiple of so many positions is a program of its own; of fewer, compiling takes longer than
# what is saved (`tools.bench.graphs`).
POSITIONS = 32
# A few targets are filled up to a multiple of this, so that few sizes are compiled.
_FEW = 10


class ActiveFeatures:
    """Active features of a prompt in order of layer, position and index, and by position.

    `layer_TZ`, `feature_TZ` and `activation_TZ` list those of each position, filled up with zeros;
    `slot_X` is the place in them of the features `[X]` of the graph.
    """

    def __init__(
        self,
        layer_X: np.ndarray,
        position_X: np.ndarray,
        feature_X: np.ndarray,
        activation_X: np.ndarray,
        positions: int,
    ) -> None:
        """Active features of a prompt of so many positions, in order."""
        self.layer_X, self.position_X, self.feature_X = layer_X, position_X, feature_X
        self.activation_X, T = activation_X, positions
        count_T = np.bincount(self.position_X, minlength=T)
        order = np.argsort(self.position_X, kind="stable")
        starts_T = np.concatenate([[0], np.cumsum(count_T)[:-1]])
        self.slot_X = np.empty(len(order), np.int64)
        self.slot_X[order] = np.arange(len(order)) - starts_T[self.position_X[order]]
        shape = (T, rounded(int(count_T.max())))
        self.layer_TZ, self.feature_TZ = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        self.activation_TZ = np.zeros(shape, activation_X.dtype)
        at = self.position_X, self.slot_X
        self.layer_TZ[at], self.feature_TZ[at] = self.layer_X, self.feature_X
        self.activation_TZ[at] = self.activation_X

    @classmethod
    def of(cls, feature_LTF: np.ndarray | jax.Array) -> "ActiveFeatures":
        """Those of all activations of a prompt that are not 0.

        Raises:
          UsageError: there are none.
        """
        feature_LTF = np.asarray(feature_LTF)
        layer_X, position_X, feature_X = np.nonzero(feature_LTF)
        if not len(layer_X):
            raise UsageError(
                "transcoder: none of its features is active on these tokens; give a longer prompt "
                "or a transcoder with live features"
            )
        activation_X = feature_LTF[layer_X, position_X, feature_X]
        return cls(layer_X, position_X, feature_X, activation_X, feature_LTF.shape[1])


def rounded(count: int) -> int:
    """`count` rounded up to one of four sizes per power of two, so that few sizes are compiled."""
    step = max(8, 1 << max(count.bit_length() - 3, 0))
    return -(-count // step) * step


def targets_at_once(replacement: Replacement, places: int, platform: str | None = None) -> int:
    """How many targets one downward pass takes within the bound on memory, a power of two.

    Args:
      replacement: the model, or its shapes.
      places: active features of a position, at most.
      platform: "cpu", "gpu" or "tpu"; None for that of this process.
    """
    L, T, D = replacement.error_LTD.shape
    floats = T * (6 * D + 4 * replacement.layers.mixer.width + 2 * places + L)
    within_memory = max(MEMORY // (4 * floats), 1)
    most = min(MOST_TARGETS, within_memory)
    if (platform or jax.default_backend()) == "cpu":
        most = min(most, max(_CACHED // (T * D), _TOGETHER))
    return 1 << (most.bit_length() - 1)


class RowFiller:
    """Rows of the adjacency matrix in the order of the graph's nodes, a chunk at a time.

    A chunk of features is computed with the positions up to its last, rounded up to a multiple of
    `positions`.
    """

    def __init__(
        self,
        replacement: Replacement,
        features: Features,
        table: ActiveFeatures,
        positions: int = POSITIONS,
    ) -> None:
        self.replacement, self.features, self.table = replacement, features, table
        self.positions = positions
        self.layer_X = table.layer_X
        places = tuple(map(jnp.asarray, (table.layer_TZ, table.feature_TZ, table.activation_TZ)))
        L, _, D = replacement.error_LTD.shape
        stored = 4 * L * table.layer_TZ.size * D <= MEMORY
        gathered = GatheredWrites(features, *places)
        self.writes: Written = _writes(features, *places) if stored else gathered
        enough = 1 << (len(table.layer_X) - 1).bit_length()
        self.chunk = min(targets_at_once(replacement, table.layer_TZ.shape[1]), enough)

    def of_features(
        self, index_X: np.ndarray, others: Targets | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows and biases of these features of the table, then of other targets.

        They are computed together, by one program.
        """
        table, X = self.table, len(index_X)
        places = [x[index_X] for x in (table.layer_X, table.position_X, table.feature_X)]
        if others is not None:
            more = np.asarray(others.layer_X), np.asarray(others.position_X)
            more = *more, np.zeros_like(more[0])
            places = [np.concatenate(each) for each in zip(places, more, strict=True)]
        rows = np.empty((len(places[0]), self.columns), self.replacement.error_LTD.dtype)
        biases = np.empty(len(places[0]), rows.dtype)
        sizes = {"size": self.chunk, "positions": self.positions}
        for some, positions in chunks(*places[:2], **sizes):
            at = np.concatenate([some, np.full(self.chunk - len(some), some[0])])
            # Of another target, the features' own function has something that is replaced.
            layer_X, *where = (x[at].astype(np.int32) for x in places)
            layer_X = np.where(at < X, layer_X, 0)
            targets = _feature_targets(self.replacement, self.features, layer_X, *where)
            if others is not None:
                targets = _replaced(targets, others, at - X)
            found = self._rows(targets, positions=positions)
            rows[some], biases[some] = (x[: len(some)] for x in found)
        return rows, biases

    @property
    def columns(self) -> int:
        """How many sources a row has: features, errors and tokens."""
        L, T, _ = self.replacement.error_LTD.shape
        return len(self.table.layer_X) + L * T + T

    def of(self, targets: Targets, *, entering: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Rows and biases of any targets; `entering` as in `linear.attribution_rows`."""
        count = len(targets.layer_X)
        # Logits are computed by the program of features.
        size = min(-(-count // _FEW) * _FEW, self.chunk) if entering else self.chunk
        missing = -count % size

        def padded(x: jax.Array, fill: int) -> Any:
            # By numpy, which compiles nothing.
            after = [(0, missing)] + [(0, 0)] * (x.ndim - 1)
            return np.pad(np.asarray(x), after, constant_values=fill)

        filled = Targets(
            padded(targets.layer_X, -1),
            *(padded(x, 0) for x in (targets.position_X, targets.vector_XD, targets.constant_X)),
        )
        parts = []
        for start in range(0, count, size):
            some = jax.tree.map(lambda x, start=start: x[start : start + size], filled)
            parts.append(self._rows(some, entering=entering))
        rows, biases = (np.concatenate(each)[:count] for each in zip(*parts, strict=True))
        return rows, biases

    def _rows(
        self, targets: Targets, *, entering: bool = False, positions: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        length = len(self.replacement.token_TD)
        rows = _attribution_rows(
            *(self.replacement, self.writes, targets),
            entering=entering,
            positions=min(positions or length, length),
        )
        X = len(rows.bias_X)
        features = np.asarray(rows.feature_XTZ)[:, self.table.position_X, self.table.slot_X]
        errors = np.asarray(rows.error_XLT).reshape(X, -1)
        row = np.concatenate([features, errors, np.asarray(rows.token_XT)], 1)
        return row, np.asarray(rows.bias_X)


def _replaced(targets: Targets, others: Targets, other_X: np.ndarray) -> Targets:
    """Targets with those of index `other_X` in their places, where it is not below 0."""
    is_other_X = other_X >= 0
    if not is_other_X.any():
        return targets
    index_X = np.maximum(other_X, 0)

    def chosen(own: jax.Array, other: jax.Array) -> np.ndarray:
        mask = is_other_X.reshape(-1, *(1,) * (own.ndim - 1))
        return np.where(mask, np.asarray(other)[index_X], np.asarray(own)).astype(own.dtype)

    return jax.tree.map(chosen, targets, others)


_attribution_rows = exact_jit(linear.attribution_rows, static_argnames=("entering", "positions"))
_feature_targets = exact_jit(linear.feature_targets)


@exact_jit
def _writes(features, layer_TZ, feature_TZ, activation_TZ):
    flat = (x.reshape(-1) for x in (layer_TZ, feature_TZ, activation_TZ))
    write_LXD = writes(features, *flat)
    return Writes(write_LXD.reshape(write_LXD.shape[0], *layer_TZ.shape, -1))


def chunks(
    layer_X: np.ndarray, position_X: np.ndarray, *, size: int, positions: int
) -> Iterator[tuple[np.ndarray, int]]:
    """Indices of targets that are computed together, and how many positions hold them.

    Targets of close positions, and of one layer, go together: a chunk begins at its highest.

    Args:
      layer_X, position_X: places of the targets.
      size: most targets of a chunk.
      positions: step of the number of positions.
    """
    part_X = position_X // positions
    order = np.lexsort((-layer_X, part_X))
    for start in range(0, len(order), size):
        some = order[start : start + size]
        yield some, (int(part_X[some].max()) + 1) * positions


class Rows(Protocol):
    """Rows of logits, and of the features that are chosen so far."""

    @property
    def chosen(self) -> np.ndarray:
        """The features with a row, by column, in the order in which they were chosen."""
        ...

    def influence(self) -> np.ndarray:
        """Influence of every feature in these rows."""
        ...

    def add(self, index_X: np.ndarray) -> None:
        """Computes the rows of more features."""
        ...


def choose(rows: Rows, count: int, step: int) -> None:
    """Adds rows of features until there are `count`.

    The features of most influence in the rows found so far are next, `step` at a time.
    """
    while (missing := count - len(rows.chosen)) > 0:
        of_features = rows.influence()
        of_features[rows.chosen] = -1.0
        rows.add(influence.highest(of_features, min(step, missing)))


@dataclasses.dataclass(frozen=True, eq=False)
class FeatureRows:
    """Rows and biases of features, whose columns are `chosen`, in their order; then of logits."""

    chosen: np.ndarray
    weights: np.ndarray
    biases: np.ndarray


class WholeRows:
    """Rows with all their entries (`Rows`), logits first."""

    def __init__(
        self,
        filler: RowFiller,
        logit_rows: np.ndarray,
        logit_bias: np.ndarray,
        probabilities: np.ndarray,
        count: int,
    ) -> None:
        """Starts with the rows, constants and probabilities of logits; `count` features follow."""
        self._filler, self._probabilities = filler, probabilities
        logits, columns = logit_rows.shape
        self._weights = np.empty((logits + count, columns), logit_rows.dtype)
        self._biases = np.empty(logits + count, logit_bias.dtype)
        self._weights[:logits], self._biases[:logits] = logit_rows, logit_bias
        self._size_R = influence.row_sizes(logit_rows)
        self.chosen = np.arange(0)

    def influence(self) -> np.ndarray:
        logits, columns = len(self._probabilities), self._weights.shape[1]
        edges = influence.Edges(
            weight_RS=self._weights[: len(self._size_R)],
            node_R=np.concatenate([np.full(logits, -1), self.chosen]),
            start_R=np.concatenate([self._probabilities, np.zeros(len(self.chosen))]),
            kind_S=np.full(columns, influence.FEATURE),
            error_S=np.full(columns, -1),
        )
        return influence.influence(edges, self._size_R)[: len(self._filler.layer_X)]

    def add(self, index_X: np.ndarray) -> None:
        at = slice(len(self._size_R), len(self._size_R) + len(index_X))
        self._weights[at], self._biases[at] = self._filler.of_features(index_X)
        self._size_R = np.concatenate([self._size_R, influence.row_sizes(self._weights[at])])
        self.chosen = np.concatenate([self.chosen, index_X])

    def in_order(self) -> FeatureRows:
        """Features in the order of columns, before the logits."""
        logits, order = len(self._probabilities), np.argsort(self.chosen)
        rows = np.concatenate([logits + order, np.arange(logits)])
        return FeatureRows(self.chosen[order], self._weights[rows], self._biases[rows])


def _check_memory(rows: int, columns: int, copies: int) -> None:
    """Raises UsageError where rows are larger than the memory of this machine."""
    needed = 4 * rows * columns * copies
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise UsageError(
            f"max_features: {rows:,} rows of {columns:,} sources are {needed / 1e9:,.0f} GB, and "
            f"this machine has {memory / 1e9:,.0f} GB of memory; give a number of features, or a "
            "lower one"
        )


def feature_rows(
    filler: RowFiller,
    logits: Targets,
    probabilities: np.ndarray,
    max_features: int | None,
) -> FeatureRows:
    """Rows of logits and of features.

    With a maximum, the features of most influence in the rows found so far are next, a chunk at a
    time.

    Args:
      filler: the source of rows of features, the first columns.
      logits: the logits as readings.
      probabilities: probabilities of the logits.
      max_features: how many features get a row; None for all.

    Raises:
      UsageError: the rows are larger than the memory of this machine.
    """
    total = len(filler.layer_X)
    count = total if max_features is None else min(max_features, total)
    # Rows that are chosen one after another are put into order at the end, by a copy.
    copies = 1 if count == total else 2
    _check_memory(count + len(probabilities), filler.columns, copies)
    if count == total:
        every = np.arange(total)
        return FeatureRows(every, *filler.of_features(every, logits))
    rows = WholeRows(filler, *filler.of(logits), probabilities, count)
    # A step that no platform or bound on memory changes: it decides which features are chosen.
    choose(rows, count, MOST_TARGETS)
    return rows.in_order()
