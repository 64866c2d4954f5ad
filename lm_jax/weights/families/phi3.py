"""Phi-3: Llama's block with q, k, v in one matrix, gate and up in another; partial rotations.

Models of a long context rotate by LongRoPE.
"""

from typing import Any

import numpy as np

from lm_jax.model.config import DecoderConfig
from lm_jax.model.rope import LongRopeScaling
from lm_jax.weights.families.fields import (
    HEAD_DIM,
    LLAMA_FIELDS,
    read_block,
    read_head_dim,
    read_same_windows,
    write_block,
    write_same_windows,
)
from lm_jax.weights.families.llama import embedding_entries
from lm_jax.weights.families.table import Entry, Family, Tables


def read_config(hf: Any) -> DecoderConfig:
    # Older folders say "su" for LongRoPE, and transformers adds the first context when it runs.
    hf.standardize_rope_params()
    return DecoderConfig(
        family="phi3",
        **read_block(hf, LLAMA_FIELDS, partial=True),
        head_dim=read_head_dim(hf),
        windows=read_same_windows(hf),
    )


def write_config(cfg: DecoderConfig) -> dict[str, Any]:
    return {
        **write_block(cfg, LLAMA_FIELDS | HEAD_DIM, partial=True),
        **_write_first_context(cfg),
        # A default padding token outside a small vocabulary would be refused.
        "pad_token_id": None,
        **write_same_windows(cfg),
    }


def _write_first_context(cfg: DecoderConfig) -> dict[str, int]:
    """The context that LongRoPE extends, which the format has beside the other numbers of it."""
    match cfg.rope and cfg.rope.scaling:
        case LongRopeScaling(original_length=length):
            return {"original_max_position_embeddings": length}
    return {}


def entries(cfg: DecoderConfig) -> list[Entry]:
    t, block = Tables(cfg), "model.layers.{l}."
    return [
        *embedding_entries(t, cfg),
        t.same(block + "input_layernorm.weight", "blocks/ln1/scale"),
        t.same(block + "post_attention_layernorm.weight", "blocks/ln2/scale"),
        _stacked_rows(
            t, block + "self_attn.qkv_proj.weight", *(f"blocks/mixer/{n}" for n in "qkv")
        ),
        t.linear(block + "self_attn.o_proj.weight", "blocks/mixer/o", inputs=2),
        _stacked_rows(t, block + "mlp.gate_up_proj.weight", "blocks/mlp/gate", "blocks/mlp/up"),
        t.linear(block + "mlp.down_proj.weight", "blocks/mlp/down"),
    ]


def _stacked_rows(t: Tables, name: str, *paths: str) -> Entry:
    """Matrices that read the same input, stored [out, in] one below the other."""
    parts = [t.linear(name, path) for path in paths]
    ends = np.cumsum([part.shape[0] for part in parts])
    width = parts[0].shape[1]

    def read(w: np.ndarray) -> tuple[np.ndarray, ...]:
        rows = np.split(w, ends[:-1])
        return tuple(part.read(own)[0] for part, own in zip(parts, rows, strict=True))

    def write(*values: np.ndarray) -> np.ndarray:
        return np.concatenate([part.write(a) for part, a in zip(parts, values, strict=True)])

    return Entry(name, paths, (int(ends[-1]), width), read, write)


PHI3 = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    read_config=read_config,
    write_config=write_config,
    entries=entries,
)
