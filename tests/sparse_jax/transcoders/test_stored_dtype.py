"""Matrices in bfloat16 stay so in memory on a GPU, and what is computed of them is float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import lm_jax
from sparse_jax.graphs import attribute
from sparse_jax.transcoders import files
from sparse_jax.transcoders.layouts import tensors
from tests.sparse_jax.graphs.circuit_tracer_inputs import write

TOKENS = np.array([0, 5, 17, 200, 3, 44, 9])
# Entries are sums of the same numbers in float32; a program of other dtypes may add in another
# order: the square root of fewer than 4,000 roundings, of a row's absolute sum.
ENTRIES = 4_000**0.5 * 2.0**-24


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(tensors, "keeps_halves", lambda: True)


@pytest.fixture(params=["llama_clt", "llama_skip"])
def folders(request, tmp_path):
    """A model, a dictionary in bfloat16, and one with the same numbers in float32."""
    model, dictionary = write(request.param, tmp_path)
    rounded = tmp_path / "rounded"
    rounded.mkdir()
    (rounded / "config.yaml").write_text((dictionary / "config.yaml").read_text())
    for file in dictionary.glob("*.safetensors"):
        half = {name: x.astype(jnp.bfloat16) for name, x in load_file(file).items()}
        save_file(half, file)
        save_file({k: x.astype(np.float32) for k, x in half.items()}, rounded / file.name)
    return model, dictionary, rounded


def test_matrices_stay_bfloat16_and_biases_become_float32(folders):
    _, dictionary, _ = folders
    params = files.load(dictionary)[0].params
    halves = {leaf.dtype for leaf in jax.tree.leaves((params["encoder"], params["decoder"]))}
    assert halves == {jnp.dtype(jnp.bfloat16)}
    others = {k: x for k, x in params.items() if k not in ("encoder", "decoder")}
    assert {leaf.dtype for leaf in jax.tree.leaves(others)} == {jnp.dtype(jnp.float32)}


def test_on_a_cpu_they_become_float32(folders, monkeypatch):
    """Its programs widen whole matrices, which would then be there twice."""
    monkeypatch.undo()
    params = files.load(folders[1])[0].params
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}


def test_a_graph_is_that_of_the_same_numbers_in_float32(folders):
    model, *dictionaries = folders
    loaded = lm_jax.load_pretrained(str(model))
    half, wide = (attribute(loaded, files.load(each)[0], TOKENS) for each in dictionaries)
    assert half.adjacency.dtype == np.float32
    for name in ("layer", "position", "feature"):
        assert half.nodes[name].equals(wide.nodes[name])
    size_R1 = np.abs(wide.adjacency).sum(1, keepdims=True)
    assert (np.abs(half.adjacency - wide.adjacency) <= ENTRIES * size_R1).all()
    assert half.certificate().max() < 1e-5


def test_what_is_computed_of_them_is_float32(folders):
    _, dictionary, rounded = folders
    half, wide = (files.load(each)[0] for each in (dictionary, rounded))
    L, D, F = (getattr(half.cfg, name) for name in ("num_layers", "hidden_size", "features"))
    input_LXD = jax.random.normal(jax.random.key(0), (L, 3, D))
    layer_X, feature_X = jnp.arange(L), jnp.arange(L) + F // 2
    for of in (
        lambda each: each.reconstruct(input_LXD),
        lambda each: each.encode_some(input_LXD, layer_X, feature_X),
        lambda each: each.decoder_norms(),
        lambda each: each.readings(layer_X, layer_X, feature_X)[0],
    ):
        found, expected = of(half), of(wide)
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
