"""Decoder configuration: one frozen, hashable description that all families of weights map onto.

A `DecoderConfig` holds only what changes the mathematics. It is a static argument of `jax.jit`;
nothing in it is an array. Families (Llama, GPT-2, Gemma and others) differ in these numbers alone:
there is one decoder (`decoder.py`), and a family is a config reader and a table of names
(`lm_jax/weights`).
"""

import dataclasses
from typing import Literal, get_args

from lm_jax.errors import BadInputError

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
NormPlacement = Literal["pre", "post", "both"]
QKNorm = Literal["none", "head", "each_head", "projection"]
# Positions are int32.
_LONGEST = 2**31 - 1
# Bounds of what float32 holds, with room for a product.
SMALLEST, LARGEST = 1e-30, 1e30


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Frequency scaling of Llama 3.1 and later: long wavelengths slowed, short ones kept.

    Wavelengths over `original_length / low_freq_factor` are divided by `factor`, those under
    `original_length / high_freq_factor` are kept, those between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Every frequency divided by `factor` (position interpolation)."""

    factor: float


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """Frequency scaling by YaRN (Peng et al., 2023, section 3.4).

    The index of the pair that turns so many times within `original_length` is found for `beta_fast`
    and `beta_slow`, and rounded outwards. Pairs before the first are kept, those after the second
    divided by `factor`, those between interpolated. Cosines and sines, and so what queries and keys
    are rotated to, are multiplied by `attention_factor`.
    """

    factor: float
    original_length: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclasses.dataclass(frozen=True)
class LongRopeScaling:
    """Each pair's frequency divided by a number of its own (LongRoPE; Ding et al., 2024).

    By `short_factor` in sequences of up to `original_length` positions and by `long_factor` in
    longer ones. `attention_factor` is as in `YarnScaling`, at any length.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_length: int
    attention_factor: float


@dataclasses.dataclass(frozen=True)
class DynamicScaling:
    """A base that grows with a sequence longer than `original_length` (dynamic NTK).

    Of width w, theta is multiplied by (`factor` T / `original_length` - `factor` + 1)^(w / (w - 2))
    in a sequence of T positions, so that the slowest pair is slowed by what is in the brackets.
    """

    factor: float
    original_length: int


RopeScaling = Llama3Scaling | LinearScaling | YarnScaling | LongRopeScaling | DynamicScaling


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions in the rotate-half layout, on the first `fraction` of each head's width.

    Raises:
      BadInputError: listing every number that cannot be used.
    """

    theta: float = 10_000.0
    fraction: float = 1.0
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        problems = []
        if not 1.0 < self.theta <= LARGEST:
            problems.append(f"theta = {self.theta} must be a number above 1")
        if not 0.0 < self.fraction <= 1.0:
            problems.append(f"fraction = {self.fraction} must be above 0 and at most 1")
        scaling = {} if self.scaling is None else vars(self.scaling)
        problems += [
            f"scaling.{name} = {number} must be a positive number"
            for name, value in scaling.items()
            for number in (value if isinstance(value, tuple) else (value,))
            if not SMALLEST <= number <= LARGEST
        ]
        if isinstance(self.scaling, Llama3Scaling) and not (
            self.scaling.low_freq_factor < self.scaling.high_freq_factor
        ):
            problems.append(
                f"scaling.low_freq_factor = {self.scaling.low_freq_factor} must be below "
                f"high_freq_factor = {self.scaling.high_freq_factor}"
            )
        if problems:
            raise BadInputError("rotary positions: " + "; ".join(problems))


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
    the whole projected width (`projection`; OLMo 2); it has no bias.
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
    parallel_residual: bool = False
    activation: Activation = "silu"
    gated_mlp: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    rope: Rope | None = Rope()
    local_rope: Rope | None = None
    windows: tuple[int | None, ...] = ()
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
                f"qk_norm = {self.qk_norm!r} must be 'none', 'head', 'each_head' or 'projection'"
            )
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

    def rotary_width(self, rope: Rope) -> int:
        """How many of a head's H coordinates are rotated."""
        return int(self.head_dim * rope.fraction)

    @property
    def scale(self) -> float:
        """The factor on q.k before the mask."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

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


def _is_size(value: object, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _LONGEST
