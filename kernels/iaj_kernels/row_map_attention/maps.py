"""The row maps that `row_map_attention` computes: static descriptions, and functions of score rows.

"When Does Polynomial Attention Concentrate?", Eq. 2, Algorithm 1 and section 5.1. With scores s, a
bias b, u = s + b, r = max(u, 0) and n the number of keys that the query sees, a row of weights is

    softmax              e^s / sum e^s                (a bias would cancel, Theorem 4.1)
    relu_power           r^p / sum r^p                any p > 0
    sigmoid              sigma(u) / sum sigma(u)
    ramapuram_sigmoid    sigma(u - log n)             (arXiv:2409.04431), or sigma(u)
    relu_over_length     r^p / n^alpha                (Wortsman et al., arXiv:2309.08586)

The last two are not normalised. A map is called on whole rows; the arithmetic of the fast
implementations, which see a part of a row at a time, is in `tile.py`.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from iaj_kernels.attention.rows import over_sum
from iaj_kernels.attention.rows import softmax as softmax_of_rows

OP = "row_map_attention"

Kind = Literal["softmax", "relu_power", "sigmoid", "ramapuram_sigmoid", "relu_over_length"]


@dataclasses.dataclass(frozen=True)
class RowMap:
    """One row map, to be called on scores; hashable, so it is static under `jit`.

    Built by the functions below. `p` and `alpha` are read by the relu maps alone, `minus_log_n` by
    `ramapuram_sigmoid`.
    """

    kind: Kind
    p: float = 1.0
    alpha: float = 0.0
    minus_log_n: bool = False

    @property
    def normalised(self) -> bool:
        """Whether a row's weights are divided by their sum."""
        return self.kind in ("softmax", "relu_power", "sigmoid")

    @property
    def relu(self) -> bool:
        """Whether the weight is a power of max(u, 0)."""
        return self.kind in ("relu_power", "relu_over_length")

    @property
    def biased(self) -> bool:
        """Whether the bias matters."""
        return self.kind != "softmax"

    @property
    def degree(self) -> float | None:
        """p of a relu map; None for the others."""
        return self.p if self.relu else None

    @property
    def counts_keys(self) -> bool:
        """Whether a weight depends on the number of visible keys."""
        return self.minus_log_n or (self.kind == "relu_over_length" and self.alpha != 0)

    def __call__(self, scores: Any, bias: Any = 0.0) -> jax.Array:
        """Weights of `scores[..., S]`, where a masked key has score -inf and weight 0.

        Arithmetic is in float32, or in the scores' dtype if that is wider. A row whose weights sum
        to 0 (a dead row, or one with no key) is all zeros. Gradients are finite; those of the relu
        maps are 0 at the threshold and below it. A NaN score gives NaN.

        Args:
          bias: b, a scalar or an array that broadcasts to `scores`.
        """
        scores = jnp.asarray(scores)
        dtype = jnp.promote_types(scores.dtype, jnp.float32)
        z, bias = scores.astype(dtype), jnp.asarray(bias, dtype)
        if bias.ndim:
            bias = jnp.broadcast_to(bias, z.shape)
        kept = z != -jnp.inf
        match self.kind:
            case "softmax":
                return softmax_of_rows(z)
            case "sigmoid":
                # In the log domain: sigma is 0 in float32 below -104 though the ratios are not.
                log_weight = jax.nn.log_sigmoid(jnp.where(kept, z, 0) + bias)
                return softmax_of_rows(jnp.where(kept, log_weight, -jnp.inf))
            case "relu_power":
                r = _positive_part(z + bias)
                # The map does not depend on the scale of r, so the peak needs no gradient; without
                # it r^16 leaves float32 from r = 256 on.
                peak = jax.lax.stop_gradient(r.max(-1, keepdims=True))
                return over_sum(_power(r / jnp.where(peak > 0, peak, 1), self.p))
            case "ramapuram_sigmoid":
                u = jnp.where(kept, z, 0) + bias
                if self.minus_log_n:
                    u = u - jnp.log(_length(kept, dtype))
                return jnp.where(kept, jax.nn.sigmoid(u), 0)
            case "relu_over_length":
                weight = _power(_positive_part(z + bias), self.p)
                return weight / _length(kept, dtype) ** self.alpha
            case _:
                raise ValueError(f"{OP}: no row map of kind {self.kind!r}")


def _positive_part(u: jax.Array) -> jax.Array:
    """max(u, 0) with slope 0 at the threshold; a NaN stays NaN."""
    return jnp.where(u <= 0, 0, u)


def _length(kept: jax.Array, dtype: Any) -> jax.Array:
    return jnp.maximum(kept.sum(-1, keepdims=True), 1).astype(dtype)


def _power(x: jax.Array, p: float) -> jax.Array:
    if p == int(p):
        return x ** int(p)
    # The slope of x^p at 0 is inf or 0 * inf; inactive keys have none.
    return jnp.where(x == 0, 0, jnp.where(x == 0, 1, x) ** p)


SOFTMAX = RowMap("softmax")


def softmax() -> RowMap:
    """`e^s / sum e^s`."""
    return SOFTMAX


def relu_power(p: float) -> RowMap:
    """`r^p / sum r^p`, from r / r_max: right at p = 16 for scores of any size."""
    return RowMap("relu_power", p=_positive("relu_power", p))


def sigmoid() -> RowMap:
    """`sigma(u) / sum sigma(u)`, in the log domain: right where sigma itself underflows."""
    return RowMap("sigmoid")


def ramapuram_sigmoid(minus_log_n: bool = True) -> RowMap:
    """`sigma(u - log n)`, or `sigma(u)` without `minus_log_n`; not normalised."""
    return RowMap("ramapuram_sigmoid", minus_log_n=minus_log_n)


def relu_over_length(p: float, alpha: float) -> RowMap:
    """`r^p / n^alpha`, n being the keys that the query sees and not the length; not normalised."""
    if not math.isfinite(alpha):
        raise ValueError(f"{OP}: relu_over_length has alpha = {alpha}; pass a finite number")
    return RowMap("relu_over_length", p=_positive("relu_over_length", p), alpha=float(alpha))


def _positive(kind: str, p: float) -> float:
    if not 0 < p < math.inf:
        raise ValueError(f"{OP}: {kind} has p = {p}; pass a positive number")
    return float(p)
