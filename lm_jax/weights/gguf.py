"""GGUF files: dequantised through the `gguf` package and presented under Hugging Face names.

Conventions of the format that differ from Hugging Face's and are undone here:

  * files of the `llama` architecture store the rows of q and k interleaved within each head, for a
    rotation of neighbouring pairs; `gemma3` files do not;
  * norm weights of Gemma have their one already added;
  * the frequency scaling of Llama 3.1 and later is a tensor, `rope_freqs.weight`;
  * Gemma 3's rule which layers are local, their rotary base, and the attention scale of its 27B
    model are known to the program that runs the file, and not stored in it.

Every field of the architecture is read or known to change nothing; any other is refused.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
from pathlib import Path
import re
from typing import Any

import numpy as np

from lm_jax.errors import BadInputError, nearest
from lm_jax.model.config import DecoderConfig, LinearScaling, Llama3Scaling, Rope
from lm_jax.model.layers import inverse_frequencies
from lm_jax.text.gguf_reader import open_gguf
from lm_jax.text.tokenizer import Tokenizer

_COMMON = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_LLAMA = {"ffn_norm.weight": "post_attention_layernorm.weight"}
_GEMMA3 = {
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
_ROPE_FREQS = "rope_freqs.weight"
_ROWS = 4096
_NO_EFFECT = ("vocab_size", "tensor_data_layout")
_REMEDY = "use the Hugging Face folder of the model"


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How one GGUF architecture maps onto a family."""

    names: Mapping[str, str]
    config: Callable[["_Fields", Mapping[str, Any]], DecoderConfig]
    interleaved: bool = False


class _Fields:
    """The fields `<architecture>.*` of a file; remembers which were asked for."""

    def __init__(self, path: Path, kind: str, fields: Mapping[str, Any]):
        self._where = f"{path}: GGUF field {kind}."
        self._values = {
            key.removeprefix(f"{kind}."): field.contents()
            for key, field in fields.items()
            if key.startswith(f"{kind}.")
        }
        self._asked: set[str] = set(_NO_EFFECT)

    def number(self, key: str, *default: Any) -> Any:
        """A positive number; the default, which may be anything, where there is no such field."""
        value = self(key, *default)
        if key in self._values and (not isinstance(value, int | float) or not value > 0):
            self.refuse(key, "must be one positive number for all layers")
        return value

    def __call__(self, key: str, *default: Any) -> Any:
        self._asked.add(key)
        if key not in self._values and not default:
            raise BadInputError(
                f"{self._where}{key} is missing; fetch the file again, or {_REMEDY}"
            )
        return self._values.get(key, *default)

    def only(self, key: str, value: Any) -> None:
        """Refuses the field, where it is there, if it is not `value`."""
        if self(key, value) != value:
            self.refuse(key, f"is not supported (only {value!r} is)")

    def refuse(self, key: str, why: str) -> None:
        raise BadInputError(f"{self._where}{key} = {self._values[key]!r} {why}; {_REMEDY}")

    def check_all_asked(self) -> None:
        if unknown := sorted(self._values.keys() - self._asked):
            raise BadInputError(
                f"{self._where}{{{', '.join(unknown)}}} not known, and might change the model; "
                f"{_REMEDY}"
            )


def _llama_config(fields: _Fields, tensors: Mapping[str, Any]) -> DecoderConfig:
    rope = _rope(fields, 10_000.0)
    if _ROPE_FREQS in tensors:
        factors = _dequantised(tensors[_ROPE_FREQS])
        rope = dataclasses.replace(rope, scaling=_llama3_scaling(rope, factors))
    return _config(fields, tensors, family="llama", rope=rope)


def _gemma3_config(fields: _Fields, tensors: Mapping[str, Any]) -> DecoderConfig:
    layers, width = fields.number("block_count"), fields.number("embedding_length")
    heads = fields.number("attention.head_count")
    window = fields.number("attention.sliding_window", None)
    # A number n makes every n-th layer see the whole past; a list says of each if it is local.
    pattern = fields("attention.sliding_window_pattern", 6)
    local = pattern if isinstance(pattern, list) else [(i + 1) % pattern for i in range(layers)]
    return _config(
        fields,
        tensors,
        family="gemma3_text",
        norm_offset=1.0,
        norm_placement="both",
        qk_norm="head",
        activation="gelu_tanh",
        rope=_rope(fields, 1_000_000.0),
        local_rope=Rope(theta=fields.number("rope.freq_base_swa", 10_000.0)),
        windows=tuple(window if is_local else None for is_local in local),
        # The 27B model, known by its 62 layers, divides by the root of D / N and not of H.
        attention_scale=(width // heads if layers == 62 else fields.number("attention.key_length"))
        ** -0.5,
        logit_softcap=fields.number("final_logit_softcapping", None),
        embed_scale=math.sqrt(width),
    )


def _config(fields: _Fields, tensors: Mapping[str, Any], **family: Any) -> DecoderConfig:
    heads, width = fields.number("attention.head_count"), fields.number("embedding_length")
    head_dim = fields.number("attention.key_length", width // heads)
    fields.only("attention.value_length", head_dim)
    fields.only("rope.dimension_count", head_dim)
    if "token_embd.weight" not in tensors:
        raise BadInputError(f"GGUF: tensor token_embd.weight is missing; {_REMEDY}")
    cfg = DecoderConfig(
        num_layers=fields.number("block_count"),
        num_heads=heads,
        num_kv_heads=fields.number("attention.head_count_kv", heads),
        head_dim=head_dim,
        hidden_size=width,
        mlp_size=fields.number("feed_forward_length"),
        vocab_size=_shape(tensors["token_embd.weight"])[0],
        max_length=fields.number("context_length"),
        norm_eps=_shortest(fields.number("attention.layer_norm_rms_epsilon")),
        tie_embeddings="output.weight" not in tensors,
        **family,
    )
    fields.check_all_asked()
    return cfg


def _rope(fields: _Fields, theta: float) -> Rope:
    kind = fields("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        fields.refuse("rope.scaling.type", "is not supported (only 'none' and 'linear' are)")
    factor = fields.number("rope.scaling.factor", 1.0)
    scaling = LinearScaling(factor) if kind == "linear" else None
    return Rope(theta=fields.number("rope.freq_base", theta), scaling=scaling)


def _llama3_scaling(rope: Rope, factors: np.ndarray) -> Llama3Scaling:
    """The settings that every Llama 3 release shares, proved to give the stored factors."""
    scaling = Llama3Scaling(
        factor=float(factors.max()), low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192
    )
    unscaled, scaled = (
        inverse_frequencies(dataclasses.replace(rope, scaling=s), 2 * factors.size)
        for s in (None, scaling)
    )
    if rope.scaling is not None or not np.allclose(unscaled / scaled, factors, rtol=1e-4):
        raise BadInputError(
            f"GGUF: {_ROPE_FREQS} is not the frequency scaling of a Llama 3 model; {_REMEDY}"
        )
    return scaling


def _shortest(x: float) -> float:
    """The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(x)))


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(_COMMON | _LLAMA, _llama_config, interleaved=True),
    "gemma3": Architecture(_COMMON | _GEMMA3, _gemma3_config),
}


class GGUFSource:
    """The weights of one GGUF file under the names of its family's table; `cfg` is the decoder."""

    def __init__(self, path: Path):
        self._path = path
        self._reader = open_gguf(path)
        fields = self._reader.fields
        if "split.count" in fields and fields["split.count"].contents() > 1:
            raise BadInputError(
                f"{path} is one part of a split GGUF file; join the parts with gguf-split --merge"
            )
        kind = fields["general.architecture"].contents() if "general.architecture" in fields else ""
        if kind not in ARCHITECTURES:
            raise BadInputError(
                f"{path}: GGUF architecture {kind!r} is not supported{nearest(kind, ARCHITECTURES)}"
            )
        self._architecture = ARCHITECTURES[kind]
        tensors = {t.name: t for t in self._reader.tensors}
        self.cfg = self._architecture.config(_Fields(path, kind, fields), tensors)
        tensors.pop(_ROPE_FREQS, None)
        self._tensors = {self._hf_name(name): tensor for name, tensor in tensors.items()}

    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the file."""
        return Tokenizer.from_gguf(self._reader)

    def _hf_name(self, name: str) -> str:
        block = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        inner = block[2] if block else name
        # A name outside the table is kept, so that the check of the table reports it.
        renamed = self._architecture.names.get(inner, inner)
        return f"model.layers.{block[1]}.{renamed}" if block else renamed

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight."""
        return {name: _shape(tensor) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """One weight, float32, in the layout of the Hugging Face folder."""
        w = _dequantised(self._tensors[name])
        if self._architecture.interleaved and name.endswith(("q_proj.weight", "k_proj.weight")):
            pairs = w.reshape(-1, self.cfg.head_dim // 2, 2, w.shape[-1])
            w = pairs.swapaxes(1, 2).reshape(w.shape)
        if name.endswith("norm.weight") and self.cfg.norm_offset:
            w = w - np.float32(self.cfg.norm_offset)
        return w


def _dequantised(tensor: Any) -> np.ndarray:
    from gguf.quants import dequantize

    w = np.empty(_shape(tensor), np.float32)
    try:
        # Some rows at a time, as the package makes a second copy of what it is given.
        for start in range(0, len(w), _ROWS):
            part = slice(start, start + _ROWS)
            w[part] = dequantize(tensor.data[part], tensor.tensor_type)
    except NotImplementedError as error:
        raise BadInputError(
            f"GGUF: tensor {tensor.name} is quantised as {tensor.tensor_type.name}, which the gguf "
            f"package cannot undo; take another quantisation of the model, or {_REMEDY}"
        ) from error
    return w


def _shape(tensor: Any) -> tuple[int, ...]:
    # The format lists axes from the fastest varying one.
    return tuple(int(n) for n in reversed(tensor.shape))
