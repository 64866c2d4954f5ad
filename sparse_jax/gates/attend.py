"""Gated attention of a decoder: a Bernoulli gate on every attention edge.

Sparse Attention Post-Training, Eq. 1 to 3: from the same scores s as the softmax,

    e = s + bias        A ~ Bernoulli(sigma(e))        pattern = A softmax(s)

without normalising again (the ablation `renormalise` does). The forward pass
`lm_jax.forward(..., attend=gated(...))` returns in `aux`, by layer,

    expected_edges_BN   the sum of sigma(e) over visible pairs, differentiable
    open_edges_BN       number of open gates
    pairs_B             number of visible pairs, the denominator of a share

`by_kernels` computes the same without forming scores (`iaj_kernels.gated_attention`); it samples
the same gates, because the noise is a function of seed, row, head, query and key.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from iaj_kernels.attention.visibility import Visibility
from iaj_kernels.core import counts, dispatch
from iaj_kernels.gated_attention import reference
from iaj_kernels.gated_attention.api import gated_attention
from iaj_kernels.gated_attention.config import MODES, Config
from iaj_kernels.gated_attention.edges import EdgeList
from lm_jax.errors import UsageError, nearest
from lm_jax.model.attention import Fused, LayerAttend, PerLayer, fused, register_fused
from lm_jax.model.config import DecoderConfig
from lm_jax.parallel.kernels import shard_kernel, split_axes

NAME = "kernels"
# The list of open edges in `aux`, an `EdgeList` with a leading axis L.
EDGES = "edges"


@dataclasses.dataclass(frozen=True)
class Gated:
    """The function of a gated attend; `data` of one layer holds `bias_N`, `seed` and `valid_BT`.

    Attributes:
      mode: "sample" samples the gates, "threshold" opens those with e > 0, "expected" multiplies by
        sigma(e), "open" opens all.
      raw_gate: e = q.k + bias, as Eq. 1 is printed, in place of the scaled (and capped) score.
      scale: factor of the scores, which a raw gate undoes.
      capped: whether the scores are capped, which a raw gate cannot undo.
      renormalise: whether to divide A softmax(s) by its sum over keys, which Eq. 2 does not.
      edge_capacity: length of the list of open edges in `aux`, which kernels alone make; None for
        none.
    """

    mode: str
    raw_gate: bool
    scale: float
    capped: bool = False
    renormalise: bool = False
    edge_capacity: int | None = None

    def __call__(
        self, scores_BNTS: jax.Array, data: dict[str, Any]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        if self.edge_capacity is not None:
            raise UsageError("listing_edges: only kernels list edges; use by_kernels(attend)")
        if self.raw_gate and self.capped:
            raise UsageError(
                "gated: a raw gate needs q.k, and this model's scores are capped (score_softcap); "
                "use by_kernels(attend), or raw_gate=False"
            )
        B, N, T, S = scores_BNTS.shape
        visible_BNTS = scores_BNTS > -jnp.inf
        raw_BNTS = jnp.where(visible_BNTS, scores_BNTS, 0.0)
        if data["valid_BT"] is not None:
            visible_BNTS = visible_BNTS & data["valid_BT"][:, None, :, None]
        visible_B1TS = visible_BNTS[:, :1]
        config = Config(
            mode=self.mode,
            scale=1.0,
            target=dispatch.target(),
            gate_scale=1.0 / self.scale if self.raw_gate else None,
            renormalise=self.renormalise,
        )
        origin_2, start_B = jnp.zeros(2, jnp.int32), jnp.full(B, S - T, jnp.int32)
        bits_BNTS = reference.bits(B, T, N, S, data["seed"], origin_2, start_B)
        pattern_BNTS, expected_BN, opened_BN = reference.weights(
            config, raw_BNTS, data["bias_N"], bits_BNTS, visible_B1TS
        )
        return pattern_BNTS, _aux(expected_BN, opened_BN, counts.total(visible_B1TS, (1, 2, 3)))


def _aux(expected_BN: jax.Array, opened_BN: jax.Array, pairs_B: jax.Array) -> dict[str, jax.Array]:
    return {
        "expected_edges_BN": expected_BN,
        "open_edges_BN": opened_BN,
        "pairs_B": pairs_B,
    }


def gated(
    cfg: DecoderConfig,
    *,
    mode: str = "sample",
    key: jax.Array | None = None,
    bias: jax.Array | float = 0.0,
    valid_BT: jax.Array | None = None,
    raw_gate: bool = False,
    renormalise: bool = False,
) -> PerLayer:
    """The attend of a decoder with gates in every layer.

    Args:
      cfg: the model.
      mode: see `Gated`.
      key: random key of the gate noise, with its own seed for each layer; for mode "sample" only.
      bias: the bias of the gate logits: one number, or `[L, N]`.
      valid_BT: false where a token is padding; such a query attends to nothing and is not counted.
      raw_gate: the gate logit of Eq. 1 as printed, q.k without its scale.
      renormalise: whether the weights of the open edges are made to sum to one, an ablation of Eq.
        2.

    Raises:
      UsageError: the mode is unknown, a key is missing or not needed, or `bias` has another shape.
    """
    if mode not in MODES:
        raise UsageError(f"mode = {mode!r} is no mode of a gate{nearest(mode, MODES)}")
    if (key is not None) != (mode == "sample"):
        text = "needs a key to sample gates" if key is None else "samples nothing; leave key out"
        raise UsageError(f"gated: mode {mode!r} {text}")
    L, N = cfg.num_layers, cfg.num_heads
    bias = jnp.asarray(bias, jnp.float32)
    if bias.shape not in ((), (L, N)):
        raise UsageError(
            f"gated: bias has shape {bias.shape}; pass a number, or one per layer and head, "
            f"({L}, {N})"
        )
    seed_L = jnp.zeros(L, jnp.uint32) if key is None else jax.random.bits(key, (L,), jnp.uint32)
    valid_LBT = None
    if valid_BT is not None:
        valid_LBT = jnp.broadcast_to(valid_BT[None], (L, *valid_BT.shape))
    data = {"bias_N": jnp.broadcast_to(bias, (L, N)), "seed": seed_L, "valid_BT": valid_LBT}
    capped = cfg.score_softcap is not None
    fn = Gated(mode, raw_gate, cfg.scale, capped=capped, renormalise=renormalise)
    return PerLayer(fn, data)


def by_kernels(attend: PerLayer) -> Fused:
    """The same attend, computed by `iaj_kernels.gated_attention`."""
    return fused(attend, NAME)


def listing_edges(attend: PerLayer, capacity: int) -> PerLayer:
    """The same attend, which by kernels adds to `aux` the open edges of a layer, up to `capacity`.

    `aux["edges"]` is an `iaj_kernels.gated_attention.edges.EdgeList` with arrays `[L, capacity]`;
    its `count` and `overflow` are `[L]`. The batch is not to be split over a mesh.
    """
    assert isinstance(attend.fn, Gated), "only gates open and close edges"
    return PerLayer(dataclasses.replace(attend.fn, edge_capacity=capacity), attend.data)


def _kernel(
    attend: LayerAttend,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    visibility: Visibility,
    scale: float,
    cap: float | None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    fn, data = attend.fn, attend.data
    (B, T), S = q_BTNH.shape[:2], k_BSKH.shape[1]
    segments = None
    if visibility.query_segments_BT is not None:
        segments = (visibility.query_segments_BT, visibility.key_segments_BS)
    if data["valid_BT"] is not None:
        # A padding query has a segment of its own, in which it sees nothing.
        of_query, of_key = segments or (0, jnp.zeros((B, S), jnp.int32))
        segments = (jnp.where(data["valid_BT"], of_query, -1), of_key)

    def run(first, q_BTNH, k_BSKH, v_BSKH, bias_N, seed, window, segments, start_B):
        output = gated_attention(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            gate_bias=bias_N,
            seed=seed if fn.mode == "sample" else None,
            mode=fn.mode,
            scale=scale,
            gate_scale=1.0 if fn.raw_gate else None,
            soft_cap=cap,
            causal=visibility.causal,
            window=window,
            segment_ids=segments,
            start=start_B if visibility.first is None else visibility.first,
            origin=(first["B"], first["N"]),
            renormalise=fn.renormalise,
            edge_capacity=fn.edge_capacity,
        )
        return output.out_BTNH, output.expected_edges_BN, output.open_edges_BN, output.edges

    sizes = {"B": B, "N": q_BTNH.shape[2], "K": k_BSKH.shape[2]}
    if fn.edge_capacity is not None and split_axes(sizes):
        raise UsageError("listing_edges: a mesh splits the rows or heads; call it without one")
    listed = None if fn.edge_capacity is None else EdgeList._make([""] * len(EdgeList._fields))
    out_BTNH, expected_BN, opened_BN, edges = shard_kernel(
        run,
        (
            q_BTNH,
            k_BSKH,
            v_BSKH,
            data["bias_N"],
            data["seed"],
            visibility.window,
            segments,
            visibility.start_B,
        ),
        ("BTNH", "BSKH", "BSKH", "N", "", "", ("BT", "BS") if segments else "", "B"),
        ("BTNH", "BN", "BN", listed),
        split="BNK",
    )
    pairs_BT = visibility.counts_BT(T, S)
    if data["valid_BT"] is not None:
        pairs_BT = jnp.where(data["valid_BT"], pairs_BT, 0)
    aux = _aux(expected_BN, opened_BN, counts.total(pairs_BT, 1))
    return out_BTNH, aux if edges is None else aux | {EDGES: edges}


register_fused(Gated, NAME, _kernel)
