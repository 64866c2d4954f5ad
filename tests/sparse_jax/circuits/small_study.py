"""Models and prompts of a circuit study of seconds.

All prompts have the same shape, so that every program is compiled once.
"""

import json

import jax
import jax.numpy as jnp

import lm_jax
from sparse_jax.gates import model as sparse_model
from tests import tiny
from tests.sparse_jax.circuits.word_tokenizer import word_tokenizer

LAYERS, HEADS, COUNT = 2, 4, 5
SMALL = {"count": COUNT, "points": 3, "random_draws": 2, "edge_sample": 24, "resamples": 200}


def save_models(folder):
    """A random model, the same with gates, one in which only head 1.2 writes; prompts of a user."""
    tokenizer = word_tokenizer()
    cfg = tiny.decoder(
        vocab_size=tokenizer.vocab_size,
        num_heads=HEADS,
        num_kv_heads=2,
        max_length=64,
        family="llama",
    )
    params = jax.tree.map(lambda x: 3.0 * x, lm_jax.init_params(jax.random.key(1), cfg))
    lm_jax.save_pretrained(folder / "dense", cfg, params, tokenizer)
    base = lm_jax.load_pretrained(folder / "dense")
    gates = sparse_model.constant_gates(cfg, -1.0)
    sparse_model.save(folder / "sparse" / "model", base, gates, {})
    mixer = params["blocks"]["mixer"]
    mixer = mixer | {"o": jnp.zeros_like(mixer["o"]).at[1, 2].set(mixer["o"][1, 2])}
    planted = params | {"blocks": params["blocks"] | {"mixer": mixer}}
    lm_jax.save_pretrained(folder / "planted", cfg, planted, tokenizer)
    names = [("Mary", "John", "Anna"), ("Tom", "Alice", "Robert"), ("James", "Sarah", "Laura")]
    write_lines(
        folder / "mine.jsonl",
        *(example(*each) for each in (*names, *(each[::-1] for each in names[:2]))),
    )
    return folder


def example(name, other, third):
    """As many tokens as the longest prompt of the task `ioi` has."""
    text = "After the lunch , {} and {} went to the park . {} gave a ball to"
    return {
        "clean": text.format(name, other, name),
        "corrupt": text.format(third, other, third),
        "answers": [f" {other}"],
        "wrong_answers": [f" {name}"],
    }


def write_lines(path, *examples):
    path.write_text("\n".join(json.dumps(each) for each in examples), "utf-8")
    return str(path)
