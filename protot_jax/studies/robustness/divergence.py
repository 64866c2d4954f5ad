"""Divergences of next-token distributions, and what else changes between two of them.

Prototype Transformer, section 5.2. With p and q the two distributions and m their mean,

    JS = 1/2 KL(p || m) + 1/2 KL(q || m)    in nats, at most ln 2,
    AG = 1/2 KL(m || p) + 1/2 KL(m || q)    without a bound.

The paper names JS. Values of its Table 3 above ln 2 are not possible for it; they are for AG.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from lm_jax.errors import UsageError

# The largest float32 that is not above ln 2.
LARGEST = np.nextafter(np.float32(np.log(2)), np.float32(0))


def jensen_shannon(logits_a: ArrayLike, logits_b: ArrayLike) -> jax.Array:
    """Jensen-Shannon divergence of softmax(logits_a) and softmax(logits_b) over the last axis.

    In nats and float32: 0 for equal distributions, ln 2 for disjoint ones, symmetric to the bit.
    With a = |log p - log q|, an entry adds 1/2 (large h - small (a - h)) for
    h = ln 2 - log(1 + exp(-a)), in which no two nearly equal numbers are subtracted: small
    divergences keep their digits. A logit of minus infinity is a probability of 0.

    Args:
      logits_a: `[..., V]`, of any float dtype.
      logits_b: logits of the same shape.

    Returns:
      The divergences `[...]`.

    Raises:
      UsageError: the shapes differ.
    """
    large, small, a = _ordered(logits_a, logits_b)
    h = -jnp.log1p(0.5 * jnp.expm1(-a))
    lost = jnp.where(small > 0, small * (a - h), 0.0)
    return jnp.clip(0.5 * jnp.sum(large * h - lost, axis=-1), 0.0, LARGEST)


def arithmetic_geometric(logits_a: ArrayLike, logits_b: ArrayLike) -> jax.Array:
    """Arithmetic-geometric divergence, `jensen_shannon` with the roles of m and p, q exchanged.

    In nats; infinite where one distribution excludes what the other does not.
    """
    large, small, a = _ordered(logits_a, logits_b)
    h = -jnp.log1p(0.5 * jnp.expm1(-a))
    # log m - (log p + log q) / 2 = a / 2 - h, with m = (large + small) / 2.
    mean = 0.5 * (large + small)
    return jnp.maximum(jnp.sum(jnp.where(mean > 0, mean * (0.5 * a - h), 0.0), axis=-1), 0.0)


def _ordered(logits_a: ArrayLike, logits_b: ArrayLike) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The larger and the smaller probability of each entry, and |log p - log q|."""
    a, b = (jnp.asarray(x).astype(jnp.float32) for x in (logits_a, logits_b))
    if a.shape != b.shape:
        raise UsageError(f"logits_a {a.shape} and logits_b {b.shape} must have one shape")
    log_p, log_q = (jax.nn.log_softmax(x, axis=-1) for x in (a, b))
    above, below = jnp.maximum(log_p, log_q), jnp.minimum(log_p, log_q)
    step = jnp.where(jnp.isneginf(above), 0.0, above - below)
    return jnp.exp(above), jnp.exp(below), step


class Agreement(NamedTuple):
    """How much of the first of two rankings is left in the second (Table 5).

    Attributes:
      overlap: share of the ten most probable tokens that they have in common.
      spearman: rank correlation over the union of the twenty most probable tokens of each; NaN
        where one does not vary there.
      same_top: whether the most probable token is the same.
      mass: what the second gives to the ten most probable tokens of the first.
    """

    overlap: float
    spearman: float
    same_top: bool
    mass: float


def agreement(logits_a: ArrayLike, logits_b: ArrayLike) -> Agreement:
    """Compares the rankings of two rows of logits `[V]`."""
    a, b = np.asarray(logits_a, np.float64), np.asarray(logits_b, np.float64)
    order_a, order_b = (np.argsort(-x, kind="stable") for x in (a, b))
    most = min(10, a.size)
    union = np.union1d(order_a[:20], order_b[:20])
    varies = np.ptp(a[union]) > 0 and np.ptp(b[union]) > 0
    spearman = float(stats.spearmanr(a[union], b[union]).statistic) if varies else float("nan")
    exponentials = np.exp(b - b.max())
    return Agreement(
        overlap=len(np.intersect1d(order_a[:most], order_b[:most])) / most,
        spearman=spearman,
        same_top=bool(order_a[0] == order_b[0]),
        mass=float(exponentials[order_a[:most]].sum() / exponentials.sum()),
    )
