"""The row maps that `row_map_attention` computes, as static descriptions.

"When Does Polynomial Attention Concentrate?", Eq. 2, Algorithm 1 and section 5.1. With scores s, a
bias b, u = s + b, r = max(u, 0) and n the number of keys that the query sees, a row of weights is

    softmax              e^s / sum e^s                (a bias would cancel, Theorem 4.1)
    relu_power           r^p / sum r^p                any p > 0
    sigmoid              sigma(u) / sum sigma(u)
    ramapuram_sigmoid    sigma(u - log n)             (arXiv:2409.04431), or sigma(u)
    relu_over_length     r^p / n^alpha                (Wortsman et al., arXiv:2309.08586)

The last two are not normalised. Their arithmetic is in `tile.py`.
"""

import dataclasses
import math
from typing import Literal

OP = "row_map_attention"

Kind = Literal["softmax", "relu_power", "sigmoid", "ramapuram_sigmoid", "relu_over_length"]


@dataclasses.dataclass(frozen=True)
class RowMap:
    """One row map; hashable, so it is static under `jit`. Made by the functions below.

    `p` and `alpha` are read by the relu maps alone, `minus_log_n` by `ramapuram_sigmoid`.
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
    def counts_keys(self) -> bool:
        """Whether a weight depends on the number of visible keys."""
        return self.minus_log_n or (self.kind == "relu_over_length" and self.alpha != 0)


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
