"""Gemma 2 and 3 text: norms before and after mixer and MLP, sliding-window and full layers in turn.

Gemma 2 caps scores and logits. Gemma 3 has per-head norms of queries and keys in place of the
score cap, and a rotary base of its own in layers with a window.
"""

import math
from typing import Any

from lm_jax.model.config import DecoderConfig
from lm_jax.weights.families.fields import (
    ATTENTION_BIAS,
    HEAD_DIM,
    LLAMA_FIELDS,
    positive,
    read_activation,
    read_fields,
    read_rope,
    read_windows,
    refuse,
    write_activation,
    write_fields,
    write_rope,
    write_windows,
)
from lm_jax.weights.families.llama import attention_entries, embedding_entries, gated_mlp_entries
from lm_jax.weights.families.table import Entry, Family, Tables

_FIELDS = LLAMA_FIELDS | ATTENTION_BIAS | HEAD_DIM
_CAP = {"logit_softcap": "final_logit_softcapping"}
_CAPS = _CAP | {"score_softcap": "attn_logit_softcapping"}


def read_gemma2(hf: Any) -> DecoderConfig:
    return DecoderConfig(
        family="gemma2",
        **_read_shared(hf),
        **read_fields(hf, _CAPS),
        rope=read_rope(hf.rope_parameters, hf.max_position_embeddings),
    )


def read_gemma3(hf: Any) -> DecoderConfig:
    # Reference code reads a score soft cap from the config of Gemma 3 and never applies it.
    refuse(hf, attn_logit_softcapping=(None,))
    full, sliding = "full_attention", "sliding_attention"
    return DecoderConfig(
        family="gemma3_text",
        **_read_shared(hf),
        **read_fields(hf, _CAP),
        qk_norm="head",
        rope=read_rope(
            hf.rope_parameters[full], hf.max_position_embeddings, f"rope_parameters.{full}"
        ),
        local_rope=read_rope(
            hf.rope_parameters[sliding], hf.max_position_embeddings, f"rope_parameters.{sliding}"
        ),
    )


def _read_shared(hf: Any) -> dict[str, Any]:
    refuse(hf, use_bidirectional_attention=(False, None))
    return {
        **read_fields(hf, _FIELDS),
        "norm_offset": 1.0,
        "norm_placement": "both",
        "activation": read_activation(hf.hidden_activation, "hidden_activation"),
        "windows": read_windows(hf),
        "attention_scale": positive(hf.query_pre_attn_scalar, "query_pre_attn_scalar") ** -0.5,
        "embed_scale": math.sqrt(hf.hidden_size),
    }


def write_gemma2(cfg: DecoderConfig) -> dict[str, Any]:
    return {
        **_write_shared(cfg),
        **write_fields(cfg, _CAPS),
        "rope_parameters": write_rope(cfg.rope),
    }


def write_gemma3(cfg: DecoderConfig) -> dict[str, Any]:
    return {
        **_write_shared(cfg),
        **write_fields(cfg, _CAP),
        "rope_parameters": {
            "full_attention": write_rope(cfg.rope),
            "sliding_attention": write_rope(cfg.local_rope),
        },
    }


def _write_shared(cfg: DecoderConfig) -> dict[str, Any]:
    return {
        **write_fields(cfg, _FIELDS),
        "hidden_activation": write_activation(cfg.activation),
        **write_windows(cfg),
        "query_pre_attn_scalar": _integral(cfg.scale**-2),
    }


def _integral(x: float) -> int:
    """`query_pre_attn_scalar` is an integer in the format; its root is what we hold."""
    return round(x)


def entries(cfg: DecoderConfig) -> list[Entry]:
    t, block = Tables(cfg), "model.layers.{l}."
    norms = {
        "input_layernorm": "ln1",
        "post_attention_layernorm": "ln1_post",
        "pre_feedforward_layernorm": "ln2",
        "post_feedforward_layernorm": "ln2_post",
    }
    if cfg.qk_norm == "head":
        norms |= {f"self_attn.{n}_norm": f"mixer/{n}_norm" for n in "qk"}
    return [
        *embedding_entries(t, cfg),
        *(t.same(f"{block}{n}.weight", f"blocks/{ours}/scale") for n, ours in norms.items()),
        *attention_entries(t, cfg, block),
        *gated_mlp_entries(t, cfg, block),
    ]


GEMMA2 = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    read_config=read_gemma2,
    write_config=write_gemma2,
    entries=entries,
)
GEMMA3 = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    read_config=read_gemma3,
    write_config=write_gemma3,
    entries=entries,
)
