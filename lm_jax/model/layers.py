"""Layers of all model families, as functions of arrays.

Matrix products run in the dtype of the parameters; norms, rotations, scores and softmax run in
float32. Each reciprocal scale of a norm is a site, so that it can be read or frozen.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import math
from typing import Any
import zlib

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from iaj_kernels.core import noise
from lm_jax.model.config import DecoderConfig
from lm_jax.model.lora import Adapted
from lm_jax.model.params import Initializer, ParamSpec, ParamTree, constant, zeros
from lm_jax.model.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    YarnScaling,
)
from lm_jax.model.sites import Scope

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


# Name of the values of a block that `rematerialised` saves.
PRODUCT = "product"


def project(
    equation: str, x: jax.Array, w: jax.Array | Adapted, bias: jax.Array | None = None
) -> jax.Array:
    """`einsum(equation, x, w)` plus a bias over the trailing axes, for every weight product.

    The last axes of `x` are summed over with the first of `w`.
    """
    inputs, _ = equation.split("->")
    axes_x, axes_w = inputs.split(",")
    summed = sum(letter in axes_x for letter in axes_w)
    if isinstance(w, Adapted):
        update = _matrix_product(_matrix_product(x, w.down, summed), w.up, 1)
        y = _matrix_product(x, w.weight, summed)
        y = y + (w.strength * update).astype(y.dtype)
    else:
        y = _matrix_product(x, w, summed)
    y = y if bias is None else y + add_axes(bias, y.ndim)
    return checkpoint_name(y, PRODUCT)


def project_heads(
    x_BTND: jax.Array, w: jax.Array | Adapted, bias_NH: jax.Array | None = None
) -> jax.Array:
    """`project("BTD,DNH->BTNH", ...)` where every head reads an input of its own."""
    if isinstance(w, Adapted):
        down_BTNR = _matrix_product(x_BTND, w.down, 1)
        update_BTNH = jnp.einsum("BTNR,RNH->BTNH", down_BTNR, w.up)
        y_BTNH = jnp.einsum("BTND,DNH->BTNH", x_BTND, w.weight)
        y_BTNH = y_BTNH + (w.strength * update_BTNH).astype(y_BTNH.dtype)
    else:
        y_BTNH = jnp.einsum("BTND,DNH->BTNH", x_BTND, w)
    y_BTNH = y_BTNH if bias_NH is None else y_BTNH + add_axes(bias_NH, y_BTNH.ndim)
    return checkpoint_name(y_BTNH, PRODUCT)


# Of two matrices: with several token axes XLA's CPU compiler transposes the gradient for the
# product with x entry by entry, fused with all that computes it. The backward pass saves x in its
# own shape, not a second array in the shape of a matrix.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def _matrix_product(x: jax.Array, w: jax.Array, summed: int) -> jax.Array:
    rows, columns = math.prod(w.shape[:summed]), w.shape[summed:]
    y = x.reshape(-1, rows) @ w.reshape(rows, -1)
    return y.reshape(*x.shape[: x.ndim - summed], *columns)


def rematerialised(block: Callable[..., Any], scope: Scope, *args: Any) -> Any:
    """Runs `block(scope, *args)`; the backward pass saves `args` and weight products alone.

    Everything else is cheap to recompute, and large to store.
    """

    def pure(state: Any, *args: Any) -> tuple[Any, Any]:
        inner = Scope(scope.edits, scope.record, visited=scope.visited, state=state)
        return block(inner, *args), (inner.records, inner.aux, inner.state)

    keep = jax.checkpoint_policies.save_only_these_names(PRODUCT)
    run = jax.checkpoint(pure, prevent_cse=False, policy=keep)
    output, (records, aux, scope.state) = run(scope.state, *args)
    scope.records |= records
    scope.aux |= aux
    return output


def add_axes(x: jax.Array, ndim: int) -> jax.Array:
    """`x` with leading axes of length one, up to `ndim`."""
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)


def softcap(x: jax.Array, cap: float | None) -> jax.Array:
    """`cap * tanh(x / cap)`; `None` leaves `x` alone."""
    return x if cap is None else cap * jnp.tanh(x / cap)


# Dropout


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Dropout: zeroes a share `rate` of the entries and scales the rest; identity without a key.

    Srivastava et al., 2014, in the inverted form. Each name has random bits of its own. Whether an
    entry is kept is a function of key, name and the place of the entry in the whole array
    (`iaj_kernels.core.noise`), with a probability exact to 2^-32: the same on every mesh.
    """

    rate: float = 0.0
    key: jax.Array | None = None

    @property
    def active(self) -> bool:
        """Whether anything is dropped."""
        return self.key is not None and self.rate > 0.0

    @jax.named_scope("dropout")
    def __call__(self, x: jax.Array, name: str) -> jax.Array:
        if self.key is None or not self.active:
            return x
        key = jax.random.fold_in(self.key, zlib.crc32(name.encode()))
        least = jnp.uint32(min(round(self.rate * 2**32), 2**32 - 1))
        kept = _bits(jax.random.bits(key, (2,), jnp.uint32), x.shape) >= least
        return jnp.where(kept, x / (1.0 - self.rate), 0.0).astype(x.dtype)


def _bits(seed_2: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """32 random bits (uint32) for every entry of an array of at least two axes."""
    *counters, query, key = (
        jax.lax.broadcasted_iota(jnp.uint32, (1,) * i + (size,) + (1,) * (len(shape) - i - 1), i)
        for i, size in enumerate(shape)
    )
    batch = jnp.zeros((1,) * len(shape), jnp.uint32)
    for counter, size in zip(counters, shape, strict=False):
        batch = batch * jnp.uint32(size) + counter
    return noise.bits(noise.stream(seed_2[0], batch, seed_2[1]), query, key)


NO_DROPOUT = Dropout()

# Norms


def norm_spec(cfg: DecoderConfig) -> ParamTree:
    """The scale, and for layer norm the bias, over D; nothing for norms without weights."""
    if not cfg.norm_weights:
        return {}
    spec = {"scale": constant(1.0 - cfg.norm_offset, (cfg.hidden_size,), "D")}
    if cfg.norm == "layer":
        spec["bias"] = zeros((cfg.hidden_size,), "D")
    return spec


def norm(
    p: ParamTree,
    x: jax.Array,
    cfg: DecoderConfig,
    scope: Scope,
    site: str,
    axes: tuple[int, ...] = (-1,),
) -> jax.Array:
    """RMS or layer norm over the last axis or `axes`, in float32, returned in the dtype of `x`.

    The site `<site>.scale` is the divisor sqrt(mean square + eps), of length one on those axes.
    """
    # The two barriers keep XLA from fusing (and so rounding) differently when an edit is before
    # the norm or on its divisor: an edit that changes nothing then changes no bit.
    h = jax.lax.optimization_barrier(x).astype(jnp.float32)
    if cfg.norm == "layer":
        h = h - h.mean(axes, keepdims=True)
    divisor = jnp.sqrt(jnp.mean(h * h, axes, keepdims=True) + cfg.norm_eps)
    divisor = jax.lax.optimization_barrier(scope(site + ".scale", divisor))
    y = h / divisor
    if "scale" in p:
        y = y * add_axes(p["scale"].astype(jnp.float32) + cfg.norm_offset, x.ndim)
    if "bias" in p:
        y = y + add_axes(p["bias"].astype(jnp.float32), x.ndim)
    return y.astype(x.dtype)


# Rotary positions


def inverse_frequencies(rope: Rope, width: int, length: int = 1) -> np.ndarray:
    """Radians per position for each rotated pair, float32 [width / 2] (Su et al., 2021, eq. 15).

    `length` is the number of tokens of the sequence, where the scaling depends on it.
    """
    powers = np.arange(0, width, 2, dtype=np.float64) / width
    freq = 1.0 / rope.theta**powers
    match rope.scaling:
        case LinearScaling(factor=factor):
            freq = freq / factor
        case Llama3Scaling() as s:
            wavelength = 2 * math.pi / freq
            ramp = (s.original_length / wavelength - s.low_freq_factor) / (
                s.high_freq_factor - s.low_freq_factor
            )
            keep = np.clip(ramp, 0.0, 1.0)
            freq = keep * freq + (1 - keep) * freq / s.factor
        case YarnScaling() as s:
            first, last = (
                width
                * math.log(s.original_length / (turns * 2 * math.pi))
                / 2
                / math.log(rope.theta)
                for turns in (s.beta_fast, s.beta_slow)
            )
            first, last = max(math.floor(first), 0), min(math.ceil(last), width - 1)
            # As the released code does where both are the same pair.
            span = last - first or 0.001
            slowed = np.clip((np.arange(width // 2) - first) / span, 0.0, 1.0)
            freq = (1 - slowed) * freq + slowed * freq / s.factor
        case LongRopeScaling() as s:
            factors = s.long_factor if length > s.original_length else s.short_factor
            freq = freq / np.array(factors, np.float64)
        case DynamicScaling() as s:
            slowest = s.factor * max(length / s.original_length, 1.0) - (s.factor - 1.0)
            freq = freq / slowest ** (width / (width - 2) * powers)
        case ProportionalScaling() as s:
            turning = np.arange(width // 2) < int(s.rotated * width / 2)
            freq = np.where(turning, freq / s.factor, 0.0)
    return freq.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class RowLengths:
    """How many tokens the sequence of a position has, `[B, 1]` or `[B, T]`; at most `longest`."""

    tokens_BT: jax.Array
    longest: int


def rope_tables(
    rope: Rope, width: int, positions_BT: jax.Array, length: int | RowLengths | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every position's angles, float32 `[B, T, width / 2]`.

    `length` is that of `inverse_frequencies`, by default T, or one for every row or position. YaRN
    and LongRoPE scale both.
    """
    length = positions_BT.shape[1] if length is None else length
    if isinstance(length, RowLengths):
        frequencies = _frequencies_by_row(rope, width, length)
    else:
        frequencies = add_axes(jnp.asarray(inverse_frequencies(rope, width, length)), 3)
    angle = positions_BT.astype(jnp.float32)[..., None] * frequencies
    if isinstance(rope.scaling, YarnScaling | LongRopeScaling):
        factor = rope.scaling.attention_factor
        return factor * jnp.cos(angle), factor * jnp.sin(angle)
    return jnp.cos(angle), jnp.sin(angle)


def _frequencies_by_row(rope: Rope, width: int, length: RowLengths) -> jax.Array:
    """`inverse_frequencies` of every length, `[B, 1 or T, width / 2]`."""
    lengths = rope.lengths(length.longest)
    # Looked up, and not computed in float32: any way to read a text then rotates it alike.
    table = np.stack([inverse_frequencies(rope, width, n) for n in lengths])
    return jnp.asarray(table)[jnp.clip(length.tokens_BT - lengths.start, 0, len(lengths) - 1)]


def rotate(x_BTNH: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates coordinate pairs (i, i + width / 2) of the first `width` coordinates of each head."""
    cos, sin = (t[:, :, None, :] for t in tables)
    half = cos.shape[-1]
    x = x_BTNH.astype(jnp.promote_types(x_BTNH.dtype, jnp.float32))
    a, b, rest = x[..., :half], x[..., half : 2 * half], x_BTNH[..., 2 * half :]
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BTNH.dtype)
    return jnp.concatenate([turned, rest], -1) if rest.shape[-1] else turned


def rotate_back(x_BTNH: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """What `rotate` made `x_BTNH` of."""
    cos, sin = tables
    # YaRN and LongRoPE scale both.
    square = cos * cos + sin * sin
    return rotate(x_BTNH, (cos / square, -sin / square))


# MLP


def mlp_spec(cfg: DecoderConfig) -> ParamTree:
    """`up`, `down` and, for gated families, `gate`; biases where the config has them."""
    D, F = cfg.hidden_size, cfg.mlp_size
    spec: dict[str, Any] = {"up": ParamSpec((D, F), "DF"), "down": ParamSpec((F, D), "FD")}
    if cfg.gated_mlp:
        spec["gate"] = ParamSpec((D, F), "DF")
    if cfg.mlp_bias:
        spec |= {"up_bias": zeros((F,), "F"), "down_bias": zeros((D,), "D")}
        if cfg.gated_mlp:
            spec["gate_bias"] = zeros((F,), "F")
    return spec


@jax.named_scope("mlp")
def mlp(
    p: ParamTree,
    x_BTD: jax.Array,
    cfg: DecoderConfig,
    scope: Scope,
    dropout: Dropout = NO_DROPOUT,
) -> jax.Array:
    """`down(act(gate(x)) * up(x))`, or `down(act(up(x)))` without a gate."""
    x_BTD = scope("mlp.in", x_BTD)
    act = ACTIVATIONS[cfg.activation]
    h_BTF = project("BTD,DF->BTF", x_BTD, p["up"], p.get("up_bias"))
    if cfg.gated_mlp:
        gate_BTF = project("BTD,DF->BTF", x_BTD, p["gate"], p.get("gate_bias"))
        h_BTF = scope.function("mlp.act", act, gate_BTF) * h_BTF
    else:
        h_BTF = scope.function("mlp.act", act, h_BTF)
    h_BTF = scope("mlp.post", dropout(h_BTF, "mlp.post"))
    return project("BTF,FD->BTD", h_BTF, p["down"], p.get("down_bias"))


# Embedding


def embed_spec(cfg: DecoderConfig) -> ParamTree:
    """Token embedding and, without rotary positions, a learned embedding of `max_length` P."""
    tokens = ParamSpec((cfg.vocab_size, cfg.hidden_size), "VD")
    if cfg.pad_id is not None:
        tokens = dataclasses.replace(tokens, init=_with_zero_row(tokens.init, cfg.pad_id))
    spec = {"tokens": tokens}
    if cfg.rope is None:
        spec["positions"] = ParamSpec((cfg.max_length, cfg.hidden_size), "PD")
    return spec


def _with_zero_row(init: Initializer, row: int) -> Initializer:
    return lambda key, shape, dtype: init(key, shape, dtype).at[row].set(0)


@jax.named_scope("embed")
def embed(
    p: ParamTree, tokens_BT: jax.Array, positions_BT: jax.Array, cfg: DecoderConfig
) -> jax.Array:
    """Rows of the embedding; ids or positions out of range give NaN rows, never another row's."""
    x_BTD = rows(p["tokens"], tokens_BT)
    if cfg.embed_scale != 1.0:
        # The factor is rounded to the weights' dtype first, as the released Gemma code does.
        x_BTD = x_BTD * jnp.asarray(cfg.embed_scale, x_BTD.dtype)
    if cfg.rope is None:
        x_BTD = x_BTD + rows(p["positions"], positions_BT)
    return x_BTD


def rows(table_VD: jax.Array, index_BT: jax.Array) -> jax.Array:
    """`table[index]`, NaN where the index is out of range."""
    return table_VD.at[index_BT].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


@jax.named_scope("logits")
def unembed(params: ParamTree, x_BTD: jax.Array, cfg: DecoderConfig) -> jax.Array:
    """Logits in float32 `[B, T, V]`."""
    w_VD = unembedding(params, cfg)
    logits = jnp.einsum("BTD,VD->BTV", x_BTD, w_VD, preferred_element_type=jnp.float32)
    return softcap(logits, cfg.logit_softcap)


def unembedding(params: ParamTree, cfg: DecoderConfig) -> jax.Array:
    """The unembedding matrix `[V, D]`: the token embedding where it is tied."""
    return params["embed"]["tokens"] if cfg.tie_embeddings else params["unembed"].T
