"""GPT-2: learned positions, one matrix for q, k and v, matrices stored [in, out]."""

from typing import Any

import numpy as np

from lm_jax.model.config import DecoderConfig
from lm_jax.weights.families.fields import (
    read_activation,
    refuse,
    shared_head_dim,
    write_activation,
)
from lm_jax.weights.families.table import Entry, Family, Tables


def read_config(hf: Any) -> DecoderConfig:
    refuse(
        hf,
        scale_attn_weights=(True,),
        scale_attn_by_inverse_layer_idx=(False,),
        add_cross_attention=(False,),
    )
    return DecoderConfig(
        family="gpt2",
        num_layers=hf.n_layer,
        num_heads=hf.n_head,
        num_kv_heads=hf.n_head,
        head_dim=shared_head_dim(hf),
        hidden_size=hf.n_embd,
        mlp_size=hf.n_inner or 4 * hf.n_embd,
        vocab_size=hf.vocab_size,
        max_length=hf.n_positions,
        norm="layer",
        norm_eps=hf.layer_norm_epsilon,
        activation=read_activation(hf.activation_function, "activation_function"),
        gated_mlp=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        rope=None,
        tie_embeddings=hf.tie_word_embeddings,
    )


def write_config(cfg: DecoderConfig) -> dict[str, Any]:
    return {
        "n_layer": cfg.num_layers,
        "n_head": cfg.num_heads,
        "n_embd": cfg.hidden_size,
        "n_inner": cfg.mlp_size,
        "vocab_size": cfg.vocab_size,
        "n_positions": cfg.max_length,
        "layer_norm_epsilon": cfg.norm_eps,
        "activation_function": write_activation(cfg.activation),
        "tie_word_embeddings": cfg.tie_embeddings,
    }


def entries(cfg: DecoderConfig) -> list[Entry]:
    t, block = Tables(cfg), "transformer.h.{l}."
    D, N, H = cfg.hidden_size, cfg.num_heads, cfg.head_dim
    paths = tuple(f"blocks/mixer/{n}" for n in "qkv")
    entries = [
        t.same("transformer.wte.weight", "embed/tokens"),
        t.same("transformer.wpe.weight", "embed/positions"),
        *t.layer_norm("transformer.ln_f", "final"),
        *t.layer_norm(block + "ln_1", "blocks/ln1"),
        *t.layer_norm(block + "ln_2", "blocks/ln2"),
        Entry(
            block + "attn.c_attn.weight",
            paths,
            (D, 3 * N * H),
            lambda w: tuple(w.reshape(D, 3, N, H).swapaxes(0, 1)),
            lambda q, k, v: np.stack([q, k, v], 1).reshape(D, 3 * N * H),
        ),
        Entry(
            block + "attn.c_attn.bias",
            tuple(f"{path}_bias" for path in paths),
            (3 * N * H,),
            lambda w: tuple(w.reshape(3, N, H)),
            lambda q, k, v: np.stack([q, k, v]).ravel(),
        ),
        t.linear(block + "attn.c_proj.weight", "blocks/mixer/o", inputs=2, transposed=False),
        t.same(block + "attn.c_proj.bias", "blocks/mixer/o_bias"),
    ]
    for theirs, ours in (("c_fc", "up"), ("c_proj", "down")):
        entries += [
            t.linear(f"{block}mlp.{theirs}.weight", f"blocks/mlp/{ours}", transposed=False),
            t.same(f"{block}mlp.{theirs}.bias", f"blocks/mlp/{ours}_bias"),
        ]
    if not cfg.tie_embeddings:
        entries.append(t.linear("lm_head.weight", "unembed"))
    return entries


GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    read_config=read_config,
    write_config=write_config,
    entries=entries,
    ignored=(r".*\.attn\.(bias|masked_bias)",),
)
