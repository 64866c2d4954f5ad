"""Counter-based noise: a pure function of (seed, batch, head, query, key), the same in every tile.

Each coordinate is mixed into a 32-bit word by Chris Wellons' `lowbias32` finaliser (two products,
three xor-shifts; https://nullprogram.com/blog/2018/07/31/), so no state is carried, and forward,
backward, any tile size, any implementation and any sharding draw the same numbers. Works inside a
Pallas kernel: 32-bit integer arithmetic on arrays that broadcast, nothing else.
"""

import jax
from jax import lax
import jax.numpy as jnp

# Odd constants that spread a coordinate over the word before it is mixed.
_SEED, _BATCH, _HEAD, _QUERY, _KEY = 0xC2B2AE35, 0x27D4EB2F, 0x165667B1, 0x9E3779B1, 0x85EBCA6B


def _word(x: jax.Array | int) -> jax.Array:
    return jnp.asarray(x).astype(jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    return _stir(_fold(x))


def _fold(x: jax.Array) -> jax.Array:
    return x ^ lax.shift_right_logical(x, jnp.uint32(16))


def _stir(x: jax.Array) -> jax.Array:
    x = x * jnp.uint32(0x7FEB352D)
    x = x ^ lax.shift_right_logical(x, jnp.uint32(15))
    x = x * jnp.uint32(0x846CA68B)
    return _fold(x)


def stream(seed: jax.Array, batch: jax.Array | int, head: jax.Array | int) -> jax.Array:
    """The noise word (uint32) of one batch row and query head; the arguments broadcast."""
    # The offset: `_mix` keeps 0, so seed 0 would give the first pair of the first row bits 0.
    word = _mix(_word(seed) + jnp.uint32(_SEED))
    word = _mix(word + _word(batch) * jnp.uint32(_BATCH))
    return _mix(word ^ (_word(head) * jnp.uint32(_HEAD)))


def bits(stream: jax.Array, query: jax.Array, key: jax.Array) -> jax.Array:
    """32 random bits (uint32) for absolute positions `query` and `key`, which broadcast."""
    return bits_of_row(row(stream, query), key)


def row(stream: jax.Array, query: jax.Array) -> jax.Array:
    """The noise word (uint32) of one query: the half of `bits` that all its keys share."""
    return _fold(_mix(_word(query) * jnp.uint32(_QUERY) + stream))


def bits_of_row(row: jax.Array, key: jax.Array) -> jax.Array:
    """`bits` from the noise word of the query."""
    # A fold is linear in xor, so `_mix` of the query's word and the key's takes one fold of each
    # row and one of each column, in place of one of each pair.
    return _stir(row ^ _fold(_word(key) * jnp.uint32(_KEY)))


def uniform(bits: jax.Array) -> jax.Array:
    """float32 in [2^-24, 1 - 2^-24], the odd multiples of 2^-24: never 0, never 1, all exact.

    24 bits and a half would not be representable next to 1, and would round to it.
    """
    return from_one(bits) - jnp.float32(1 - 2**-24)


def from_one(bits: jax.Array) -> jax.Array:
    """float32 in [1, 2), the `uniform` of these bits and 1 - 2^-24: exact."""
    # The bits of the mantissa: cheaper than a conversion from integer on a GPU.
    word = lax.shift_right_logical(bits, jnp.uint32(9)) | jnp.uint32(0x3F800000)
    return lax.bitcast_convert_type(word, jnp.float32)


def logistic(u: jax.Array) -> jax.Array:
    """Standard logistic noise, ln u - ln(1 - u), of `uniform`'s u; at most 16.7 in size."""
    return jnp.log(u) - jnp.log1p(-u)
