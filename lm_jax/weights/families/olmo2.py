"""OLMo 2: norms after attention and MLP alone; q/k norms over all heads together."""

from typing import Any

from lm_jax.model.config import DecoderConfig
from lm_jax.weights.families.fields import (
    ATTENTION_BIAS,
    HEAD_DIM,
    LLAMA_FIELDS,
    read_block,
    read_head_dim,
    write_block,
)
from lm_jax.weights.families.llama import attention_entries, embedding_entries, gated_mlp_entries
from lm_jax.weights.families.table import Entry, Family, Tables

_FIELDS = LLAMA_FIELDS | ATTENTION_BIAS


def read_config(hf: Any) -> DecoderConfig:
    return DecoderConfig(
        family="olmo2",
        **read_block(hf, _FIELDS),
        head_dim=read_head_dim(hf),
        norm_placement="post",
        qk_norm="projection",
    )


def write_config(cfg: DecoderConfig) -> dict[str, Any]:
    return write_block(cfg, _FIELDS | HEAD_DIM)


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
    read_config=read_config,
    write_config=write_config,
    entries=entries,
)
