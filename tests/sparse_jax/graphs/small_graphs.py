"""Graphs of small models of every kind of block, with transcoders far from a fit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.model import params as params_lib
from lm_jax.model.edits import Add, Replace
from lm_jax.model.frozen import frozen_sites, mlp_norm_sites
from lm_jax.model.sites import keep
from protot_jax import build_model
from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.graphs import attribute, linear
from sparse_jax.graphs.basis import writes
from sparse_jax.transcoders import transcoder as transcoders
from sparse_jax.transcoders.transcoder import Transcoder, TranscoderConfig
from tests.sparse_jax.circuits.small_models import circuit_model, moved, word_tokenizer

# Blocks, bias of the gates (None for a dense model), window of the transcoder.
MODELS = [
    ("llama", None, None),
    ("llama", 0.3, 1),
    ("gpt2", None, None),
    ("gpt2", 0.3, 2),
    ("gemma", None, 2),
    ("pythia", None, None),
    ("olmo2", None, None),
    ("stablelm", None, None),
    ("protot", None, None),
]
# Quick: gates, layer norm, biases and a window; rotations, per-head norms, norms after attention.
_QUICK = [("gpt2", 0.3, 2), ("gemma", None, 2)]


def _marked(models):
    return [
        each if each in _QUICK else pytest.param(each, marks=pytest.mark.slow) for each in models
    ]


EACH = _marked(MODELS)
# The models whose mixer has attention scores.
WITH_SCORES = [each for each in MODELS if each[0] != "protot"]
EACH_WITH_SCORES = _marked(WITH_SCORES)
LAYERS, TOKENS, FEATURES = 3, 6, 12


@functools.cache
def small_model(blocks, bias=None):
    if blocks == "protot":
        return prototype_model()
    changes = {"windows": (3, None, 3)} if blocks == "gemma" else {}
    return circuit_model(blocks, bias=bias, num_layers=LAYERS, scale=6.0, **changes)


def prototype_model():
    """As wide as the others, with three prototypes in a layer and a convolution that matters."""
    like = small_model("llama").cfg
    cfg, mixer = build_model(
        "protot",
        hidden_size=like.hidden_size,
        num_layers=LAYERS,
        vocab_size=like.vocab_size,
        context=like.max_length,
        tie_embeddings=True,
        num_prototypes=3,
    )
    start = lm_jax.init_params(jax.random.key(5), cfg, mixer=mixer)
    params = moved(start, 5, 6.0)
    # Six times as long they would leave most gates at 0 or 1.
    params["blocks"]["mixer"]["prototypes"] = start["blocks"]["mixer"]["prototypes"]
    return CircuitModel(params, cfg, mixer=mixer)


@functools.cache
def small_transcoder(window=None, kind="jumprelu"):
    cfg = TranscoderConfig(
        LAYERS, small_model("llama").cfg.hidden_size, FEATURES, kind, window, threshold=0.1
    )
    params = params_lib.init(jax.random.key(3), transcoders.spec(cfg))
    for seed, name in enumerate(("encoder_bias", "decoder_bias")):
        params[name] = 0.3 * jax.random.normal(jax.random.key(seed), params[name].shape)
    return Transcoder(params, cfg)


def small_tokens(seed=0):
    # Not of a model: one that is made while a test traces is not made of numbers.
    size = word_tokenizer().vocab_size
    return np.random.default_rng(seed).integers(0, size, TOKENS)


@functools.cache
def small_graph(blocks, bias=None, window=None):
    return attribute(small_model(blocks, bias), small_transcoder(window), small_tokens())


def dense_features(graph):
    """The activations of a graph's features `[L, T, F]`, 0 for all others."""
    cfg = graph.transcoder.cfg
    shape = (*graph.replacement.error_LTD.shape[:2], cfg.features)
    feature_LTF = np.zeros(shape, np.float32)
    rows = graph.nodes.filter(graph.kinds == "feature")
    at = tuple(np.asarray(rows[name]) for name in ("layer", "position", "feature"))
    feature_LTF[at] = np.asarray(rows["activation"])
    return feature_LTF


def widened(tree):
    """A tree with float64 in place of float32; to be called within `jax.enable_x64`."""
    return jax.tree.map(
        lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def active_writes(transcoder, table, feature_LTF):
    """What the features of a table write, of activations that are traced."""
    z_TZ = feature_LTF[table.layer_TZ, np.arange(TOKENS)[:, None], table.feature_TZ]
    z_TZ = jnp.where(table.activation_TZ != 0, z_TZ, 0.0)
    flat = table.layer_TZ.ravel(), table.feature_TZ.ravel(), z_TZ.ravel()
    write_LXD = writes(transcoder, *map(jnp.asarray, flat))
    return linear.Writes(write_LXD.reshape(LAYERS, *z_TZ.shape, -1))


def source_nodes(graph):
    """The nodes of all columns, as dictionaries."""
    return graph.nodes.slice(0, graph.num_sources).to_pylist()


def with_each_doubled(model, transcoder, nodes, sites=()):
    """Forward passes with all frozen, in each of which one source is there twice.

    Attention patterns or gates, divisors of norms and MLP outputs are those of the clean pass. A
    feature adds its decoders once more, an error or a token itself.

    Returns:
      the clean pass, of one row, and those of the nodes `[S]`; both record `sites` and `mlp.in`.
    """
    cfg = model.cfg
    frozen = [*frozen_sites(cfg, model.mixer), *mlp_norm_sites(cfg)]
    frozen += ["attn.q_norm.scale", "attn.k_norm.scale"] * (cfg.qk_norm != "none")
    sites = dict.fromkeys([*sites, "mlp.in"], keep)
    tokens_BT = jnp.asarray(small_tokens(), jnp.int32)[None]
    record = sites | dict.fromkeys([*frozen, "mlp.out"], keep)
    clean = model.forward(tokens_BT, jnp.ones_like(tokens_BT, bool), record=record)
    z_LTF = transcoder.encode(clean.records["mlp.in"][:, 0])
    output_LTD = clean.records["mlp.out"][:, 0]
    error_LTD = output_LTD - transcoder.decode(z_LTF)
    L, T, _ = output_LTD.shape
    kind_S = np.array([node["kind"] for node in nodes])
    layer_S, at_S, feature_S = (
        np.array([node[name] or 0 for node in nodes]) for name in ("layer", "position", "feature")
    )
    is_feature_S, is_error_S = kind_S == "feature", kind_S == "error"
    own_LS = np.arange(L)[:, None] == layer_S
    # A feature writes what the transcoder reconstructs of it alone.
    index_S = np.where(is_feature_S, feature_S, 0)
    alone_LSF = np.eye(FEATURES)[index_S] * (own_LS & is_feature_S)[:, :, None]
    alone_LSF = jnp.asarray(alone_LSF, jnp.float32) * z_LTF[layer_S, at_S, index_S][None, :, None]
    write_LSD = transcoder.decode(alone_LSF) - transcoder.params["decoder_bias"][:, None]
    own_LS1 = jnp.asarray((own_LS & is_error_S)[:, :, None])
    write_LSD = write_LSD + jnp.where(own_LS1, error_LTD[:, at_S], 0.0)
    is_token_S1 = jnp.asarray((kind_S == "token")[:, None])
    token_SD = model.params["embed"]["tokens"][np.where(kind_S == "token", feature_S, 0)]
    embedding_SD = jnp.where(is_token_S1, token_SD * cfg.embed_scale, 0.0)
    at_ST1 = jnp.asarray((at_S[:, None] == np.arange(T))[:, :, None], jnp.float32)
    S, write_LSTD = len(nodes), write_LSD[:, :, None] * at_ST1[None]
    embedding_STD = embedding_SD[:, None] * at_ST1

    def replaced(value):
        return Replace(value, jnp.ones([value.shape[0]] + [1] * (value.ndim - 1), bool))

    edits = {name: replaced(clean.records[name]) for name in frozen}
    edits["mlp.out"] = replaced(clean.records["mlp.out"] + write_LSTD)
    edits["embed"] = Add(embedding_STD)
    tokens_ST = jnp.broadcast_to(tokens_BT, (S, T))
    valid_ST = jnp.ones_like(tokens_ST, bool)
    return clean, model.forward(tokens_ST, valid_ST, edits=edits, record=sites)
