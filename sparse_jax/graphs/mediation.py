"""Which heads, and which pairs of a query and a key, carry an edge of an attribution graph.

With X_l[k] the tangent of the source at the input of block l and c_l[q] the cotangent of the target
at its attention output, the share of head h, query position q and key position k is

    a(l, h, q, k) = A_h[q, k] . norm_l(X_l[k]) W_V W_O . c_l[q]

the edge minus the edge with that entry of the pattern removed (paper, Eq. 7), since a path passes
the attention of a layer once. In a model of prototypes, h is a prototype and A_h its frozen gates.
For each layer up to the target's,

    sum over h, q, k of a  +  X_l . c_skip  +  writes of the source into layers >= l  =  edge

The sum over layers is not the edge: a path through two heads counts at both.
"""

from collections.abc import Iterator

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from sparse_jax.graphs import linear
from sparse_jax.graphs.linear import Sources, Tangents, Targets
from sparse_jax.graphs.replacement import Replacement


@struct.dataclass
class Mediation:
    """Parts of the edges from X sources to X targets.

    Attributes:
      score_XLNTS: a(l, h, q, k); by heads alone its sums over pairs, with T and S of 1.
      bypass_XL: paths past the attention of the layer.
      late_XL: paths that begin at or after the layer.
      layer_X: layer of each target, L for logits; layers above have no share.
    """

    score_XLNTS: jax.Array
    bypass_XL: jax.Array
    late_XL: jax.Array
    layer_X: jax.Array

    def certificate(self, edge_X: np.ndarray) -> np.ndarray:
        """Error of the sum over parts against the edges `[X, L]`.

        It is relative to the largest sum of absolute parts over layers, and 0 for layers above the
        target.
        """
        bypass, late = (np.asarray(x, np.float64) for x in (self.bypass_XL, self.late_XL))
        total_XL = _sums(self.score_XLNTS) + bypass + late
        size_XL = _sums(np.abs(np.asarray(self.score_XLNTS))) + np.abs(bypass) + np.abs(late)
        error_XL = np.abs(total_XL - np.asarray(edge_X, np.float64)[:, None])
        has_share_XL = np.arange(error_XL.shape[1])[None] <= np.asarray(self.layer_X)[:, None]
        largest_X1 = size_XL.max(1, keepdims=True)
        error_XL = error_XL / np.where(largest_X1 > 0, largest_X1, 1.0)
        return np.where(has_share_XL, error_XL, 0.0)

    def over_count(self, edge_X: np.ndarray) -> np.ndarray:
        """Sum of all scores over all layers, as a multiple of the edge `[X]`; NaN without one."""
        total_X = _sums(self.score_XLNTS).sum(1)
        edge_X = np.asarray(edge_X, np.float64)
        return np.divide(total_X, edge_X, out=np.full(len(edge_X), np.nan), where=edge_X != 0)


def _sums(score_XLNTS: jax.Array | np.ndarray) -> np.ndarray:
    """Sums over heads and pairs of each layer `[X, L]`, in float64."""
    score_XLC = np.asarray(score_XLNTS).reshape(*score_XLNTS.shape[:2], -1)
    return score_XLC.sum(-1, dtype=np.float64)


def mediate(replacement: Replacement, sources: Sources, targets: Targets) -> Mediation:
    """Mediation of the edge from each source to the target of the same index."""
    each_X = jnp.arange(len(targets.layer_X))
    tangents = linear.tangents(replacement, sources)
    return mediate_edges(replacement, sources, tangents, each_X, targets, each_X)


def mediate_edges(
    replacement: Replacement,
    sources: Sources,
    tangents: Tangents,
    source_X: jax.Array,
    targets: Targets,
    target_X: jax.Array,
    open_L3P: jax.Array | None = None,
    *,
    by_head: bool = False,
) -> Mediation:
    """Mediation of X edges: one tangent per source, one cotangent per target.

    Tangents are kept of all layers; cotangents of one, as the pass goes down.

    Args:
      replacement: the model.
      sources, targets: ends of edges, each once.
      tangents: tangents of the sources (`linear.tangents`).
      source_X, target_X: indices in them of the ends of each edge.
      open_L3P: the entries of each layer's pattern that are not 0 (`open_pairs`), without which
        there is no share; None to contract all.
      by_head: whether only sums over pairs are wanted, of which a long prompt has too many.
    """
    L, T, _ = replacement.error_LTD.shape
    at_X = sources.position_X[source_X]

    def down(c_XTD, each):
        layer, index, reading, input_XTD, value_XS, write_XD, open_3P = each
        read_XTD = linear.readings(targets, index, T)
        c_attn_XTD, c_skip_XTD = linear.below_attention(layer, reading, c_XTD, read_XTD)
        value_XS, u_XT = value_XS[source_X], layer.cotangents(c_attn_XTD)[target_X]
        if by_head:
            score_XNTS = layer.mixer.head_shares(value_XS, u_XT)[:, :, None, None]
        elif open_3P is None:
            score_XNTS = layer.mixer.shares(value_XS, u_XT)
        else:
            share_XP = layer.mixer.pair_shares(value_XS, u_XT, open_3P)
            score_XNTS = jnp.zeros((len(share_XP), *layer.mixer.pattern_shape), share_XP.dtype)
            score_XNTS = score_XNTS.at[:, *open_3P].set(share_XP, mode="drop")
        # Of all sources with all targets: one product, where edges have rows of many megabytes.
        bypass_X = jnp.einsum("XTD,YTD->XY", input_XTD, c_skip_XTD)[source_X, target_X]
        written_X = (write_XD[source_X] * c_XTD[target_X, at_X]).sum(-1)
        below_XTD = c_skip_XTD + layer.transpose(c_attn_XTD)
        return below_XTD, (score_XNTS, bypass_X, written_X)

    each = (
        *(replacement.layers, jnp.arange(L), replacement.reading, tangents.input_LXTD),
        *(tangents.value_LXS, jnp.swapaxes(sources.write_XLD, 0, 1), open_L3P),
    )
    start_XTD = linear.readings(targets, L, T)
    _, parts = jax.lax.scan(down, start_XTD, each, reverse=True)
    score_XLNTS, bypass_XL, written_XL = (jnp.swapaxes(part, 0, 1) for part in parts)
    late_XL = jax.lax.cumsum(written_XL, axis=1, reverse=True)
    return Mediation(score_XLNTS, bypass_XL, late_XL, targets.layer_X[target_X])


def open_pairs(pattern_LNTS: np.ndarray) -> np.ndarray:
    """Entries of each layer that are not 0 `[L, 3, P]`: head, query and key position.

    Layers with fewer are filled up with a head that does not exist. P is a power of two, so that
    few sizes are compiled.
    """
    L, N = pattern_LNTS.shape[:2]
    entries = [np.stack(np.nonzero(layer_NTS)) for layer_NTS in pattern_LNTS]
    most = max(each.shape[1] for each in entries)
    open_L3P = np.full((L, 3, 1 << max(most - 1, 0).bit_length()), N, np.int32)
    open_L3P[:, 1:] = 0
    for layer, each in enumerate(entries):
        open_L3P[layer, :, : each.shape[1]] = each
    return open_L3P


def batches_with_few_sources(source_X: np.ndarray, batch: int) -> Iterator[slice]:
    """Runs of whole batches of edges, as long as can be, with at most `batch` different sources."""
    start, different = 0, set[int]()
    for at in range(0, len(source_X), batch):
        own = set(source_X[at : at + batch].tolist())
        if len(different | own) > batch:
            yield slice(start, at)
            start, different = at, set()
        different |= own
    yield slice(start, len(source_X))


def by_source(edges_X2: np.ndarray, most: int) -> list[np.ndarray]:
    """Edges, pairs of source and target, in parts of at most `most` sources, sorted by target.

    `Graph.mediations` of each then has few passes.
    """
    _, rank_X = np.unique(edges_X2[:, 0], return_inverse=True)
    block_X = rank_X // most
    ordered_X = np.lexsort((edges_X2[:, 1], block_X))
    starts = np.flatnonzero(np.diff(block_X[ordered_X])) + 1
    return np.split(edges_X2[ordered_X], starts)
