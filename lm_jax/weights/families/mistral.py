"""Mistral: Llama's block without biases, under one sliding window in every layer, or none."""

from typing import Any

from lm_jax.model.config import DecoderConfig
from lm_jax.weights.families import llama
from lm_jax.weights.families.fields import (
    HEAD_DIM,
    LLAMA_FIELDS,
    read_activation,
    read_fields,
    read_head_dim,
    read_rope,
    read_same_windows,
    write_activation,
    write_fields,
    write_rope,
    write_same_windows,
)
from lm_jax.weights.families.table import Family


def read_config(hf: Any) -> DecoderConfig:
    return DecoderConfig(
        family="mistral",
        **read_fields(hf, LLAMA_FIELDS),
        head_dim=read_head_dim(hf),
        activation=read_activation(hf.hidden_act, "hidden_act"),
        rope=read_rope(hf.rope_parameters, hf.max_position_embeddings),
        windows=read_same_windows(hf),
    )


def write_config(cfg: DecoderConfig) -> dict[str, Any]:
    return {
        **write_fields(cfg, LLAMA_FIELDS | HEAD_DIM),
        "hidden_act": write_activation(cfg.activation),
        "rope_parameters": write_rope(cfg.rope),
        **write_same_windows(cfg),
    }


MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    prefix="model.",
    head="lm_head.weight",
    read_config=read_config,
    write_config=write_config,
    entries=llama.entries,
    ignored=(r".*rotary_emb\.inv_freq",),
)
