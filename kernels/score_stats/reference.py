"""Score statistics from the whole array of scores: the definition, and the oracle.

"When Does Polynomial Attention Concentrate?", section 3. It holds several arrays `[B, T, N, S]`.
"""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from kernels.score_stats.config import Call, Config, ScoreStats, Status


def run(config: Config, call: Call) -> ScoreStats:
    """The statistics at each bias, `[X, B, T, N]`; see `api.score_stats`."""
    q_BTNH, k_BSKH, bias_X, target_BTN, seen = call
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
    z_BTNS = jnp.where(seen.mask_BTS(T, S)[:, :, None, :], z_BTNS, -jnp.inf)
    return lax.map(lambda bias: _at_bias(config, z_BTNS, bias, target_BTN), bias_X)


def _at_bias(config: Config, z: jax.Array, bias: jax.Array, target: jax.Array | None) -> ScoreStats:
    """The statistics of rows `z[..., S]`."""
    S = z.shape[-1]
    kept = z != -jnp.inf
    u = z + bias
    r = jnp.clip(u, 0.0, config.cap)

    top = jnp.argmax(z, axis=-1).astype(jnp.int32)
    star = top if target is None else target
    is_star = lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1) == star[..., None]
    rival = kept & ~is_star
    z_star, u_star, r_star = (
        jnp.max(jnp.where(is_star, x, lowest), axis=-1)
        for x, lowest in ((z, -jnp.inf), (u, -jnp.inf), (r, 0.0))
    )

    empty = ~kept.any(-1)
    invalid = (kept & ~(u < jnp.inf)).any(-1) | (star < 0) | (star >= S)
    # A CPU or GPU may flush a smaller weight to 0.
    live = ~empty & ~invalid & (r_star >= np.finfo(np.float32).tiny)

    ratio = r / jnp.where(live, r_star, 1.0)[..., None]
    # XLA multiplies by a reciprocal, and x (1 / x) may round to less than 1.
    ties = (z == z_star[..., None]) | (r == r_star[..., None])
    ratio = jnp.where(ties, 1.0, ratio)
    ratio = jnp.where(rival & live[..., None], ratio, 0.0)
    s_p = [jnp.sum(ratio**p, axis=-1) for p in config.degrees]
    s_p = jnp.where(live[..., None], jnp.stack(s_p, axis=-1), jnp.inf)
    active = jnp.sum(rival & live[..., None] & (r > 0.0), axis=-1, dtype=jnp.int32)

    margin = z_star - jnp.max(jnp.where(rival, z, -jnp.inf), axis=-1)
    margin = jnp.where(empty | invalid, 0.0, margin)
    relative_margin = jnp.where(live, margin / jnp.where(live, u_star, 1.0), 0.0)
    below_one = jnp.nextafter(jnp.float32(1.0), jnp.float32(0.0))
    relative_margin = jnp.where(
        active > 0, jnp.minimum(relative_margin, below_one), relative_margin
    )

    status = jnp.select(
        [empty, invalid, ~live, u_star >= config.cap],
        [jnp.int32(s) for s in (Status.EMPTY, Status.INVALID, Status.DEAD, Status.SATURATED)],
        jnp.int32(Status.ACTIVE),
    )
    return ScoreStats(
        s_p=s_p,
        target_mass=1.0 / (1.0 + s_p),
        margin=margin,
        relative_margin=relative_margin,
        active=active,
        argmax=jnp.where(empty | invalid, -1, top),
        status=status,
        u_star=jnp.where(empty | invalid, 0.0, u_star),
        r_star=jnp.where(live, r_star, 0.0),
    )
