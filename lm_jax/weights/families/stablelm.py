"""StableLM: layer norm, a gated MLP, partial rotations; layer norms of single heads in some.

In the parallel form (StableLM 2 12B) attention and MLP read one norm; we hold it once for each, and
save only where both are equal.
"""

from typing import Any

import numpy as np

from lm_jax.errors import BadInputError
from lm_jax.model.config import DecoderConfig
from lm_jax.weights.families.fields import COMMON_FIELDS, read_block, shared_head_dim, write_block
from lm_jax.weights.families.llama import attention_entries, gated_mlp_entries
from lm_jax.weights.families.table import Entry, Family, Tables

_FIELDS = COMMON_FIELDS | {
    "num_kv_heads": "num_key_value_heads",
    "norm_eps": "layer_norm_eps",
    "qkv_bias": "use_qkv_bias",
    "parallel_residual": "use_parallel_residual",
}


def read_config(hf: Any) -> DecoderConfig:
    return DecoderConfig(
        family="stablelm",
        **read_block(hf, _FIELDS, partial=True),
        head_dim=shared_head_dim(hf),
        norm="layer",
        qk_norm="each_head" if hf.qk_layernorm else "none",
    )


def write_config(cfg: DecoderConfig) -> dict[str, Any]:
    return write_block(cfg, _FIELDS, partial=True, qk_layernorm=cfg.qk_norm == "each_head")


def entries(cfg: DecoderConfig) -> list[Entry]:
    t, block = Tables(cfg), "model.layers.{l}."
    if cfg.parallel_residual:
        norms = [_shared(t, f"{block}input_layernorm", part) for part in ("weight", "bias")]
    else:
        norms = [
            *t.layer_norm(block + "input_layernorm", "blocks/ln1"),
            *t.layer_norm(block + "post_attention_layernorm", "blocks/ln2"),
        ]
    if cfg.qk_norm == "each_head":
        norms += [
            t.by_head(
                f"{block}self_attn.{n}_layernorm.norms.{{n}}.weight",
                f"blocks/mixer/{n}_norm/scale",
            )
            for n in "qk"
        ]
    head = [] if cfg.tie_embeddings else [t.linear("lm_head.weight", "unembed")]
    return [
        t.same("model.embed_tokens.weight", "embed/tokens"),
        *t.layer_norm("model.norm", "final"),
        *head,
        *norms,
        *attention_entries(t, cfg, block),
        *gated_mlp_entries(t, cfg, block),
    ]


def _shared(t: Tables, name: str, part: str) -> Entry:
    """The one norm of a parallel block, as `part` is called there, for attention and MLP."""
    ours = {"weight": "scale", "bias": "bias"}[part]
    paths = tuple(f"blocks/{norm}/{ours}" for norm in ("ln1", "ln2"))

    def write(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        if not np.array_equal(first, second):
            raise BadInputError(
                f"{paths[0]} differs from {paths[1]}: the parallel block of StableLM has one norm "
                "for both; save with lm_jax.checkpoint"
            )
        return first

    return Entry(f"{name}.{part}", paths, t.one_layer(paths[0]), lambda w: (w, w), write)


STABLELM = Family(
    name="stablelm",
    architecture="StableLmForCausalLM",
    read_config=read_config,
    write_config=write_config,
    entries=entries,
    ignored=(r".*rotary_emb\.inv_freq",),
)
