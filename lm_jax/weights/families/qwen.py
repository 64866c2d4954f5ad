"""Qwen 2 to 3: Llama's block, where any layers may have a sliding window.

Qwen 2 and 2.5 have biases on queries, keys and values; Qwen 3 has per-head norms of queries and
keys in their place.
"""

from typing import Any

from lm_jax.model.config import DecoderConfig
from lm_jax.weights.families import llama
from lm_jax.weights.families.fields import (
    ATTENTION_BIAS,
    HEAD_DIM,
    LLAMA_FIELDS,
    read_activation,
    read_fields,
    read_head_dim,
    read_rope,
    read_windows,
    write_activation,
    write_fields,
    write_rope,
    write_windows,
)
from lm_jax.weights.families.table import Family

_QWEN2_FIELDS = LLAMA_FIELDS
_QWEN3_FIELDS = LLAMA_FIELDS | ATTENTION_BIAS


def read_qwen2(hf: Any) -> DecoderConfig:
    return DecoderConfig(
        family="qwen2", **read_fields(hf, _QWEN2_FIELDS), qkv_bias=True, **_read_shared(hf)
    )


def read_qwen3(hf: Any) -> DecoderConfig:
    return DecoderConfig(
        family="qwen3", **read_fields(hf, _QWEN3_FIELDS), qk_norm="head", **_read_shared(hf)
    )


def _read_shared(hf: Any) -> dict[str, Any]:
    return {
        "head_dim": read_head_dim(hf),
        "activation": read_activation(hf.hidden_act, "hidden_act"),
        "rope": read_rope(hf.rope_parameters, hf.max_position_embeddings),
        "windows": read_windows(hf),
    }


def write_qwen2(cfg: DecoderConfig) -> dict[str, Any]:
    return {
        **write_fields(cfg, _QWEN2_FIELDS | HEAD_DIM),
        **_write_shared(cfg),
    }


def write_qwen3(cfg: DecoderConfig) -> dict[str, Any]:
    return {
        **write_fields(cfg, _QWEN3_FIELDS | HEAD_DIM),
        **_write_shared(cfg),
    }


def _write_shared(cfg: DecoderConfig) -> dict[str, Any]:
    return {
        "hidden_act": write_activation(cfg.activation),
        "rope_parameters": write_rope(cfg.rope),
        "use_sliding_window": any(cfg.layer_windows),
        **write_windows(cfg),
    }


QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    prefix="model.",
    head="lm_head.weight",
    read_config=read_qwen2,
    write_config=write_qwen2,
    entries=llama.entries,
    ignored=(r".*rotary_emb\.inv_freq",),
)
QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    prefix="model.",
    head="lm_head.weight",
    read_config=read_qwen3,
    write_config=write_qwen3,
    entries=llama.entries,
)
