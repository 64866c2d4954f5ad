"""The gated delta rule in place of softmax, with a decay set by how far a head of the model looks.

The rule is that of Yang, Kautz and Hatamizadeh 2024 ("Gated Delta Networks", arXiv:2412.06464,
Eq. 10). With keys k and queries q of length one, a value v and a memory S of each head,

    S_t = alpha (I - beta k_t k_t^T) S_{t-1} + beta k_t v_t^T        o_t = S_t^T q_t

Zhou et al. 2026 (Taylor-Calibrate, arXiv:2606.16429) set decay and writing strength of such a
student from attention statistics of its teacher. The rule here is our own and simpler, one number
of each head: m, the mean distance from a query to the keys that softmax reads, gives

    alpha = m / (1 + m)        beta = 1 - alpha = 1 / (1 + m)

The factors beta alpha^r of the distances r = 0, 1, ... sum to 1 and have the mean m. A weight is
such a factor times q.k, less what later keys erase, so that rows do not sum to 1. With m = 0 a
query reads its own key alone. `audit.bias_tables` measures m.

The outputs are sums of values, whose weights have both signs. With D_ts = alpha^(t - s) where query
t sees key s and 0 elsewhere, K and Q of unit rows and L the strictly lower triangle of
beta (K K^T) * D, the rows of

    W = ((Q K^T) * D) (I + L)^{-1} beta

are those weights (`iaj_kernels.delta_rule.xla` derives the system). As visibility is part of D, a
document that follows another starts with an empty memory, and padding writes nothing. In a layer
with a sliding window the keys outside it are left out of each row; no recurrence computes that,
since what left the window stays mixed into the memory.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from iaj_kernels.core.triangular import unit_lower_inverse


@dataclasses.dataclass(frozen=True)
class GatedDelta:
    """The gated delta rule as a map; hashable. Its bias is the mean distance m of each head."""

    kind: ClassVar[Literal["gdn"]] = "gdn"
    degree = None
    signed = True
    normalised = False

    def weights(
        self, q_BTNH: jax.Array, k_BSKH: jax.Array, scores_BNTS: jax.Array, distance: Any
    ) -> jax.Array:
        """The weights `[B, N, T, S]` of the values, 0 at masked keys.

        Arithmetic is in float32, or in the dtype of the queries if that is wider. A query stands at
        the last key that it sees, so that the queries may be any of a sequence, as while decoding.

        Args:
          q_BTNH: queries as scored.
          k_BSKH: keys as scored; query head n reads key head n // G.
          scores_BNTS: scores of the model, read for nothing but which keys are masked, -inf.
          distance: m in tokens, a scalar or `[N, 1, 1]`; below 0 it counts as 0.
        """
        B, T, N, H = q_BTNH.shape
        S, K = k_BSKH.shape[1:3]
        dtype = jnp.promote_types(q_BTNH.dtype, jnp.float32)
        q_BTNH, k_BSKH = unit(q_BTNH.astype(dtype)), unit(k_BSKH.astype(dtype))
        q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
        read = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, precision="highest")
        alike_BKSC = jnp.einsum("BSKH,BCKH->BKSC", k_BSKH, k_BSKH, precision="highest")
        alike_BNSC = jnp.repeat(alike_BKSC, N // K, axis=1)
        sees_BNTS = scores_BNTS != -jnp.inf
        keys_S = jnp.arange(S, dtype=jnp.int32)
        at_BNT = jnp.where(sees_BNTS, keys_S[None, None, None], 0).max(-1)
        m_1N11 = jnp.broadcast_to(jnp.asarray(distance, dtype), (N, 1, 1))[None]
        beta_1N11 = 1 / (1 + jnp.maximum(m_1N11, 0))
        away_BNTS = at_BNT[..., None] - keys_S[None, None, None]
        seen_BNTS = jnp.where(sees_BNTS, _decay(m_1N11, away_BNTS), 0)
        away_1NSC = (keys_S[:, None] - keys_S[None])[None, None]
        system_BNSC = jnp.where(_pairs(sees_BNTS), _decay(m_1N11, away_1NSC), 0)
        inverse_BNSC = unit_lower_inverse(beta_1N11 * alike_BNSC * system_BNSC)
        read_BNTS = read.reshape(B, N, T, S) * seen_BNTS
        weights_BNTS = jnp.einsum(
            "BNTS,BNSC->BNTC", read_BNTS, inverse_BNSC * beta_1N11, precision="highest"
        )
        return jnp.where(sees_BNTS, weights_BNTS, 0)


def unit(x: jax.Array) -> jax.Array:
    """Vectors of the last axis over their length; one without a length stays 0."""
    square = (x * x).sum(-1, keepdims=True)
    some = square > 0
    return jnp.where(some, x * jax.lax.rsqrt(jnp.where(some, square, 1)), 0)


def _decay(m_1N11: jax.Array, away: jax.Array) -> jax.Array:
    """alpha^r at distances r, of which those below 0 count as 0.

    The logarithm of alpha is -log(1 + 1 / m): a power of a rounded alpha would be off by r
    roundings.
    """
    away = jnp.maximum(away, 0)
    some = m_1N11 >= jnp.finfo(m_1N11.dtype).tiny
    rate_1N11 = jnp.log1p(1 / jnp.where(some, m_1N11, 1))
    return jnp.where(some, jnp.exp(-away * rate_1N11), away == 0)


def _pairs(sees_BNTS: jax.Array) -> jax.Array:
    """Which keys `[B, N, S, S]` were seen at which later ones: those that one query sees together.

    A whole sequence has a query at every key, which is the last that sees it.
    """
    T, S = sees_BNTS.shape[2:]
    if T == S:
        return sees_BNTS
    sees_BNTS = sees_BNTS.astype(jnp.float32)
    return jnp.einsum("BNTS,BNTC->BNSC", sees_BNTS, sees_BNTS, precision="highest") > 0
