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

from iaj_kernels.attention.visibility import visibility
from lm_jax.errors import UsageError
from lm_jax.model.attention import Attend, Fused, attention
from lm_jax.model.config import DecoderConfig
from lm_jax.model.frozen.attention import FrozenAttention
from lm_jax.model.layers import (
    NO_DROPOUT,
    Dropout,
    norm,
    project,
    project_heads,
    rotate,
    rotate_back,
)
from lm_jax.model.params import ParamSpec, ParamTree, constant, zeros
from lm_jax.model.sites import HEAD_INPUT_SITES, Scope

RopeTables = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Layer:
    """Context of a mixer in its layer: sites, positions, masks, dropout; exists during tracing.

    `positions_BT` are absolute and ascend by one; `window` is None, or a scalar that may be traced,
    as `index`, the number of the layer, is. `valid_BT` is false where a token is padding.
    `norm(x, site=...)` made the mixer's input of the residual stream `resid_BTD`: a norm, or
    nothing where blocks have none before the mixer. `document_BT` numbers the documents that are
    joined in a row, each of which is mixed by itself; None for one document. `lent` are the keys
    and values `k`, `v` of another layer that this one reads, or None; `lends` takes those that it
    reads of its own. `cache_rope` are the rotations of all positions of a cache, `[B, S, .]`, where
    they depend on how many tokens a row has (`Rope.lengths`): its keys are then kept unrotated.
    """

    positions_BT: jax.Array
    scope: Scope
    attend: Attend | Fused
    rope: RopeTables | None = None
    cache_rope: RopeTables | None = None
    window: jax.Array | None = None
    rng: jax.Array | None = None
    index: jax.Array | int = 0
    valid_BT: jax.Array | None = None
    document_BT: jax.Array | None = None
    dropout: Dropout = NO_DROPOUT
    resid_BTD: jax.Array | None = None
    norm: Callable[..., jax.Array] | None = None
    lent: Mapping[str, jax.Array] | None = None
    lends: dict[str, jax.Array] = dataclasses.field(default_factory=dict)

    @property
    def resets_BT(self) -> jax.Array | None:
        """True at the first token of every document but the first of a row; None without them."""
        if self.document_BT is None:
            return None
        changes_BT = self.document_BT[:, 1:] != self.document_BT[:, :-1]
        return jnp.pad(changes_BT, ((0, 0), (1, 0)))


class Mixer(Protocol):
    """A token mixer; `cache` is None outside decoding.

    `cache` is the layer's part of what `init_cache` declares: arrays for a `recurrent` mixer, which
    returns new ones, and for any other `caches.LayerSlice`, which it writes at some positions.

    A `recurrent` one keeps a state of one size, reads no `positions_BT` and has no longest context;
    it reads from `Layer.valid_BT` which tokens are padding, and may count the others. One whose
    `separates_documents` is true reads `Layer.document_BT`; `forward` refuses joined documents for
    any other.
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
    separates_documents: ClassVar[bool] = True
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
            shared = cfg.qk_norm in ("head", "head_and_value")
            for name, heads, axes in (("q_norm", N, "NH"), ("k_norm", K, "KH")):
                shape, axes = ((H,), "H") if shared else ((heads, H), axes)
                spec[name] = {"scale": constant(1.0 - cfg.norm_offset, shape, axes)}
        return {name: part for name, part in spec.items() if name[0] not in _absent(cfg)}

    def init_cache(self, cfg: DecoderConfig, batch: int, length: int, dtype: Any) -> Any:
        if isinstance(cfg.kv, int):
            return {}
        # Heads come before positions: the products with one query then need no transposed copy.
        shape = (batch, cfg.num_kv_heads, length, cfg.head_dim)
        return {"k": jnp.zeros(shape, dtype), "v": jnp.zeros(shape, dtype)}

    def flops(self, cfg: DecoderConfig, tokens: int, causal: str) -> tuple[int, int]:
        D, N, K, H = cfg.hidden_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        products = 2 * N + K * (2 - len(_absent(cfg)))
        projections = cfg.num_layers * tokens * 2 * products * D * H
        pairs = cfg.num_layers * tokens * tokens
        if causal == "triangle" and self.causal:
            pairs = sum(_visible_pairs(tokens, window) for window in cfg.layer_windows)
        return projections, 2 * 2 * N * H * pairs

    def apply(
        self, p: ParamTree, x_BTD: jax.Array, cfg: DecoderConfig, layer: Layer, cache: Any
    ) -> tuple[jax.Array, Any]:
        scope = layer.scope
        heads = _projected(p, x_BTD, cfg, layer)
        scored = [name for name in ("q", "k") if name in heads]
        if cfg.qk_norm != "none":
            axes = (-2, -1) if cfg.qk_norm == "projection" else (-1,)
            for name in scored:
                site = f"attn.{name}_norm"
                heads[name] = norm(p[name + "_norm"], heads[name], cfg, scope, site, axes)
        unrotated = heads.get("k")
        if layer.rope is not None:
            heads |= {name: rotate(heads[name], layer.rope) for name in scored}
        heads |= {name: scope("attn.rot_" + name, heads[name]) for name in scored}

        q_BTNH = heads.pop("q")
        if isinstance(cfg.kv, int):
            heads = _lent(cfg, layer)
        elif cache is not None and layer.cache_rope is not None:
            if layer.rope is not None and "attn.rot_k" in scope.edits:
                heads["k"] = rotate_back(heads["k"], layer.rope)
            elif unrotated is not None:
                heads["k"] = unrotated
        z_BTNH, cache = self.attend(q_BTNH, heads, cfg, layer, cache)
        return project("BTNH,NHD->BTD", z_BTNH, p["o"], p.get("o_bias")), cache

    def attend(
        self,
        q_BTNH: jax.Array,
        heads: dict[str, jax.Array],
        cfg: DecoderConfig,
        layer: Layer,
        cache: Any,
    ) -> tuple[jax.Array, Any]:
        """What the heads read, `z_BTNH`, and the cache with the new keys and values.

        Args:
          q_BTNH: queries as scored.
          heads: keys `k` and values `v` of the new tokens, `[B, T, K, H]`; those of all tokens
            where they are another layer's.
          cfg: configuration of the model.
          layer: context of the layer.
          cache: the layer's part of the cache, or None.
        """
        scope, positions_BT = layer.scope, layer.positions_BT
        if cache is not None and not isinstance(cfg.kv, int):
            rows_B1 = jnp.arange(positions_BT.shape[0])[:, None]
            cache = {
                name: cache[name].write_at((rows_B1, slice(None), positions_BT), new)
                for name, new in heads.items()
            }
            heads = {name: kept.read().swapaxes(1, 2) for name, kept in cache.items()}
            if layer.cache_rope is not None:
                heads["k"] = rotate(heads["k"], layer.cache_rope)
        layer.lends.update(heads)
        k_BSKH, v_BSKH = heads["k"], heads["v"]
        B, T = positions_BT.shape
        # Causality hides padding, which is after every token, and cache slots not yet written.
        segments_BT = layer.document_BT
        if not self.causal and layer.valid_BT is not None:
            segments_BT = jnp.where(layer.valid_BT, 0 if segments_BT is None else segments_BT, -1)
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
        return z_BTNH, cache

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


def _absent(cfg: DecoderConfig) -> str:
    """Those of k and v that have no projection, and so no bias or norm either."""
    return {"separate": "", "tied": "v"}.get(str(cfg.kv), "kv")


def _projected(
    p: ParamTree, x_BTD: jax.Array, cfg: DecoderConfig, layer: Layer
) -> dict[str, jax.Array]:
    """Queries, keys and values by name; only those that the layer projects itself."""
    scope, names = layer.scope, [name for name in "qkv" if name in p]
    if scope.touches(HEAD_INPUT_SITES):
        numbers = {"q": cfg.num_heads, "k": cfg.num_kv_heads, "v": cfg.num_kv_heads}
        heads = {name: _project_inputs(p, name, numbers[name], layer) for name in names}
    else:
        heads = {
            name: project("BTD,DNH->BTNH", x_BTD, p[name], p.get(name + "_bias")) for name in names
        }
    heads["q"] = scope("attn.q", heads["q"])
    if "k" in heads:
        heads["k"] = scope("attn.k", heads["k"])
        v_BSKH = heads.get("v", heads["k"])
        if cfg.qk_norm == "head_and_value":
            v_BSKH = norm({}, v_BSKH, cfg, scope, "attn.v_norm")
        heads["v"] = scope("attn.v", v_BSKH)
    return heads


def _lent(cfg: DecoderConfig, layer: Layer) -> dict[str, jax.Array]:
    """Keys and values of another layer, with those of the tokens that its cache holds."""
    if layer.lent is None:
        raise UsageError(
            f"config.kv = {cfg.kv}: a model's own config has no other layer to take keys from; "
            "name it in config.layers"
        )
    sites = {"k": "attn.rot_k", "v": "attn.v"}
    return {name: layer.scope(site, layer.lent[name]) for name, site in sites.items()}


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
