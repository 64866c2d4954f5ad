"""Measures of heads against loops over queries and keys, and circuits of whole vocabularies."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.inspect import head_measures
from lm_jax.inspect.head_measures import MEASURES, WEIGHTS
from tests.sparse_jax.circuits.small_models import circuit_model

# Grouped keys; layer norm and biases; norms before and after attention, offsets, windows; layer
# norm after attention; norms after attention alone.
MODELS = ["llama", "gpt2", "gemma", "sandwich", "olmo2"]
TOKENS, COUNT = [3, 5, 3, 7, 5, 3, 2, 7, 0, 0], 8


def run_of(model):
    tokens_1T = jnp.asarray([TOKENS], jnp.int32)
    record = dict.fromkeys((*head_measures.sites(model.cfg), "attn.out"), lm_jax.keep)
    return model.forward(tokens_1T, (jnp.arange(len(TOKENS)) < COUNT)[None], record=record)


def loops(model, records):
    """Sums, norms and additions, one query and one head at a time, in float64."""
    cfg = model.cfg
    at = {name: np.asarray(records[name][:, 0], np.float64) for name in head_measures.sites(cfg)}
    pattern, z, stream = (at[name] for name in ("attn.pattern", "attn.z", "resid_pre"))
    L, N, T, _ = pattern.shape
    output = np.asarray(model.params["blocks"]["mixer"]["o"], np.float64)
    sums = {name: np.zeros((L, N)) for name in MEASURES}
    equal = {name: np.zeros(L) for name in WEIGHTS}
    norms, added = np.zeros((L, N, T)), np.zeros((L, N, T, cfg.hidden_size))
    repeated = 0
    for query in range(COUNT):
        before = [k for k in range(query) if TOKENS[k] == TOKENS[query]]
        repeated += bool(before) and query > 0
        for layer, head in np.ndindex(L, N):
            row = pattern[layer, head, query]
            adds = z[layer, query, head] @ output[layer, head]
            if "ln1_post.scale" in at:
                adds = adds - adds.mean() if cfg.norm == "layer" else adds
                weight = np.asarray(model.params["blocks"]["ln1_post"]["scale"][layer], np.float64)
                adds = adds * (weight + cfg.norm_offset) / at["ln1_post.scale"][layer, query]
            added[layer, head, query] = adds
            norms[layer, head, query] = np.linalg.norm(adds) / np.linalg.norm(stream[layer, query])
            if query == 0:
                continue
            window = cfg.layer_windows[layer] or T
            keys = range(max(0, query - window + 1), query + 1)
            shares = [row[k] / sum(row) for k in keys if row[k]]
            own = {
                "first": row[0],
                "previous": row[query - 1],
                "self": row[query],
                "duplicate": sum(row[k] for k in before),
                "induction": sum(row[k + 1] for k in before),
                "entropy": -sum(p * np.log(p) for p in shares) / np.log(len(keys)),
                "written": norms[layer, head, query],
            }
            for name, value in own.items():
                sums[name][layer, head] += value
            places = {
                "first": [0],
                "previous": [query - 1],
                "self": [query],
                "duplicate": before,
                "induction": [k + 1 for k in before],
            }
            for name, where in places.items():
                equal[name][layer] += len(set(where) & set(keys)) / len(keys) / N
    return sums, equal, repeated, norms, added


@pytest.mark.parametrize("blocks", MODELS)
def test_measures_are_those_of_loops(blocks):
    model = circuit_model(blocks)
    records = run_of(model).records
    found = head_measures.measure(
        model.params, model.cfg, records, jnp.asarray(TOKENS), jnp.asarray(COUNT)
    )
    sums, equal, repeated, norms, added = loops(model, records)
    assert int(found.queries) == COUNT - 1 and int(found.repeated) == repeated == 4
    for name in MEASURES:
        np.testing.assert_allclose(found.sums[name], sums[name], rtol=1e-4, atol=1e-5)
    for name in WEIGHTS:
        np.testing.assert_allclose(found.equal[name], equal[name], rtol=1e-5, atol=1e-6)
    best = norms[:, :, 1:COUNT].argmax(-1) + 1
    np.testing.assert_array_equal(found.query_LN, best)
    layer, head = np.indices(best.shape)
    np.testing.assert_allclose(found.norm_LN, norms[layer, head, best], rtol=1e-4)
    wanted = added[layer, head, best]
    size = np.abs(wanted).max()
    np.testing.assert_allclose(found.added_LND, wanted, atol=1e-4 * size)
    patterns = np.asarray(records["attn.pattern"][:, 0])
    np.testing.assert_allclose(found.weight_LNS, patterns[layer, head, best], rtol=1e-6)


def test_entropy_is_of_what_gates_leave_open_and_padding_counts_for_nothing():
    """Uneven sums of weights, a query without any, and a row of the embedding that is 0."""
    model = circuit_model("llama")
    params = jax.tree.map(jnp.asarray, model.params)
    params["embed"]["tokens"] = params["embed"]["tokens"].at[TOKENS[-1]].set(0.0)
    model = dataclasses.replace(model, params=params)
    records = dict(run_of(model).records)
    open_LNTS = np.random.default_rng(0).random(records["attn.pattern"][:, 0].shape) < 0.6
    open_LNTS[:, :, 3] = False
    records["attn.pattern"] = records["attn.pattern"] * open_LNTS[:, None]
    found = head_measures.measure(
        model.params, model.cfg, records, jnp.asarray(TOKENS), jnp.asarray(COUNT)
    )
    pattern = np.asarray(records["attn.pattern"][:, 0], np.float64)
    for layer, head in np.ndindex(pattern.shape[:2]):
        total = 0.0
        for query in range(1, COUNT):
            shares = [
                p / pattern[layer, head, query].sum() for p in pattern[layer, head, query] if p
            ]
            total -= sum(p * np.log(p) for p in shares) / np.log(query + 1)
        np.testing.assert_allclose(found.sums["entropy"][layer, head], total, rtol=1e-4, atol=1e-6)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    assert (np.asarray(found.sums["written"]) > 0).all()


@pytest.mark.parametrize("blocks", ["llama", "gemma", "olmo2"])
def test_heads_add_up_to_what_attention_adds(blocks):
    """In models without biases."""
    model = circuit_model(blocks)
    records = run_of(model).records
    added = loops(model, records)[4].sum(1)[:, :COUNT]
    wanted = np.asarray(records["attn.out"][:, 0, :COUNT])
    np.testing.assert_allclose(added, wanted, atol=1e-4 * np.abs(wanted).max())


def uneven(model):
    """The model with weights of its last norm that differ by far."""
    params = jax.tree.map(jnp.asarray, model.params)
    scale_D = params["final"]["scale"]
    params["final"]["scale"] = scale_D * jnp.exp(
        jax.random.normal(jax.random.key(9), scale_D.shape)
    )
    return dataclasses.replace(model, params=params)


def linear_norm(x, norm, cfg):
    """A norm of rows without its divisor and bias; nothing where the model has no such norm."""
    if norm is None:
        return x
    x = x - x.mean(1, keepdims=True) if cfg.norm == "layer" else x
    return x * (norm + cfg.norm_offset)


@pytest.mark.parametrize("blocks", [*MODELS, "pythia"])
def test_copying_is_of_the_eigenvalues_of_the_whole_circuit(blocks):
    """Every token's embedding, moved to logits a step at a time."""
    model = uneven(circuit_model(blocks))
    cfg, p = model.cfg, jax.tree.map(lambda x: np.asarray(x, np.float64), model.params)
    weight = np.asarray(lm_jax.model.layers.unembedding(p, cfg))
    got = head_measures.copying(model.params, cfg)
    of = cfg.num_heads // cfg.num_kv_heads

    def norm(name, layer):
        own = p["blocks"].get(name)
        return None if own is None else own["scale"][layer]

    for layer, head in np.ndindex(got.shape):
        moved = linear_norm(p["embed"]["tokens"], norm("ln1", layer), cfg)
        moved = moved @ p["blocks"]["mixer"]["v"][layer, :, head // of]
        moved = moved @ p["blocks"]["mixer"]["o"][layer, head]
        moved = linear_norm(moved, norm("ln1_post", layer), cfg)
        circuit_VV = linear_norm(moved, p["final"]["scale"], cfg) @ weight.T
        values = np.linalg.eigvals(circuit_VV)
        wanted = values.real.sum() / np.abs(values).sum()
        np.testing.assert_allclose(got[layer, head], wanted, atol=1e-6)
    assert got.max() - got.min() > 0.1


@pytest.mark.parametrize("blocks", ["gpt2", "pythia"])
def test_copying_does_not_see_what_a_norm_takes_out(blocks):
    model = uneven(circuit_model(blocks))
    before = head_measures.copying(model.params, model.cfg)
    mixer = dict(model.params["blocks"]["mixer"])
    # A direction that is the same in all coordinates, in the output of every head.
    mixer["o"] = mixer["o"] + jnp.linspace(-3.0, 3.0, mixer["o"].shape[2])[None, None, :, None]
    blocks = model.params["blocks"] | {"mixer": mixer}
    after = head_measures.copying(model.params | {"blocks": blocks}, model.cfg)
    np.testing.assert_allclose(after, before, atol=1e-6)


def test_raised_and_lowered_tokens_are_those_of_the_logits():
    model = circuit_model("gpt2")
    cfg, p = model.cfg, model.params
    added = jax.random.normal(jax.random.key(0), (cfg.num_layers, cfg.num_heads, cfg.hidden_size))
    raised, lowered = head_measures.promoted(p, cfg, added, 3)
    x = np.asarray(added, np.float64)
    x = (x - x.mean(-1, keepdims=True)) * np.asarray(p["final"]["scale"])
    logits = x @ np.asarray(lm_jax.model.layers.unembedding(p, cfg), np.float64).T
    order = np.argsort(logits, axis=-1)
    np.testing.assert_array_equal(raised, order[..., ::-1][..., :3])
    np.testing.assert_array_equal(lowered, order[..., :3])
    # Rows of the embedding beyond the tokens are no tokens.
    order = np.argsort(logits[..., :11], axis=-1)
    raised, lowered = head_measures.promoted(p, cfg, added, 3, tokens=11)
    np.testing.assert_array_equal(raised, order[..., ::-1][..., :3])
    np.testing.assert_array_equal(lowered, order[..., :3])
