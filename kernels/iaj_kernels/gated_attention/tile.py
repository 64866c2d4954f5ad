"""Bernoulli-gated attention on one tile of raw scores q.k, for every fast path.

Sparse Attention Post-Training, section 3.1 and appendix B; the tiling and the online softmax are
FlashAttention-2's. For queries i and keys j of a tile, all in float32:

1. `logits`: the softmax score s and the gate logit e, both times log2(e), so that each exponential
   is one exp2. s is left as `factor(config)` times a base, the product q.k or its tanh: a fused
   multiply-add then takes the top or the log-sum-exp off it.
2. `gate`: with z = exp(-e), sigma(e) = 1 / (1 + z). For uniform u the logistic noise
   ln(u / (1 - u)) opens the gate where e + noise > 0, which is u > w for w = z (1 - u); and the
   relaxed gate of the straight-through gradient is sigma(e + noise) = u / (u + w). No logarithm is
   taken.
3. `absorb`: the online softmax. The gate multiplies a weight after the denominator counted it.
4. `backward`: P from the saved log-sum-exp, then, with g_ij = dout_i . v_j and
   delta_i = dout_i . out_i = sum_j A_ij P_ij g_ij,

       de = P g S'(e) + dE sigma(e) (1 - sigma(e))        ds = A P g - P delta + de

   where S' is the slope of the relaxed gate, and dE the cotangent of the expected edges.

A tile is any array whose last two axes are queries and keys. `mask` is true where a key is visible,
or None where all are. A backend passes its own `Intrinsics` where those of jnp are slow.
"""

from collections.abc import Callable, Mapping
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from iaj_kernels.attention import tiles
from iaj_kernels.core import dispatch, noise
from iaj_kernels.gated_attention.config import Config

LOG2_E = math.log2(math.e)

# By head width. Compiled for an H200, no main loop among them spills a register. float32 products
# are exact, so they use no tensor core and their tiles are small.
_TENSOR_CORE_TILES: Mapping[int, tiles.Table] = {
    64: dict.fromkeys(("forward", "queries", "keys"), (64, 64, 4, 2)),
    128: {"forward": (128, 64, 8, 2), "queries": (128, 64, 8, 2), "keys": (32, 128, 8, 2)},
    256: {"forward": (128, 64, 8, 2), "queries": (128, 32, 8, 1), "keys": (64, 32, 8, 1)},
}
_EXACT_TILES: Mapping[int, tiles.Table] = {
    16: dict.fromkeys(("forward", "queries", "keys"), (64, 64, 4, 2)),
    64: dict.fromkeys(("forward", "queries", "keys"), (32, 32, 4, 1)),
    128: {"forward": (32, 32, 8, 1), "queries": (16, 32, 8, 1), "keys": (32, 32, 8, 1)},
    256: {"forward": (16, 32, 8, 1), "queries": (32, 32, 8, 1), "keys": (16, 32, 8, 1)},
}
WIDEST = 256


def default_tiles(sizes: Mapping[str, int], dtype: Any) -> dict[str, int]:
    """The tiles of a call that tuning has not measured."""
    table = _TENSOR_CORE_TILES if dispatch.exact_dot(dtype) is None else _EXACT_TILES
    return tiles.named(table[min(width for width in table if width >= sizes["H"])])


# The top of a row that sees no key: finite, so that -inf - top is never NaN.
_LOWEST = -1e30


class Intrinsics(NamedTuple):
    """Elementary functions of float32 tiles, for which a backend may have own instructions."""

    exp2: Callable[[jax.Array], jax.Array]
    exp2_of_minus: Callable[[jax.Array], jax.Array]
    tanh: Callable[[jax.Array], jax.Array]
    reciprocal: Callable[[jax.Array], jax.Array]
    # x y + z, and z - x y.
    add_product: Callable[[jax.Array, Any, Any], jax.Array]
    subtract_product: Callable[[jax.Array, Any, Any], jax.Array]


PLAIN = Intrinsics(
    exp2=jnp.exp2,
    exp2_of_minus=lambda x: jnp.exp2(-x),
    tanh=jnp.tanh,
    reciprocal=lambda x: 1.0 / x,
    add_product=lambda x, y, z: x * y + z,
    subtract_product=lambda x, y, z: z - x * y,
)


class Gate(NamedTuple):
    """Every gate of a tile.

    Attributes:
      is_open: bool; for the count of open edges in mode "expected", where e > 0.
      probability: sigma(e).
      slope: the derivative by e of the relaxed gate that replaces A in the backward pass.
      probability_slope: sigma(e) (1 - sigma(e)).
    """

    is_open: jax.Array
    probability: jax.Array
    slope: jax.Array
    probability_slope: jax.Array


class Rows(NamedTuple):
    """Running statistics of each row of queries over the tiles so far: `[..., X]`.

    Attributes:
      top: the largest score, in bits.
      total: the sum of exp2(score - top), the softmax denominator.
      expected: the sum of sigma(e).
      opened: the count of open gates, exact up to 2^24 keys.
    """

    top: jax.Array
    total: jax.Array
    expected: jax.Array
    opened: jax.Array


def factor(config: Config) -> float:
    """The softmax score in bits (times log2 e) is this times the base; positive."""
    return (config.scale if config.soft_cap is None else config.soft_cap) * LOG2_E


def logits(
    config: Config, raw: jax.Array, bias: jax.Array, functions: Intrinsics = PLAIN
) -> tuple[jax.Array, jax.Array]:
    """The base of the softmax score of each pair, and its gate logit in bits.

    Args:
      raw: the products q.k, neither scaled nor masked.
      bias: the gate bias of the head, in natural units; broadcasts against `raw`.
    """
    base = raw
    if config.soft_cap is not None:
        base = functions.tanh(raw * (config.scale / config.soft_cap))
    own, times = base, factor(config)
    if config.gate_scale is not None:
        own, times = raw, config.gate_scale * LOG2_E
    return base, functions.add_product(own, times, bias * LOG2_E)


def gate(
    config: Config, logit: jax.Array, bits: jax.Array | None, functions: Intrinsics = PLAIN
) -> Gate:
    """The gates of a tile.

    Args:
      logit: the gate logits in bits, from `logits`.
      bits: random bits from `noise.bits`; read in mode "sample" alone.
    """
    # Infinite odds are right: the probability is 0, and no w is below u.
    odds = functions.exp2_of_minus(logit)
    probability = functions.reciprocal(1.0 + odds)
    probability_slope = _slope(probability, functions)
    if config.mode == "sample":
        if bits is None:
            raise ValueError("gated_attention: mode='sample' needs the random bits of its tile")
        u = noise.uniform(bits)
        w = odds * (1.0 - u)
        relaxed = u * functions.reciprocal(u + w)
        return Gate(u > w, probability, _slope(relaxed, functions), probability_slope)
    if config.mode == "open":
        # Always true, but computed from the tile: a constant costs a GPU a change of layout.
        everywhere = odds >= 0.0
        return Gate(everywhere, probability, jnp.zeros_like(logit), probability_slope)
    return Gate(logit > 0.0, probability, probability_slope, probability_slope)


def _slope(sigmoid: jax.Array, functions: Intrinsics) -> jax.Array:
    return functions.subtract_product(sigmoid, sigmoid, sigmoid)


def gated(config: Config, gate: Gate, p: jax.Array) -> jax.Array:
    """A times `p`."""
    if config.mode == "open":
        return p
    if config.mode == "expected":
        return gate.probability * p
    return jnp.where(gate.is_open, p, 0.0)


def no_rows(shape: tuple[int, ...]) -> Rows:
    """Rows before their first tile."""
    zeros = jnp.zeros(shape, jnp.float32)
    return Rows(jnp.full(shape, _LOWEST, jnp.float32), zeros, zeros, zeros)


def absorb(
    config: Config,
    rows: Rows,
    raw: jax.Array,
    bias: jax.Array,
    bits: jax.Array | None,
    mask: jax.Array | None,
    functions: Intrinsics = PLAIN,
) -> tuple[Rows, jax.Array, jax.Array]:
    """Updates the rows by one tile: a step of the online softmax.

    Returns:
      the rows, the gated weights A exp2(score - top) of the tile, and the factor `[..., X]` that
      rescales a running sum from the old top to the new one.
    """
    base, logit = logits(config, raw, bias, functions)
    gates = gate(config, logit, bits, functions)
    is_open, probability = gates.is_open, gates.probability
    if mask is not None:
        base = jnp.where(mask, base, -jnp.inf)
        is_open = is_open & mask
        probability = jnp.where(mask, probability, 0.0)
    times = factor(config)
    top = jnp.maximum(rows.top, jnp.max(base, axis=-1) * times)
    decay = functions.exp2(rows.top - top)
    p = functions.exp2(functions.add_product(base, times, -top[..., None]))
    # The gate as a number: a GPU adds and multiplies it in fewer instructions than it selects and
    # counts.
    opened = jnp.where(is_open, jnp.float32(1.0), jnp.float32(0.0))
    rows = Rows(
        top=top,
        total=rows.total * decay + jnp.sum(p, axis=-1),
        expected=rows.expected + jnp.sum(probability, axis=-1),
        opened=rows.opened + jnp.sum(opened, axis=-1),
    )
    return rows, p * (gates.probability if config.mode == "expected" else opened), decay


def finish(rows: Rows, sum_: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The output and the log-sum-exp in bits; zeros for a row that sees no key.

    Args:
      sum_: `[..., X, H]`, the sum of gated weights times values.
    """
    empty = rows.total == 0.0
    total = jnp.where(empty, 1.0, rows.total)
    return sum_ / total[..., None], jnp.where(empty, 0.0, rows.top + jnp.log2(total))


def backward(
    config: Config,
    raw: jax.Array,
    bias: jax.Array,
    bits: jax.Array | None,
    mask: jax.Array | None,
    lse: jax.Array,
    g: jax.Array,
    delta: jax.Array,
    d_expected: jax.Array,
    functions: Intrinsics = PLAIN,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The element-wise part of the backward pass.

    Args:
      lse: the row's log-sum-exp in bits, from `finish`; it and the next three broadcast against
        the tile.
      g: dout . v.
      delta: dout . out.
      d_expected: the cotangent of the head's expected edges.

    Returns:
      A P, the gradient of the gate logit (in natural units), and that of `scale * raw`: the caller
      multiplies its sums of the last by `config.scale`.
    """
    base, logit = logits(config, raw, bias, functions)
    gates = gate(config, logit, bits, functions)
    p = functions.exp2(functions.add_product(base, factor(config), -lse))
    probability_slope = gates.probability_slope
    if mask is not None:
        p = jnp.where(mask, p, 0.0)
        probability_slope = jnp.where(mask, probability_slope, 0.0)
    pg = p * g
    d_gate = d_expected * probability_slope
    if config.mode != "open":
        d_gate = functions.add_product(pg, gates.slope, d_gate)
    d_score = functions.subtract_product(p, delta, gated(config, gates, pg))
    if config.gate_scale is None:
        d_score += d_gate
    if config.soft_cap is not None:
        d_score *= functions.subtract_product(base, base, 1.0)
    if config.gate_scale is not None:
        d_score = functions.add_product(d_gate, config.gate_scale / config.scale, d_score)
    return gated(config, gates, p), d_gate, d_score
