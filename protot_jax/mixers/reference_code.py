"""The prefix mean with the arithmetic of the authors' released code, for comparison.

It divides each gate by beta^j + 1e-12, sums, and multiplies by (1 - beta) beta^i; the mass is at
least 1e-6. In exact arithmetic that is the prefix mean. In float32 it fails in two stages: once
beta^j is below 1e-12, after 40 half-lives, later writes are no longer discounted against one
another; once the mass is below its clamp the mean shrinks to zero. `iaj_kernels.prefix_mean` has
neither fault (docs/kernels/prefix_mean.md).

The formulae are those of the released code, the program is not: the two sums over j are one product
with a causal mask, in time and memory T^2 and without an array [B, T, R, E].
"""

import jax
import jax.numpy as jnp

from iaj_kernels.prefix_mean.state import State
from lm_jax.errors import UsageError

EPSILON = 1e-12
LEAST_MASS = 1e-6


def released_prefix_mean(
    write_BTR: jax.Array,
    value_BTE: jax.Array,
    decay_R: jax.Array,
    read_BTR: jax.Array,
    *,
    initial_state: State | None = None,
    return_state: bool = False,
    mass_normalisation: bool = True,
    resets_BT: jax.Array | None = None,
) -> jax.Array | tuple[jax.Array, None]:
    """`iaj_kernels.prefix_mean` of a whole sequence, with the errors of the released code.

    It has no state and cannot decode: `return_state` returns None for it.

    Raises:
      UsageError: for an initial state, or resets.
    """
    if initial_state is not None:
        raise UsageError(
            "the released arithmetic keeps no state; decode with the exact prefix mean"
        )
    if resets_BT is not None:
        raise UsageError(
            "the released arithmetic has no resets between documents; give each a row of its own, "
            "or use the exact prefix mean"
        )
    T = write_BTR.shape[1]
    f32 = jnp.float32
    decay_11R = decay_R.astype(f32)[None, None]
    power_1TR = decay_11R ** jnp.arange(T, dtype=f32)[None, :, None]
    scaled_BTR = write_BTR.astype(f32) / (power_1TR + EPSILON)
    if mass_normalisation:
        outer_1TR = (1.0 - decay_11R) * power_1TR
        mass_BTR = outer_1TR * jnp.cumsum(scaled_BTR, axis=1)
        factor_BTR = outer_1TR[:, :-1] / jnp.maximum(mass_BTR[:, :-1], LEAST_MASS)
    else:
        # N of Eq. 2, from which `PrototypeMixer` computes the released moving average.
        factor_BTR = power_1TR[:, 1:]
    weight_BTR = read_BTR.astype(f32)[:, 1:] * factor_BTR
    # Step i reads the sum up to step i - 1, so the first reads zero.
    weight_BTS = jnp.einsum("bir,bjr->bij", weight_BTR, scaled_BTR[:, :-1])
    weight_BTS = jnp.where(jnp.tri(T - 1, dtype=bool)[None], weight_BTS, 0.0)
    out_BTE = jnp.einsum("bij,bje->bie", weight_BTS, value_BTE.astype(f32)[:, :-1])
    out_BTE = jnp.pad(out_BTE, ((0, 0), (1, 0), (0, 0))).astype(value_BTE.dtype)
    return (out_BTE, None) if return_state else out_BTE
