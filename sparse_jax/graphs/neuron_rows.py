"""Rows with a source for every neuron at every position, of which the largest entries are kept.

A thousand tokens of SmolLM2-135M have 46 million neurons, and 256 rows with all of them 47 GB. A
row is therefore computed a layer at a time, from its target down. Of each layer it keeps

    sums      over all neurons of the MLP, at each position, and of their absolute values
    entries   those above a millionth of the row's absolute sum

so that row sums and shares of influence are of all neurons, and an entry that is not kept counts
with the other neurons of its MLP.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.model.precision import exact_jit
from sparse_jax.graphs import influence, linear
from sparse_jax.graphs.attribute import Prompt
from sparse_jax.graphs.linear import Blocks, Targets
from sparse_jax.graphs.rows import MEMORY, POSITIONS, ActiveFeatures, FeatureRows, chunks

# The least share of a row's absolute sum that is kept.
LEAST = 1e-6
# Targets at a time, and into how many parts the positions of a long prompt are divided.
_CHUNK, _PARTS = 32, 8


@dataclasses.dataclass(frozen=True, eq=False)
class _Row:
    """One row.

    Attributes:
      column_E, value_E: the entries that are kept, in order of columns.
      sum_LT: sums over all neurons of each MLP at each position.
      token_T: entries of the tokens.
      bias: what everything constant adds.
      size: sum of all absolute entries, constants apart.
    """

    column_E: np.ndarray
    value_E: np.ndarray
    sum_LT: np.ndarray
    token_T: np.ndarray
    bias: float
    size: float

    def entries(self, column_X: np.ndarray) -> np.ndarray:
        """Entries of columns; 0 for those that are not kept."""
        if not len(self.column_E):
            return np.zeros(len(column_X), self.value_E.dtype)
        at_X = np.minimum(np.searchsorted(self.column_E, column_X), len(self.column_E) - 1)
        return np.where(self.column_E[at_X] == column_X, self.value_E[at_X], 0.0)


class NeuronRows:
    """Rows of logits and neurons (`rows.Rows`); a column is a neuron's index in `[L, T, F]`."""

    def __init__(self, prompt: Prompt, activation_LTF: jax.Array, decoder_LFD: jax.Array) -> None:
        """Starts without rows; a neuron writes its activation times its decoder."""
        self._prompt, self._decoder_LFD, r = prompt, decoder_LFD, prompt.replacement
        self._rows: list[_Row] = []
        self._activation_LTF = activation_LTF
        self.shape = activation_LTF.shape
        self.chosen = np.arange(0)
        _, T, F = self.shape
        floats = T * (F + 4 * r.error_LTD.shape[2] + 3 * r.layers.mixer.width)
        within_memory = max(MEMORY // (4 * floats), 1)
        self._chunk = min(_CHUNK, 1 << (within_memory.bit_length() - 1))
        self._positions = POSITIONS * -(-T // (POSITIONS * _PARTS))

    def add_logits(self) -> None:
        """Computes the rows of the logits, the first."""
        targets, T = self._prompt.logit_targets(), self.shape[1]
        for start in range(0, len(targets.layer_X), self._chunk):
            some = np.arange(start, min(start + self._chunk, len(targets.layer_X)))
            padded = np.resize(some, self._chunk)
            chosen = jax.tree.map(lambda x, at=padded: np.asarray(x)[at], targets)
            self._rows += self._of(chosen, T)[: len(some)]

    def add(self, index_X: np.ndarray) -> None:
        place_3X = np.stack(np.unravel_index(index_X, self.shape)).astype(np.int32)
        rows: list[Any] = [None] * len(index_X)
        sizes, p = {"size": self._chunk, "positions": self._positions}, self._prompt
        for some, positions in chunks(place_3X[0], place_3X[1], **sizes):
            at = np.resize(some, self._chunk)
            targets = _targets(p.replacement, p.features, *(x[at] for x in place_3X))
            computed = self._of(targets, min(positions, self.shape[1]))
            for place, row in zip(some, computed, strict=False):
                rows[place] = row
        self._rows += rows
        self.chosen = np.concatenate([self.chosen, index_X])

    def influence(self) -> np.ndarray:
        size_R = np.array([row.size for row in self._rows])
        logits = len(size_R) - len(self.chosen)
        between_RX = np.stack([np.abs(row.entries(self.chosen)) for row in self._rows])
        start_R = np.concatenate([self._prompt.probabilities, np.zeros(len(self.chosen))])
        through_R = influence.through_rows(
            between_RX / size_R[:, None], np.arange(len(size_R)) >= logits, start_R
        )
        total_S = np.zeros(int(np.prod(self.shape)))
        for row, share in zip(self._rows, through_R / size_R, strict=True):
            total_S[row.column_E] += share * np.abs(row.value_E)
        return total_S

    def others_as_errors(self, table: ActiveFeatures) -> FeatureRows:
        """Rows of a table's features, then logits; errors are what all other neurons add."""
        L, T, _ = self.shape
        column_X = np.ravel_multi_index(
            (table.layer_X, table.position_X, table.feature_X), self.shape
        )
        order = np.argsort(self.chosen)
        logits = len(self._rows) - len(self.chosen)
        at = order[np.searchsorted(self.chosen, column_X, sorter=order)]
        rows = [self._rows[r] for r in (*(logits + at), *range(logits))]
        weights = np.empty((len(rows), len(column_X) + L * T + T), np.float32)
        for weight_S, row in zip(weights, rows, strict=True):
            entry_X = row.entries(column_X)
            error_LT = row.sum_LT.astype(np.float64)
            np.subtract.at(error_LT, (table.layer_X, table.position_X), entry_X)
            weight_S[:] = np.concatenate([entry_X, error_LT.ravel(), row.token_T])
        biases = np.array([row.bias for row in rows], np.float32)
        return FeatureRows(np.arange(len(column_X)), weights, biases)

    def _of(self, targets: Targets, positions: int) -> list[_Row]:
        """Rows of a chunk of targets at the first positions, a layer at a time from the top."""
        replacement, (L, T, F) = self._prompt.replacement, self.shape
        X = len(targets.layer_X)
        c_XTD, constants_X = _start(replacement, targets, positions=positions)
        size_X = np.zeros(X)
        sum_XLT = np.zeros((X, L, T), np.float32)
        kept: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(X)]
        for layer in reversed(range(min(int(np.max(targets.layer_X)) + 1, L))):
            c_XTD, constants_X, own_XTF, sum_XT, size_XT = _down(
                *(replacement, self._activation_LTF, self._decoder_LFD, targets),
                *(c_XTD, constants_X, layer),
                positions=positions,
            )
            sum_XLT[:, layer, :positions] = sum_XT
            size_X += np.asarray(size_XT, np.float64).sum(1)
            for x, own_E in enumerate(np.asarray(own_XTF).reshape(X, -1)):
                at = np.flatnonzero(np.abs(own_E) > LEAST * size_X[x])
                kept[x].append((layer * T * F + at, own_E[at]))
        token_XT, bias_X = map(np.asarray, _below_all(replacement, c_XTD, constants_X))
        token_XT = np.pad(token_XT, ((0, 0), (0, T - positions)))
        size_X += np.abs(token_XT).sum(1, dtype=np.float64)
        rows = []
        for x, parts in enumerate(kept):
            parts = parts[::-1] or [(np.empty(0, np.int64), np.empty(0, np.float32))]
            column_E, value_E = (np.concatenate(each) for each in zip(*parts, strict=True))
            some_E = np.abs(value_E) > LEAST * size_X[x]
            rows.append(
                _Row(
                    *(column_E[some_E], value_E[some_E], sum_XLT[x], token_XT[x]),
                    *(float(bias_X[x]), max(float(size_X[x]), influence.LEAST_SUM)),
                )
            )
        return rows


_targets = exact_jit(linear.feature_targets)
_below_all = exact_jit(linear.below_all)


def _first_cotangents(replacement, targets, *, positions):
    L = len(replacement.error_LTD)
    return linear.readings(targets, L, positions), targets.constant_X


_start = exact_jit(_first_cotangents, static_argnames="positions")


def _down_one_layer(
    replacement, activation_LTF, decoder_LFD, targets, c_XTD, constants_X, layer, *, positions
):
    """Cotangents below one block, and the entries of its neurons with their sums."""
    own_XTF = jnp.einsum("XTD,FD->XTF", c_XTD, decoder_LFD[layer])
    own_XTF *= activation_LTF[layer, :positions][None]
    block = Blocks.of(replacement).one(layer).first(positions)
    read_XTD = linear.readings(targets, layer, positions)
    c_XTD, added_X = block.below(c_XTD, read_XTD)
    sums = own_XTF.sum(-1), jnp.abs(own_XTF).sum(-1)
    return c_XTD, constants_X + added_X, own_XTF, *sums


_down = exact_jit(_down_one_layer, static_argnames="positions")
