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
from sparse_jax.graphs import linear
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
from sparse_jax.graphs.linear import OwnLayerWrites, Targets
from sparse_jax.graphs.rows import ActiveFeatures, FeatureRows, feature_rows
from sparse_jax.transcoders.activations import products_of_some

# `feature_type` of a neuron in a file, and `kind` in `results.ModelFacts`.
NEURON, KIND = "mlp neuron", "neurons"
# Neurons that get a row in `graph`, and targets at a time.
MAX_FEATURES, _CHUNK = 256, 32


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

    def writes(
        self, layer_X: jax.Array, feature_X: jax.Array, activation_X: jax.Array
    ) -> jax.Array:
        """Writes of neurons into each layer, `[L, X, D]`: zero but in a neuron's own layer."""
        down_LFD = self.params["down"]
        own_LX = jnp.arange(len(down_LFD))[:, None] == layer_X[None]
        written_XD = down_LFD[layer_X, feature_X] * activation_X[:, None]
        return jnp.where(own_LX[:, :, None], written_XD[None], 0.0)

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
    all; errors are what the other neurons of an MLP write. Peak memory is about `max_features`
    times 4 L T F bytes beside the weights: .8 GB for SmolLM2-135M and 16 tokens.

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
    prompt = prepare(model, Neurons.of(model), tokens, targets, against)
    if max_features >= prompt.replacement.feature_LTF.size:
        return attribute(model, Neurons.of(model), tokens, targets=targets, against=against)
    with exact_products():
        rows = _NeuronRows(prompt)
        logits = rows.of(prompt.logit_targets())
        computed = feature_rows(rows, *logits, prompt.probabilities, max_features)
        kept_LTF = np.zeros(rows.shape, bool)
        kept_LTF.ravel()[computed.chosen] = True
        prompt = _choose_features(prompt, kept_LTF)
    table = ActiveFeatures(np.asarray(prompt.replacement.feature_LTF))
    return assemble(prompt, table, _others_as_errors(computed, table, rows.shape))


def _choose_features(prompt: Prompt, kept_LTF: np.ndarray) -> Prompt:
    """The prompt with some neurons for features; errors are what the others write."""
    assert isinstance(prompt.features, Neurons)
    features = dataclasses.replace(prompt.features, kept_LTF=jnp.asarray(kept_LTF))
    pre_LTF = prompt.replacement.pre_LTF
    replacement = dataclasses.replace(
        prompt.replacement,
        feature_LTF=jnp.where(kept_LTF, pre_LTF, 0.0),
        error_LTD=_written(features, jnp.where(kept_LTF, 0.0, pre_LTF)),
    )
    return dataclasses.replace(prompt, replacement=replacement, features=features)


def _others_as_errors(
    computed: FeatureRows, table: ActiveFeatures, shape: tuple[int, int, int]
) -> FeatureRows:
    """Rows with columns for a table's features, errors and tokens, from rows with all neurons."""
    L, T, F = shape
    columns = np.ravel_multi_index((table.layer_X, table.position_X, table.feature_X), shape)
    logits, order = len(computed.weights) - len(computed.chosen), np.argsort(computed.chosen)
    at = order[np.searchsorted(computed.chosen, columns, sorter=order)]
    rows = np.concatenate([logits + at, np.arange(logits)])
    weights = np.empty((len(rows), len(columns) + L * T + T), np.float32)
    # A row at a time: it has a million columns.
    for weight_S, row in zip(weights, rows, strict=True):
        row_S = computed.weights[row]
        others_S = row_S[: L * T * F].copy()
        others_S[columns] = 0.0
        error_X = others_S.reshape(-1, F).sum(1, dtype=np.float64)
        weight_S[:] = np.concatenate([row_S[columns], error_X, row_S[L * T * F :]])
    return FeatureRows(np.arange(len(columns)), weights, computed.biases[rows])


class _NeuronRows:
    """Rows with a column for every neuron at every position (`rows.Filler`)."""

    def __init__(self, prompt: Prompt) -> None:
        self.replacement, self.features = prompt.replacement, prompt.features
        L, T, F = self.replacement.feature_LTF.shape
        self.shape = L, T, F
        self.layer_X = np.repeat(np.arange(L), T * F)
        self.chunk = _CHUNK

    def of_features(self, index_X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows and biases of neurons by column."""
        places = np.unravel_index(index_X, self.shape)
        return self.of(_targets(self.replacement, self.features, *map(jnp.asarray, places)))

    def of(self, targets: Targets) -> tuple[np.ndarray, np.ndarray]:
        """Rows and biases of at most a chunk of targets."""
        rows, bias_X = _rows(self.replacement, self.features, targets)
        return np.asarray(rows), np.asarray(bias_X)


_targets = exact_jit(linear.feature_targets)


@exact_jit
def _written(features, activation_LTF):
    """What neurons of these activations write `[L, T, D]`."""
    return features.written(activation_LTF)


@exact_jit
def _rows(replacement, features, targets):
    writes = OwnLayerWrites(features.params["down"], replacement.feature_LTF)
    rows = linear.attribution_rows(replacement, writes, targets)
    X = len(rows.bias_X)
    # Errors are zero: rounding of what neurons reconstruct.
    return jnp.concatenate([rows.feature.reshape(X, -1), rows.token_XT], 1), rows.bias_X
