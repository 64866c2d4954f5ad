"""Sums over keys that stand for all of them at once: the states of linear attention.

Of every key that is added, the sums hold phi(k) v^T and phi(k), so that the weights of a query on
all of them together, and what it reads, are products with its own features.

`FeatureSums` are of a feature map. Features are kept as logarithms, and each has its largest
logarithm over keys taken out of its sum, so that no sum overflows. `TaylorSums` are of the
polynomial 1 + u + u^2 / 2 with u = scale q.k + b (`field_maps`), whose features are the monomials
of a key up to degree two,

    phi(k) = (1, k_i, k_i k_j for i <= j)

and whose coefficients are with the query. They have both signs, and the sum of the weights, of
which each is 1/2 or more, has not.
"""

import dataclasses
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from polyattn_jax.recipes.decoding.constant_memory import einsum
from polyattn_jax.recipes.feature_maps import FeatureMap

Held = dict[str, jax.Array]


class Sums(Protocol):
    """Sums of one kind."""

    def empty(self, B: int, K: int, H: int) -> Held:
        """Sums over no key."""
        ...

    def read(self, held: Held, q_BCKGH: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
        """Logarithms `[B, K, G, C]` of the sum of weights, and averages `[B, K, G, C, H]` read."""
        ...

    def added(
        self, held: Held, k_BSKH: jax.Array, v_BSKH: jax.Array, leaves_BS: jax.Array, scale: float
    ) -> Held:
        """The sums with some of these keys."""
        ...


@dataclasses.dataclass(frozen=True)
class FeatureSums:
    """Sums of a feature map: `values` [B, K, F, H], `weights` and `top` [B, K, F]."""

    map: FeatureMap

    def empty(self, B: int, K: int, H: int) -> Held:
        """Sums over no key."""
        F = self.map.size(H)
        held = {name: jnp.zeros((B, K, F), jnp.float32) for name in ("weights", "top")}
        return held | {"values": jnp.zeros((B, K, F, H), jnp.float32)}

    def read(self, held: Held, q_BCKGH: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
        """Logarithms of the sum of weights, and averages."""
        log_BKGCF = self.map.log_features(q_BCKGH.transpose(0, 2, 3, 1, 4), scale)
        some = (held["weights"] > 0)[:, :, None, None]
        a_BKGCF = jnp.where(some, log_BKGCF + held["top"][:, :, None, None], -jnp.inf)
        peak_BKGC1 = a_BKGCF.max(-1, keepdims=True)
        peak_BKGC1 = jnp.where(jnp.isneginf(peak_BKGC1), 0, peak_BKGC1)
        phi_BKGCF = jnp.exp(a_BKGCF - peak_BKGC1)
        total_BKGC = einsum("BKGCF,BKF->BKGC", phi_BKGCF, held["weights"])
        sum_BKGCH = einsum("BKGCF,BKFH->BKGCH", phi_BKGCF, held["values"])
        return _log(total_BKGC) + peak_BKGC1[..., 0], _over(sum_BKGCH, total_BKGC)

    def added(
        self, held: Held, k_BSKH: jax.Array, v_BSKH: jax.Array, leaves_BS: jax.Array, scale: float
    ) -> Held:
        """The sums with some of these keys."""
        log_BSKF = self.map.log_features(k_BSKH, scale)
        log_BKSF = jnp.where(leaves_BS[..., None, None], log_BSKF, -jnp.inf).swapaxes(1, 2)
        before_BKF = jnp.where(held["weights"] > 0, held["top"], -jnp.inf)
        top_BKF = jnp.maximum(before_BKF, log_BKSF.max(2))
        top_BKF = jnp.where(jnp.isneginf(top_BKF), 0, top_BKF)
        factor_BKF = jnp.exp(before_BKF - top_BKF)
        phi_BKSF = jnp.exp(log_BKSF - top_BKF[:, :, None])
        values = held["values"] * factor_BKF[..., None]
        return {
            "values": values + einsum("BKSF,BSKH->BKFH", phi_BKSF, v_BSKH),
            "weights": held["weights"] * factor_BKF + phi_BKSF.sum(2),
            "top": top_BKF,
        }


@dataclasses.dataclass(frozen=True)
class TaylorSums:
    """Sums of the Taylor polynomial with bias `b`: `values` [B, K, F, H], `weights` [B, K, F]."""

    b: float

    def empty(self, B: int, K: int, H: int) -> Held:
        """Sums over no key."""
        F = math.comb(H + 2, 2)
        return {
            "values": jnp.zeros((B, K, F, H), jnp.float32),
            "weights": jnp.zeros((B, K, F), jnp.float32),
        }

    def read(self, held: Held, q_BCKGH: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
        """Logarithms of the sum of weights, and averages."""
        q_BKGCH = scale * q_BCKGH.transpose(0, 2, 3, 1, 4)
        # 1 + (z + b) + (z + b)^2 / 2 by powers of z; a pair of coordinates is there twice.
        factor_F = self._coefficients(q_BKGCH.shape[-1])
        phi_BKGCF = _monomials(q_BKGCH) * factor_F
        total_BKGC = einsum("BKGCF,BKF->BKGC", phi_BKGCF, held["weights"])
        sum_BKGCH = einsum("BKGCF,BKFH->BKGCH", phi_BKGCF, held["values"])
        some = (held["weights"][..., 0] > 0)[:, :, None, None]
        # Rounding alone could bring a sum of weights below half of their number.
        least_BKGC = held["weights"][:, :, None, None, 0] / 2
        total_BKGC = jnp.where(some, jnp.maximum(total_BKGC, least_BKGC), 0)
        return _log(total_BKGC), _over(sum_BKGCH, total_BKGC)

    def added(
        self, held: Held, k_BSKH: jax.Array, v_BSKH: jax.Array, leaves_BS: jax.Array, scale: float
    ) -> Held:
        """The sums with some of these keys."""
        del scale
        phi_BSKF = jnp.where(leaves_BS[..., None, None], _monomials(k_BSKH), 0)
        return {
            "values": held["values"] + einsum("BSKF,BSKH->BKFH", phi_BSKF, v_BSKH),
            "weights": held["weights"] + phi_BSKF.sum(1),
        }

    def _coefficients(self, H: int) -> Any:
        """Factors `[1, 1, 1, 1, F]` of the monomials of a scaled query."""
        first, second = np.triu_indices(H)
        pairs = np.where(first == second, 0.5, 1.0)
        constant = 1 + self.b + self.b**2 / 2
        factor_F = np.concatenate([[constant], np.full(H, 1 + self.b), pairs])
        return jnp.asarray(factor_F, jnp.float32)[None, None, None, None]


def _monomials(x: jax.Array) -> jax.Array:
    """The monomials `[..., F]` of vectors `[..., H]` up to degree two, each once."""
    first, second = np.triu_indices(x.shape[-1])
    return jnp.concatenate([jnp.ones_like(x[..., :1]), x, x[..., first] * x[..., second]], -1)


def _log(total: jax.Array) -> jax.Array:
    some = total > 0
    return jnp.where(some, jnp.log(jnp.where(some, total, 1)), -jnp.inf)


def _over(sums: jax.Array, total: jax.Array) -> jax.Array:
    return sums / jnp.where(total > 0, total, 1)[..., None]
