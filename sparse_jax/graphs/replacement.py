"""The replacement model of a prompt: everything that a linear pass through a frozen model needs.

A transcoder stands for the MLPs. Attention patterns and the divisors of all norms are constants of
the prompt (paper, Eq. 6), so the residual stream is a linear function of

    tokens      embeddings, at layer 0
    features    a W_dec,s->l of each active feature of a transcoder, at layers l >= s
    errors      MLP output minus reconstruction, at each layer
    constants   position embeddings, biases of norms, values, attention outputs and decoders

and MLP inputs, feature pre-activations and logits are linear functions of it. A transcoder may
have a linear path W_skip from inputs to MLP outputs, which belongs to the maps of the blocks, and
it may read the stream before the norm. A norm is
`factor * centre(x) + bias`, where `factor` is its weight over the recorded divisor, and `centre`
subtracts the mean for layer norm. Gates of a sparse model are in the recorded patterns. Blocks may
have another mixer that is linear with its gates held (`lm_jax.model.frozen`), as prototypes are.
"""

import dataclasses
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from lm_jax.errors import UsageError
from lm_jax.model.config import DecoderConfig
from lm_jax.model.frozen import (
    FrozenLayers,
    centre,
    divisors,
    freeze_layers,
    frozen_sites,
    mixer_sites,
    mlp_norm_sites,
    norm_factor,
)
from lm_jax.model.frozen.attention import Recomputing
from lm_jax.model.layers import rows, unembedding
from lm_jax.model.mixers import AttentionMixer
from lm_jax.model.sites import keep
from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.graphs.basis import Features
from sparse_jax.graphs.scores import FrozenScores, freeze_scores, score_sites

# Bytes of attention patterns that are stored.
STORED = 2 * 2**30


@struct.dataclass
class Reading:
    """How features read the residual stream: `factor * centre(x) + bias`, in each layer.

    Methods are of one layer or all; fields have a leading L.

    Attributes:
      factor_LTD, bias_LD: those of the norm before each MLP; 1 and 0 without one.
      skip_LDD: W_skip, from inputs of MLPs to what they add to the stream; None without it.
      centred: whether the norm subtracts the mean.
    """

    factor_LTD: jax.Array
    bias_LD: jax.Array
    skip_LDD: jax.Array | None = None
    centred: bool = struct.field(pytree_node=False, default=False)

    def first(self, positions: int) -> "Reading":
        """The same of the first positions."""
        return dataclasses.replace(self, factor_LTD=self.factor_LTD[..., :positions, :])

    def tangent(self, x: jax.Array) -> jax.Array:
        """Change of inputs of MLPs `[..., T, D]`, of that of the residual stream."""
        return centre(x, self.centred) * self.factor_LTD

    def cotangent(self, c: jax.Array) -> jax.Array:
        """Derivatives by the residual stream, of those by inputs of MLPs."""
        return centre(c * self.factor_LTD, self.centred)

    def skipped(self, x_XTD: jax.Array) -> jax.Array:
        """What W_skip of one layer adds to the stream, of what is added to the stream before it."""
        if self.skip_LDD is None:
            return jnp.zeros_like(x_XTD)
        return jnp.einsum("XTD,ED->XTE", self.one().tangent(x_XTD), self.skip_LDD)

    def below_skip(self, c_XTD: jax.Array) -> jax.Array:
        """Derivatives by the stream before W_skip of one layer, through it."""
        if self.skip_LDD is None:
            return jnp.zeros_like(c_XTD)
        return self.one().cotangent(jnp.einsum("XTE,ED->XTD", c_XTD, self.skip_LDD))

    def one(self) -> "Reading":
        """The same with an axis for a batch, of one layer."""
        return dataclasses.replace(self, factor_LTD=self.factor_LTD[None])

    def constant(self) -> jax.Array:
        """What W_skip of all layers adds because of biases alone `[L, D]`."""
        if self.skip_LDD is None:
            return jnp.zeros_like(self.bias_LD)
        return jnp.einsum("LD,LED->LE", self.bias_LD, self.skip_LDD)


@struct.dataclass
class Replacement:
    """One prompt of T tokens in a model whose MLPs a transcoder replaces; float32 throughout.

    Attributes:
      layers: linear maps of the blocks.
      reading: how features read the residual stream, and W_skip.
      final_TD, final_bias_D: those of the last norm.
      token_TD: token embeddings.
      position_TD: position embeddings, zero where positions are rotations.
      attention_bias_LTD: what mixers add to the residual stream because of biases alone.
      decoder_bias_LD: decoder bias of the transcoder, with what W_skip adds because of biases.
      input_LTD: inputs of the features.
      output_LTD: outputs of the MLPs.
      error_LTD: output minus reconstruction.
      logits_V: logits at the last position, before a soft cap.
      probability_V: probabilities of the next token, by the model itself.
      scores: the attention scores; None for a mixer without scores.
    """

    layers: FrozenLayers
    reading: Reading
    final_TD: jax.Array
    final_bias_D: jax.Array
    token_TD: jax.Array
    position_TD: jax.Array
    attention_bias_LTD: jax.Array
    decoder_bias_LD: jax.Array
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


def record(
    model: CircuitModel, features: Features, tokens_T: jax.Array, *, stored: int = STORED
) -> tuple[Replacement, jax.Array]:
    """The replacement model of a prompt and its activations `[L, T, F]`, from one forward pass.

    Activations are apart, because a graph needs only those that are not 0.

    Args:
      model: a dense or sparse model; its parameters are cast to float32.
      features: a transcoder of raw activations (`Transcoder.folded`), or neurons.
      tokens_T: ids of the prompt.
      stored: the most bytes of attention patterns that are stored; larger ones are computed again
        where they are needed, if they are a softmax of scores.
    """
    cfg = model.cfg
    mixer = _frozen_mixer(model, len(tokens_T), stored)
    params = jax.tree.map(lambda x: x.astype(jnp.float32), model.params)
    model = dataclasses.replace(model, params=params)
    names = [*frozen_sites(cfg, mixer), *score_sites(cfg, model.mixer)]
    names += [*mlp_norm_sites(cfg), features.site, "mlp.out"]
    tokens_BT = tokens_T[None]
    run = model.forward(
        tokens_BT,
        jnp.ones_like(tokens_BT, bool),
        record=dict.fromkeys(names, keep),
        logits_at=jnp.full((1, 1), tokens_T.size - 1),
    )
    records = {name: x[0] if name == "final.scale" else x[:, 0] for name, x in run.records.items()}
    params, blocks = model.params, model.params["blocks"]
    reading = _reading(features, records, blocks, cfg)
    final_TD, final_bias_D = norm_factor(params.get("final"), records["final.scale"], cfg)
    layers = freeze_layers(params, records, cfg, mixer)
    position_TD = jnp.zeros((tokens_T.size, cfg.hidden_size), jnp.float32)
    if cfg.rope is None:
        position_TD = rows(params["embed"]["positions"], jnp.arange(tokens_T.size))
    input_LTD = records[features.site]
    features = features.for_prompt(input_LTD)
    # Of the first tokens, where attention sinks are, a transcoder may not have been trained.
    has_features_T = jnp.arange(tokens_T.size) >= features.skip_start
    feature_LTF = jnp.where(has_features_T[:, None], features.encode(input_LTD), 0.0)
    reconstruction_LTD = features.decode(feature_LTF)
    if reading.skip_LDD is not None:
        reconstruction_LTD += jnp.einsum("LTD,LED->LTE", input_LTD, reading.skip_LDD)
    replacement = Replacement(
        layers=layers,
        reading=reading,
        final_TD=final_TD,
        final_bias_D=final_bias_D,
        token_TD=rows(params["embed"]["tokens"], tokens_T) * cfg.embed_scale,
        position_TD=position_TD,
        attention_bias_LTD=layers.constants(),
        decoder_bias_LD=features.decoder_bias_LD + reading.constant(),
        input_LTD=input_LTD,
        output_LTD=records["mlp.out"],
        error_LTD=records["mlp.out"] - reconstruction_LTD,
        logits_V=unembedding(params, cfg) @ run.hidden[0, -1],
        probability_V=jax.nn.softmax(run.logits[0, -1]),
        scores=freeze_scores(blocks["mixer"], layers.norm_bias_LD, records, cfg, model.mixer),
    )
    return replacement, feature_LTF


def _frozen_mixer(model: CircuitModel, T: int, stored: int) -> Any:
    """The mixer whose maps are frozen: the model's own, or one that stores no patterns."""
    cfg = model.cfg
    mixer_sites(model.mixer)
    plain = type(model.mixer) is AttentionMixer and model.gates is None
    large = 4 * cfg.num_layers * cfg.num_heads * T * T > stored
    return Recomputing(cfg) if plain and large else model.mixer


def _reading(features: Features, records: Any, blocks: Any, cfg: DecoderConfig) -> Reading:
    """How features read the stream of a prompt: through the norm before the MLP, or as it is."""
    divisor_LT1 = divisors(records, "ln2", cfg)
    if features.site == "mlp.in":
        factor_LTD, bias_LD = norm_factor(blocks.get("ln2"), divisor_LT1, cfg)
        return Reading(factor_LTD, bias_LD, features.skip_LDD, cfg.norm == "layer")
    one_LTD = jnp.ones((*divisor_LT1.shape[:-1], cfg.hidden_size), jnp.float32)
    return Reading(one_LTD, jnp.zeros_like(one_LTD[:, 0]), features.skip_LDD)
