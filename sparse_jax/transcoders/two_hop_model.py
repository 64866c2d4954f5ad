"""Models of two MLPs that compute Boolean functions in two hops, and their activations.

Of 4 G bits b, the first MLP writes ANDs of pairs, the second results that depend on those alone:

    h_i = b_2i and b_2i+1        relay:  o_i = h_i        and:  o_j = h_2j and h_2j+1

A relay is a look-up of what was looked up, as the capital of a city's country: one feature of the
first layer could write both hops. For an AND of ANDs that saves no feature. Each bit, h and o has a
dimension of the residual stream of its own.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.train.objective import LMBatch
from sparse_jax.transcoders.inputs import Activations
from sparse_jax.transcoders.objective import Transcoding

SecondHop = Literal["relay", "and"]


@dataclasses.dataclass(frozen=True)
class TwoHopModel:
    """The model of G groups of four bits, and slices of its residual stream."""

    groups: int
    second_hop: str

    @property
    def bits(self) -> slice:
        return slice(0, 4 * self.groups)

    @property
    def pairs(self) -> slice:
        return slice(4 * self.groups, 6 * self.groups)

    @property
    def outputs(self) -> slice:
        return slice(6 * self.groups, self.hidden_size)

    @property
    def hidden_size(self) -> int:
        return (8 if self.second_hop == "relay" else 7) * self.groups

    def activations(self, bits_XB: jax.Array) -> Activations:
        """Inputs and outputs of the two MLPs, unscaled, of X inputs of B = 4 G bits."""
        bits_XB = bits_XB.astype(jnp.float32)
        pairs_XP = bits_XB[:, 0::2] * bits_XB[:, 1::2]
        output_XJ = pairs_XP
        if self.second_hop == "and":
            output_XJ = pairs_XP[:, 0::2] * pairs_XP[:, 1::2]

        def residual(values_XK: jax.Array, at: slice) -> jax.Array:
            wide = ((0, 0), (at.start, self.hidden_size - at.stop))
            return jnp.pad(values_XK, wide)

        first_XD, written_XD = residual(bits_XB, self.bits), residual(pairs_XP, self.pairs)
        return Activations(
            input_LXD=jnp.stack([first_XD, first_XD + written_XD]),
            output_LXD=jnp.stack([written_XD, residual(output_XJ, self.outputs)]),
            mask_X=jnp.ones(len(bits_XB), bool),
        )

    def every_input(self) -> np.ndarray:
        """All inputs, `[2^B, B]`."""
        count = 4 * self.groups
        return (np.arange(1 << count)[:, None] >> np.arange(count)) & 1


def one_token(bits_XB: jax.Array) -> LMBatch:
    """A batch in which each input is one token."""
    token_X1 = jnp.zeros((len(bits_XB), 1), jnp.int32)
    mask_X1 = jnp.ones((len(bits_XB), 1), bool)
    return LMBatch(token_X1, mask_X1, token_X1, mask_X1)


@dataclasses.dataclass(frozen=True)
class TwoHopTranscoding(Transcoding):
    """The loss of a transcoder on the activations of `model`; a row of a batch is its bits."""

    model: TwoHopModel = TwoHopModel(1, "relay")

    def _activations(self, frozen: Any, tokens_BS: jax.Array) -> Activations:
        return self.model.activations(tokens_BS)
