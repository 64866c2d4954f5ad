"""Rotary positions of the prototype mixer: of queries, and of values.

Options that the released code has and keeps off; the paper has no positions, and the definitions
here are ours. R_t turns pairs of coordinates (k, k + width / 2) of each head's part by angles in
proportion to t, with the frequencies of Su et al. 2021, Eq. 15. A token's place t is its number,
from 0, among the tokens of its document, without padding:

    queries     the read gate of token i is of <R_i W x_i, P_r>. A prototype has no place, so that
                the gate depends on the one of its token.
    values      token i reads R_{-i} sum_j s_ij R_j v_j = sum_j s_ij R_{j-i} v_j, with s_ij the
                share of token j and v_j its value after the convolution: a value arrives turned by
                its distance. So does the memory of a channel at the site `mixer.memory`.

Decoding counts tokens in its cache, and so does a batch whose prompts are padded on the left.
Angles are float32: unit normal values of width 64, turned by a distance of 5 with a base of 10,000,
are off by up to 4e-5 at the thousandth token of a document, 9e-4 at the 100,000th, 0.01 at the
millionth and 0.4 at the ten-millionth.
"""

import jax
import jax.numpy as jnp

from lm_jax.model.layers import rope_tables, rotate
from lm_jax.model.mixers import Layer, RopeTables
from lm_jax.model.rope import Rope


def places(layer: Layer, held_B: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Place `[B, T]` of every token in its document, and how many each row holds after them `[B]`.

    Padding has the place of the last token before it, -1 before the first of a row.

    Args:
      layer: the layer, whose masks mark padding and documents.
      held_B: tokens before these ones; None for none.
    """
    if layer.valid_BT is None:
        valid_BT = jnp.ones(layer.positions_BT.shape, jnp.int32)
    else:
        valid_BT = layer.valid_BT.astype(jnp.int32)
    count_BT = jnp.cumsum(valid_BT, 1)
    if held_B is not None:
        count_BT += held_B[:, None]
    place_BT = count_BT - 1
    if layer.resets_BT is not None:
        before_BT = jnp.where(layer.resets_BT, count_BT - valid_BT, 0)
        place_BT -= jax.lax.cummax(before_BT, 1)
    return place_BT, count_BT[:, -1]


def tables(place_BT: jax.Array, width: int, theta: float) -> RopeTables:
    """Cosine and sine `[B, T, width / 2]` of the angle of each pair at every place, float32.

    `theta` is the base of the frequencies; the first pair turns by 1 radian a token.
    """
    return rope_tables(Rope(theta=theta), width, place_BT)


def turned(x_BTNE: jax.Array, turn: RopeTables, *, back: bool = False) -> jax.Array:
    """The N vectors of each token turned by the angles of its place, or turned `back` by them."""
    cos_BTF, sin_BTF = turn
    return rotate(x_BTNE, (cos_BTF, -sin_BTF if back else sin_BTF))
