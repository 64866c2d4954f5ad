"""Attribution graphs whose features are the neurons of a model's MLPs, without any training.

A neuron is an exact "transcoder" feature. Of the input x of its MLP,

    gated MLP    activation  act(x W_gate) . (x W_up)    quotient  act(x W_gate)
    plain MLP    activation  act(x W_up)                 quotient  act(x W_up) / (x W_up)

With the quotient frozen at its value on the prompt (RelP, the identity rule for activation
functions), the activation is its own pre-activation and linear in x; it writes its row of W_down
into its own layer. Nothing is left over: errors of the replacement model are zero, and rows and
biases sum to the activations. What a frozen gate reads is attributed to nothing.

Neurons are not transcoder features: most are active on every token. `graph` therefore keeps those
of most influence on the logits, and the error of an MLP is what its other neurons write.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import os
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import UsageError
from lm_jax.model.config import DecoderConfig
from lm_jax.model.edits import Add
from lm_jax.model.layers import ACTIVATIONS
from lm_jax.model.params import ParamTree
from lm_jax.model.precision import exact_jit, exact_products
from sparse_jax.graphs.attribute import (
    Model,
    Prompt,
    assemble,
    attribute,
    circuit_model,
    prepare,
)
from sparse_jax.graphs.graph import Graph
from sparse_jax.graphs.interventions import ScaledActivations, responding
from sparse_jax.graphs.neuron_rows import NeuronRows
from sparse_jax.graphs.rows import ActiveFeatures, choose
from sparse_jax.transcoders.activations import products_of_some

# `feature_type` of a neuron in a file, and `kind` in `results.ModelFacts`.
NEURON, KIND = "mlp neuron", "neurons"
# Neurons that get a row in `graph`, and how many are chosen at a time.
MAX_FEATURES, STEP = 256, 32


@struct.dataclass
class Neurons:
    """The neurons of all MLPs of a model, in place of a transcoder (`basis.Features`).

    Attributes:
      params: parameters of the MLPs, float32: up, down and their biases; gate and its bias where it
        is gated.
      kept_LTF: the neurons that are features on a prompt; None for all.
      quotient_LTF: quotients frozen on a prompt (`for_prompt`); None before.
      activation: function of the MLPs.
      post_norms: whether MLP outputs pass a norm, which `check` refuses.
    """

    params: Mapping[str, jax.Array]
    kept_LTF: jax.Array | None
    quotient_LTF: jax.Array | None
    activation: str = struct.field(pytree_node=False)
    post_norms: bool = struct.field(pytree_node=False)

    @classmethod
    def of(cls, model: Model) -> "Neurons":
        """The neurons of a model."""
        mlps = model.params["blocks"].get("mlp", {})
        params = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in mlps.items()}
        return cls(params, None, None, model.cfg.activation, "ln2_post" in model.cfg.norm_names)

    @property
    def site(self) -> str:
        """The site of the inputs of MLPs."""
        return "mlp.in"

    @property
    def skip_LDD(self) -> None:
        """None, since all that an MLP writes passes its neurons."""
        return None

    def for_model(self, params: ParamTree, cfg: DecoderConfig) -> "Neurons":
        """Itself: its inputs are those of the model's MLPs."""
        del params, cfg
        return self

    @property
    def skip_start(self) -> int:
        """The number 0, since neurons have values at every token."""
        return 0

    @property
    def signed(self) -> bool:
        """True: of a gated MLP, or of GELU, activations are below 0 on many tokens."""
        return True

    @property
    def decoder_bias_LD(self) -> jax.Array:
        """Biases of MLP outputs."""
        down_LFD = self.params["down"]
        return self.params.get("down_bias", jnp.zeros((len(down_LFD), down_LFD.shape[2])))

    def check(self, cfg: DecoderConfig) -> None:
        """Raises where neurons are not of such a model, or its MLPs are more than their neurons.

        Raises:
          UsageError: naming the difference.
        """
        if self.post_norms:
            raise UsageError(
                "neurons: MLP outputs of this model pass a norm, after which a neuron has no row "
                "of its own; train a transcoder (iaj sparse transcoder)"
            )
        L, _, D = self.params["down"].shape
        if (cfg.num_layers, cfg.hidden_size) != (L, D):
            raise UsageError(
                f"neurons: of {L} layers of width {D}, but the model has {cfg.num_layers} of "
                f"{cfg.hidden_size}; take those of this model (Neurons.of)"
            )

    def for_prompt(self, input_LTD: jax.Array) -> "Neurons":
        """The neurons with quotients frozen, from the inputs of a prompt's MLPs."""
        act = ACTIVATIONS[self.activation]
        if "gate" in self.params:
            quotient_LTF = act(self._product("gate", input_LTD))
            return dataclasses.replace(self, quotient_LTF=quotient_LTF)
        hidden_LTF = self._product("up", input_LTD)
        is_zero_LTF = hidden_LTF == 0
        slope = jax.grad(act)(jnp.zeros((), hidden_LTF.dtype))
        quotient_LTF = act(hidden_LTF) / jnp.where(is_zero_LTF, 1.0, hidden_LTF)
        quotient_LTF = jnp.where(is_zero_LTF, slope, quotient_LTF)
        return dataclasses.replace(self, quotient_LTF=quotient_LTF)

    def pre_activations(self, input_LXD: jax.Array) -> jax.Array:
        """Activations `[L, T, F]` of all neurons by the frozen quotients, at inputs of T tokens."""
        return self._frozen() * self._product("up", input_LXD)

    def encode(self, input_LXD: jax.Array) -> jax.Array:
        """Activations of the neurons that are features, 0 for others."""
        pre_LTF = self.pre_activations(input_LXD)
        return pre_LTF if self.kept_LTF is None else jnp.where(self.kept_LTF, pre_LTF, 0.0)

    def encode_some(
        self, input_LXD: jax.Array, layer_Y: jax.Array, feature_Y: jax.Array
    ) -> jax.Array:
        """Activations `[X, Y]` of some neurons by the MLPs themselves."""
        hidden_XY = self._product_of_some("up", input_LXD, layer_Y, feature_Y)
        act = ACTIVATIONS[self.activation]
        if "gate" not in self.params:
            return act(hidden_XY)
        return act(self._product_of_some("gate", input_LXD, layer_Y, feature_Y)) * hidden_XY

    def decode(self, features_LXF: jax.Array) -> jax.Array:
        """MLP outputs `[L, T, D]` of activations."""
        return self.written(features_LXF) + self.decoder_bias_LD[:, None]

    def written(self, features_LXF: jax.Array) -> jax.Array:
        """What neurons of these activations write, without biases."""
        return jnp.einsum("LXF,LFD->LXD", features_LXF, self.params["down"])

    def readings(
        self, layer_X: jax.Array, position_X: jax.Array, feature_X: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Vectors `[X, D]` and constants `[X]`: weights and bias times the frozen quotient."""
        quotient_X = self._frozen()[layer_X, position_X, feature_X]
        vector_XD = self.params["up"][layer_X, :, feature_X] * quotient_X[:, None]
        if "up_bias" not in self.params:
            return vector_XD, jnp.zeros_like(quotient_X)
        return vector_XD, self.params["up_bias"][layer_X, feature_X] * quotient_X

    def writes_into(
        self,
        layer: jax.Array | int,
        layer_X: jax.Array,
        feature_X: jax.Array,
        activation_X: jax.Array,
    ) -> jax.Array:
        """What neurons write into one layer, `[X, D]`: nothing if it is not their own."""
        own_X = jnp.where(layer_X == layer, activation_X, 0.0)
        return self.params["down"][layer_X, feature_X] * own_X[:, None]

    def _product(self, name: str, input_LXD: jax.Array) -> jax.Array:
        product_LXF = jnp.einsum("LXD,LDF->LXF", input_LXD, self.params[name])
        bias_LF = self.params.get(f"{name}_bias")
        return product_LXF if bias_LF is None else product_LXF + bias_LF[:, None]

    def _product_of_some(
        self, name: str, input_LXD: jax.Array, layer_Y: jax.Array, feature_Y: jax.Array
    ) -> jax.Array:
        weight_YD = self.params[name][layer_Y, :, feature_Y]
        product_XY = products_of_some(input_LXD, layer_Y, weight_YD)
        bias_LF = self.params.get(f"{name}_bias")
        return product_XY if bias_LF is None else product_XY + bias_LF[layer_Y, feature_Y][None]

    def _frozen(self) -> jax.Array:
        if self.quotient_LTF is None:
            raise UsageError("neurons: nothing is frozen yet; call for_prompt with MLP inputs")
        return self.quotient_LTF


@responding.register
def _(
    features: Neurons,
    error_LTD: jax.Array,
    added_LBTD: jax.Array,
    embedding_BTD: jax.Array,
    scaled: ScaledActivations,
) -> Mapping[str, Any]:
    # The MLPs themselves are their neurons, with what `error_LTD` has of them.
    del features, error_LTD
    return {"mlp.post": scaled, "mlp.out": Add(added_LBTD), "embed": Add(embedding_BTD)}


def graph(
    model: Model | str | os.PathLike[str],
    tokens: Sequence[int] | np.ndarray,
    *,
    targets: Sequence[int] | None = None,
    against: Sequence[int] | None = None,
    max_features: int = MAX_FEATURES,
) -> Graph:
    """The attribution graph of a prompt in the basis of neurons.

    Features are the neurons (at a position) of most influence on the logits, found greedily among
    all; errors are what the other neurons of an MLP write. Entries below a millionth of a row's
    absolute sum count with these (`neuron_rows`).

    Args:
      model: the argument of `attribute`.
      tokens: ids of the prompt, `[T]`.
      targets: ids of the logit nodes, as in `attribute`.
      against: ids that they are explained against, as in `attribute`.
      max_features: neurons that are features.

    Raises:
      UsageError: as `attribute`.
    """
    if max_features < 1:
        raise UsageError(f"max_features = {max_features} must be at least 1")
    model = circuit_model(model)
    neurons = Neurons.of(model)
    prompt, activation_LTF = prepare(model, neurons, tokens, targets, against)
    if max_features >= activation_LTF.size:
        return attribute(model, neurons, tokens, targets=targets, against=against)
    with exact_products():
        rows = NeuronRows(prompt, activation_LTF, neurons.params["down"])
        rows.add_logits()
        choose(rows, max_features, STEP)
        kept_LTF = np.zeros(rows.shape, bool)
        kept_LTF.ravel()[rows.chosen] = True
        prompt = _choose_features(prompt, activation_LTF, kept_LTF)
    table = ActiveFeatures.of(np.where(kept_LTF, activation_LTF, 0.0))
    return assemble(prompt, table, rows.others_as_errors(table))


def _choose_features(prompt: Prompt, activation_LTF: jax.Array, kept_LTF: np.ndarray) -> Prompt:
    """The prompt with some neurons for features; errors are what the others write."""
    assert isinstance(prompt.features, Neurons)
    features = dataclasses.replace(prompt.features, kept_LTF=jnp.asarray(kept_LTF))
    error_LTD = _written(features, jnp.where(kept_LTF, 0.0, activation_LTF))
    replacement = dataclasses.replace(prompt.replacement, error_LTD=error_LTD)
    return dataclasses.replace(prompt, replacement=replacement, features=features)


@exact_jit
def _written(features, activation_LTF):
    """What neurons of these activations write `[L, T, D]`."""
    return features.written(activation_LTF)
