"""The decoder as a Flax Linen module, for code that expects `model.init` and `model.apply`.

The module holds no mathematics: its one variable is the parameter tree, and its call is `forward`.
"""

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from lm_jax.model import decoder
from lm_jax.model.config import DecoderConfig
from lm_jax.model.mixers import ATTENTION, Mixer


class Decoder(nn.Module):
    """`Decoder(cfg).apply({"params": {"decoder": params}}, tokens_BT, **forward_arguments)`."""

    cfg: DecoderConfig
    mixer: Mixer = ATTENTION
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens_BT: jax.Array, **kwargs: Any) -> decoder.Output:
        params = self.param(
            "decoder",
            lambda key: decoder.init_params(key, self.cfg, dtype=self.dtype, mixer=self.mixer),
        )
        return decoder.forward(params, tokens_BT, self.cfg, mixer=self.mixer, **kwargs)
