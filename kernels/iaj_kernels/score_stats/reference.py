"""Score statistics from the whole array of scores: the definition, and the oracle.

"When Does Polynomial Attention Concentrate?", section 3 and Appendix T. For a score row z, a bias b
and a cap tau (infinite unless given),

1. shift and clip: u_j = z_j + b, r_j = min(max(u_j, 0), tau);
2. pick the target *: the argmax of z, or an answer key that the caller names;
3. S_p = sum_{j != *} (r_j / r_*)^p; the target receives 1 / (1 + S_p) of the mass (Eq. 1, 3);
4. for any other row map phi, S_phi = sum_{j != *} phi(z_j) / phi(z_*) (Appendix T).

The ratio is taken before the power and the target is left out of the sum, never subtracted from
it, so nothing cancels and no power of a large score is formed. Several arrays of the size of the
scores are held, and none is multiplied by the number of degrees.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from iaj_kernels.score_stats.config import Array, Call, Config, RowStats, Status


def run(config: Config, call: Call) -> RowStats:
    """The statistics at each bias, `[X, B, T, N]`; see `api.score_stats`."""
    q_BTNH, k_BSKH, bias_X, target_BTN, visibility = call
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    z_BTKGS = jnp.einsum(
        "BTKGH,BSKH->BTKGS",
        q_BTNH.reshape(B, T, K, N // K, H).astype(jnp.float32),
        k_BSKH.astype(jnp.float32),
        precision="highest",
    )
    z_BTNS = z_BTKGS.reshape(B, T, N, S) * config.scale
    if config.soft_cap is not None:
        z_BTNS = config.soft_cap * jnp.tanh(z_BTNS / config.soft_cap)
    z_BTNS = jnp.where(visibility.mask_BTS(T, S)[:, :, None, :], z_BTNS, -jnp.inf)

    def at(bias: jax.Array) -> RowStats:
        return row_stats(jnp, z_BTNS, bias, target_BTN, degrees=config.degrees, cap=config.cap)

    return lax.map(at, bias_X)


def row_stats(
    xp: Any,
    z: Array,
    bias: Array | float,
    target: Array | int | None,
    *,
    degrees: Sequence[float],
    cap: float,
    weight: Array | None = None,
) -> RowStats:
    """The statistics of rows of scores `z[..., S]`, in their dtype, by numpy or jax.numpy.

    Args:
      xp: the module.
      z: -inf where the key is hidden.
      bias: b, a scalar or an array that broadcasts to `z`.
      target: key indices that broadcast to the rows; None takes the argmax.
      degrees: the powers p > 0.
      cap: tau.
      weight: the weights `[..., S]` of another row map, used in place of r.
    """
    dtype, S = z.dtype, z.shape[-1]
    kept = z != -np.inf
    b = xp.asarray(bias, dtype)
    u = z + (xp.broadcast_to(b, z.shape) if b.ndim else b)

    top = z.argmax(-1).astype(np.int32)
    star = top if target is None else xp.broadcast_to(xp.asarray(target, np.int32), top.shape)
    keys = xp.arange(S, dtype=np.int32).reshape((1,) * (z.ndim - 1) + (S,))
    is_star = keys == star[..., None]
    is_distractor = kept & ~is_star

    z_star = xp.where(is_star, z, -np.inf).max(-1)
    u_star = xp.where(is_star, u, -np.inf).max(-1)
    r = xp.clip(u, 0, cap)
    power_map = weight is None
    if power_map:
        weight = r
    weight_star = xp.where(is_star, weight, 0).max(-1)

    empty = ~kept.any(-1)
    sound = ~kept | ((u < np.inf) & (weight < np.inf))
    invalid = ~sound.all(-1) | (star < 0) | (star >= S)
    # A CPU or GPU may flush a smaller weight to 0.
    live = ~(empty | invalid) & (weight_star >= np.finfo(dtype).tiny)

    counted = is_distractor & live[..., None] & (weight > 0)
    # XLA divides by multiplying with the reciprocal, and x (1 / x) may be below 1: a tie is set.
    tied = weight == weight_star[..., None]
    if power_map:
        tied |= z == z_star[..., None]
    ratio = xp.where(tied, 1, weight / xp.where(live, weight_star, 1)[..., None])
    ratio = xp.where(counted, ratio, 0)
    s_p = [xp.where(live, _power(xp, ratio, p).sum(-1), np.inf) for p in degrees]
    s_p = xp.stack(s_p, -1)

    margin = xp.where(empty | invalid, 0, z_star - xp.where(is_distractor, z, -np.inf).max(-1))
    positive = live & (u_star > 0)
    rho = xp.where(positive, margin / xp.where(positive, u_star, 1), 0)
    # With a distractor above the threshold rho < 1, but rounding can reach 1.
    below_one = dtype.type(1 - np.finfo(dtype).epsneg)
    rho = xp.where((is_distractor & (r > 0)).any(-1), xp.minimum(rho, below_one), rho)

    status = xp.where(u_star >= cap, int(Status.SATURATED), int(Status.ACTIVE))
    status = xp.where(live, status, int(Status.DEAD))
    status = xp.where(invalid, int(Status.INVALID), status)
    status = xp.where(empty, int(Status.EMPTY), status)
    return RowStats(
        s_p=s_p,
        target_mass=1 / (1 + s_p),
        margin=margin,
        relative_margin=rho,
        active=counted.sum(-1, dtype=np.int32),
        argmax=xp.where(empty | invalid, -1, top).astype(np.int32),
        status=status.astype(np.int32),
        u_star=xp.where(empty | invalid, 0, u_star),
        r_star=xp.where(live, weight_star, 0),
    )


def _power(xp: Any, x: Array, p: float) -> Array:
    """x^p for x >= 0: repeated squaring for an integer p, the library's power otherwise."""
    if p != int(p):
        return xp.power(x, x.dtype.type(p))
    if p == 1:
        return x
    half = _power(xp, x, p // 2)
    return half * half * x if p % 2 else half * half
