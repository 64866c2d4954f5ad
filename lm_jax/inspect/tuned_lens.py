"""The tuned lens: an affine map of each layer's stream to what the last norm reads.

Belrose et al. 2023, "Eliciting Latent Predictions from Transformers with the Tuned Lens": with h
the input of block i, the last norm and the unembedding read h + A_i h + b_i. Lenses are trained
outside of this project and read by `lm_jax.weights.lenses.load_tuned`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import UsageError


@dataclasses.dataclass(frozen=True, eq=False)
class TunedLens:
    """Affine maps of the inputs of all blocks.

    Attributes:
      weight_LDD: A of the input of each block; rows are outputs.
      bias_LD: b of each.
    """

    weight_LDD: np.ndarray
    bias_LD: np.ndarray

    @property
    def layers(self) -> int:
        """The number of the model's layers."""
        return len(self.bias_LD)

    def transport(self, h: jax.Array, layer: int) -> jax.Array:
        """What the last norm reads for the output h `[..., D]` of a block; of the last h itself.

        Raises:
          UsageError: there is no such block, or h has another width.
        """
        L, D = self.bias_LD.shape
        if not 0 <= layer < L:
            raise UsageError(f"lens: of {L} layers, which has no layer {layer}; give 0 to {L - 1}")
        if h.shape[-1] != D:
            raise UsageError(
                f"lens: of width {D}, and the stream has {h.shape[-1]}; take the lens of this model"
            )
        if layer == L - 1:
            return h
        # The output of a block is the input of the next.
        weight_DD, bias_D = (
            jnp.asarray(x[layer + 1], h.dtype) for x in (self.weight_LDD, self.bias_LD)
        )
        added = jnp.einsum("...D,ED->...E", h, weight_DD, precision="highest")
        return h + added + jnp.broadcast_to(bias_D, h.shape)
