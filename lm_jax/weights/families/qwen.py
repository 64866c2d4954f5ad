"""Qwen 2 to 3: Llama's block, where any layers may have a sliding window.

Qwen 2 and 2.5 have biases on queries, keys and values; Qwen 3 has per-head norms of queries and
keys in their place.
"""

from collections.abc import Mapping
from typing import Any

from lm_jax.model.config import DecoderConfig
from lm_jax.weights.families import llama
from lm_jax.weights.families.fields import (
    ATTENTION_BIAS,
    HEAD_DIM,
    LLAMA_FIELDS,
    read_block,
    read_head_dim,
    read_windows,
    write_block,
    write_windows,
)
from lm_jax.weights.families.table import Family

_QWEN2_FIELDS = LLAMA_FIELDS
_QWEN3_FIELDS = LLAMA_FIELDS | ATTENTION_BIAS


def read_qwen2(hf: Any) -> DecoderConfig:
    return _read(hf, _QWEN2_FIELDS, family="qwen2", qkv_bias=True)


def read_qwen3(hf: Any) -> DecoderConfig:
    return _read(hf, _QWEN3_FIELDS, family="qwen3", qk_norm="head")


def _read(hf: Any, fields: Mapping[str, str], **own: Any) -> DecoderConfig:
    shared = read_block(hf, fields)
    return DecoderConfig(**own, **shared, head_dim=read_head_dim(hf), windows=read_windows(hf))


def write_qwen2(cfg: DecoderConfig) -> dict[str, Any]:
    return _write(cfg, _QWEN2_FIELDS)


def write_qwen3(cfg: DecoderConfig) -> dict[str, Any]:
    return _write(cfg, _QWEN3_FIELDS)


def _write(cfg: DecoderConfig, fields: Mapping[str, str]) -> dict[str, Any]:
    return {
        **write_block(cfg, {**fields, **HEAD_DIM}),
        "use_sliding_window": any(cfg.layer_windows),
        **write_windows(cfg),
    }


QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    read_config=read_qwen2,
    write_config=write_qwen2,
    entries=llama.entries,
    ignored=(r".*rotary_emb\.inv_freq",),
)
QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    read_config=read_qwen3,
    write_config=write_qwen3,
    entries=llama.entries,
)
