"""Effects of places by layer and position, against whole passes edited one by one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import UsageError
from sparse_jax.circuits import patching, place_patching
from sparse_jax.circuits.place_patching import PLACES, heads_of, place_effects
from sparse_jax.circuits.runs import measure
from tests import rounding
from tests.sparse_jax.circuits import oracle
from tests.sparse_jax.circuits.small_models import circuit_model, ioi_batch


@pytest.fixture(scope="module")
def batch():
    return ioi_batch()


def whole_passes(model, batch, place, direction):
    """The definition: one run from the first layer on for each layer, head and position."""
    site = PLACES[place]
    here, there = patching.sides(batch, direction)
    other = measure(model, batch, there, record={site: lm_jax.keep})[1][site]
    L, T = model.cfg.num_layers, here.shape[1]
    heads = heads_of(model.cfg, place)
    N = heads or 1
    before_B = measure(model, batch, here)[0]

    def patched(which):
        layer, head, position = which
        mask = jnp.zeros((L, 1, T, N), bool).at[layer, 0, position, head].set(True)
        mask = mask[..., None] if heads else mask
        edits = {site: lm_jax.Replace(other, mask)}
        return measure(model, batch, here, edits=edits)[0] - before_B

    grid = np.stack(np.meshgrid(*map(np.arange, (L, N, T)), indexing="ij"), -1).reshape(-1, 3)
    effects = jax.lax.map(patched, jnp.asarray(grid)).reshape(L, N, T, -1)
    return effects if heads else effects[:, 0]


@pytest.mark.parametrize(
    ("place", "blocks", "direction"),
    [
        ("resid_pre", "gemma", "noising"),
        ("attn_out", "gpt2", "denoising"),
        ("mlp_out", "pythia", "noising"),
        ("head_out", "llama", "denoising"),
        ("query", "gpt2", "noising"),
        ("key", "llama", "noising"),
        ("value", "llama", "denoising"),
    ],
)
def test_effects_are_those_of_whole_passes(batch, place, blocks, direction):
    model = circuit_model(blocks, bias=0.3)
    wanted = oracle.expected(lambda m: whole_passes(m, batch, place, direction), model)
    result = place_effects(model, batch, place, direction=direction, at_once=5)
    rounding.assert_within(result, wanted)
    # In every layer, and at several positions of the first: what the last one adds is read at one.
    large = np.abs(result) > 10 * wanted.bounds
    counts_L = large.any(-1).reshape(model.cfg.num_layers, -1).sum(1)
    assert counts_L.min() >= 1 and counts_L[0] > 1
    differ_BT = np.asarray(batch.clean_BT != batch.corrupt_BT)
    first = differ_BT.any(0).argmax()
    assert first > 0 and (result[..., :first, :] == 0).all()


def test_the_stream_that_enters_the_first_layer_is_the_token(batch):
    """Where a pair differs in one token, its stream there carries the whole change."""
    model = circuit_model()
    where = np.asarray(batch.clean_BT != batch.corrupt_BT).argmax(1)
    rows = np.arange(len(where))
    one = dataclasses.replace(
        batch,
        corrupt_BT=batch.clean_BT.at[rows, where].set(batch.corrupt_BT[rows, where]),
    )
    both = [measure(model, one, each)[0] for each in (one.corrupt_BT, one.clean_BT)]
    wanted = oracle.expected(
        lambda m: measure(m, one, one.corrupt_BT)[0] - measure(m, one, one.clean_BT)[0], model
    )
    effects = place_effects(model, one, "resid_pre")
    rounding.assert_within(effects[0, where, rows], wanted)
    rounding.assert_within(both[0] - both[1], wanted)
    # Elsewhere the streams that enter the first layer are the same.
    rest = effects[0].copy()
    rest[where, rows] = 0
    assert (rest == 0).all() and (effects[1] != 0).any()


def test_pairs_may_differ_at_different_positions(batch):
    """And the first position of any of them is patched."""
    model = circuit_model()
    rows = np.arange(len(batch.clean_BT))
    at = np.where(rows == 0, 2, 3)
    changed = (batch.clean_BT[rows, at] + 1) % model.cfg.vocab_size
    other = dataclasses.replace(batch, corrupt_BT=batch.clean_BT.at[rows, at].set(changed))
    effects = place_effects(model, other, "resid_pre")
    assert (effects[0, at, rows] != 0).all()
    assert (effects[0, 3, 0], effects[0, 2, 1]) == (0, 0)


def test_one_program_serves_all_layers_and_positions(batch):
    model = circuit_model()
    place_effects(model, batch, "mlp_out", at_once=3)
    size = place_patching._patch_places._cache_size()
    place_effects(model, batch, "mlp_out", at_once=3, direction="denoising")
    assert place_patching._patch_places._cache_size() == size


def test_an_unknown_place_or_direction_is_refused(batch):
    with pytest.raises(UsageError, match=r"no place 'resid'.*'resid_pre'"):
        place_effects(circuit_model(), batch, "resid")
    with pytest.raises(UsageError, match=r"no direction 'noise'.*'noising'"):
        place_effects(circuit_model(), batch, "resid_pre", direction="noise")
