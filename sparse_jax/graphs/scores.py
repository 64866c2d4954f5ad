"""Attention scores with the divisors of norms held: a bilinear map of the residual stream.

A mixer without queries and keys, such as prototypes, has none.
"""

from collections.abc import Mapping

from flax import struct
import jax
import jax.numpy as jnp

from lm_jax.errors import UsageError
from lm_jax.model.config import DecoderConfig, Rope
from lm_jax.model.layers import rope_tables
from lm_jax.model.mixers import AttentionMixer
from lm_jax.model.params import ParamTree


@struct.dataclass
class FrozenScores:
    """Attention scores as a bilinear map of the inputs of blocks, leaves with a leading L.

    A score is `scale` times the product of a query and a key, each a linear map of the residual
    stream: projection, norm by its recorded divisor, rotation.

    Attributes:
      query_LDNH, key_LDKH: weights.
      query_bias_LNH, key_bias_LKH: what biases of norm and projection add.
      query_norm_LTNH, key_norm_LSKH: factors of the norms of queries and keys; None without.
      rotation_2LTR: cosines and sines of the R rotated pairs of coordinates; None without.
      rotated_query_LTNH, rotated_key_LSKH: queries and keys of the forward pass, as scored.
      scale: factor of the product, before a soft cap.
    """

    query_LDNH: jax.Array
    key_LDKH: jax.Array
    query_bias_LNH: jax.Array
    key_bias_LKH: jax.Array
    query_norm_LTNH: jax.Array | None
    key_norm_LSKH: jax.Array | None
    rotation_2LTR: jax.Array | None
    rotated_query_LTNH: jax.Array
    rotated_key_LSKH: jax.Array
    scale: float = struct.field(pytree_node=False)


def score_sites(cfg: DecoderConfig, mixer: object) -> tuple[str, ...]:
    """The sites that `freeze_scores` needs; none where the mixer has no queries and keys."""
    if not isinstance(mixer, AttentionMixer):
        return ()
    norms = ("attn.q_norm.scale", "attn.k_norm.scale") if cfg.qk_norm != "none" else ()
    return ("attn.rot_q", "attn.rot_k", *norms)


def freeze_scores(
    p: ParamTree,
    norm_bias_LD: jax.Array,
    records: Mapping[str, jax.Array],
    cfg: DecoderConfig,
    mixer: object,
) -> FrozenScores | None:
    """The scores of all layers on one prompt; None where the mixer has no queries and keys.

    Args:
      p: parameters of the mixers of all layers.
      norm_bias_LD: bias of the norm before the mixer.
      records: `score_sites` of one prompt, without the axis B.
      cfg: configuration of the decoder.
      mixer: mixer of the blocks.

    Raises:
      UsageError: queries and keys pass a norm that subtracts a mean over all heads.
    """
    if not isinstance(mixer, AttentionMixer):
        return None
    if (cfg.norm, cfg.qk_norm) == ("layer", "projection"):
        raise UsageError(
            "model: qk_norm = 'projection' with norm = 'layer' has no frozen scores here; give a "
            "model with norm = 'rms'"
        )

    def bias(name: str) -> jax.Array:
        bias_LNH = jnp.einsum("LD,LDNH->LNH", norm_bias_LD, p[name])
        return bias_LNH + p.get(f"{name}_bias", 0.0)

    def norm(name: str) -> jax.Array | None:
        if cfg.qk_norm == "none":
            return None
        weight = p[f"{name}_norm"]["scale"] + cfg.norm_offset
        weight_LNH = weight[:, None] if cfg.qk_norm == "head" else weight
        return weight_LNH[:, None] / records[f"attn.{name}_norm.scale"]

    return FrozenScores(
        query_LDNH=p["q"],
        key_LDKH=p["k"],
        query_bias_LNH=bias("q"),
        key_bias_LKH=bias("k"),
        query_norm_LTNH=norm("q"),
        key_norm_LSKH=norm("k"),
        rotation_2LTR=_rotation(cfg, records["attn.rot_q"].shape[1]),
        rotated_query_LTNH=records["attn.rot_q"],
        rotated_key_LSKH=records["attn.rot_k"],
        scale=cfg.scale,
    )


def _rotation(cfg: DecoderConfig, T: int) -> jax.Array | None:
    if cfg.rope is None:
        return None

    def table(rope: Rope) -> jax.Array:
        positions_BT = jnp.arange(T)[None]
        return jnp.stack([x[0] for x in rope_tables(rope, cfg.rotary_width(rope), positions_BT)])

    far_2TR = table(cfg.rope)
    near_2TR = far_2TR if cfg.local_rope is None else table(cfg.local_rope)
    return jnp.stack([far_2TR if w is None else near_2TR for w in cfg.layer_windows], 1)
