"""What an attribution graph needs of the features that stand for a model's MLPs.

A `Transcoder` has these methods, and so have the neurons of the MLPs themselves (`neurons`). A
feature reads the input of one MLP, after its norm or before it, and writes into outputs of MLPs.
`reading` is its pre-activation: linear in that input, if need be by quotients that are frozen for a
prompt.
"""

from typing import Protocol

import jax
import jax.numpy as jnp

from lm_jax.model.config import DecoderConfig
from lm_jax.model.params import ParamTree


class Features(Protocol):
    """Features of all layers, a pytree; L, F and D are layers, features of one, and width."""

    @property
    def signed(self) -> bool:
        """Whether activations may be below 0."""
        ...

    @property
    def skip_start(self) -> int:
        """First tokens of a prompt that have no features; their MLP outputs are errors."""
        ...

    @property
    def site(self) -> str:
        """The site of the inputs: "mlp.in", or "resid_mid" for the residual stream itself."""
        ...

    @property
    def skip_LDD(self) -> jax.Array | None:
        """Linear paths from inputs to MLP outputs, past all features; None without any."""
        ...

    def for_model(self, params: ParamTree, cfg: DecoderConfig) -> "Features":
        """The features with inputs that the model has."""
        ...

    def check(self, cfg: DecoderConfig) -> None:
        """Raises where they are not of such a model.

        Raises:
          UsageError: naming what differs.
        """
        ...

    def for_prompt(self, input_LTD: jax.Array) -> "Features":
        """The features with what is frozen on a prompt, from the inputs of its MLPs."""
        ...

    def pre_activations(self, input_LXD: jax.Array) -> jax.Array:
        """Readings `[L, X, F]`."""
        ...

    def encode(self, input_LXD: jax.Array) -> jax.Array:
        """Activations `[L, X, F]`."""
        ...

    def encode_some(
        self, input_LXD: jax.Array, layer_Y: jax.Array, feature_Y: jax.Array
    ) -> jax.Array:
        """Activations `[X, Y]` of some features, on inputs where nothing is frozen."""
        ...

    def decode(self, features_LXF: jax.Array) -> jax.Array:
        """MLP outputs `[L, X, D]` of activations, biases included and `skip_LDD` not."""
        ...

    @property
    def decoder_bias_LD(self) -> jax.Array:
        """What MLP outputs are without any feature."""
        ...

    def readings(
        self, layer_X: jax.Array, position_X: jax.Array, feature_X: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Vectors `[X, D]` and constants `[X]` of the readings, as functions of MLP inputs."""
        ...

    def writes_into(
        self,
        layer: jax.Array | int,
        layer_X: jax.Array,
        feature_X: jax.Array,
        activation_X: jax.Array,
    ) -> jax.Array:
        """What features of these activations write into one layer, `[X, D]`."""
        ...


def writes(
    features: Features, layer_X: jax.Array, feature_X: jax.Array, activation_X: jax.Array
) -> jax.Array:
    """What features of these activations write into each layer, `[L, X, D]`."""
    layers = range(len(features.decoder_bias_LD))
    each = (layer_X, feature_X, activation_X)
    return jnp.stack([features.writes_into(layer, *each) for layer in layers])
