"""Why a head looked there: an attention score by pairs of a source at the query and one at the key.

With the divisors of norms frozen, query and key of a head are linear in the residual stream, which
is a sum over the sources of a graph. The score before mask and soft cap is then bilinear,

    score(q, k) = scale . sum over sources s, s' of  query_s . key_s'

where query_s is what s adds to the rotated query at position q: through norm, projection, per-head
norm and rotation, from its own position or through attention below. Biases and position embeddings
together are the bias node. All pairs sum to the score (Sparse Attention Post-Training, Fig. 8).

No source is followed upwards: the H coordinates of query and key are 2 H targets, whose rows one
downward pass gives for all sources.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import UsageError
from lm_jax.model.frozen import centre
from lm_jax.model.layers import rotate
from sparse_jax.graphs.influence import highest
from sparse_jax.graphs.linear import Targets
from sparse_jax.graphs.replacement import Replacement
from sparse_jax.graphs.scores import FrozenScores


@dataclasses.dataclass(frozen=True)
class Contributors:
    """The largest contributions to a score by absolute value, largest first.

    Attributes:
      queries: (node, what it contributes at the query position with the whole key).
      keys: (node, what it contributes at the key position with the whole query).
      pairs: (node at the query, node at the key, their term).
    """

    queries: tuple[tuple[int, float], ...]
    keys: tuple[tuple[int, float], ...]
    pairs: tuple[tuple[int, int, float], ...]

    @property
    def nodes(self) -> frozenset[int]:
        """All nodes that are named."""
        return frozenset(
            node
            for part in (self.queries, self.keys, self.pairs)
            for at in part
            for node in at[:-1]
        )


@dataclasses.dataclass(frozen=True, eq=False)
class QK:
    """One attention score by sources; see the head of this file.

    Attributes:
      layer, head, query, key: layer, query head and positions of the score.
      score: score in the forward pass, scaled, before mask and soft cap.
      nodes: indices in `Graph.nodes` of the S sources that reach the head, the bias last.
      query_SH, key_SH: what each adds to the rotated query and key, float64 of float32 results.
      scale: factor of the product.
    """

    layer: int
    head: int
    query: int
    key: int
    score: float
    nodes: np.ndarray
    query_SH: np.ndarray
    key_SH: np.ndarray
    scale: float

    @property
    def terms(self) -> np.ndarray:
        """Contribution of each pair, `[S at the query, S at the key]`."""
        return self.scale * self.query_SH @ self.key_SH.T

    @property
    def total(self) -> float:
        """Sum of all terms."""
        return self.scale * float(self.query_SH.sum(0) @ self.key_SH.sum(0))

    @property
    def query_marginals(self) -> np.ndarray:
        """Sum of each query source's terms over keys `[S]`."""
        return self.scale * self.query_SH @ self.key_SH.sum(0)

    @property
    def key_marginals(self) -> np.ndarray:
        """Sum of each key source's terms over queries `[S]`."""
        return self.scale * self.key_SH @ self.query_SH.sum(0)

    def certificate(self) -> float:
        """Error of the sum of terms against the score, relative to the sum of absolute terms."""
        size = float(np.abs(self.terms).sum())
        return abs(self.total - self.score) / size if size else abs(self.score)

    def top(self, count: int = 5) -> Contributors:
        """The largest contributions; the paper shows five."""

        def largest(value: np.ndarray) -> list[tuple[Any, ...]]:
            order = highest(np.abs(value).ravel(), count)
            places = zip(*np.unravel_index(order, value.shape), strict=True)
            return [(*(int(self.nodes[i]) for i in at), float(value[at])) for at in places]

        values = self.query_marginals, self.key_marginals, self.terms
        return Contributors(*(tuple(largest(value)) for value in values))


def check(replacement: Replacement, layer: int, head: int, query: int, key: int) -> None:
    """Raises where the model has no such score.

    Raises:
      UsageError: naming the argument and its range.
    """
    L, T, N, _ = scores_of(replacement).rotated_query_LTNH.shape
    for name, value, size in (("layer", layer, L), ("head", head, N), ("query", query, T)):
        if not 0 <= value < size:
            raise UsageError(f"qk: {name} = {value} is outside 0..{size - 1}")
    if not 0 <= key <= query:
        raise UsageError(f"qk: key = {key} must be within 0..{query}, no later than the query")


def scores_of(replacement: Replacement) -> FrozenScores:
    """The bilinear map of scores.

    Raises:
      UsageError: the model has no attention scores.
    """
    if replacement.scores is None:
        raise UsageError("qk: this model's mixer has no attention scores; use mediation instead")
    return replacement.scores


def targets(
    replacement: Replacement, layer: jax.Array, head: jax.Array, query: jax.Array, key: jax.Array
) -> Targets:
    """The H coordinates of a rotated query, then those of a rotated key, as readings.

    They are of the input of the layer's block (`linear.attribution_rows(entering=True)`).
    """
    s, layers = scores_of(replacement), replacement.layers
    heads_per_key = s.query_LDNH.shape[2] // s.key_LDKH.shape[2]

    def one(weight_LDNH, bias_LNH, norm_LTNH, position, head):
        """Coordinates `[H, D]` and constants `[H]` of the query or key at one position."""
        rows_XH = jnp.concatenate([weight_LDNH[layer, :, head], bias_LNH[layer, head][None]])
        if norm_LTNH is not None:
            rows_XH = centre(rows_XH, layers.centred) * norm_LTNH[layer, position, head][None]
        if s.rotation_2LTR is not None:
            cos, sin = s.rotation_2LTR[:, layer, position][:, None, None]
            rows_XH = rotate(rows_XH[None, None], (cos, sin))[0, 0]
        vector_HD = centre(rows_XH[:-1].T * layers.norm_LTD[layer, position][None], layers.centred)
        return vector_HD, rows_XH[-1]

    at_query = one(s.query_LDNH, s.query_bias_LNH, s.query_norm_LTNH, query, head)
    at_key = one(s.key_LDKH, s.key_bias_LKH, s.key_norm_LSKH, key, head // heads_per_key)
    vectors, constants = zip(at_query, at_key, strict=True)
    H = len(at_query[1])
    return Targets(
        jnp.full(2 * H, layer),
        jnp.repeat(jnp.stack([query, key]), H),
        jnp.concatenate(vectors),
        jnp.concatenate(constants),
    )


def of_rows(
    replacement: Replacement,
    place: tuple[int, int, int, int],
    rows: np.ndarray,
    biases: np.ndarray,
    bias_node: int,
) -> QK:
    """A score by sources.

    Args:
      replacement: the model.
      place: layer, head, query and key.
      rows: `[2 H, S]` of `targets`, sources in the order of the graph's nodes.
      biases: constants of those rows.
      bias_node: index of the bias.
    """
    layer, head, query, key = place
    scores = scores_of(replacement)
    parts_SX = np.concatenate([rows, biases[:, None]], 1).T.astype(np.float64)
    reaches_S = np.append((parts_SX[:-1] != 0).any(1), True)
    nodes = np.append(np.arange(rows.shape[1]), bias_node)
    query_SH, key_SH = np.split(parts_SX[reaches_S], 2, axis=1)
    group = scores.rotated_query_LTNH.shape[2] // scores.rotated_key_LSKH.shape[2]
    rotated_query_H, rotated_key_H = (
        np.asarray(x, np.float64)
        for x in (
            scores.rotated_query_LTNH[layer, query, head],
            scores.rotated_key_LSKH[layer, key, head // group],
        )
    )
    return QK(
        *place,
        score=scores.scale * float(rotated_query_H @ rotated_key_H),
        nodes=nodes[reaches_S],
        query_SH=query_SH,
        key_SH=key_SH,
        scale=scores.scale,
    )


def as_json(qk: QK, ids: Mapping[int, str], count: int = 5) -> dict[str, Any]:
    """A score with its largest contributions; `ids` are of nodes by index in the graph."""
    top = qk.top(count)
    place = {name: getattr(qk, name) for name in ("layer", "head", "query", "key", "score")}
    # As Neuronpedia calls them in `qk_tracing_results`.
    return place | {
        "pair_wise_contributors": [[ids[q], ids[k], value] for q, k, value in top.pairs],
        "top_q_marginal_contributors": [[ids[node], value] for node, value in top.queries],
        "top_k_marginal_contributors": [[ids[node], value] for node, value in top.keys],
    }
