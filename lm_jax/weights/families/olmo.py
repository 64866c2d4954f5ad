"""OLMo 1, as `OLMo-7B-hf`: Llama's block under layer norms that have no weights."""

from typing import Any

from lm_jax.errors import BadInputError
from lm_jax.model.config import DecoderConfig
from lm_jax.weights.families.fields import (
    ATTENTION_BIAS,
    COMMON_FIELDS,
    read_block,
    shared_head_dim,
    write_block,
)
from lm_jax.weights.families.llama import attention_entries, gated_mlp_entries
from lm_jax.weights.families.table import Entry, Family, Tables

# Fixed in the layer norms of the architecture, and in no config.
_EPS = 1e-5
_FIELDS = COMMON_FIELDS | ATTENTION_BIAS | {"num_kv_heads": "num_key_value_heads"}


def read_config(hf: Any) -> DecoderConfig:
    if hf.clip_qkv is not None:
        raise BadInputError(
            f"config.json: clip_qkv = {hf.clip_qkv} is not supported; use a model that does not "
            "clip its queries, keys and values, such as OLMo-7B-hf"
        )
    return DecoderConfig(
        family="olmo",
        **read_block(hf, _FIELDS),
        head_dim=shared_head_dim(hf),
        norm="layer",
        norm_eps=_EPS,
        norm_weights=False,
    )


def write_config(cfg: DecoderConfig) -> dict[str, Any]:
    return write_block(cfg, _FIELDS, clip_qkv=None)


def entries(cfg: DecoderConfig) -> list[Entry]:
    t, block = Tables(cfg), "model.layers.{l}."
    embedding = [t.same("model.embed_tokens.weight", "embed/tokens")]
    if not cfg.tie_embeddings:
        embedding.append(t.linear("lm_head.weight", "unembed"))
    return [
        *embedding,
        *attention_entries(t, cfg, block),
        *gated_mlp_entries(t, cfg, block),
    ]


OLMO = Family(
    name="olmo",
    architecture="OlmoForCausalLM",
    read_config=read_config,
    write_config=write_config,
    entries=entries,
    ignored=(r".*rotary_emb\.inv_freq",),
)
