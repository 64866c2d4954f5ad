"""Measures of heads against loops over queries and keys, and circuits of whole vocabularies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.inspect import head_measures
from lm_jax.inspect.head_measures import MEASURES
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
            seen = row[: query + 1]
            own = {
                "first": row[0],
                "previous": row[query - 1],
                "self": row[query],
                "duplicate": sum(row[k] for k in before),
                "induction": sum(row[k + 1] for k in before),
                "entropy": -sum(p * np.log(p) for p in seen if p) / np.log(query + 1),
                "written": norms[layer, head, query],
            }
            for name, value in own.items():
                sums[name][layer, head] += value
    return sums, repeated, norms, added


@pytest.mark.parametrize("blocks", MODELS)
def test_measures_are_those_of_loops(blocks):
    model = circuit_model(blocks)
    records = run_of(model).records
    found = head_measures.measure(
        model.params, model.cfg, records, jnp.asarray(TOKENS), jnp.asarray(COUNT)
    )
    sums, repeated, norms, added = loops(model, records)
    assert int(found.queries) == COUNT - 1 and int(found.repeated) == repeated == 4
    for name in MEASURES:
        np.testing.assert_allclose(found.sums[name], sums[name], rtol=1e-4, atol=1e-5)
    best = norms[:, :, 1:COUNT].argmax(-1) + 1
    np.testing.assert_array_equal(found.query_LN, best)
    layer, head = np.indices(best.shape)
    np.testing.assert_allclose(found.norm_LN, norms[layer, head, best], rtol=1e-4)
    wanted = added[layer, head, best]
    size = np.abs(wanted).max()
    np.testing.assert_allclose(found.added_LND, wanted, atol=1e-4 * size)
    patterns = np.asarray(records["attn.pattern"][:, 0])
    np.testing.assert_allclose(found.weight_LNS, patterns[layer, head, best], rtol=1e-6)


@pytest.mark.parametrize("blocks", ["llama", "gemma"])
def test_heads_add_up_to_what_attention_adds(blocks):
    """In models without biases."""
    model = circuit_model(blocks)
    records = run_of(model).records
    added = loops(model, records)[3].sum(1)[:, :COUNT]
    wanted = np.asarray(records["attn.out"][:, 0, :COUNT])
    np.testing.assert_allclose(added, wanted, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("blocks", ["llama", "gpt2", "gemma"])
def test_copying_is_of_the_eigenvalues_of_the_whole_circuit(blocks):
    model = circuit_model(blocks)
    cfg, p = model.cfg, jax.tree.map(lambda x: np.asarray(x, np.float64), model.params)
    embed, weight = p["embed"]["tokens"], np.asarray(lm_jax.model.layers.unembedding(p, cfg))
    if cfg.norm == "layer":
        embed, weight = (x - x.mean(1, keepdims=True) for x in (embed, weight))
    got = head_measures.copying(model.params, cfg)
    of = cfg.num_heads // cfg.num_kv_heads
    for layer, head in np.ndindex(got.shape):
        into = embed * (p["blocks"]["ln1"]["scale"][layer] + cfg.norm_offset)
        moved = into @ p["blocks"]["mixer"]["v"][layer, :, head // of]
        moved = moved @ p["blocks"]["mixer"]["o"][layer, head]
        if "ln1_post" in cfg.norm_names:
            moved = moved * (p["blocks"]["ln1_post"]["scale"][layer] + cfg.norm_offset)
        circuit_VV = (moved * (p["final"]["scale"] + cfg.norm_offset)) @ weight.T
        values = np.linalg.eigvals(circuit_VV)
        wanted = values.real.sum() / np.abs(values).sum()
        np.testing.assert_allclose(got[layer, head], wanted, atol=1e-6)
    assert got.max() - got.min() > 0.1


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
