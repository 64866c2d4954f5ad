"""Splits of readouts against whole Jacobians, entry by entry, and their sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.inspect import jacobian_lens, lens_split
from sparse_jax.circuits.rules import EXACT
from sparse_jax.circuits.runs import HeldGates
from tests.sparse_jax.circuits.small_models import circuit_model

LENGTH, SKIPPED, LAYER = 7, 1, 0
# Grouped keys; norms around attention, windows; parallel blocks; layer norm and biases.
MODELS = ["llama", "gemma", "pythia", "gpt2"]


def small(blocks, **options):
    if blocks == "gemma":
        options |= {"windows": (3, None, 3)}
    return circuit_model(blocks, num_layers=3, scale=8.0, **options)


def prompts(model, count=2):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, model.cfg.vocab_size, (count, LENGTH)).tolist()
    # The second is shorter, and padded.
    return [ids[0], *(each[:-2] for each in ids[1:])]


def directions(model):
    rng = np.random.default_rng(1)
    return rng.normal(size=(2, model.cfg.hidden_size)).astype(np.float32)


def split_of(model, own=None, ids=None):
    h_D, u_D = directions(model)
    return lens_split.split(
        model if own is None else own,
        prompts(model) if ids is None else ids,
        layer=LAYER,
        stream_D=h_D,
        readout_D=u_D,
        length=LENGTH,
        skipped=SKIPPED,
    )


@pytest.mark.parametrize("blocks", MODELS)
def test_heads_and_what_passes_them_by_sum_to_the_readout_of_the_lens(blocks):
    model = small(blocks)
    h_D, u_D = directions(model)
    found = split_of(model)
    lens = jacobian_lens.fit(
        model, prompts(model), length=LENGTH, rows=model.cfg.hidden_size, skipped=SKIPPED
    )
    wanted = u_D @ lens.matrix_SDD[LAYER] @ h_D
    size = np.abs(found.head_LN).sum() + np.abs(found.bypass_L).max()
    assert abs(found.total - wanted) <= 1e-4 * size
    assert found.certificate().max() < 1e-5
    assert found.prompts == 2
    each = [split_of(model, ids=[ids]).head_LN for ids in prompts(model)]
    np.testing.assert_allclose(found.error_LN, np.abs(each[0] - each[1]) / 2, rtol=1e-3, atol=1e-6)
    # Up to the layer nothing passes a head; above it heads matter.
    assert not found.head_LN[: LAYER + 1].any()
    np.testing.assert_allclose(found.bypass_L[: LAYER + 1], found.total, rtol=1e-5)
    assert np.abs(found.head_LN[LAYER + 1 :]).min(1).max() > 1e-4 * size


@pytest.mark.parametrize("blocks", ["llama", "pythia"])
def test_a_head_s_share_is_what_goes_when_its_output_is_held(blocks):
    """Each head of each layer held at its value in turn, by forward differentiation."""
    model = small(blocks)
    h_D, u_D = directions(model)
    (ids,) = prompts(model, 1)
    found = split_of(model, ids=[ids])
    tokens_1T = jnp.asarray([ids], jnp.int32)
    valid_1T = jnp.ones_like(tokens_1T, bool)
    counted_T = np.asarray(jacobian_lens.counted(tokens_1T, LENGTH, SKIPPED))
    L, N = model.cfg.num_layers, model.cfg.num_heads
    clean = model.forward(tokens_1T, valid_1T, record={"attn.z": lm_jax.keep}).records["attn.z"]

    def readout(scale, head_LN):
        held = jnp.asarray(head_LN, bool)[:, None, None, :, None]
        moved_TD = scale * counted_T[:, None] * h_D[None] / counted_T.sum()
        offset_LTD = jnp.zeros((L, *moved_TD.shape)).at[LAYER].set(moved_TD)
        edits = {
            "resid_post": lm_jax.Add(offset_LTD[:, None]),
            "attn.z": lm_jax.Replace(clean, jnp.broadcast_to(held, clean.shape)),
        }
        record = {"final_input": lm_jax.keep}
        run = model.forward(tokens_1T, valid_1T, edits=edits, record=record)
        return jnp.einsum("TD,T,D->", run.records["final_input"][0], counted_T, u_D)

    def derivative(head_LN):
        return float(jax.jvp(lambda s: readout(s, head_LN), (0.0,), (1.0,))[1])

    whole = derivative(np.zeros((L, N), bool))
    assert whole == pytest.approx(found.total, rel=1e-4)
    size = np.abs(found.head_LN).max()
    for layer in range(LAYER + 1, L):
        for head in range(N):
            without = np.zeros((L, N), bool)
            without[layer, head] = True
            share = whole - derivative(without)
            assert found.head_LN[layer, head] == pytest.approx(share, abs=1e-3 * size)


def test_only_open_edges_of_a_sparse_model_carry_a_readout():
    dense, model = small("llama"), small("llama", bias=0.3)
    own = HeldGates(model)
    found = split_of(model, own)
    assert found.certificate().max() < 1e-5
    assert found.edges < split_of(dense).edges
    (ids,) = prompts(model, 1)
    h_D, u_D = directions(model)
    each = lens_split._split(own, np.asarray([ids]), LENGTH, LAYER, h_D, u_D, skipped=SKIPPED)
    tokens_1T = jnp.asarray([ids], jnp.int32)
    run = model.forward(
        tokens_1T,
        jnp.ones_like(tokens_1T, bool),
        rules=EXACT,
        record={"attn.pattern": lm_jax.keep},
    )
    closed = np.asarray(run.records["attn.pattern"][:, 0]) == 0
    share = np.asarray(each.share_LNTS)
    assert not share[closed].any() and share[~closed].any()
    # Closed edges that causality does not close.
    assert (closed & np.tri(LENGTH, dtype=bool)).any()


def test_edges_are_counted_until_they_carry_nine_tenths():
    assert lens_split._carrying(np.array([1.0, 5.0, 0.0, 4.0])) == 2
    assert lens_split._carrying(np.array([1.0, 1.0, 1.0, 1.0])) == 4
    assert lens_split._carrying(np.zeros(3)) == 0


def test_what_does_not_fit_is_named():
    model = small("llama")
    h_D, u_D = directions(model)
    options = {"stream_D": h_D, "readout_D": u_D, "length": LENGTH, "skipped": SKIPPED}
    with pytest.raises(UsageError, match=r"layer = 2 is outside 0\.\.1, the last left out"):
        lens_split.split(model, prompts(model), layer=2, **options)
    with pytest.raises(UsageError, match=r"stream_D has shape \(3,\); expected"):
        lens_split.split(model, prompts(model), layer=0, **options | {"stream_D": h_D[:3]})
    with pytest.raises(UsageError, match=r"none has 3 tokens or more; give longer"):
        lens_split.split(model, [[1, 2]], layer=0, **options)
    with pytest.raises(UsageError, match=r"length = 2 must be 3 \(two more than skipped\)"):
        lens_split.split(model, prompts(model), layer=0, **options | {"length": 2})
    with pytest.raises(UsageError, match=r"the model has gates, .* hold them, HeldGates"):
        split_of(small("llama", bias=0.3))
