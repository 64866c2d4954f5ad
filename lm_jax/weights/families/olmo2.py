"""OLMo 2: norms after attention and MLP alone; q/k norms over all heads together."""

from typing import Any

from lm_jax.model.config import DecoderConfig
from lm_jax.weights.families.fields import (
    ATTENTION_BIAS,
    HEAD_DIM,
    LLAMA_FIELDS,
    read_activation,
    read_fields,
    read_head_dim,
    read_rope,
    write_activation,
    write_fields,
    write_rope,
)
from lm_jax.weights.families.llama import attention_entries, embedding_entries, gated_mlp_entries
from lm_jax.weights.families.table import Entry, Family, Tables

_FIELDS = LLAMA_FIELDS | ATTENTION_BIAS


def read_config(hf: Any) -> DecoderConfig:
    return DecoderConfig(
        family="olmo2",
        **read_fields(hf, _FIELDS),
        head_dim=read_head_dim(hf),
        norm_placement="post",
        qk_norm="projection",
        activation=read_activation(hf.hidden_act, "hidden_act"),
        rope=read_rope(hf.rope_parameters, hf.max_position_embeddings),
    )


def write_config(cfg: DecoderConfig) -> dict[str, Any]:
    return {
        **write_fields(cfg, _FIELDS | HEAD_DIM),
        "hidden_act": write_activation(cfg.activation),
        "rope_parameters": write_rope(cfg.rope),
    }


def entries(cfg: DecoderConfig) -> list[Entry]:
    t, block = Tables(cfg), "model.layers.{l}."
    return [
        *embedding_entries(t, cfg),
        t.same(block + "post_attention_layernorm.weight", "blocks/ln1_post/scale"),
        t.same(block + "post_feedforward_layernorm.weight", "blocks/ln2_post/scale"),
        *(
            t.flat(f"{block}self_attn.{n}_norm.weight", f"blocks/mixer/{n}_norm/scale")
            for n in "qk"
        ),
        *attention_entries(t, cfg, block),
        *gated_mlp_entries(t, cfg, block),
    ]


OLMO2 = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    prefix="model.",
    head="lm_head.weight",
    read_config=read_config,
    write_config=write_config,
    entries=entries,
)
