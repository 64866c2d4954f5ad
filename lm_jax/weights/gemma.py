"""Gemma 3 text: sandwich norms, per-head q/k norms, five sliding-window layers to each full one."""

import math
from typing import Any

from lm_jax.model.config import DecoderConfig
from lm_jax.weights.llama import attention_entries, embedding_entries, gated_mlp_entries
from lm_jax.weights.table import (
    ATTENTION_BIAS,
    HEAD_DIM,
    LLAMA_FIELDS,
    Entry,
    Family,
    Tables,
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

_FIELDS = LLAMA_FIELDS | ATTENTION_BIAS | HEAD_DIM


def read_config(hf: Any) -> DecoderConfig:
    # Reference code reads a score soft cap from the config of Gemma 3 and never applies it.
    refuse(hf, use_bidirectional_attention=(False, None), attn_logit_softcapping=(None,))
    return DecoderConfig(
        family="gemma3_text",
        **read_fields(hf, _FIELDS),
        norm_offset=1.0,
        norm_placement="both",
        qk_norm="head",
        activation=read_activation(hf.hidden_activation, "hidden_activation"),
        rope=read_rope(hf.rope_parameters["full_attention"], "rope_parameters.full_attention"),
        local_rope=read_rope(
            hf.rope_parameters["sliding_attention"], "rope_parameters.sliding_attention"
        ),
        windows=read_windows(hf),
        attention_scale=hf.query_pre_attn_scalar**-0.5,
        logit_softcap=hf.final_logit_softcapping,
        embed_scale=math.sqrt(hf.hidden_size),
    )


def write_config(cfg: DecoderConfig) -> dict[str, Any]:
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        **write_fields(cfg, _FIELDS),
        "hidden_activation": write_activation(cfg.activation),
        **write_windows(cfg),
        "rope_parameters": {
            "full_attention": write_rope(cfg.rope),
            "sliding_attention": write_rope(cfg.local_rope),
        },
        "query_pre_attn_scalar": _integral(cfg.scale**-2),
        "final_logit_softcapping": cfg.logit_softcap,
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
        "self_attn.q_norm": "mixer/q_norm",
        "self_attn.k_norm": "mixer/k_norm",
    }
    return [
        *embedding_entries(t, cfg),
        *(t.same(f"{block}{n}.weight", f"blocks/{ours}/scale") for n, ours in norms.items()),
        *attention_entries(t, cfg, block),
        *gated_mlp_entries(t, cfg, block),
    ]


GEMMA3 = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    prefix="model.",
    head="lm_head.weight",
    read_config=read_config,
    write_config=write_config,
    entries=entries,
)
