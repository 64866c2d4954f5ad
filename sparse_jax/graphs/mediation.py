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

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.model.frozen import FrozenLayers
from sparse_jax.graphs import linear
from sparse_jax.graphs.linear import Sources, Targets
from sparse_jax.graphs.replacement import Replacement


@struct.dataclass
class SourceParts:
    """Of sources: values `[X, L, S, ...]`, inputs of blocks `[X, L, S, D]`, what is written."""

    value_XLS: jax.Array
    input_XLSD: jax.Array
    sources: Sources


@struct.dataclass
class TargetParts:
    """Of targets: cotangents of the sums of values `[X, L, T, ...]`, of c_skip and of c_out."""

    sum_XLT: jax.Array
    skip_XLTD: jax.Array
    out_XLTD: jax.Array
    layer_X: jax.Array


@struct.dataclass
class Mediation:
    """Parts of the edges from X sources to X targets.

    Attributes:
      score_XLNTS: a(l, h, q, k).
      bypass_XL: paths past the attention of the layer.
      late_XL: paths that begin at or after the layer.
      layer_X: of the targets, L for logits; layers above have no share.
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
        score, bypass, late = (
            np.asarray(x, np.float64) for x in (self.score_XLNTS, self.bypass_XL, self.late_XL)
        )
        total_XL = score.sum((2, 3, 4)) + bypass + late
        size_XL = np.abs(score).sum((2, 3, 4)) + np.abs(bypass) + np.abs(late)
        error_XL = np.abs(total_XL - np.asarray(edge_X, np.float64)[:, None])
        has_share_XL = np.arange(error_XL.shape[1])[None] <= np.asarray(self.layer_X)[:, None]
        largest_X1 = size_XL.max(1, keepdims=True)
        error_XL = error_XL / np.where(largest_X1 > 0, largest_X1, 1.0)
        return np.where(has_share_XL, error_XL, 0.0)

    def over_count(self, edge_X: np.ndarray) -> np.ndarray:
        """Sum of all scores over all layers, as a multiple of the edge `[X]`; NaN without one."""
        total_X = np.asarray(self.score_XLNTS, np.float64).sum((1, 2, 3, 4))
        edge_X = np.asarray(edge_X, np.float64)
        return np.divide(total_X, edge_X, out=np.full(len(edge_X), np.nan), where=edge_X != 0)


def source_parts(replacement: Replacement, sources: Sources) -> SourceParts:
    """What the shares of sources need, one upward pass."""
    input_XLSD, _ = linear.tangents(replacement, sources)
    value_XLS = jax.vmap(FrozenLayers.values, (0, 1), 1)(replacement.layers, input_XLSD)
    return SourceParts(value_XLS, input_XLSD, sources)


def target_parts(replacement: Replacement, targets: Targets) -> TargetParts:
    """What the shares of targets need, one downward pass."""
    c = linear.cotangents(replacement, targets)
    sum_XLT = jax.vmap(FrozenLayers.cotangents, (0, 1), 1)(replacement.layers, c.attention_XLTD)
    return TargetParts(sum_XLT, c.skip_XLTD, c.out_XLTD, targets.layer_X)


def contract(replacement: Replacement, sources: SourceParts, targets: TargetParts) -> Mediation:
    """Mediation of the edge from each source to the target of the same index."""
    X = len(targets.layer_X)
    score_XLNTS = jax.vmap(lambda mixer, *parts: mixer.shares(*parts), (0, 1, 1), 1)(
        replacement.layers.mixer, sources.value_XLS, targets.sum_XLT
    )
    at_X = sources.sources.position_X
    out_XLD = targets.out_XLTD[jnp.arange(X), :, at_X]
    written_XL = (sources.sources.write_XLD * out_XLD).sum(-1)
    return Mediation(
        score_XLNTS,
        (sources.input_XLSD * targets.skip_XLTD).sum((2, 3)),
        jax.lax.cumsum(written_XL, axis=1, reverse=True),
        targets.layer_X,
    )


def mediate(replacement: Replacement, sources: Sources, targets: Targets) -> Mediation:
    """Mediation of X edges: one tangent per source, one cotangent per target."""
    return contract(
        replacement, source_parts(replacement, sources), target_parts(replacement, targets)
    )
