"""Fields of a transformers config (config.json) that families share, read and written.

Each reader is beside its inverse, and refuses by name what the decoder has no place for.
"""

from collections.abc import Mapping
import math
from typing import Any

from lm_jax.errors import BadInputError, nearest
from lm_jax.model.config import DecoderConfig
from lm_jax.model.rope import (
    LARGEST,
    SMALLEST,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)

# Our fields and their names in the configs of most families after GPT-2.
COMMON_FIELDS = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "hidden_size": "hidden_size",
    "mlp_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_length": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings",
}
ATTENTION_BIAS = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}
HEAD_DIM = {"head_dim": "head_dim"}
# Those of families that descend from Llama have these as well.
LLAMA_FIELDS = COMMON_FIELDS | {"num_kv_heads": "num_key_value_heads", "norm_eps": "rms_norm_eps"}


def read_fields(hf: Any, fields: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a `DecoderConfig` that a transformers config holds under other names."""
    return {ours: getattr(hf, theirs) for ours, theirs in fields.items()}


def write_fields(cfg: DecoderConfig, fields: Mapping[str, str]) -> dict[str, Any]:
    """The inverse of `read_fields`."""
    return {theirs: getattr(cfg, ours) for ours, theirs in fields.items()}


def positive(value: Any, field: str) -> float:
    """A positive number that float32 holds, or a refusal of the field of config.json."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not SMALLEST <= value <= LARGEST:
        raise BadInputError(f"config.json: {field} = {value!r} must be a positive number")
    return float(value)


def read_head_dim(hf: Any) -> int:
    """`head_dim`, which many configs leave out where the heads share the width of the model."""
    return getattr(hf, "head_dim", None) or shared_head_dim(hf)


def shared_head_dim(hf: Any) -> int:
    """The width of the model by its heads; of none, the decoder's config is refused by name."""
    return hf.hidden_size // max(hf.num_attention_heads, 1)


def read_windows(hf: Any) -> tuple[int | None, ...]:
    """The window of every layer, of `layer_types` and `sliding_window`; empty where none has one.

    Raises:
      BadInputError: for another kind of layer, or layers with a window whose size is missing.
    """
    kinds = {"sliding_attention": hf.sliding_window, "full_attention": None}
    unknown = sorted(set(hf.layer_types) - set(kinds))
    if unknown:
        raise BadInputError(f"config.json: layer_types has {unknown}; known: {sorted(kinds)}")
    if "sliding_attention" in hf.layer_types and not hf.sliding_window:
        raise BadInputError(
            f"config.json: sliding_window = {hf.sliding_window}, but layer_types has layers with a "
            "window; give its size"
        )
    windows = tuple(kinds[kind] for kind in hf.layer_types)
    return windows if any(windows) else ()


def write_windows(cfg: DecoderConfig) -> dict[str, Any]:
    """The inverse of `read_windows`.

    Raises:
      BadInputError: if windows are of several sizes.
    """
    sizes = {w for w in cfg.layer_windows if w is not None}
    if len(sizes) > 1:
        raise BadInputError(
            f"windows = {cfg.windows}: family {cfg.family} has one window size for all layers"
        )
    kinds = ["full_attention" if w is None else "sliding_attention" for w in cfg.layer_windows]
    return {"sliding_window": sizes.pop() if sizes else None, "layer_types": kinds}


def read_same_windows(hf: Any) -> tuple[int | None, ...]:
    """The window `sliding_window` for every layer; empty without one."""
    return () if hf.sliding_window is None else (hf.sliding_window,) * hf.num_hidden_layers


def write_same_windows(cfg: DecoderConfig) -> dict[str, Any]:
    """The inverse of `read_same_windows`.

    Raises:
      BadInputError: if layers differ.
    """
    if len(set(cfg.layer_windows)) > 1:
        raise BadInputError(
            f"windows = {cfg.windows}: family {cfg.family} has the same window in all layers"
        )
    return {"sliding_window": cfg.layer_windows[0]}


ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")


def longrope_attention_factor(factor: float, original_length: int) -> float:
    """What LongRoPE multiplies cosines and sines by, of a context that is `factor` times longer."""
    if factor <= 1.0 or original_length <= 1:
        return 1.0
    return math.sqrt(1.0 + math.log(factor) / math.log(original_length))


def read_rope(
    parameters: Mapping[str, Any],
    max_length: int,
    where: str = "rope_parameters",
    *,
    partial: bool = False,
) -> Rope:
    """A transformers `rope_parameters` dict as a `Rope`, in a model of context `max_length`.

    `partial` says that the family rotates only a part of each head where `partial_rotary_factor`
    is below one; the others have no such part.

    Raises:
      BadInputError: for a kind of scaling that is not supported, or a number that is missing.
    """

    def number(key: str, *default: float) -> float:
        value = parameters.get(key)
        return default[0] if value is None and default else positive(value, f"{where}.{key}")

    kind = parameters.get("rope_type", "default")

    def numbers(key: str) -> tuple[float, ...]:
        values = parameters.get(key)
        if not isinstance(values, list):
            raise BadInputError(f"config.json: {where}.{key} = {values!r} must be a list")
        return tuple(positive(value, f"{where}.{key}") for value in values)

    scaling: RopeScaling | None
    match kind:
        case "default":
            scaling = None
        case "linear":
            scaling = LinearScaling(number("factor"))
        case "llama3":
            scaling = Llama3Scaling(
                factor=number("factor"),
                low_freq_factor=number("low_freq_factor"),
                high_freq_factor=number("high_freq_factor"),
                original_length=int(number("original_max_position_embeddings")),
            )
        case "yarn":
            unknown = [name for name in ("mscale", "mscale_all_dim") if parameters.get(name)]
            if unknown or not parameters.get("truncate", True):
                raise BadInputError(
                    f"config.json: {where} has {', '.join(unknown) or 'truncate = false'}, which "
                    "is not supported with yarn; use a model without it"
                )
            factor = number("factor")
            usual = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
            scaling = YarnScaling(
                factor=factor,
                original_length=int(number("original_max_position_embeddings")),
                attention_factor=number("attention_factor", usual),
                beta_fast=number("beta_fast", 32.0),
                beta_slow=number("beta_slow", 1.0),
            )
        case "longrope":
            original_length = int(number("original_max_position_embeddings"))
            factor = number("factor", max_length / max(original_length, 1))
            scaling = LongRopeScaling(
                short_factor=numbers("short_factor"),
                long_factor=numbers("long_factor"),
                original_length=original_length,
                attention_factor=number(
                    "attention_factor", longrope_attention_factor(factor, original_length)
                ),
            )
        case "proportional":
            # Its `partial_rotary_factor` is of the pairs, not of the first coordinates.
            rotated = number("partial_rotary_factor", 1.0)
            scaling = ProportionalScaling(rotated=rotated, factor=number("factor", 1.0))
            return Rope(theta=number("rope_theta"), scaling=scaling)
        case "dynamic":
            scaling = DynamicScaling(factor=number("factor"), original_length=max_length)
        case _:
            raise BadInputError(
                f"config.json: {where}.rope_type = {kind!r} is not supported"
                f"{nearest(str(kind), ROPE_TYPES)}"
            )
    fraction = number("partial_rotary_factor", 1.0)
    if fraction != 1.0 and not partial:
        raise BadInputError(
            f"config.json: {where}.partial_rotary_factor = {fraction} is not supported in this "
            "family (only 1.0 is)"
        )
    return Rope(theta=number("rope_theta"), fraction=fraction, scaling=scaling)


def write_rope(rope: Rope | None) -> dict[str, Any]:
    """The inverse of `read_rope`.

    Raises:
      BadInputError: if there is none, for a family whose positions are rotary.
    """
    if rope is None:
        raise BadInputError("cfg.rope = None: this family has rotary positions; give it a Rope")
    out: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": "default"}
    if rope.fraction != 1.0:
        out["partial_rotary_factor"] = rope.fraction
    match rope.scaling:
        case LinearScaling(factor=factor):
            out |= {"rope_type": "linear", "factor": factor}
        case Llama3Scaling() as s:
            out |= {
                "rope_type": "llama3",
                "factor": s.factor,
                "low_freq_factor": s.low_freq_factor,
                "high_freq_factor": s.high_freq_factor,
                "original_max_position_embeddings": s.original_length,
            }
        case YarnScaling() as s:
            out |= {
                "rope_type": "yarn",
                "factor": s.factor,
                "attention_factor": s.attention_factor,
                "beta_fast": s.beta_fast,
                "beta_slow": s.beta_slow,
                "original_max_position_embeddings": s.original_length,
            }
        case LongRopeScaling() as s:
            out |= {
                "rope_type": "longrope",
                "short_factor": list(s.short_factor),
                "long_factor": list(s.long_factor),
                "attention_factor": s.attention_factor,
                "original_max_position_embeddings": s.original_length,
            }
        case DynamicScaling(factor=factor):
            out |= {"rope_type": "dynamic", "factor": factor}
        case ProportionalScaling() as s:
            out |= {
                "rope_type": "proportional",
                "partial_rotary_factor": s.rotated,
                "factor": s.factor,
            }
    return out


ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def read_activation(name: str, field: str) -> Any:
    """Our name of a transformers activation, or a refusal."""
    if name not in ACTIVATIONS:
        raise BadInputError(
            f"config.json: {field} = {name!r} is not supported{nearest(name, ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def write_activation(name: str) -> str:
    """The transformers name of our activation."""
    return {"gelu_tanh": "gelu_pytorch_tanh"}.get(name, name)


def read_block(hf: Any, fields: Mapping[str, str], *, partial: bool = False) -> dict[str, Any]:
    """What most families after GPT-2 share: fields, the activation, and rotary positions.

    Args:
      hf: a transformers config.
      fields: our names of its fields, with theirs.
      partial: whether the family rotates only a part of each head (`read_rope`).
    """
    return read_fields(hf, fields) | {
        "activation": read_activation(hf.hidden_act, "hidden_act"),
        "rope": read_rope(hf.rope_parameters, hf.max_position_embeddings, partial=partial),
    }


def write_block(
    cfg: DecoderConfig, fields: Mapping[str, str], *, partial: bool = False, **own: Any
) -> dict[str, Any]:
    """The inverse of `read_block`, with fields that are the family's own."""
    whole = {"partial_rotary_factor": 1.0} if partial else {}
    return {
        **write_fields(cfg, fields),
        **own,
        "hidden_act": write_activation(cfg.activation),
        "rope_parameters": whole | write_rope(cfg.rope),
    }


def refuse(config: Any, **unsupported: Any) -> None:
    """Raises if any named field of a transformers config is not one of the values given for it."""
    for field, allowed in unsupported.items():
        value = getattr(config, field, allowed[0])
        if value not in allowed:
            raise BadInputError(
                f"config.json: {field} = {value!r} is not supported (only {allowed[0]!r} is)"
            )
