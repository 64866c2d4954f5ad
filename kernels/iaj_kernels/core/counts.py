"""Sums of counts in int32 that stop at its largest value in place of wrapping around.

A row of 65,536 queries has more visible pairs than int32 can count.
"""

import jax
import jax.numpy as jnp

LARGEST = 2**31 - 1


def add(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a + b` of int32 counts, at most `LARGEST`."""
    return a + jnp.minimum(b, jnp.int32(LARGEST) - a)


def total(counts: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    """The int32 sum over `axis` of counts or of a mask, exact up to `LARGEST`, at most that."""
    exact = counts.sum(axis, dtype=jnp.int32)
    # From 2^31 to 2^32 the sum is negative; above that it may be anything, and floats tell.
    fits = (exact >= 0) & (counts.sum(axis, dtype=jnp.float32) < 3.0 * 2**30)
    return jnp.where(fits, exact, jnp.int32(LARGEST))
