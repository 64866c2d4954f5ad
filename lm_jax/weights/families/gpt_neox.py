"""GPT-NeoX and Pythia: partial rotary positions, parallel residual, q, k, v interleaved by head."""

from typing import Any

import numpy as np

from lm_jax.model.config import DecoderConfig
from lm_jax.weights.families.fields import (
    ATTENTION_BIAS,
    COMMON_FIELDS,
    read_block,
    shared_head_dim,
    write_block,
)
from lm_jax.weights.families.table import Entry, Family, Tables

_FIELDS = COMMON_FIELDS | ATTENTION_BIAS
_FIELDS |= {"norm_eps": "layer_norm_eps", "parallel_residual": "use_parallel_residual"}


def read_config(hf: Any) -> DecoderConfig:
    return DecoderConfig(
        family="gpt_neox",
        **read_block(hf, _FIELDS, partial=True),
        num_kv_heads=hf.num_attention_heads,
        head_dim=shared_head_dim(hf),
        norm="layer",
        gated_mlp=False,
        mlp_bias=True,
    )


def write_config(cfg: DecoderConfig) -> dict[str, Any]:
    return write_block(cfg, _FIELDS, partial=True)


def entries(cfg: DecoderConfig) -> list[Entry]:
    t, block = Tables(cfg), "gpt_neox.layers.{l}."
    D, N, H = cfg.hidden_size, cfg.num_heads, cfg.head_dim
    paths = tuple(f"blocks/mixer/{n}" for n in "qkv")
    qkv = block + "attention.query_key_value."
    entries = [
        t.same("gpt_neox.embed_in.weight", "embed/tokens"),
        *t.layer_norm("gpt_neox.final_layer_norm", "final"),
        *t.layer_norm(block + "input_layernorm", "blocks/ln1"),
        *t.layer_norm(block + "post_attention_layernorm", "blocks/ln2"),
        Entry(
            qkv + "weight",
            paths,
            (3 * N * H, D),
            lambda w: tuple(w.reshape(N, 3, H, D).transpose(1, 3, 0, 2)),
            lambda q, k, v: np.stack([q, k, v]).transpose(2, 0, 3, 1).reshape(3 * N * H, D),
        ),
        t.linear(block + "attention.dense.weight", "blocks/mixer/o", inputs=2),
    ]
    if cfg.qkv_bias:
        entries.append(
            Entry(
                qkv + "bias",
                tuple(f"{path}_bias" for path in paths),
                (3 * N * H,),
                lambda w: tuple(w.reshape(N, 3, H).swapaxes(0, 1)),
                lambda q, k, v: np.stack([q, k, v], 1).ravel(),
            )
        )
        entries.append(t.same(block + "attention.dense.bias", "blocks/mixer/o_bias"))
    for theirs, ours in (("dense_h_to_4h", "up"), ("dense_4h_to_h", "down")):
        entries += [
            t.linear(f"{block}mlp.{theirs}.weight", f"blocks/mlp/{ours}"),
            t.same(f"{block}mlp.{theirs}.bias", f"blocks/mlp/{ours}_bias"),
        ]
    if not cfg.tie_embeddings:
        entries.append(t.linear("embed_out.weight", "unembed"))
    return entries


GPT_NEOX = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    head="embed_out.weight",
    read_config=read_config,
    write_config=write_config,
    entries=entries,
    ignored=(r".*\.attention\.(bias|masked_bias)", r".*rotary_emb\.inv_freq"),
)
