"""Token mixers: what a block does between its two norms.

A `Mixer` declares its parameters, mixes a whole sequence, and carries a cache for decoding. The
decoder knows nothing else about it, so attention, prototypes, Mamba and DeltaNet share everything
around it.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

from kernels.attention.visibility import visibility
from lm_jax.errors import UsageError
from lm_jax.model.attention import Attend, Fused, attention
from lm_jax.model.config import DecoderConfig
from lm_jax.model.frozen import FrozenAttention
from lm_jax.model.layers import NO_DROPOUT, Dropout, norm, project, project_heads, rotate
from lm_jax.model.params import ParamSpec, ParamTree, constant, zeros
from lm_jax.model.sites import HEAD_INPUT_SITES, Scope

RopeTables = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Layer:
    """Context of a mixer in its layer: sites, positions, masks, dropout; exists during tracing.

    `positions_BT` are absolute and ascend by one; `window` is None, or a scalar that may be traced,
    as `index`, the number of the layer, is. `valid_BT` is false where a token is padding.
    `norm(x, site=...)` made the mixer's input of the residual stream `resid_BTD`: a norm, or
    nothing where blocks have none before the mixer.
    """

    positions_BT: jax.Array
    scope: Scope
    attend: Attend | Fused
    rope: RopeTables | None = None
    window: jax.Array | None = None
    rng: jax.Array | None = None
    index: jax.Array | int = 0
    valid_BT: jax.Array | None = None
    dropout: Dropout = NO_DROPOUT
    resid_BTD: jax.Array | None = None
    norm: Callable[..., jax.Array] | None = None


class Mixer(Protocol):
    """A token mixer; `cache` is None outside decoding.

    A `recurrent` one keeps a state of one size, has no position and no longest context, and reads
    from `Layer.valid_BT` which tokens are padding.
    """

    recurrent: ClassVar[bool]

    def spec(self, cfg: DecoderConfig) -> ParamTree:
        """The parameters of one layer."""
        ...

    def init_cache(self, cfg: DecoderConfig, batch: int, length: int, dtype: Any) -> Any:
        """An empty cache of one layer for `length` positions."""
        ...

    def flops(self, cfg: DecoderConfig, tokens: int, causal: str) -> tuple[int, int]:
        """FLOPs of all layers on one sequence: products with weights, and all other operations.

        `causal` is the convention for attention, as `lm_jax.model.flops` names them.
        """
        ...

    def apply(
        self, p: ParamTree, x_BTD: jax.Array, cfg: DecoderConfig, layer: Layer, cache: Any
    ) -> tuple[jax.Array, Any]:
        """Mixes T positions that follow what the cache holds; returns `out_BTD` and the cache."""
        ...

    def step(
        self, p: ParamTree, x_BTD: jax.Array, cfg: DecoderConfig, layer: Layer, cache: Any
    ) -> tuple[jax.Array, Any]:
        """`apply` for T = 1 with a cache, where a recurrence is cheaper than the parallel form."""
        ...


@dataclasses.dataclass(frozen=True)
class AttentionMixer:
    """Multi-head attention with grouped keys, rotary positions and q/k norms as configured.

    `pattern_dropout` also drops weights of the pattern where the forward pass has dropout.
    """

    pattern_dropout: bool = False
    recurrent: ClassVar[bool] = False
    causal: ClassVar[bool] = True
    frozen_sites: ClassVar[tuple[str, ...]] = ("attn.pattern",)

    def spec(self, cfg: DecoderConfig) -> ParamTree:
        D, N, K, H = cfg.hidden_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        spec: dict[str, Any] = {
            "q": ParamSpec((D, N, H), "DNH"),
            "k": ParamSpec((D, K, H), "DKH"),
            "v": ParamSpec((D, K, H), "DKH"),
            "o": ParamSpec((N, H, D), "NHD"),
        }
        if cfg.qkv_bias:
            spec |= {
                "q_bias": zeros((N, H), "NH"),
                "k_bias": zeros((K, H), "KH"),
                "v_bias": zeros((K, H), "KH"),
            }
        if cfg.out_bias:
            spec["o_bias"] = zeros((D,), "D")
        if cfg.qk_norm != "none":
            shared = cfg.qk_norm == "head"
            for name, heads, axes in (("q_norm", N, "NH"), ("k_norm", K, "KH")):
                shape, axes = ((H,), "H") if shared else ((heads, H), axes)
                spec[name] = {"scale": constant(1.0 - cfg.norm_offset, shape, axes)}
        return spec

    def init_cache(self, cfg: DecoderConfig, batch: int, length: int, dtype: Any) -> Any:
        shape = (batch, length, cfg.num_kv_heads, cfg.head_dim)
        return {"k": jnp.zeros(shape, dtype), "v": jnp.zeros(shape, dtype)}

    def flops(self, cfg: DecoderConfig, tokens: int, causal: str) -> tuple[int, int]:
        D, N, K, H = cfg.hidden_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        projections = cfg.num_layers * tokens * 2 * (2 * N + 2 * K) * D * H
        pairs = cfg.num_layers * tokens * tokens
        if causal == "triangle" and self.causal:
            pairs = sum(_visible_pairs(tokens, window) for window in cfg.layer_windows)
        return projections, 2 * 2 * N * H * pairs

    def apply(
        self, p: ParamTree, x_BTD: jax.Array, cfg: DecoderConfig, layer: Layer, cache: Any
    ) -> tuple[jax.Array, Any]:
        scope, positions_BT = layer.scope, layer.positions_BT
        if scope.touches(HEAD_INPUT_SITES):
            heads = {"q": cfg.num_heads, "k": cfg.num_kv_heads, "v": cfg.num_kv_heads}
            projected = [_project_inputs(p, name, N, layer) for name, N in heads.items()]
        else:
            projected = [
                project("BTD,DNH->BTNH", x_BTD, p[name], p.get(name + "_bias"))
                for name in ("q", "k", "v")
            ]
        q_BTNH, k_BSKH, v_BSKH = (
            scope("attn." + name, x) for name, x in zip(("q", "k", "v"), projected, strict=True)
        )
        if cfg.qk_norm != "none":
            axes = (-2, -1) if cfg.qk_norm == "projection" else (-1,)
            q_BTNH = norm(p["q_norm"], q_BTNH, cfg, scope, "attn.q_norm", axes)
            k_BSKH = norm(p["k_norm"], k_BSKH, cfg, scope, "attn.k_norm", axes)
        if layer.rope is not None:
            q_BTNH, k_BSKH = rotate(q_BTNH, layer.rope), rotate(k_BSKH, layer.rope)
        q_BTNH, k_BSKH = scope("attn.rot_q", q_BTNH), scope("attn.rot_k", k_BSKH)

        if cache is not None:
            rows_B1 = jnp.arange(positions_BT.shape[0])[:, None]
            cache = {
                name: cache[name].at[rows_B1, positions_BT].set(new, mode="drop")
                for name, new in (("k", k_BSKH), ("v", v_BSKH))
            }
            k_BSKH, v_BSKH = cache["k"], cache["v"]
        B, T = positions_BT.shape
        # Causality hides padding, which is after every token, and cache slots not yet written.
        segments_BT = None
        if not self.causal and layer.valid_BT is not None:
            segments_BT = jnp.where(layer.valid_BT, 0, -1)
        visible = visibility(
            "attention",
            *(B, T, k_BSKH.shape[1]),
            causal=self.causal,
            window=layer.window,
            segment_ids=segments_BT,
            start=0 if cache is None else positions_BT[:, 0],
        )
        z_BTNH = attention(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            visible,
            attend=layer.attend,
            scale=cfg.scale,
            cap=cfg.score_softcap,
            scope=scope,
            dropout=layer.dropout if self.pattern_dropout else NO_DROPOUT,
        )
        return project("BTNH,NHD->BTD", z_BTNH, p["o"], p.get("o_bias")), cache

    step = apply

    def freeze(self, p: ParamTree, records: Mapping[str, jax.Array]) -> FrozenAttention:
        """Attention with the pattern of one prompt (`frozen.FreezableMixer`)."""
        return FrozenAttention(
            pattern_LNTS=records["attn.pattern"],
            value_LDKH=p["v"],
            output_LNHD=p["o"],
            value_bias_LKH=p.get("v_bias"),
            output_bias_LD=p.get("o_bias"),
        )


@dataclasses.dataclass(frozen=True)
class BidirectionalAttention(AttentionMixer):
    """Attention without a causal mask: every position sees its whole row, except padding.

    Padding is where `Layer.valid_BT` is false.

    Raises:
      UsageError: there is a cache (a new token would change what earlier positions hold), or a
        sliding window.
    """

    causal: ClassVar[bool] = False

    def apply(
        self, p: ParamTree, x_BTD: jax.Array, cfg: DecoderConfig, layer: Layer, cache: Any
    ) -> tuple[jax.Array, Any]:
        if cache is not None:
            raise UsageError(
                "mixer: bidirectional attention cannot decode with a cache; pass whole rows to "
                "forward, or use the causal AttentionMixer"
            )
        if layer.window is not None:
            raise UsageError(
                "mixer: bidirectional attention has no sliding window; leave out config.windows, "
                "or use the causal AttentionMixer"
            )
        return super().apply(p, x_BTD, cfg, layer, cache)

    step = apply


def _project_inputs(p: ParamTree, name: str, N: int, layer: Layer) -> jax.Array:
    """Queries, keys or values of N heads, each of which reads and normalises its own input."""
    assert layer.resid_BTD is not None and layer.norm is not None
    if layer.scope.touches(frozenset({"ln1.scale"})):
        raise UsageError(
            "edits or record: ln1.scale is one divisor for all heads, but an input of single heads "
            f"is touched too, each with its own; use {name}_input.scale"
        )
    B, T, D = layer.resid_BTD.shape
    x_BTND = jnp.broadcast_to(layer.resid_BTD[:, :, None], (B, T, N, D))
    h_BTND = layer.norm(layer.scope(name + "_input", x_BTND), site=name + "_input")
    return project_heads(h_BTND, p[name], p.get(name + "_bias"))


def _visible_pairs(tokens: int, window: int | None) -> int:
    """Pairs of a query and a key that is not after it, nor more than its window before it."""
    reach = min(tokens, window or tokens)
    return reach * (reach + 1) // 2 + (tokens - reach) * reach


ATTENTION = AttentionMixer()
