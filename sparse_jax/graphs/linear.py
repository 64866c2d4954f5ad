"""Linear passes through a replacement model: tangents upwards, cotangents downwards.

A target reads the residual stream at one layer and position: a feature the input of its MLP, a
logit the last layer's output. Its cotangents are the derivatives of that reading by the residual
stream below; a source's tangent is what it adds to the residual stream above. Both passes take one
layer after another for a whole batch (axis X), without automatic differentiation:

    c_out     cotangent of the block's output, which features, errors and decoder biases write
    c_attn    cotangent of the attention output
    c_skip    cotangent of the block's input, past attention

c_attn = c_skip = c_out + readings of the layer's MLP; in parallel blocks c_attn = c_out.
"""

from flax import struct
import jax
import jax.numpy as jnp

from lm_jax.model.frozen import FrozenLayers, centre
from sparse_jax.graphs.replacement import Replacement
from sparse_jax.transcoders.transcoder import Transcoder


@struct.dataclass
class Targets:
    """Readings of the residual stream.

    Attributes:
      layer_X: whose MLP input is read; L for the logits, -1 for no reading.
      position_X: where.
      vector_XD: the reading is its product with the residual stream, plus a constant.
      constant_X: of biases in the norm that the reading is after, and of the encoder.
    """

    layer_X: jax.Array
    position_X: jax.Array
    vector_XD: jax.Array
    constant_X: jax.Array


@struct.dataclass
class Sources:
    """Additions to the residual stream.

    Attributes:
      position_X: where.
      write_XLD: added to the output of each layer.
      embedding_XD: added to the input of the first.
    """

    position_X: jax.Array
    write_XLD: jax.Array
    embedding_XD: jax.Array


@struct.dataclass
class Cotangents:
    """Of targets, at every layer `[X, L, T, D]`; names as in the head of this file."""

    out_XLTD: jax.Array
    attention_XLTD: jax.Array
    skip_XLTD: jax.Array


def feature_targets(
    replacement: Replacement,
    transcoder: Transcoder,
    layer_X: jax.Array,
    position_X: jax.Array,
    feature_X: jax.Array,
) -> Targets:
    """Pre-activations of features."""
    encoder_XD = transcoder.params["encoder"][layer_X, feature_X]
    factor_XD = replacement.read_LTD[layer_X, position_X]
    bias_X = (encoder_XD * replacement.read_bias_LD[layer_X]).sum(-1)
    return Targets(
        layer_X,
        position_X,
        centre(encoder_XD * factor_XD, replacement.layers.centred),
        bias_X + transcoder.params["encoder_bias"][layer_X, feature_X],
    )


def feature_writes(
    transcoder: Transcoder, layer_X: jax.Array, feature_X: jax.Array, activation_X: jax.Array
) -> jax.Array:
    """What features write into each layer `[L, X, D]`: activation times decoder."""
    written = []
    for target in range(transcoder.cfg.num_layers):
        sources = transcoder.cfg.sources(target)
        w_SFD = transcoder.params["decoder"][f"to_{target}"]
        index_X = layer_X - sources.start
        within_X = (index_X >= 0) & (index_X < len(sources))
        w_XD = w_SFD[jnp.clip(index_X, 0, len(sources) - 1), feature_X]
        written.append(w_XD * jnp.where(within_X, activation_X, 0.0)[:, None])
    return jnp.stack(written)


def logit_targets(replacement: Replacement, direction_XD: jax.Array) -> Targets:
    """Directions after the last norm, at the last position."""
    L, T, _ = replacement.read_LTD.shape
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
    layer: FrozenLayers, c_out_XTD: jax.Array, read_XTD: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`c_attn` and `c_skip` of a block, of `c_out` and what its MLP's targets read."""
    c_skip_XTD = c_out_XTD + read_XTD
    return (c_out_XTD if layer.parallel else c_skip_XTD), c_skip_XTD


def cotangents(replacement: Replacement, targets: Targets) -> Cotangents:
    """Cotangents of targets at all layers."""
    L, T, _ = replacement.read_LTD.shape

    def down(c_XTD, each):
        layer, index = each
        c_attn_XTD, c_skip_XTD = below_attention(layer, c_XTD, readings(targets, index, T))
        below_XTD = c_skip_XTD + layer.transpose(c_attn_XTD)
        return below_XTD, (c_XTD, c_attn_XTD, c_skip_XTD)

    each = replacement.layers, jnp.arange(L)
    _, stacked = jax.lax.scan(down, readings(targets, L, T), each, reverse=True)
    return Cotangents(*(jnp.swapaxes(x_LXTD, 0, 1) for x_LXTD in stacked))


def tangents(replacement: Replacement, sources: Sources) -> tuple[jax.Array, jax.Array]:
    """Tangents of sources at the input of blocks `[X, L, T, D]`, and after all `[X, T, D]`."""
    T = replacement.read_LTD.shape[1]
    at_XT1 = (sources.position_X[:, None] == jnp.arange(T)[None])[:, :, None]

    def up(x_XTD, each):
        layer, write_XD = each
        above_XTD = x_XTD + layer.apply(x_XTD)
        return above_XTD + jnp.where(at_XT1, write_XD[:, None], 0.0), x_XTD

    start_XTD = jnp.where(at_XT1, sources.embedding_XD[:, None], 0.0)
    each = replacement.layers, jnp.swapaxes(sources.write_XLD, 0, 1)
    last_XTD, x_LXTD = jax.lax.scan(up, start_XTD, each)
    return jnp.swapaxes(x_LXTD, 0, 1), last_XTD


@struct.dataclass
class Rows:
    """Rows of the adjacency matrix by kind of source, and what constants add.

    Attributes:
      feature_XTZ: of features, by position and place in the table of that position.
      error_XLT, token_XT: of errors and tokens.
      bias_X: of everything constant.
    """

    feature_XTZ: jax.Array
    error_XLT: jax.Array
    token_XT: jax.Array
    bias_X: jax.Array


def attribution_rows(replacement: Replacement, write_LTZD: jax.Array, targets: Targets) -> Rows:
    """Attributions to targets, layer by layer from the highest of them down.

    Args:
      replacement: the model.
      write_LTZD: what each active feature of a position writes into each layer: activation times
        decoder, zero where it does not write.
      targets: what is attributed. Layers above all of them are skipped.
    """
    L, T, Z, _ = write_LTZD.shape
    X = len(targets.layer_X)
    top = targets.layer_X.max()

    def down(carry, each):
        def step():
            layer, index, write_TZD, error_TD, attention_TD, decoder_D = each
            c_XTD, feature_XTZ, bias_X = carry
            feature_XTZ = feature_XTZ + jnp.einsum("XTD,TZD->XTZ", c_XTD, write_TZD)
            error_XT = jnp.einsum("XTD,TD->XT", c_XTD, error_TD)
            c_attn_XTD, c_skip_XTD = below_attention(layer, c_XTD, readings(targets, index, T))
            constants_X = jnp.einsum("XTD,D->X", c_XTD, decoder_D)
            constants_X += jnp.einsum("XTD,TD->X", c_attn_XTD, attention_TD)
            c_XTD = c_skip_XTD + layer.transpose(c_attn_XTD)
            return (c_XTD, feature_XTZ, bias_X + constants_X), error_XT

        def skip():
            return carry, jnp.zeros((X, T), write_LTZD.dtype)

        return jax.lax.cond(each[1] <= top, step, skip)

    r = replacement
    start = readings(targets, L, T), jnp.zeros((X, T, Z), write_LTZD.dtype), targets.constant_X
    each = (
        *(r.layers, jnp.arange(L), write_LTZD, r.error_LTD),
        *(r.attention_bias_LTD, r.decoder_bias_LD),
    )
    (c_XTD, feature_XTZ, bias_X), error_LXT = jax.lax.scan(down, start, each, reverse=True)
    return Rows(
        feature_XTZ,
        jnp.swapaxes(error_LXT, 0, 1),
        jnp.einsum("XTD,TD->XT", c_XTD, r.token_TD),
        bias_X + jnp.einsum("XTD,TD->X", c_XTD, r.position_TD),
    )
