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

from typing import Protocol, Self

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
      feature_XTZ: attributions of features, by position and place in its table.
      error_XLT, token_XT: attributions of errors and tokens.
      bias_X: what everything constant adds.
    """

    feature_XTZ: jax.Array
    error_XLT: jax.Array
    token_XT: jax.Array
    bias_X: jax.Array


# Floats of gathered writes at a time.
_GATHERED = 2**24


class Written(Protocol):
    """What features write, by position and place in the table of that position (axes T, Z)."""

    @property
    def places(self) -> int:
        """How many places Z a position has."""
        ...

    def first(self, positions: int) -> Self:
        """What those at the first positions write."""
        ...

    def products(self, c_XTD: jax.Array, index: jax.Array) -> jax.Array:
        """Products `[X, T, Z]` of derivatives with what they write into one layer."""
        ...


@struct.dataclass
class Writes:
    """What features write into all layers, stored.

    Attributes:
      write_LTZD: additions to each layer.
    """

    write_LTZD: jax.Array

    @property
    def places(self) -> int:
        """How many places Z a position has."""
        return self.write_LTZD.shape[2]

    def first(self, positions: int) -> "Writes":
        """What those at the first positions write."""
        return Writes(self.write_LTZD[:, :positions])

    def products(self, c_XTD: jax.Array, index: jax.Array) -> jax.Array:
        """Products of derivatives with what they write into one layer."""
        return jnp.einsum("XTD,TZD->XTZ", c_XTD, self.write_LTZD[index])


@struct.dataclass
class GatheredWrites:
    """What features write, gathered from their decoders a layer and some positions at a time.

    Of long prompts all layers together are too much to store.

    Attributes:
      features: features with their decoders.
      layer_TZ, feature_TZ, activation_TZ: layer, index and activation by place; activation 0 where
        a place is empty.
    """

    features: Features
    layer_TZ: jax.Array
    feature_TZ: jax.Array
    activation_TZ: jax.Array

    @property
    def places(self) -> int:
        """How many places Z a position has."""
        return self.layer_TZ.shape[1]

    def first(self, positions: int) -> "GatheredWrites":
        """What those at the first positions write."""
        each = (self.layer_TZ, self.feature_TZ, self.activation_TZ)
        return GatheredWrites(self.features, *(x[:positions] for x in each))

    def products(self, c_XTD: jax.Array, index: jax.Array) -> jax.Array:
        """Products of derivatives with what they write into one layer."""
        X, T, D = c_XTD.shape
        size = min(max(_GATHERED // (self.places * D), 1), T)

        def some(each: tuple[jax.Array, ...]) -> jax.Array:
            c_CXD, *table_CZ = each
            flat = (x.reshape(-1) for x in table_CZ)
            write_CZD = self.features.writes_into(index, *flat).reshape(*table_CZ[0].shape, -1)
            return jnp.einsum("CXD,CZD->CXZ", c_CXD, write_CZD)

        def parts(x: jax.Array) -> jax.Array:
            more = [(0, -T % size)] + [(0, 0)] * (x.ndim - 1)
            return jnp.pad(x, more).reshape(-1, size, *x.shape[1:])

        table = self.layer_TZ, self.feature_TZ, self.activation_TZ
        given = tuple(map(parts, (c_XTD.swapaxes(0, 1), *table)))
        found_BCXZ = jax.lax.map(some, given)
        return found_BCXZ.reshape(-1, X, self.places)[:T].swapaxes(0, 1)


@struct.dataclass
class Blocks:
    """What a downward pass needs of blocks; of all layers with a leading L, or of one.

    Attributes:
      layers, reading: linear maps of the mixers, and how features read the stream.
      error_LTD: what errors write.
      attention_LTD, decoder_LD: what mixers and MLPs add because of biases alone.
    """

    layers: FrozenLayers
    reading: Reading
    error_LTD: jax.Array
    attention_LTD: jax.Array
    decoder_LD: jax.Array

    @classmethod
    def of(cls, replacement: Replacement) -> "Blocks":
        """The blocks of a replacement model."""
        r = replacement
        return cls(r.layers, r.reading, r.error_LTD, r.attention_bias_LTD, r.decoder_bias_LD)

    def one(self, index: jax.Array) -> "Blocks":
        """The block of one layer."""
        return jax.tree.map(lambda x: x[index], self)

    def first(self, positions: int) -> "Blocks":
        """The same of the first positions, of all layers or one."""
        return Blocks(
            self.layers.first(positions),
            self.reading.first(positions),
            self.error_LTD[..., :positions, :],
            self.attention_LTD[..., :positions, :],
            self.decoder_LD,
        )

    def below(
        self, c_XTD: jax.Array, read_XTD: jax.Array, *, entering: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """Cotangents of one block's input, and what its constants add to targets `[X]`.

        Args:
          c_XTD: cotangents of its output.
          read_XTD: what targets read in it (`readings`).
          entering: whether they read its input, not that of its MLP.
        """
        at_mlp_XTD = jnp.zeros_like(read_XTD) if entering else read_XTD
        c_attn_XTD, c_skip_XTD = below_attention(self.layers, self.reading, c_XTD, at_mlp_XTD)
        constants_X = jnp.einsum("XTD,D->X", c_XTD, self.decoder_LD)
        constants_X += jnp.einsum("XTD,TD->X", c_attn_XTD, self.attention_LTD)
        below_XTD = c_skip_XTD + self.layers.transpose(c_attn_XTD)
        return (below_XTD + read_XTD if entering else below_XTD), constants_X


def below_all(
    replacement: Replacement, c_XTD: jax.Array, constants_X: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attributions of tokens `[X, T]`, and those of all constants together `[X]`.

    Args:
      replacement: the model.
      c_XTD: cotangents of the first block's input, at the first T positions.
      constants_X: what the targets' own constants and those of the blocks add.
    """
    T = c_XTD.shape[1]
    token_XT = jnp.einsum("XTD,TD->XT", c_XTD, replacement.token_TD[:T])
    return token_XT, constants_X + jnp.einsum("XTD,TD->X", c_XTD, replacement.position_TD[:T])


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
    writes = writes.first(T)

    def down(carry, each):
        def step():
            block, index = each
            c_XTD, feature_XTZ, constants_X = carry
            feature_XTZ, error_XT = jax.lax.cond(
                index < top,
                lambda: (
                    feature_XTZ + writes.products(c_XTD, index),
                    jnp.einsum("XTD,TD->XT", c_XTD, block.error_LTD),
                ),
                # Nothing above the highest targets is written to.
                lambda: (feature_XTZ, none_XT),
            )
            c_XTD, added_X = block.below(c_XTD, readings(targets, index, T), entering=entering)
            return (c_XTD, feature_XTZ, constants_X + added_X), error_XT

        return jax.lax.cond(each[1] <= top, step, lambda: (carry, none_XT))

    dtype = replacement.error_LTD.dtype
    none_XT = jnp.zeros((X, T), dtype)
    none_XTZ = jnp.zeros((X, T, writes.places), dtype)
    start = readings(targets, L, T), none_XTZ, targets.constant_X
    each = Blocks.of(replacement).first(T), jnp.arange(L)
    (c_XTD, feature_XTZ, constants_X), error_LXT = jax.lax.scan(down, start, each, reverse=True)
    token_XT, bias_X = below_all(replacement, c_XTD, constants_X)

    def of_all(x: jax.Array, axis: int) -> jax.Array:
        later = list(x.shape)
        later[axis] = length - T
        return jnp.concatenate([x, jnp.zeros(later, x.dtype)], axis) if length > T else x

    return Rows(
        of_all(feature_XTZ, -2),
        of_all(jnp.swapaxes(error_LXT, 0, 1), -1),
        of_all(token_XT, -1),
        bias_X,
    )
