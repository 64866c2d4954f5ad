"""Small models of every kind of block, with weights far from their start, on IOI prompts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import lm_jax
from sparse_jax.circuits.runs import Batch, CircuitModel
from sparse_jax.circuits.tasks import make_task
from sparse_jax.gates.model import constant_gates
from tests import tiny
from tests.sparse_jax.circuits.word_tokenizer import word_tokenizer

BLOCKS = {
    "llama": {"num_heads": 4, "num_kv_heads": 2, "family": "llama"},
    "gpt2": {**tiny.GPT2, "family": "gpt2"},
    "gemma": {
        "num_heads": 4,
        "num_kv_heads": 1,
        "norm_placement": "both",
        "qk_norm": "head",
        "norm_offset": 1.0,
        "windows": (4, None),
        "family": "gemma3",
    },
    "grouped": {
        **tiny.GPT2,
        "rope": lm_jax.Rope(),
        "num_heads": 4,
        "num_kv_heads": 2,
        "family": "",
    },
    # Norms that subtract the mean after attention and MLPs too.
    "sandwich": {**tiny.GPT2, "norm_placement": "both", "family": ""},
    "olmo2": {
        "num_heads": 4,
        "num_kv_heads": 2,
        "norm_placement": "post",
        "qk_norm": "projection",
        "family": "olmo2",
    },
    "stablelm": {
        "num_heads": 4,
        "num_kv_heads": 2,
        "norm": "layer",
        "qk_norm": "each_head",
        "rope": lm_jax.Rope(fraction=0.25),
        "family": "stablelm",
    },
    "pythia": {
        **tiny.GPT2,
        "rope": lm_jax.Rope(fraction=0.25),
        "parallel_residual": True,
        "activation": "gelu",
        "family": "gpt_neox",
    },
}


def ioi_batch(count=3, seed=0):
    return Batch.of(make_task("ioi", word_tokenizer(), count=count, seed=seed))


def circuit_model(blocks="llama", *, bias=None, seed=1, scale=12.0, **changes):
    """With gates of this bias, or dense. Biases and norm weights differ from 0 and 1."""
    options = BLOCKS[blocks] | {"vocab_size": word_tokenizer().vocab_size} | changes
    cfg = tiny.decoder(**options)
    params = lm_jax.init_params(jax.random.key(seed), cfg)
    params = moved(params, seed, scale)
    gates = None if bias is None else constant_gates(cfg, bias)
    return CircuitModel(params, cfg, gates)


def moved(params, seed, scale):
    """Weights times a scale; what starts as a constant with noise added."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    results = [
        scale * x if jnp.ptp(x) > 0 else x + 0.2 * jax.random.normal(key, x.shape)
        for x, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, results)


def some_edges(graph):
    """Into every kind of reader, from every kind of writer before it."""
    names, readers = graph.writer_names, graph.reader_names
    first = graph.layer_readers
    edges = [(0, 0), (0, graph.num_heads), (0, first - 1), (names.index("m0"), len(readers) - 1)]
    edges += [(names.index("a0.h1"), first + i) for i in range(graph.layer_readers)]
    edges += [(names.index("m0"), first + i) for i in range(0, graph.layer_readers, 2)]
    edges += [(names.index("a1.h0"), len(readers) - 1), (0, len(readers) - 1)]
    return np.array(edges)


def both_ways(function, batch):
    """A function of a batch, and of the batch with its prompts swapped: denoising by definition."""
    pair = jnp.stack([batch.clean_BT, batch.corrupt_BT])

    def one(clean_and_corrupt):
        clean_BT, corrupt_BT = clean_and_corrupt
        return function(dataclasses.replace(batch, clean_BT=clean_BT, corrupt_BT=corrupt_BT))

    return jax.lax.map(one, (pair, pair[::-1]))
