"""The prototype mixer with its gates held: a linear map, in which prototypes are what heads are.

Prototype Transformer, Eq. 1 and 2. With the gates of one prompt,

    out_q = alpha U sum_r sum_{k<q} M_r[q, k] v_k
    M_r[q, k] = read_qr beta_r^(q-k) write_kr / sum_{j<q} beta_r^(q-j) write_jr

where v_k is the value of token k, in the first layers averaged with the convolution of the values
of tokens k - 4 to k. All prototypes share V and U, so that the mixer is one matrix sum_r M_r of
positions, and only shares tell prototypes apart. No entry with k >= q is other than zero: a token
does not read what it writes. With rotary values a v_k is turned by the place of k, and the sum back
by that of q.
"""

import dataclasses

from flax import struct
import jax
import jax.numpy as jnp

from protot_jax.mixers.convolution import causal_convolution
from protot_jax.mixers.rotary import turned


@struct.dataclass
class FrozenPrototypes:
    """The linear maps (`lm_jax.model.frozen.FrozenMixer`), fields with a leading L.

    Attributes:
      pattern_LNTS: M above, N prototypes.
      value_LDE: V.
      taps_LCE: taps of the convolution with what is averaged with it; the last is the present.
      output_LED: alpha U.
      turns_L2TF: cosine and sine of the angle of each pair of coordinates by place; None where
        values are not rotary.
    """

    pattern_LNTS: jax.Array
    value_LDE: jax.Array
    taps_LCE: jax.Array
    output_LED: jax.Array
    turns_L2TF: jax.Array | None = None

    @property
    def pattern_shape(self) -> tuple[int, ...]:
        return self.pattern_LNTS.shape

    def first(self, positions: int) -> "FrozenPrototypes":
        pattern_LNTS = self.pattern_LNTS[..., :positions, :positions]
        return dataclasses.replace(self, pattern_LNTS=pattern_LNTS)

    @property
    def width(self) -> int:
        return self.output_LED.shape[-2]

    def values(self, h_XSD: jax.Array) -> jax.Array:
        return self._turned(self._convolved(jnp.einsum("XSD,DE->XSE", h_XSD, self.value_LDE)))

    def mix(self, value_XSE: jax.Array) -> jax.Array:
        z_XTE = jnp.einsum("TS,XSE->XTE", self.pattern_LNTS.sum(0), value_XSE)
        return jnp.einsum("XTE,ED->XTD", self._turned(z_XTE, back=True), self.output_LED)

    def cotangents(self, c_XTD: jax.Array) -> jax.Array:
        # A rotation backwards is the transpose of the rotation.
        return self._turned(jnp.einsum("XTD,ED->XTE", c_XTD, self.output_LED))

    def transpose(self, u_XTE: jax.Array) -> jax.Array:
        w_XSE = jnp.einsum("XTE,TS->XSE", u_XTE, self.pattern_LNTS.sum(0))
        w_XSE = self._turned(w_XSE, back=True)
        # The transpose of a causal convolution is the same one backwards in time.
        w_XSE = self._convolved(w_XSE[:, ::-1])[:, ::-1]
        return jnp.einsum("XSE,DE->XSD", w_XSE, self.value_LDE)

    def shares(self, value_XSE: jax.Array, u_XTE: jax.Array) -> jax.Array:
        products_XTS = jnp.einsum("XTE,XSE->XTS", u_XTE, value_XSE)
        return products_XTS[:, None] * self.pattern_LNTS[None]

    def head_shares(self, value_XSE: jax.Array, u_XTE: jax.Array) -> jax.Array:
        products_XTS = jnp.einsum("XTE,XSE->XTS", u_XTE, value_XSE)
        return jnp.einsum("XTS,NTS->XN", products_XTS, self.pattern_LNTS)

    def constant(self, norm_bias_D: jax.Array) -> jax.Array:
        T = self.pattern_LNTS.shape[1]
        norm_bias_XSD = jnp.broadcast_to(norm_bias_D, (1, T, *norm_bias_D.shape))
        return self.mix(self.values(norm_bias_XSD))[0]

    def _convolved(self, x_XSE: jax.Array) -> jax.Array:
        X, _, E = x_XSE.shape
        before = jnp.zeros((X, self.taps_LCE.shape[0] - 1, E), x_XSE.dtype)
        return causal_convolution(x_XSE, self.taps_LCE, before)[0]

    def _turned(self, x_XSE: jax.Array, *, back: bool = False) -> jax.Array:
        if self.turns_L2TF is None:
            return x_XSE
        # The first positions alone may be asked for, of maps of a longer prompt.
        cos_TF, sin_TF = self.turns_L2TF[:, : x_XSE.shape[1]]
        return turned(x_XSE[:, :, None], (cos_TF[None], sin_TF[None]), back=back)[:, :, 0]
