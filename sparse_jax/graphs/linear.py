"""Linear passes through a replacement model: tangents upwards, cotangents downwards.

A target reads the residual stream at one layer and position: a feature the input of its MLP, a
logit the last layer's output. Its cotangents are the derivatives of that reading by the residual
stream below; a source's tangent is what it adds to the residual stream above. Both passes take one
layer after another for a whole batch (axis X), without automatic differentiation:

    c_out     cotangent of the block's output, which features, errors and decoder biases write
    c_attn    cotangent of the attention output
    c_skip    cotangent of the block's input, past attention

c_attn = c_skip = c_out + readings of the layer's MLP; in parallel blocks c_attn = c_out. Where the
transcoder has W_skip, its transpose adds to these readings what comes from c_out.
"""

from typing import Any, Protocol, Self

from flax import struct
import jax
import jax.numpy as jnp

from lm_jax.model.frozen import FrozenLayers, centre
from sparse_jax.graphs.basis import Features
from sparse_jax.graphs.replacement import Reading, Replacement


@struct.dataclass
class Targets:
    """Readings of the residual stream.

    Attributes:
      layer_X: layer of each reading's MLP input; L for the logits, -1 for no reading.
      position_X: position of each reading.
      vector_XD: the reading is its product with the residual stream, plus a constant.
      constant_X: constant of each reading, from biases in the norm before it and from the encoder.
    """

    layer_X: jax.Array
    position_X: jax.Array
    vector_XD: jax.Array
    constant_X: jax.Array


@struct.dataclass
class Sources:
    """Additions to the residual stream.

    Attributes:
      position_X: position of each source.
      write_XLD: what each adds to the output of each layer.
      embedding_XD: what each adds to the input of the first layer.
    """

    position_X: jax.Array
    write_XLD: jax.Array
    embedding_XD: jax.Array


def feature_targets(
    replacement: Replacement,
    features: Features,
    layer_X: jax.Array,
    position_X: jax.Array,
    feature_X: jax.Array,
) -> Targets:
    """Pre-activations of features."""
    encoder_XD, constant_X = features.readings(layer_X, position_X, feature_X)
    reading = replacement.reading
    factor_XD = reading.factor_LTD[layer_X, position_X]
    bias_X = (encoder_XD * reading.bias_LD[layer_X]).sum(-1)
    return Targets(
        layer_X,
        position_X,
        centre(encoder_XD * factor_XD, reading.centred),
        bias_X + constant_X,
    )


def logit_targets(replacement: Replacement, direction_XD: jax.Array) -> Targets:
    """Directions after the last norm, at the last position."""
    L, T, _ = replacement.error_LTD.shape
    vector_XD = direction_XD * replacement.final_TD[-1][None]
    full = jnp.full(len(direction_XD), T - 1)
    return Targets(
        jnp.full_like(full, L),
        full,
        centre(vector_XD, replacement.layers.centred),
        direction_XD @ replacement.final_bias_D,
    )


def readings(targets: Targets, index: jax.Array | int, T: int) -> jax.Array:
    """Cotangents `[X, T, D]` of what the targets of one layer read."""
    at_XT = (targets.position_X[:, None] == jnp.arange(T)[None]) & (
        targets.layer_X[:, None] == index
    )
    return jnp.where(at_XT[:, :, None], targets.vector_XD[:, None], 0.0)


def below_attention(
    layer: FrozenLayers, reading: Reading, c_out_XTD: jax.Array, read_XTD: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`c_attn` and `c_skip` of a block, of `c_out` and what its MLP's targets read."""
    c_skip_XTD = c_out_XTD + read_XTD + reading.below_skip(c_out_XTD)
    return (c_out_XTD if layer.parallel else c_skip_XTD), c_skip_XTD


@struct.dataclass
class Tangents:
    """What sources add to the residual stream.

    Attributes:
      input_LXTD: additions at the input of each block.
      value_LXS: values of its mixer there.
      last_XTD: additions after all blocks.
    """

    input_LXTD: jax.Array
    value_LXS: jax.Array
    last_XTD: jax.Array


def tangents(replacement: Replacement, sources: Sources) -> Tangents:
    """Tangents of sources, layer by layer upwards."""
    T = replacement.error_LTD.shape[1]
    at_XT1 = (sources.position_X[:, None] == jnp.arange(T)[None])[:, :, None]

    def up(x_XTD, each):
        layer, reading, write_XD = each
        value_XS = layer.values(x_XTD)
        above_XTD = x_XTD + layer.mix(value_XS)
        above_XTD += reading.skipped(x_XTD if layer.parallel else above_XTD)
        return above_XTD + jnp.where(at_XT1, write_XD[:, None], 0.0), (x_XTD, value_XS)

    start_XTD = jnp.where(at_XT1, sources.embedding_XD[:, None], 0.0)
    each = replacement.layers, replacement.reading, jnp.swapaxes(sources.write_XLD, 0, 1)
    last_XTD, (input_LXTD, value_LXS) = jax.lax.scan(up, start_XTD, each)
    return Tangents(input_LXTD, value_LXS, last_XTD)


@struct.dataclass
class Rows:
    """Rows of the adjacency matrix by kind of source, and what constants add.

    Attributes:
      feature: attributions of features, as `Writes.attributions` returns them.
      error_XLT, token_XT: attributions of errors and tokens.
      bias_X: what everything constant adds.
    """

    feature: jax.Array
    error_XLT: jax.Array
    token_XT: jax.Array
    bias_X: jax.Array


class Written(Protocol):
    """What features write, and how attributions to them add up over layers."""

    @property
    def layers(self) -> Any:
        """Data with a leading axis L."""
        ...

    def first(self, positions: int) -> Self:
        """What those at the first positions write."""
        ...

    def start(self, X: int) -> tuple[Any, Any]:
        """Sums over layers of X targets, and what a layer without cotangents gives, both zero."""
        ...

    def add(self, total: Any, layer: Any, c_XTD: jax.Array) -> tuple[Any, Any]:
        """Sums with one layer more, from its cotangents, and what belongs to this layer alone."""
        ...

    def attributions(self, total: Any, per_layer: Any) -> jax.Array:
        """The attributions of the features, targets first."""
        ...


@struct.dataclass
class Writes:
    """What features write, by position and place in the table of that position.

    Attributes:
      write_LTZD: additions to each layer: activation times decoder, zero where a feature does not
        write.
    """

    write_LTZD: jax.Array

    @property
    def layers(self) -> Any:
        """Data with a leading axis L."""
        return self.write_LTZD

    def first(self, positions: int) -> "Writes":
        """What those at the first positions write."""
        return Writes(self.write_LTZD[:, :positions])

    def start(self, X: int) -> tuple[Any, Any]:
        """Sums over layers, and what a layer without cotangents gives, both zero."""
        return jnp.zeros((X, *self.write_LTZD.shape[1:3]), self.write_LTZD.dtype), ()

    def add(self, total: Any, layer: Any, c_XTD: jax.Array) -> tuple[Any, Any]:
        """Sums over one layer more, and what is this layer's alone."""
        return total + jnp.einsum("XTD,TZD->XTZ", c_XTD, layer), ()

    def attributions(self, total: Any, per_layer: Any) -> jax.Array:
        """The attributions `[X, T, Z]`."""
        del per_layer
        return total


@struct.dataclass
class OwnLayerWrites:
    """What all features of all positions write if each writes into its own layer only.

    Attributes:
      decoder_LFD, activation_LTF: decoder vectors and activations, the products of which are
        written.
    """

    decoder_LFD: jax.Array
    activation_LTF: jax.Array

    @property
    def layers(self) -> Any:
        """Data with a leading axis L."""
        return self.decoder_LFD, self.activation_LTF

    def first(self, positions: int) -> "OwnLayerWrites":
        """What those at the first positions write."""
        return OwnLayerWrites(self.decoder_LFD, self.activation_LTF[:, :positions])

    def start(self, X: int) -> tuple[Any, Any]:
        """Sums over layers, and what a layer without cotangents gives, both zero."""
        return (), jnp.zeros((X, *self.activation_LTF.shape[1:]), self.activation_LTF.dtype)

    def add(self, total: Any, layer: Any, c_XTD: jax.Array) -> tuple[Any, Any]:
        """Sums over one layer more, and what is this layer's alone."""
        decoder_FD, activation_TF = layer
        return total, jnp.einsum("XTD,FD->XTF", c_XTD, decoder_FD) * activation_TF[None]

    def attributions(self, total: Any, per_layer: Any) -> jax.Array:
        """The attributions `[X, L, T, F]`."""
        del total
        return jnp.swapaxes(per_layer, 0, 1)


def attribution_rows(
    replacement: Replacement,
    writes: Written,
    targets: Targets,
    *,
    entering: bool = False,
    positions: int | None = None,
) -> Rows:
    """Attributions to targets, layer by layer from the highest of them down.

    Mixers are causal: no source after a target reaches it.

    Args:
      replacement: the model.
      writes: what the features write.
      targets: the targets. Layers above all of them are skipped.
      entering: whether targets read the input of their block, before its attention, not of its MLP.
      positions: number of first positions that hold all targets; None for all positions.
    """
    L, length, _ = replacement.error_LTD.shape
    X, T = len(targets.layer_X), positions or length
    top = targets.layer_X.max()

    def down(carry, each):
        def step():
            layer, index, reading, written, error_TD, attention_TD, decoder_D = each
            c_XTD, features, bias_X = carry
            features, own = writes.add(features, written, c_XTD)
            error_XT = jnp.einsum("XTD,TD->XT", c_XTD, error_TD)
            read_XTD = readings(targets, index, T)
            at_mlp_XTD = jnp.zeros_like(read_XTD) if entering else read_XTD
            c_attn_XTD, c_skip_XTD = below_attention(layer, reading, c_XTD, at_mlp_XTD)
            constants_X = jnp.einsum("XTD,D->X", c_XTD, decoder_D)
            constants_X += jnp.einsum("XTD,TD->X", c_attn_XTD, attention_TD)
            c_XTD = c_skip_XTD + layer.transpose(c_attn_XTD)
            c_XTD = c_XTD + read_XTD if entering else c_XTD
            return (c_XTD, features, bias_X + constants_X), (error_XT, own)

        def skip():
            return carry, (jnp.zeros((X, T), replacement.error_LTD.dtype), nothing)

        return jax.lax.cond(each[1] <= top, step, skip)

    r, writes = replacement, writes.first(T)
    none, nothing = writes.start(X)
    start = readings(targets, L, T), none, targets.constant_X
    each = (
        *(r.layers.first(T), jnp.arange(L), r.reading.first(T), writes.layers),
        *(r.error_LTD[:, :T], r.attention_bias_LTD[:, :T], r.decoder_bias_LD),
    )
    (c_XTD, features, bias_X), (error_LXT, own) = jax.lax.scan(down, start, each, reverse=True)

    def of_all(x: jax.Array, axis: int) -> jax.Array:
        later = list(x.shape)
        later[axis] = length - T
        return jnp.concatenate([x, jnp.zeros(later, x.dtype)], axis) if length > T else x

    return Rows(
        of_all(writes.attributions(features, own), -2),
        of_all(jnp.swapaxes(error_LXT, 0, 1), -1),
        of_all(jnp.einsum("XTD,TD->XT", c_XTD, r.token_TD[:T]), -1),
        bias_X + jnp.einsum("XTD,TD->X", c_XTD, r.position_TD[:T]),
    )
