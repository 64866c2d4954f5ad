"""Decoder configuration: one frozen, hashable description that all families of weights map onto.

A `DecoderConfig` holds only what changes the mathematics. It is a static argument of `jax.jit`;
nothing in it is an array. Families (Llama, GPT-2, Gemma and others) differ in these numbers alone:
there is one decoder (`decoder.py`), and a family is a config reader and a table of names
(`lm_jax/weights`).
"""

import dataclasses
import itertools
from typing import Literal, get_args

from lm_jax.errors import BadInputError, UsageError
from lm_jax.model.rope import LARGEST, SMALLEST, DynamicScaling, LongRopeScaling, Rope

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
NormPlacement = Literal["pre", "post", "both"]
QKNorm = Literal["none", "head", "head_and_value", "each_head", "projection"]
KeyValues = Literal["separate", "tied"] | int
# Positions are int32.
_LONGEST = 2**31 - 1
_FULL_ROPE = Rope()


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """Fields that a layer has in place of its `DecoderConfig`'s; None leaves a field as it is.

    `kv` may also be the number of an earlier layer, whose keys and values this one reads.
    """

    head_dim: int | None = None
    num_kv_heads: int | None = None
    mlp_size: int | None = None
    kv: KeyValues | None = None


@dataclasses.dataclass(frozen=True)
class BlockEnd:
    """The end of a block after its MLP (Gemma 4; `block_end.py`).

    An input of the layer's own of `input_size` J, gated by the residual stream, is added to it (not
    with J = 0), and the stream is multiplied by a learned scalar.
    """

    input_size: int = 0


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The shape and the arithmetic of a decoder-only transformer.

    Widths: `hidden_size` D, `mlp_size` F, `head_dim` H, `num_heads` N, `num_kv_heads` K,
    `vocab_size` V, `num_layers` L; `max_length` is the longest context that the weights support.

    `norm_offset` is added to a stored norm weight (Gemma stores w and multiplies by 1 + w);
    without `norm_weights` the norms of blocks and the last one have no parameters (OLMo).
    `norm_placement` says whether the norms of a block are before its mixer and MLP, after them
    (OLMo 2), or both (Gemma). `qk_norm` is over the width of a head, with one weight [H] for all
    (`head`; Qwen 3, Gemma 3) or one for each (`each_head`; StableLM), or over the heads together,
    the whole projected width (`projection`; OLMo 2); it has no bias. `head_and_value` also norms
    values, without a weight (Gemma 4). `kv` says whether keys and values have a projection each or
    share one (`tied`).
    `layers` holds one `LayerShape` per layer; empty, all are as the config says.
    `windows` holds one entry per layer: how many keys, itself included, a query of a sliding-window
    layer sees, or None for the whole past; an empty tuple means None for every layer.
    Layers with a window use `local_rope` where it is given. `rope=None` means learned positions;
    a recurrent mixer uses neither. `mlp_size=0` leaves out the MLP and its norm (Mamba's blocks).
    `attention_scale=None` means 1 / sqrt(H). Soft caps are `c * tanh(x / c)`.
    `pad_id` is the token whose row of the embedding starts at zero, or None for no such token.

    Raises:
      BadInputError: listing every field that cannot be used.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    mlp_size: int
    vocab_size: int
    max_length: int
    family: str = "llama"
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    norm_offset: float = 0.0
    norm_weights: bool = True
    norm_placement: NormPlacement = "pre"
    qk_norm: QKNorm = "none"
    kv: KeyValues = "separate"
    parallel_residual: bool = False
    activation: Activation = "silu"
    gated_mlp: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    rope: Rope | None = _FULL_ROPE
    local_rope: Rope | None = None
    windows: tuple[int | None, ...] = ()
    layers: tuple[LayerShape, ...] = ()
    block_end: BlockEnd | None = None
    attention_scale: float | None = None
    score_softcap: float | None = None
    logit_softcap: float | None = None
    embed_scale: float = 1.0
    tie_embeddings: bool = False
    pad_id: int | None = None

    def __post_init__(self) -> None:
        problems = [
            f"{name} = {getattr(self, name)} must be a positive integer below 2^31"
            for name in (
                "num_layers",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "hidden_size",
                "vocab_size",
                "max_length",
            )
            if not _is_size(getattr(self, name), least=1)
        ]
        if not _is_size(self.mlp_size, least=0):
            problems.append(f"mlp_size = {self.mlp_size} must be a positive integer, or 0 for none")
        if not problems and self.num_heads % self.num_kv_heads:
            problems.append(
                f"num_heads = {self.num_heads} is not a multiple of "
                f"num_kv_heads = {self.num_kv_heads}"
            )
        if self.windows and len(self.windows) != self.num_layers:
            problems.append(
                f"windows has {len(self.windows)} entries for num_layers = {self.num_layers}"
            )
        if not all(w is None or _is_size(w, least=1) for w in self.windows):
            problems.append(f"windows = {self.windows} must be positive integers")
        if not 0.0 <= self.norm_eps <= LARGEST:
            problems.append(f"norm_eps = {self.norm_eps} must be a number of at least 0")
        problems += [
            f"{name} = {value} must be a positive number"
            for name in ("attention_scale", "score_softcap", "logit_softcap", "embed_scale")
            if (value := getattr(self, name)) is not None and not SMALLEST <= value <= LARGEST
        ]
        if self.pad_id is not None and not 0 <= self.pad_id < self.vocab_size:
            problems.append(f"pad_id = {self.pad_id} must be in 0..vocab_size - 1, or None")
        if self.norm not in ("rms", "layer"):
            problems.append(f"norm = {self.norm!r} must be 'rms' or 'layer'")
        if self.norm_placement not in get_args(NormPlacement):
            problems.append(
                f"norm_placement = {self.norm_placement!r} must be 'pre', 'post' or 'both'"
            )
        if self.qk_norm not in get_args(QKNorm):
            problems.append(
                f"qk_norm = {self.qk_norm!r} must be 'none', 'head', 'head_and_value', "
                "'each_head' or 'projection'"
            )
        if self.block_end and not _is_size(self.block_end.input_size, least=0):
            problems.append(
                f"block_end.input_size = {self.block_end.input_size} must be a positive integer, "
                "or 0 for none"
            )
        if self.layers and len(self.layers) != self.num_layers:
            problems.append(
                f"layers has {len(self.layers)} entries for num_layers = {self.num_layers}"
            )
        elif not problems:
            problems += self._sharing_problems()
        if self.activation not in ("silu", "gelu", "gelu_tanh", "relu"):
            problems.append(f"activation = {self.activation!r} is not one of the four known")
        for name in ("rope", "local_rope"):
            rope = getattr(self, name)
            # Without a head width that is a number, there is none to rotate.
            width = self.rotary_width(rope) if rope is not None and not problems else 2
            if width % 2 or not width:
                problems.append(
                    f"{name}.fraction = {rope.fraction} gives a rotary width of {width}, which "
                    "must be even and positive"
                )
            match rope and rope.scaling:
                case LongRopeScaling(short_factor=short, long_factor=long):
                    if not len(short) == len(long) == width // 2:
                        problems.append(
                            f"{name}.scaling has {len(short)} short and {len(long)} long factors "
                            f"for {width // 2} pairs"
                        )
                case DynamicScaling() if width == 2:
                    problems.append(f"{name}.scaling is dynamic, which needs more than one pair")
        if problems:
            raise BadInputError("decoder config: " + "; ".join(problems))
        if self.layers:
            # Each is a config, and so checked.
            _ = self.stacks

    def _sharing_problems(self) -> list[str]:
        """A phrase for every layer that cannot have the keys and values of the one it names."""

        def key_shape(layer: int) -> tuple[object, ...]:
            shape = self.layers[layer]
            return shape.head_dim, shape.num_kv_heads, self.layer_windows[layer]

        return [
            f"layers[{layer}].kv = {shape.kv} must be an earlier layer with keys of its own, of "
            "the same head_dim, num_kv_heads and window"
            for layer, shape in enumerate(self.layers)
            if isinstance(shape.kv, int)
            and not (
                0 <= shape.kv < layer
                and not isinstance(self.layers[shape.kv].kv, int)
                and key_shape(shape.kv) == key_shape(layer)
            )
        ]

    def rotary_width(self, rope: Rope) -> int:
        """How many of a head's H coordinates are rotated."""
        return int(self.head_dim * rope.fraction)

    @property
    def scale(self) -> float:
        """The factor on q.k before the mask."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def sizes(self) -> str:
        """Depth, width, vocabulary and context in words."""
        return (
            f"{self.num_layers} layers, width {self.hidden_size:,}, vocabulary "
            f"{self.vocab_size:,}, context {self.max_length:,}"
        )

    @property
    def norm_names(self) -> tuple[str, ...]:
        """The norms of a block, as parameters and sites name them."""
        suffixes = {"pre": ("",), "post": ("_post",), "both": ("", "_post")}[self.norm_placement]
        branches = ("ln1", "ln2") if self.mlp_size else ("ln1",)
        return tuple(branch + suffix for branch in branches for suffix in suffixes)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """One window (or None) for every layer."""
        return self.windows or (None,) * self.num_layers

    @property
    def stacks(self) -> tuple["Stack", ...]:
        """The runs of equal layers, in order; one where `layers` is empty.

        A layer whose keys and values others read is a run of its own.
        """
        if not self.layers:
            return (Stack(0, self),)
        lenders = {shape.kv for shape in self.layers}
        runs = itertools.groupby(
            range(self.num_layers), lambda i: (self.layers[i], i if i in lenders else None)
        )
        stacks = []
        for (shape, lender), run in runs:
            first, *rest = run
            stop = first + 1 + len(rest)
            widths = {name: value for name, value in vars(shape).items() if value is not None}
            windows = self.windows[first:stop]
            cfg = dataclasses.replace(
                self, num_layers=stop - first, windows=windows, layers=(), **widths
            )
            stacks.append(Stack(first, cfg, lender is not None))
        return tuple(stacks)

    def check_equal_blocks(self, what: str) -> None:
        """Refuses a model whose layers differ, or whose blocks go on after their MLP (Gemma 4).

        `what` needs equal layers that add a mixer and an MLP to the residual stream and no more.

        Raises:
          UsageError: naming `what`.
        """
        if self.layers or self.block_end:
            raise UsageError(
                f"{what} cannot take family {self.family}, whose layers differ in shape, share "
                "keys and values or have inputs of their own; give a model of another family"
            )


@dataclasses.dataclass(frozen=True)
class Stack:
    """Equal layers in a row, whose parameters are stacked, from layer `first` on.

    `cfg` is the config of a model of these layers alone; in that, `kv` may be the number of an
    earlier layer. `lends` says that later layers read its keys and values.
    """

    first: int
    cfg: DecoderConfig
    lends: bool = False

    @property
    def layers(self) -> range:
        """The numbers of the stack's layers."""
        return range(self.first, self.first + self.cfg.num_layers)

    @property
    def name(self) -> str:
        """The stack's key among the blocks of a model of several stacks."""
        return str(self.first)


def _is_size(value: object, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _LONGEST
