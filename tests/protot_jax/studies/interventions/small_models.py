"""Models for tests: drawn at random, or built so that one prototype carries a word."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import lm_jax
from lm_jax.text.tokenizer_training import train_tokenizer
import protot_jax
from protot_jax.mixers import models
from protot_jax.mixers.prototypes import PrototypeMixer
from protot_jax.studies.interventions import Sentence
from protot_jax.training.config import PretrainConfig

WORDS = ("the", "house", "of", "a", "river", "and", "its", "people", "who", "met", "in", "town")
R = 4
# Of the built model: its prototype and the word that only this one takes.
CARRIER, KEY, QUESTION, TARGET = 2, "river", "who", "met"
# Written by no token.
EMPTY = 3


@functools.cache
def tokenizer():
    """Whole words, and the sub-tokens of others."""
    rng = np.random.default_rng(0)
    return train_tokenizer([" ".join(rng.choice(WORDS, 40)) for _ in range(40)], vocab_size=80)


@functools.cache
def drawn(seed: int = 0) -> protot_jax.TrainedModel:
    """Three layers of four prototypes with large random weights, so that edits are felt."""
    words = tokenizer()
    cfg, mixer = models.build_model(
        "protot",
        hidden_size=16,
        num_layers=3,
        vocab_size=words.vocab_size,
        context=32,
        tie_embeddings=False,
        num_prototypes=R,
    )
    params = lm_jax.init_params(jax.random.key(seed), cfg, mixer=mixer)
    rows = params["blocks"]["mixer"]["prototypes"]
    params["blocks"]["mixer"]["prototypes"] = 2.0 * rows
    decays = jax.random.normal(jax.random.key(seed + 1), (3, R))
    params["blocks"]["mixer"]["decay_logit"] = 1.0 + decays
    params["blocks"]["mixer"]["out"] = 6.0 * params["blocks"]["mixer"]["out"]
    params["unembed"] = 2.0 * params["unembed"]
    return protot_jax.TrainedModel(cfg, mixer, params, words, PretrainConfig(), seed, 0)


def built() -> protot_jax.TrainedModel:
    """One layer over one-hot tokens: after KEY and then QUESTION it says TARGET, by CARRIER alone.

    KEY is written to CARRIER and nothing else is; QUESTION reads CARRIER; the output turns KEY into
    TARGET. All other tokens write to and read from the two others, and EMPTY gets nothing.
    """
    words = tokenizer()
    V = D = words.vocab_size + -words.vocab_size % 8
    mixer = PrototypeMixer(
        num_prototypes=R, low_rank=False, shared_routing=False, conv_layers=0, first_temperature=1.0
    )
    cfg = lm_jax.DecoderConfig(
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=D,
        hidden_size=D,
        mlp_size=0,
        vocab_size=V,
        max_length=64,
        rope=lm_jax.Rope(theta=10_000.0),
        tie_embeddings=False,
    )
    params = lm_jax.init_params(jax.random.key(0), cfg, mixer=mixer)
    key, question, target = (one_id(words, word) for word in (KEY, QUESTION, TARGET))
    prototypes_RD = np.zeros((R, D), np.float32)
    prototypes_RD[CARRIER, key] = 3.0
    prototypes_RD[:CARRIER] = 3.0
    prototypes_RD[:CARRIER, key] = 0.0
    prototypes_RD[EMPTY] = -100.0
    read_DD = np.eye(D, dtype=np.float32)
    read_DD[question] = np.eye(D)[key]
    out_ED = np.zeros((D, D), np.float32)
    out_ED[key, target] = 0.5
    mixer_params = params["blocks"]["mixer"] | {
        "prototypes": jnp.asarray(prototypes_RD)[None],
        "read": jnp.asarray(read_DD)[None],
        "value": jnp.eye(D)[None],
        "out": jnp.asarray(out_ED)[None],
    }
    params["blocks"]["mixer"] = mixer_params
    params["embed"] = jax.tree.map(lambda _: jnp.eye(V), params["embed"])
    params["unembed"] = jnp.eye(D)
    return protot_jax.TrainedModel(cfg, mixer, params, words, PretrainConfig(), 0, 0)


def one_id(words, word: str) -> int:
    (i,) = words.encode(word, add_special_tokens=False)
    return i


def sentences() -> list[Sentence]:
    """Four, with targets of one and of several tokens."""
    texts = (
        ("house", "the people of the town met in a house"),
        ("river", "a river and the people who met in the river town"),
        ("town", "its people in the house of the town"),
        ("townhouse", "the river and the people of a townhouse"),
    )
    return [Sentence("place", target, text, f"line {i}") for i, (target, text) in enumerate(texts)]


def attention() -> protot_jax.TrainedModel:
    """A LLaMA of one layer, without prototypes."""
    words = tokenizer()
    cfg, mixer = models.build_model(
        "llama",
        hidden_size=16,
        num_layers=1,
        vocab_size=words.vocab_size,
        context=32,
        tie_embeddings=True,
    )
    params = lm_jax.init_params(jax.random.key(0), cfg, mixer=mixer)
    return protot_jax.TrainedModel(cfg, mixer, params, words, drawn().config, 0, 0)
