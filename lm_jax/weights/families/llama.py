"""Llama 1 to 3.2 and models of the same arithmetic (SmolLM2)."""

from typing import Any

from lm_jax.model.config import DecoderConfig
from lm_jax.weights.families.fields import (
    ATTENTION_BIAS,
    HEAD_DIM,
    LLAMA_FIELDS,
    read_block,
    write_activation,
    write_fields,
    write_rope,
)
from lm_jax.weights.families.table import Entry, Family, Tables

_FIELDS = LLAMA_FIELDS | ATTENTION_BIAS | HEAD_DIM


def read_config(hf: Any) -> DecoderConfig:
    return DecoderConfig(
        family="llama",
        **read_block(hf, _FIELDS),
        mlp_bias=hf.mlp_bias,
    )


def write_config(cfg: DecoderConfig) -> dict[str, Any]:
    return {
        **write_fields(cfg, _FIELDS),
        "hidden_act": write_activation(cfg.activation),
        "mlp_bias": cfg.mlp_bias,
        "rope_parameters": write_rope(cfg.rope),
    }


def attention_entries(t: Tables, cfg: DecoderConfig, prefix: str) -> list[Entry]:
    """Separate q, k, v, o projections, as most families after GPT-2 store them."""
    at, ours = prefix + "self_attn.", "blocks/mixer/"
    present = [n for n in "qkv" if ours + n in t.specs]
    entries = [t.linear(f"{at}{n}_proj.weight", ours + n) for n in present]
    entries.append(t.linear(f"{at}o_proj.weight", ours + "o", inputs=2))
    if cfg.qkv_bias:
        entries += [t.flat(f"{at}{n}_proj.bias", f"{ours}{n}_bias") for n in present]
    if cfg.out_bias:
        entries.append(t.same(f"{at}o_proj.bias", ours + "o_bias"))
    return entries


def gated_mlp_entries(t: Tables, cfg: DecoderConfig, prefix: str) -> list[Entry]:
    """`gate_proj`, `up_proj`, `down_proj`."""
    entries = []
    for n in ("gate", "up", "down"):
        entries.append(t.linear(f"{prefix}mlp.{n}_proj.weight", f"blocks/mlp/{n}"))
        if cfg.mlp_bias:
            entries.append(t.same(f"{prefix}mlp.{n}_proj.bias", f"blocks/mlp/{n}_bias"))
    return entries


def embedding_entries(t: Tables, cfg: DecoderConfig) -> list[Entry]:
    """Token embedding, last norm, and the head where it is not tied."""
    entries = [
        t.same("model.embed_tokens.weight", "embed/tokens"),
        t.same("model.norm.weight", "final/scale"),
    ]
    if not cfg.tie_embeddings:
        entries.append(t.linear("lm_head.weight", "unembed"))
    return entries


def entries(cfg: DecoderConfig) -> list[Entry]:
    """Llama's table, and that of its descendants: norms of queries and keys where there are any."""
    t, block = Tables(cfg), "model.layers.{l}."
    norms = {"input_layernorm": "ln1", "post_attention_layernorm": "ln2"}
    if cfg.qk_norm == "head":
        norms |= {f"self_attn.{n}_norm": f"mixer/{n}_norm" for n in "qk"}
    return [
        *embedding_entries(t, cfg),
        *(t.same(f"{block}{n}.weight", f"blocks/{ours}/scale") for n, ours in norms.items()),
        *attention_entries(t, cfg, block),
        *gated_mlp_entries(t, cfg, block),
    ]


LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    read_config=read_config,
    write_config=write_config,
    entries=entries,
    ignored=(r".*rotary_emb\.inv_freq",),
)
