"""Qwen3: Llama's block with per-head norms of queries and keys; any layers may have a window."""

from typing import Any

from lm_jax.model.config import DecoderConfig
from lm_jax.weights import llama
from lm_jax.weights.table import (
    ATTENTION_BIAS,
    HEAD_DIM,
    LLAMA_FIELDS,
    Family,
    read_activation,
    read_fields,
    read_rope,
    read_windows,
    write_activation,
    write_fields,
    write_rope,
    write_windows,
)

_FIELDS = LLAMA_FIELDS | ATTENTION_BIAS | HEAD_DIM


def read_config(hf: Any) -> DecoderConfig:
    return DecoderConfig(
        family="qwen3",
        **read_fields(hf, _FIELDS),
        qk_norm="head",
        activation=read_activation(hf.hidden_act, "hidden_act"),
        rope=read_rope(hf.rope_parameters),
        windows=read_windows(hf),
    )


def write_config(cfg: DecoderConfig) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        **write_fields(cfg, _FIELDS),
        "hidden_act": write_activation(cfg.activation),
        "rope_parameters": write_rope(cfg.rope),
        "use_sliding_window": any(cfg.layer_windows),
        **write_windows(cfg),
    }


QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    prefix="model.",
    head="lm_head.weight",
    read_config=read_config,
    write_config=write_config,
    entries=llama.entries,
)
