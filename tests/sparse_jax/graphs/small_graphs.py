"""Graphs of small models of every kind of block, with transcoders far from a fit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import lm_jax
from lm_jax.model import params as params_lib
from protot_jax import build_model
from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.graphs import attribute
from sparse_jax.transcoders import transcoder as transcoders
from sparse_jax.transcoders.transcoder import Transcoder, TranscoderConfig
from tests.sparse_jax.circuits.small_models import circuit_model, moved

# Blocks, bias of the gates (None for a dense model), window of the transcoder.
MODELS = [
    ("llama", None, None),
    ("llama", 0.3, 1),
    ("gpt2", None, None),
    ("gpt2", 0.3, 2),
    ("gemma", None, 2),
    ("pythia", None, None),
    ("protot", None, None),
]
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
    size = small_model("llama").cfg.vocab_size
    return np.random.default_rng(seed).integers(0, size, TOKENS)


@functools.cache
def small_graph(blocks, bias=None, window=None):
    return attribute(small_model(blocks, bias), small_transcoder(window), small_tokens())


def widened(tree):
    """A tree with float64 in place of float32; to be called within `jax.enable_x64`."""
    return jax.tree.map(
        lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )
