"""GGUF files: dequantised through the `gguf` package and presented under Hugging Face names.

Two conventions of the format differ from Hugging Face's and are undone here. Files of the `llama`
architecture store the rows of q and k interleaved, for a rotation of neighbouring pairs; and norm
weights of Gemma are stored with their one already added.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from pathlib import Path
import re
from typing import Any

import numpy as np

from lm_jax.config import DecoderConfig, Rope
from lm_jax.errors import BadInputError, nearest
from lm_jax.hf.tokenizer import Tokenizer

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


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How one GGUF architecture maps onto a family."""

    family: str
    names: dict[str, str]
    config: Callable[[Callable[..., Any], dict[str, tuple[int, ...]]], DecoderConfig]
    interleaved: bool = False
    norm_offset: float = 0.0


def _llama_config(field: Callable[..., Any], shapes: dict[str, tuple[int, ...]]) -> DecoderConfig:
    kind = field("rope.scaling.type", "none")
    if kind != "none" or "rope_freqs.weight" in shapes:
        raise BadInputError(
            "GGUF: llama.rope.scaling is not supported here; use the Hugging Face folder"
        )
    return _config(
        field,
        shapes,
        family="llama",
        rope=Rope(theta=field("rope.freq_base", 10_000.0)),
    )


def _gemma3_config(field: Callable[..., Any], shapes: dict[str, tuple[int, ...]]) -> DecoderConfig:
    # Every sixth layer sees the whole past; the format leaves this pattern to the architecture.
    window, layers = field("attention.sliding_window"), field("block_count")
    return _config(
        field,
        shapes,
        family="gemma3_text",
        norm_offset=1.0,
        post_norms=True,
        qk_norm=True,
        activation="gelu_tanh",
        rope=Rope(theta=field("rope.freq_base", 1_000_000.0)),
        local_rope=Rope(theta=field("rope.freq_base_swa", 10_000.0)),
        windows=tuple(None if (i + 1) % 6 == 0 else window for i in range(layers)),
        embed_scale=math.sqrt(field("embedding_length")),
    )


def _config(field, shapes, **family) -> DecoderConfig:
    heads, width = field("attention.head_count"), field("embedding_length")
    return DecoderConfig(
        num_layers=field("block_count"),
        num_heads=heads,
        num_kv_heads=field("attention.head_count_kv", heads),
        head_dim=field("attention.key_length", width // heads),
        hidden_size=width,
        mlp_size=field("feed_forward_length"),
        vocab_size=shapes["token_embd.weight"][0],
        max_length=field("context_length"),
        norm_eps=_short(field("attention.layer_norm_rms_epsilon")),
        tie_embeddings="output.weight" not in shapes,
        **family,
    )


def _short(x: float) -> float:
    """The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(x)))


ARCHITECTURES = {
    "llama": Architecture("llama", _COMMON | _LLAMA, _llama_config, interleaved=True),
    "gemma3": Architecture("gemma3_text", _COMMON | _GEMMA3, _gemma3_config, norm_offset=1.0),
}


class GGUFSource:
    """The tensors of one GGUF file under the names of its family's table."""

    def __init__(self, path: Path):
        from gguf import GGUFReader

        try:
            self._reader = GGUFReader(path)
        except (ValueError, OSError, IndexError, KeyError) as error:
            raise BadInputError(
                f"{path}: not a readable GGUF file ({error}); it may be truncated, fetch it again"
            ) from error
        self._path = path
        kind = self._field("general.architecture")
        if kind not in ARCHITECTURES:
            raise BadInputError(
                f"{path}: GGUF architecture {kind!r} is not supported{nearest(str(kind), ARCHITECTURES)}"
            )
        self._kind, self._architecture = kind, ARCHITECTURES[kind]
        self.family = self._architecture.family
        self._tensors = {t.name: t for t in self._reader.tensors}

    def _field(self, key: str, *default: Any) -> Any:
        field = self._reader.fields.get(key)
        if field is None and default:
            return default[0]
        if field is None:
            raise BadInputError(f"{self._path}: the GGUF file has no field {key}")
        return field.contents()

    def config(self) -> DecoderConfig:
        """The decoder the file describes."""
        stored = {name: _shape(t) for name, t in self._tensors.items()}

        def field(key: str, *default: Any) -> Any:
            return self._field(f"{self._kind}.{key}", *default)

        return self._architecture.config(field, stored)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the file."""
        return Tokenizer.from_gguf(self._path)

    @functools.cached_property
    def _stored_name(self) -> dict[str, str]:
        return {self._hf_name(name): name for name in self._tensors}

    def _hf_name(self, name: str) -> str:
        block = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        inner = block[2] if block else name
        # A name outside the table is kept, so that the check of the table reports it.
        renamed = self._architecture.names.get(inner, inner)
        return f"model.layers.{block[1]}.{renamed}" if block else renamed

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: _shape(self._tensors[stored]) for name, stored in self._stored_name.items()}

    def read(self, name: str) -> np.ndarray:
        from gguf.quants import dequantize

        tensor = self._tensors[self._stored_name[name]]
        w = dequantize(tensor.data, tensor.tensor_type).reshape(_shape(tensor)).astype(np.float32)
        if self._architecture.interleaved and name.endswith(("q_proj.weight", "k_proj.weight")):
            half = self.config().head_dim // 2
            w = w.reshape(-1, half, 2, w.shape[-1]).swapaxes(1, 2).reshape(w.shape)
        if name.endswith("norm.weight"):
            w = w - np.float32(self._architecture.norm_offset)
        return w


def _shape(tensor: Any) -> tuple[int, ...]:
    # The format lists axes from the fastest varying one.
    return tuple(int(n) for n in reversed(tensor.shape))
