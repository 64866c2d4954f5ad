"""The replacement model of a prompt: everything that a linear pass through a frozen model needs.

A transcoder stands for the MLPs. Attention patterns and the divisors of all norms are constants of
the prompt (paper, Eq. 6), so the residual stream is a linear function of

    tokens      embeddings, at layer 0
    features    a W_dec,s->l of each active feature of a transcoder, at layers l >= s
    errors      MLP output minus reconstruction, at each layer
    constants   position embeddings, biases of norms, values, attention outputs and decoders

and MLP inputs, feature pre-activations and logits are linear functions of it. A norm is
`factor * centre(x) + bias`, where `factor` is its weight over the recorded divisor, and `centre`
subtracts the mean for layer norm. Gates of a sparse model are in the recorded patterns.
"""

import dataclasses
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from lm_jax.errors import UsageError
from lm_jax.model.config import DecoderConfig, Rope
from lm_jax.model.layers import rope_tables, rows, unembedding
from lm_jax.model.sites import keep
from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.graphs.basis import Features


@struct.dataclass
class FrozenLayers:
    """The linear maps of all blocks, leaves with a leading L.

    Attributes:
      pattern_LNTS: attention weights, gated where the model is.
      value_LDKH, output_LNHD: weights of values and attention outputs.
      norm_LTD: factor of the norm before attention.
      post_norm_LTD: factor of the norm after attention; None without one.
      centred: whether norms subtract the mean.
      parallel: whether the MLP reads the residual stream before attention (Pythia).
    """

    pattern_LNTS: jax.Array
    value_LDKH: jax.Array
    output_LNHD: jax.Array
    norm_LTD: jax.Array
    post_norm_LTD: jax.Array | None
    centred: bool = struct.field(pytree_node=False)
    parallel: bool = struct.field(pytree_node=False)


@struct.dataclass
class FrozenScores:
    """Attention scores as a bilinear map of the inputs of blocks, leaves with a leading L.

    A score is `scale` times the product of a query and a key, each a linear map of the residual
    stream: projection, per-head norm by its recorded divisor, rotation.

    Attributes:
      query_LDNH, key_LDKH: weights.
      query_bias_LNH, key_bias_LKH: what biases of norm and projection add.
      query_norm_LTNH, key_norm_LSKH: factors of the per-head norms; None without.
      rotation_2LTR: cosines and sines of the R rotated pairs of coordinates; None without.
      rotated_query_LTNH, rotated_key_LSKH: queries and keys of the forward pass, as scored.
      scale: on the product, before a soft cap.
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


@struct.dataclass
class Replacement:
    """One prompt of T tokens in a model whose MLPs a transcoder replaces; float32 throughout.

    Attributes:
      layers: linear maps of the blocks.
      read_LTD, read_bias_LD: factor and bias of the norm before each MLP.
      final_TD, final_bias_D: those of the last norm.
      token_TD: token embeddings.
      position_TD: position embeddings, zero where positions are rotations.
      attention_bias_LTD: what attention adds to the residual stream because of biases alone.
      decoder_bias_LD: of the transcoder.
      pre_LTF, feature_LTF: features before and after the activation function.
      input_LTD, output_LTD: inputs and outputs of the MLPs.
      error_LTD: output minus reconstruction.
      logits_V: at the last position, before a soft cap.
      probability_V: of the next token, by the model itself.
      scores: of attention; None for a mixer without scores.
    """

    layers: FrozenLayers
    read_LTD: jax.Array
    read_bias_LD: jax.Array
    final_TD: jax.Array
    final_bias_D: jax.Array
    token_TD: jax.Array
    position_TD: jax.Array
    attention_bias_LTD: jax.Array
    decoder_bias_LD: jax.Array
    pre_LTF: jax.Array
    feature_LTF: jax.Array
    input_LTD: jax.Array
    output_LTD: jax.Array
    error_LTD: jax.Array
    logits_V: jax.Array
    probability_V: jax.Array
    scores: FrozenScores | None = None


def check(model: CircuitModel, features: Features, tokens: Any) -> None:
    """Raises where the three do not go together.

    Raises:
      UsageError: naming what differs, and the remedy.
    """
    cfg = model.cfg
    if not cfg.mlp_size:
        raise UsageError("model: it has no MLPs (mlp_size = 0) to replace; give one that has")
    features.check(cfg)
    if tokens.ndim != 1 or not tokens.size:
        raise UsageError(f"tokens: shape {tokens.shape}; give the ids of one prompt, shape [T]")
    if len(tokens) > cfg.max_length:
        raise UsageError(
            f"tokens: {len(tokens)} ids are more than the model's context of {cfg.max_length}; "
            "shorten the prompt"
        )
    check_ids("tokens", tokens, cfg)


def check_ids(name: str, ids: Any, cfg: DecoderConfig) -> None:
    """Raises for an id outside the vocabulary."""
    for token in ids:
        if not 0 <= int(token) < cfg.vocab_size:
            raise UsageError(
                f"{name}: id {int(token)} is outside the vocabulary 0..{cfg.vocab_size - 1}; "
                "tokenize with the tokenizer of this model"
            )


def record(model: CircuitModel, features: Features, tokens_T: jax.Array) -> Replacement:
    """The replacement model of a prompt, from one forward pass in float32.

    Args:
      model: dense or sparse; its parameters are cast to float32.
      features: a transcoder of raw activations (`Transcoder.folded`), or neurons.
      tokens_T: ids of the prompt.
    """
    cfg = model.cfg
    params = jax.tree.map(lambda x: x.astype(jnp.float32), model.params)
    model = dataclasses.replace(model, params=params)
    names = ["attn.pattern", "ln1.scale", "ln2.scale", "final.scale", "mlp.in", "mlp.out"]
    names += ["attn.rot_q", "attn.rot_k"]
    names += ["ln1_post.scale"] if cfg.post_norms else []
    names += ["attn.q_norm.scale", "attn.k_norm.scale"] if cfg.qk_norm else []
    tokens_BT = tokens_T[None]
    run = model.forward(
        tokens_BT, jnp.ones_like(tokens_BT, bool), record=dict.fromkeys(names, keep)
    )
    records = {name: x[0] if name == "final.scale" else x[:, 0] for name, x in run.records.items()}
    params, blocks = model.params, model.params["blocks"]
    norm_LTD, norm_bias_LD = _factor(blocks.get("ln1"), records["ln1.scale"], cfg)
    read_LTD, read_bias_LD = _factor(blocks.get("ln2"), records["ln2.scale"], cfg)
    final_TD, final_bias_D = _factor(params.get("final"), records["final.scale"], cfg)
    post_LTD, post_bias_LD = None, jnp.zeros_like(norm_bias_LD)
    if cfg.post_norms:
        post_LTD, post_bias_LD = _factor(blocks.get("ln1_post"), records["ln1_post.scale"], cfg)
    layers = FrozenLayers(
        pattern_LNTS=records["attn.pattern"],
        value_LDKH=blocks["mixer"]["v"],
        output_LNHD=blocks["mixer"]["o"],
        norm_LTD=norm_LTD,
        post_norm_LTD=post_LTD,
        centred=cfg.norm == "layer",
        parallel=cfg.parallel_residual,
    )
    position_TD = jnp.zeros((tokens_T.size, cfg.hidden_size), jnp.float32)
    if cfg.rope is None:
        position_TD = rows(params["embed"]["positions"], jnp.arange(tokens_T.size))
    features = features.for_prompt(records["mlp.in"])
    feature_LTF = features.encode(records["mlp.in"])
    return Replacement(
        layers=layers,
        read_LTD=read_LTD,
        read_bias_LD=read_bias_LD,
        final_TD=final_TD,
        final_bias_D=final_bias_D,
        token_TD=rows(params["embed"]["tokens"], tokens_T) * cfg.embed_scale,
        position_TD=position_TD,
        attention_bias_LTD=_attention_bias(layers, blocks["mixer"], norm_bias_LD, post_bias_LD),
        decoder_bias_LD=features.decoder_bias_LD,
        pre_LTF=features.pre_activations(records["mlp.in"]),
        feature_LTF=feature_LTF,
        input_LTD=records["mlp.in"],
        output_LTD=records["mlp.out"],
        error_LTD=records["mlp.out"] - features.decode(feature_LTF),
        logits_V=unembedding(params, cfg) @ run.hidden[0, -1],
        probability_V=jax.nn.softmax(run.logits[0, -1]),
        scores=_scores(blocks["mixer"], norm_bias_LD, records, cfg),
    )


def _scores(mixer: Any, norm_bias_LD: jax.Array, records: Any, cfg: DecoderConfig) -> FrozenScores:
    def bias(name: str) -> jax.Array:
        bias_LNH = jnp.einsum("LD,LDNH->LNH", norm_bias_LD, mixer[name])
        return bias_LNH + mixer.get(f"{name}_bias", 0.0)

    def norm(name: str) -> jax.Array | None:
        if not cfg.qk_norm:
            return None
        weight_LH = mixer[f"{name}_norm"]["scale"] + cfg.norm_offset
        return weight_LH[:, None, None] / records[f"attn.{name}_norm.scale"]

    return FrozenScores(
        query_LDNH=mixer["q"],
        key_LDKH=mixer["k"],
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


def _factor(norm: Any, scale: jax.Array, cfg: DecoderConfig) -> tuple[jax.Array, jax.Array]:
    """Factor `[..., T, D]` and bias `[..., D]` of a norm, of its divisors `[..., T, 1]`."""
    shape = (*scale.shape[:-2], cfg.hidden_size)
    weight = jnp.ones(shape, jnp.float32)
    if norm and "scale" in norm:
        weight = norm["scale"] + cfg.norm_offset
    bias = norm["bias"] if norm and "bias" in norm else jnp.zeros(shape, jnp.float32)
    return weight[..., None, :] / scale, bias


def _attention_bias(
    layers: FrozenLayers, mixer: Any, norm_bias_LD: jax.Array, post_bias_LD: jax.Array
) -> jax.Array:
    """Attention outputs `[L, T, D]` of a residual stream that is zero."""
    value_LKH = jnp.einsum("LD,LDKH->LKH", norm_bias_LD, layers.value_LDKH)
    value_LKH = value_LKH + mixer.get("v_bias", jnp.zeros_like(value_LKH))
    groups = layers.pattern_LNTS.shape[1] // value_LKH.shape[1]
    value_LNH = jnp.repeat(value_LKH, groups, axis=1)
    # Rows of gated patterns need not sum to one.
    mass_LNT = layers.pattern_LNTS.sum(-1)
    output_LTD = jnp.einsum("LNT,LNH,LNHD->LTD", mass_LNT, value_LNH, layers.output_LNHD)
    if "o_bias" in mixer:
        output_LTD = output_LTD + mixer["o_bias"][:, None]
    if layers.post_norm_LTD is not None:
        output_LTD = centre(output_LTD, layers.centred) * layers.post_norm_LTD
    return output_LTD + post_bias_LD[:, None]


def centre(x: jax.Array, centred: bool) -> jax.Array:
    """`x` minus its mean over the last axis for layer norm, a symmetric map; else `x`."""
    return x - x.mean(-1, keepdims=True) if centred else x
