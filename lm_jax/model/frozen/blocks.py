"""The protocol of a frozen mixer, and the linear maps of all blocks with their norms."""

from collections.abc import Mapping
import dataclasses
from typing import Any, ClassVar, Protocol, runtime_checkable

from flax import struct
import jax
import jax.numpy as jnp

from lm_jax.errors import UsageError
from lm_jax.model.config import DecoderConfig
from lm_jax.model.params import ParamTree


class FrozenMixer(Protocol):
    """A pytree of the linear maps of a mixer; methods are of one layer, fields have a leading L."""

    @property
    def pattern_shape(self) -> tuple[int, ...]:
        """Shape of the weights of pairs of positions, `[L, N, T, S]` or of one layer."""
        ...

    def first(self, positions: int) -> "FrozenMixer":
        """The maps between the first positions alone, of all layers or one."""
        ...

    @property
    def width(self) -> int:
        """How many numbers the sums of values of one position are."""
        ...

    def values(self, h_XSD: jax.Array) -> jax.Array:
        """Values `[X, S, ...]` of the normed stream."""
        ...

    def mix(self, value_XS: jax.Array) -> jax.Array:
        """Output `[X, T, D]` of values, without biases."""
        ...

    def cotangents(self, c_XTD: jax.Array) -> jax.Array:
        """Derivatives `[X, T, ...]` by the sums of values, of those by the output."""
        ...

    def transpose(self, u_XT: jax.Array) -> jax.Array:
        """Derivatives `[X, S, D]` by the normed stream, of those by the sums of values."""
        ...

    def shares(self, value_XS: jax.Array, u_XT: jax.Array) -> jax.Array:
        """Share `[X, N, T, S]` of every entry of the pattern in `u . sums of values`."""
        ...

    def head_shares(self, value_XS: jax.Array, u_XT: jax.Array) -> jax.Array:
        """`shares` summed over all pairs of positions `[X, N]`, without an axis of pairs."""
        ...

    def constant(self, norm_bias_D: jax.Array) -> jax.Array:
        """Output `[T, D]` of biases alone, that of the norm before the mixer included."""
        ...


@runtime_checkable
class FreezableMixer(Protocol):
    """A mixer that is linear once the sites `frozen_sites` are held."""

    frozen_sites: ClassVar[tuple[str, ...]]

    def freeze(self, p: ParamTree, records: Mapping[str, jax.Array]) -> FrozenMixer:
        """The linear maps on one prompt.

        Args:
          p: parameters of all layers.
          records: the frozen sites of one prompt, without the axis B.
        """
        ...


@struct.dataclass
class FrozenLayers:
    """Mixers of all blocks with the norms around them; fields have a leading L.

    A norm is `factor * centre(x) + bias`: `factor` is its weight over the recorded divisor.
    Methods are of one layer, as `jax.lax.scan` and `jax.vmap` give it, and linear: without biases.

    Attributes:
      mixer: a `FrozenMixer`.
      norm_LTD, norm_bias_LD: factor and bias of the norm before the mixer; 1 and 0 without one.
      post_norm_LTD, post_norm_bias_LD: factor and bias of the norm after the mixer; None without
        one.
      centred: whether norms subtract the mean.
      parallel: whether the MLP reads the residual stream before the mixer (Pythia).
    """

    mixer: Any
    norm_LTD: jax.Array
    norm_bias_LD: jax.Array
    post_norm_LTD: jax.Array | None
    post_norm_bias_LD: jax.Array | None
    centred: bool = struct.field(pytree_node=False)
    parallel: bool = struct.field(pytree_node=False)

    def first(self, positions: int) -> "FrozenLayers":
        """The maps between the first positions alone, of all layers or one."""
        post_LTD = self.post_norm_LTD
        return dataclasses.replace(
            self,
            mixer=self.mixer.first(positions),
            norm_LTD=self.norm_LTD[..., :positions, :],
            post_norm_LTD=None if post_LTD is None else post_LTD[..., :positions, :],
        )

    def values(self, x_XSD: jax.Array) -> jax.Array:
        """Values of the block's input."""
        return self.mixer.values(centre(x_XSD, self.centred) * self.norm_LTD[None])

    def apply(self, x_XSD: jax.Array) -> jax.Array:
        """What the mixer adds to the stream `[X, T, D]`, of the block's input."""
        return self.mix(self.values(x_XSD))

    def mix(self, value_XS: jax.Array) -> jax.Array:
        """What the mixer adds to the stream, given the values."""
        o_XTD = self.mixer.mix(value_XS)
        if self.post_norm_LTD is not None:
            o_XTD = centre(o_XTD, self.centred) * self.post_norm_LTD[None]
        return o_XTD

    def cotangents(self, c_XTD: jax.Array) -> jax.Array:
        """Derivatives by the sums of values, given those by what the mixer adds."""
        if self.post_norm_LTD is not None:
            c_XTD = centre(c_XTD * self.post_norm_LTD[None], self.centred)
        return self.mixer.cotangents(c_XTD)

    def transpose(self, c_XTD: jax.Array) -> jax.Array:
        """Derivatives by the block's input `[X, S, D]`, of those by what the mixer adds."""
        y_XSD = self.mixer.transpose(self.cotangents(c_XTD))
        return centre(y_XSD * self.norm_LTD[None], self.centred)

    def constants(self) -> jax.Array:
        """What the mixers add because of biases alone `[L, T, D]`; of all layers."""
        output_LTD = jax.vmap(lambda mixer, bias_D: mixer.constant(bias_D))(
            self.mixer, self.norm_bias_LD
        )
        if self.post_norm_LTD is None:
            return output_LTD
        output_LTD = centre(output_LTD, self.centred) * self.post_norm_LTD
        assert self.post_norm_bias_LD is not None
        return output_LTD + self.post_norm_bias_LD[:, None]


def mixer_sites(mixer: object) -> tuple[str, ...]:
    """The sites of the weights that a mixer gives to pairs of positions.

    Raises:
      UsageError: the mixer has no linear form.
    """
    if not isinstance(mixer, FreezableMixer):
        raise UsageError(
            f"model: {type(mixer).__name__} is not linear with its gates held; give a model of "
            "attention or of prototypes"
        )
    return mixer.frozen_sites


def frozen_sites(cfg: DecoderConfig, mixer: object) -> tuple[str, ...]:
    """The sites that `freeze_layers` needs, and the divisor of the last norm.

    Raises:
      UsageError: the mixer has no linear form, norms that subtract the mean are only after it, or
        layers differ in shape.
    """
    cfg.check_equal_blocks("model: its frozen form")
    if cfg.norm == "layer" and cfg.norm_placement == "post":
        raise UsageError(
            "model: norm = 'layer' with norm_placement = 'post' has no frozen form here; give a "
            "model with norm = 'rms', or with norms before its mixers and MLPs"
        )
    norms = [f"{name}.scale" for name in cfg.norm_names if name.startswith("ln1")]
    return (*mixer_sites(mixer), "final.scale", *norms)


def mlp_norm_sites(cfg: DecoderConfig) -> tuple[str, ...]:
    """The site of the divisor of the norms before MLPs; none where there are no such norms."""
    return ("ln2.scale",) if "ln2" in cfg.norm_names else ()


def freeze_layers(
    params: ParamTree, records: Mapping[str, jax.Array], cfg: DecoderConfig, mixer: Any
) -> FrozenLayers:
    """The linear maps of all blocks on one prompt.

    Args:
      params: parameters of the decoder.
      records: `frozen_sites` of one prompt, without the axis B.
      cfg: configuration of the decoder.
      mixer: a `FreezableMixer`, the mixer of the blocks.
    """
    blocks = params["blocks"]
    post_LTD = post_bias_LD = None
    if "ln1_post" in cfg.norm_names:
        post_LTD, post_bias_LD = norm_factor(blocks.get("ln1_post"), records["ln1_post.scale"], cfg)
    norm_LTD, norm_bias_LD = norm_factor(blocks.get("ln1"), divisors(records, "ln1", cfg), cfg)
    return FrozenLayers(
        mixer=mixer.freeze(blocks["mixer"], records),
        norm_LTD=norm_LTD,
        norm_bias_LD=norm_bias_LD,
        post_norm_LTD=post_LTD,
        post_norm_bias_LD=post_bias_LD,
        centred=cfg.norm == "layer",
        parallel=cfg.parallel_residual,
    )


def divisors(records: Mapping[str, jax.Array], name: str, cfg: DecoderConfig) -> jax.Array:
    """Divisors `[L, T, 1]` of the norm `ln1` or `ln2` of blocks; ones where there is none."""
    if name in cfg.norm_names:
        return records[f"{name}.scale"]
    return jnp.ones((cfg.num_layers, *records["final.scale"].shape), jnp.float32)


def norm_weight(norm: Any, cfg: DecoderConfig) -> jax.Array:
    """The weight of a norm, `[D]` or of all layers `[L, D]`, ones without any; float32 or wider."""
    if not norm or "scale" not in norm:
        return jnp.ones(cfg.hidden_size, jnp.float32)
    scale = norm["scale"]
    return scale.astype(jnp.promote_types(scale.dtype, jnp.float32)) + cfg.norm_offset


def norm_factor(norm: Any, divisor: jax.Array, cfg: DecoderConfig) -> tuple[jax.Array, jax.Array]:
    """Factor `[..., T, D]` and bias `[..., D]` of a norm, of its divisors `[..., T, 1]`."""
    shape = (*divisor.shape[:-2], cfg.hidden_size)
    weight = jnp.broadcast_to(norm_weight(norm, cfg), shape)
    bias = norm["bias"] if norm and "bias" in norm else jnp.zeros(shape, jnp.float32)
    return weight[..., None, :] / divisor, bias


def centre(x: jax.Array, centred: bool) -> jax.Array:
    """`x` minus its mean over the last axis for layer norm, a symmetric map; else `x`."""
    return x - x.mean(-1, keepdims=True) if centred else x
