"""Inputs of single heads, of the MLP and of the logits; edits that share a state."""

from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.model.layers import project_heads
from lm_jax.model.lora import Adapted
from lm_jax.model.sites import HEAD_INPUT_SITES
from tests import rounding, tiny

B, T = 2, 7
CFG = tiny.decoder(num_heads=4, num_kv_heads=2, norm_placement="both", qk_norm="head")
INPUTS = ("q_input", "k_input", "v_input", "mlp_input", "final_input")


@pytest.fixture(scope="module")
def params():
    drawn = tiny.params(CFG)
    return jax.tree.map(lambda x: 8.0 * x if x.ndim > 2 else x, drawn)


def tokens(seed=1):
    return jax.random.randint(jax.random.key(seed), (B, T), 0, CFG.vocab_size)


def run(params, *, edits=None, **options):
    """One program, where `lm_jax.forward` by itself is one for every operation."""
    return jax.jit(
        lambda params, edits: lm_jax.forward(params, tokens(), CFG, edits=edits, **options)
    )(params, edits)


def test_inputs_are_the_residual_stream_and_change_no_logit(params):
    names = (*INPUTS, "resid_pre", "resid_mid", "resid_post")
    result = run(params, record=dict.fromkeys(names, lm_jax.keep))
    exact = rounding.expected(lambda p: run(p).logits, params)
    rounding.assert_within(result.logits, exact)
    stream = result.records
    for name, heads in (("q_input", 4), ("k_input", 2), ("v_input", 2)):
        assert stream[name].shape == (2, B, T, heads, CFG.hidden_size)
        np.testing.assert_array_equal(
            stream[name], stream["resid_pre"][:, :, :, None].repeat(heads, 3)
        )
    np.testing.assert_array_equal(stream["mlp_input"], stream["resid_mid"])
    np.testing.assert_array_equal(stream["final_input"], stream["resid_post"][-1])


def test_moving_all_inputs_of_a_block_is_moving_the_stream_less_the_shortcut(params):
    """x + f(x + d) = f'(x + d) - d, where f' moves the residual stream itself."""
    move = 0.3 * jax.random.normal(jax.random.key(2), (2, B, T, CFG.hidden_size))
    heads = {f"{name}_input": lm_jax.Add(move[:, :, :, None]) for name in ("q", "k", "v")}

    def by_inputs(params):
        return run(params, edits=heads | {"mlp_input": lm_jax.Add(move)}).logits

    def by_stream(params):
        edits = {"resid_pre": lm_jax.Add(move), "attn.out": lm_jax.Add(-move)}
        # At the middle the stream is itself again, and moves for the MLP alone.
        edits |= {"resid_mid": lm_jax.Add(move), "mlp.out": lm_jax.Add(-move)}
        return run(params, edits=edits).logits

    exact = rounding.expected(by_stream, params)
    rounding.assert_within(by_inputs(params), exact)
    assert np.abs(exact.values - np.asarray(run(params).logits)).max() > 0.01


def test_one_head_reads_what_the_others_do_not(params):
    """The query of head 1 alone moves, by what its projection makes of the moved input."""
    move = np.zeros((2, B, T, 4, CFG.hidden_size), np.float32)
    move[0, :, :, 1] = np.random.default_rng(0).normal(size=(B, T, CFG.hidden_size))
    names = ("attn.q", "attn.k", "attn.v")
    record = dict.fromkeys(names, lm_jax.keep)
    own = run(params, record=record | {"q_input": lm_jax.keep}).records
    moved = run(params, record=record, edits={"q_input": lm_jax.Add(jnp.asarray(move))}).records
    same = [0, 2, 3]
    np.testing.assert_array_equal(moved["attn.q"][0][:, :, same], own["attn.q"][0][:, :, same])
    for name in ("attn.k", "attn.v"):
        np.testing.assert_array_equal(moved[name][0], own[name][0])
    x = np.asarray(own["q_input"][0][:, :, 1], np.float64) + move[0, :, :, 1]
    x /= np.sqrt((x**2).mean(-1, keepdims=True) + CFG.norm_eps)
    x *= np.asarray(params["blocks"]["ln1"]["scale"][0])
    wanted = x @ np.asarray(params["blocks"]["mixer"]["q"][0, :, 1], np.float64)
    np.testing.assert_allclose(moved["attn.q"][0][:, :, 1], wanted, atol=2e-5)
    assert np.abs(np.asarray(moved["attn.q"] - own["attn.q"])[0, :, :, 1]).max() > 0.1


@struct.dataclass
class Start(lm_jax.StatefulEdit):
    def __call__(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        assert state is None
        return x, {"sum": jnp.zeros_like(x), "layers": jnp.zeros((), jnp.int32)}


@struct.dataclass
class Collect(lm_jax.StatefulEdit):
    weight: jax.Array

    def __call__(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        return x, {"sum": state["sum"] + self.weight * x, "layers": state["layers"] + 1}


@struct.dataclass
class AddSum(lm_jax.StatefulEdit):
    def __call__(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        return x + state["sum"] * state["layers"], state


WEIGHT = jnp.asarray([0.5, -2.0])


@pytest.fixture(scope="module")
def summed(params):
    """Logits with the weighted sum of both MLPs added by hand, and the slope of their sum."""
    mlps = run(params, record={"mlp.out": lm_jax.keep}).records["mlp.out"]
    added = 2 * (WEIGHT[0] * mlps[0] + WEIGHT[1] * mlps[1])
    wanted = rounding.expected(
        lambda x: run(params, edits={"final_input": lm_jax.Add(x)}).logits, added
    )

    def total(weight):
        mlps = run(params, record={"mlp.out": lm_jax.keep}).records["mlp.out"]
        added = 2 * (weight[0] * mlps[0] + weight[1] * mlps[1])
        return run(params, edits={"final_input": lm_jax.Add(added)}).logits.sum()

    return wanted, jax.jit(jax.grad(total))(WEIGHT)


@pytest.mark.parametrize("options", [{}, {"unroll": True}, {"remat": True}])
def test_a_state_passes_from_layer_to_layer(params, summed, options):
    """The logits also read a weighted sum of both MLPs, times the number of layers."""

    def total(weight):
        edits = {"embed": Start(), "mlp.out": Collect(weight), "final_input": AddSum()}
        logits = run(params, edits=edits, **options).logits
        return logits.sum(), logits

    slope, logits = jax.jit(jax.grad(total, has_aux=True))(WEIGHT)
    wanted, wanted_slope = summed
    rounding.assert_within(logits, wanted)
    np.testing.assert_allclose(slope, wanted_slope, rtol=1e-4)


def test_the_common_divisor_is_refused_beside_inputs_of_single_heads(params):
    edits = {"q_input": lm_jax.Freeze(), "ln1.scale": lm_jax.Freeze()}
    with pytest.raises(UsageError, match=r"ln1\.scale is one divisor .* use q_input\.scale"):
        run(params, edits=edits)
    assert {"q_input", "v_input.scale"} < HEAD_INPUT_SITES


def test_a_stateful_edit_without_a_layer_axis_is_refused(params):
    edits = {"embed": Start(), "mlp.out": Collect(jnp.ones(3))}
    with pytest.raises(UsageError, match=r"first axis L must be 2"):
        run(params, edits=edits)


def test_an_adapted_weight_projects_each_head_as_its_merged_weight():
    keys = jax.random.split(jax.random.key(3), 4)
    x, weight, down, up = (
        jax.random.normal(key, shape)
        for key, shape in zip(keys, [(B, T, 3, 5), (5, 3, 4), (5, 2), (2, 3, 4)], strict=True)
    )
    adapted = Adapted(weight, down, up, 0.5)
    bias = jnp.arange(12.0).reshape(3, 4)
    wanted = rounding.expected(
        lambda x, weight, down, up: project_heads(
            x, weight + 0.5 * jnp.einsum("DR,RNH->DNH", down, up), bias
        ),
        *(x, weight, down, up),
    )
    rounding.assert_within(project_heads(x, adapted, bias), wanted)


def test_a_scaled_gradient_leaves_the_value(params):
    def logit(q, factor):
        edits = {"attn.q": lm_jax.Add(q), "attn.z": lm_jax.ScaleGradient(factor)}
        return run(params, edits=edits).logits[:, -1, 3].sum()

    zero = jnp.zeros((2, B, T, 4, 8))
    (whole, slope), (same, half) = (
        jax.value_and_grad(logit)(zero, factor) for factor in (1.0, 0.5)
    )
    assert whole == same
    # The last layer's queries act through one z, which halves their gradient.
    np.testing.assert_allclose(half[1], 0.5 * slope[1], rtol=1e-6)
    assert np.abs(slope[1]).max() > 1e-3
