"""Row maps of other papers that may replace softmax: windows, softpick, entmax, polynomials.

With scores z, a bias b, u = z + b and n the number of keys that the query sees, a row of weights is

    softpick          max(e^u - 1, 0) / sum |e^u - 1|   Zuhri et al. 2025, arXiv:2504.20966
    entmax15          max(z / 2 - t, 0)^2, t such that  Peters, Niculae and Martins 2019,
                      the row sums to 1                 arXiv:1905.05702 (t by sorting)
    softmax_logn      softmax of z log n / log n0       Nakanishi 2025, arXiv:2501.19399, with
                                                        s = 1 / log n0: softmax itself at n0 keys
    poly              u^p / sum |u|^p                   Kacham et al. 2024, arXiv:2310.01655: even p
    poly_over_length  u^p / n^alpha                     Saratchandran et al. 2024, arXiv:2410.18613
    taylor2           (1 + u + u^2 / 2) / sum           Arora et al. 2024, arXiv:2402.18668
    window            softmax of the last w keys and    Xiao et al. 2023, arXiv:2309.17453
                      the first few ("sinks")

A window needs no training and keeps w keys and the sinks, whatever the length: what any other map
is to beat. A query is the last key that its row sees; the first keys are those of the whole row.
With a w of its own, `taylor2` has gamma e^u for the keys in the window and its polynomial for the
others, under one sum (the form of LoLCATs; `feature_maps`): softmax where all keys are inside.
Sigmoid with a bias of -log n is `row_maps.ramapuram_sigmoid`. An odd p gives weights of both signs,
so there is no share of mass on a key and S of such a row is not defined (`signed`). `kernels` knows
none of these maps: they run on whole rows of scores.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from iaj_kernels.attention.rows import over_sum, softmax
from lm_jax.run.config import LATER

Kind = Literal[
    "softpick", "entmax15", "softmax_logn", "poly", "poly_over_length", "taylor2", "window"
]


@dataclasses.dataclass(frozen=True)
class FieldMap:
    """One row map, called on scores as `iaj_kernels.row_map_attention.maps.RowMap` is; hashable.

    `p` and `alpha` are read by the polynomials alone, `n0` by `softmax_logn`, `w` and `sinks` by
    `window` and `taylor2`, which has no window with w = 0, and `gamma` by `taylor2` with a window.
    """

    kind: Kind
    p: int = 1
    alpha: float = 0.0
    n0: float = 1024.0
    w: int = 0
    sinks: int = 0
    gamma: float = dataclasses.field(default=1.0, metadata=LATER)

    @property
    def signed(self) -> bool:
        """Whether weights may be negative."""
        return self.kind in ("poly", "poly_over_length") and self.p % 2 == 1

    @property
    def normalised(self) -> bool:
        """Whether the weights of every row sum to 1."""
        return self.kind not in ("softpick", "poly_over_length") and not self.signed

    @property
    def degree(self) -> None:
        """None: these maps are no power of max(u, 0), and have no S_p."""
        return None

    def __call__(self, scores: Any, bias: Any = 0.0) -> jax.Array:
        """Weights of `scores[..., S]`, where a masked key has score -inf and weight 0.

        Arithmetic is in float32, or in the scores' dtype if that is wider. A row without any weight
        is all zeros. A NaN score gives NaN.

        Args:
          bias: b, a scalar or an array that broadcasts to `scores`; entmax, scaled softmax and
            windows do not depend on it.
        """
        scores = jnp.asarray(scores)
        dtype = jnp.promote_types(scores.dtype, jnp.float32)
        z, bias = scores.astype(dtype), jnp.asarray(bias, dtype)
        if bias.ndim:
            bias = jnp.broadcast_to(bias, z.shape)
        kept = z != -jnp.inf
        u = jnp.where(kept, z, 0) + bias
        match self.kind:
            case "softpick":
                return _softpick(u, kept)
            case "entmax15":
                return _entmax15(z)
            case "softmax_logn":
                factor = jnp.log(_length(kept, dtype)) / math.log(self.n0)
                return softmax(jnp.where(kept, jnp.where(kept, z, 0) * factor, -jnp.inf))
            case "poly":
                size = jnp.where(kept, jnp.abs(u), 0)
                # The map does not depend on the scale of u, so the peak needs no gradient.
                peak = jax.lax.stop_gradient(size.max(-1, keepdims=True))
                power = jnp.where(kept, (u / jnp.where(peak == 0, 1, peak)) ** self.p, 0)
                return _over(power, jnp.abs(power))
            case "poly_over_length":
                return jnp.where(kept, u**self.p, 0) / _length(kept, dtype) ** self.alpha
            case "taylor2":
                # 1 + u + u^2 / 2 without the cancellation near u = -1.
                weight = ((1 + u) ** 2 + 1) / 2
                if not self.w:
                    return over_sum(jnp.where(kept, weight, 0))
                inside = within(kept, self.w, self.sinks)
                log_weight = jnp.where(inside, u + math.log(self.gamma), jnp.log(weight))
                return softmax(jnp.where(kept, log_weight, -jnp.inf))
            case "window":
                return softmax(jnp.where(within(kept, self.w, self.sinks), z, -jnp.inf))
            case _:
                raise ValueError(f"no row map of kind {self.kind!r}")


def within(kept: jax.Array, w: int, sinks: int) -> jax.Array:
    """Which keys of a row are among its last `w` or its first `sinks`, of keys `[..., S]` kept."""
    S = kept.shape[-1]
    key = jnp.arange(S).reshape((1,) * (kept.ndim - 1) + (S,))
    query = S - 1 - jnp.argmax(kept[..., ::-1], axis=-1, keepdims=True)
    return kept & ((query - key < w) | (key < sinks))


def _softpick(u: jax.Array, kept: jax.Array) -> jax.Array:
    """|e^u - 1| = e^max(u, 0) (1 - e^-|u|), divided by e^m, m the greatest exponent."""
    above = jnp.maximum(u, 0)
    peak = jax.lax.stop_gradient(jnp.where(kept, above, 0).max(-1, keepdims=True))
    size = jnp.where(kept, jnp.exp(above - peak) * -jnp.expm1(-jnp.abs(u)), 0)
    return _over(jnp.where(u <= 0, 0, size), size)


def _over(weight: jax.Array, size: jax.Array) -> jax.Array:
    total = size.sum(-1, keepdims=True)
    return weight / jnp.where(total == 0, 1, total)


def _length(kept: jax.Array, dtype: Any) -> jax.Array:
    return jnp.maximum(kept.sum(-1, keepdims=True), 1).astype(dtype)


@jax.custom_jvp
def _entmax15(z: jax.Array) -> jax.Array:
    """1.5-entmax of every row, exact: the threshold t solves a quadratic in the support.

    With x = z / 2 in descending order and M, V the mean and variance of the first k, t_k is
    M - sqrt(1 / k - V); t is that of the largest k with t_k <= x_k, and t_k grows until there. The
    greatest x is made 0: then -1 <= t, and keys below -1, masked ones too, have no weight.
    """
    top = z.max(-1, keepdims=True)
    top = jnp.where(jnp.isneginf(top), 0, top)
    x = jnp.maximum((jnp.sort(z, axis=-1, descending=True) - top) / 2, -1)
    k = jnp.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    k = k.reshape((1,) * (x.ndim - 1) + (-1,))
    mean = jnp.cumsum(x, -1) / k
    spread = jnp.cumsum(x**2, -1) - k * mean**2
    each = mean - jnp.sqrt(jnp.maximum((1 - spread) / k, 0))
    threshold = jnp.where(each <= x, each, -1).max(-1, keepdims=True)
    support = jnp.maximum(jnp.where(z == -jnp.inf, -1, (z - top) / 2) - threshold, 0)
    return over_sum(jnp.where(z == -jnp.inf, 0, support**2))


@_entmax15.defjvp
def _entmax15_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[Any, Any]:
    """dw = s (dz - s.dz / sum s) with s = sqrt w, and so 0 outside the support."""
    weights = _entmax15(*primals)
    root = jnp.sqrt(weights)
    (dz,) = tangents
    return weights, root * (dz - (over_sum(root) * dz).sum(-1, keepdims=True))
