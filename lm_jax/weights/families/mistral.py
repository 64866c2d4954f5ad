"""Mistral: Llama's block without biases, under one sliding window in every layer, or none."""

from typing import Any

from lm_jax.model.config import DecoderConfig
from lm_jax.weights.families import llama
from lm_jax.weights.families.fields import (
    HEAD_DIM,
    LLAMA_FIELDS,
    read_block,
    read_head_dim,
    read_same_windows,
    write_block,
    write_same_windows,
)
from lm_jax.weights.families.table import Family


def read_config(hf: Any) -> DecoderConfig:
    return DecoderConfig(
        family="mistral",
        **read_block(hf, LLAMA_FIELDS),
        head_dim=read_head_dim(hf),
        windows=read_same_windows(hf),
    )


def write_config(cfg: DecoderConfig) -> dict[str, Any]:
    return write_block(cfg, LLAMA_FIELDS | HEAD_DIM) | write_same_windows(cfg)


MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    read_config=read_config,
    write_config=write_config,
    entries=llama.entries,
    ignored=(r".*rotary_emb\.inv_freq",),
)
