"""`gated_slots`: the recurrence against sums in float64, the chunked form against it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from iaj_kernels import gated_slots
from iaj_kernels.core import cases
from iaj_kernels.gated_slots import xla
from iaj_kernels.gated_slots.cases import SUITE
from iaj_kernels.gated_slots.config import Call, Config, Slots
from tests import rounding
from tests.kernels import comparison

SMALL = cases.Case(
    "small", {"B": 2, "T": 37, "N": 2, "M": 4, "H": 6, "E": 3}, options={"initial_state": True}
)
XLA = functools.partial(SUITE.call, SMALL, implementation="xla")
REFERENCE = functools.partial(SUITE.call, SMALL, implementation="reference")
both = pytest.mark.parametrize("implementation", ["reference", "xla"])


def by_sums(q, k, v, log_decay, slot_keys, slot_values):
    """What each slot holds as a sum over all tokens that wrote to it, in float64."""
    B, T, N, H = q.shape
    ends = {"end_keys": np.zeros(slot_keys.shape), "end_values": np.zeros(slot_values.shape)}
    out = np.zeros((B, T, N, v.shape[-1]))
    for b, n in np.ndindex(B, N):
        alpha_TM = np.exp(log_decay[b, :, n])
        for t in range(T):
            keys = np.prod(alpha_TM[: t + 1], 0)[:, None] * slot_keys[b, n]
            values = np.prod(alpha_TM[: t + 1], 0)[:, None] * slot_values[b, n]
            for s in range(t + 1):
                share_M = (1 - alpha_TM[s]) * np.prod(alpha_TM[s + 1 : t + 1], 0)
                keys += np.outer(share_M, k[b, s, n])
                values += np.outer(share_M, v[b, s, n])
            out[b, t, n] = special.softmax(keys @ q[b, t, n] / np.sqrt(H)) @ values
        ends["end_keys"][b, n], ends["end_values"][b, n] = keys, values
    return {"out": out, **ends}


def small(seed=0, **sizes):
    case = dataclasses.replace(SMALL, sizes={**SMALL.sizes, **sizes})
    return SUITE.make(case, jax.random.key(seed))


def head(arrays, steps):
    """The arrays of those steps alone."""
    return {k: v if k.startswith("slot") else v[:, steps] for k, v in arrays.items()}


def gradients(run):
    return jax.jit(jax.grad(lambda a: sum(jnp.sin(x).sum() for x in run(a).values())))


@functools.cache
def values_wanted():
    return rounding.expected(REFERENCE, small())


@functools.cache
def gradients_wanted():
    return rounding.expected(gradients(REFERENCE), small())


@both
def test_values_equal_sums_over_all_tokens_in_float64(implementation):
    arrays = small()
    doubles = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
    run = jax.jit(XLA if implementation == "xla" else REFERENCE)
    rounding.assert_within(run(arrays), values_wanted()._replace(values=by_sums(**doubles)))


def test_gradients_of_the_reference_equal_finite_differences():
    arrays = small(B=1, T=4, N=1, M=3, H=2, E=2)
    case = dataclasses.replace(SMALL, sizes=SMALL.sizes | {"H": 2})
    comparison.assert_slopes(SUITE, case, arrays, by_sums)


COMPARED = comparison.thinned(
    [comparison.parameter(case, nightly=False) for case in SUITE.using("test")]
)


@pytest.mark.parametrize("case", COMPARED)
def test_value_and_gradients_equal_the_reference(case):
    result = comparison.deviations(SUITE, case, "xla")
    assert all(each.ok for each in result), result


def test_the_longest_chunk_changes_nothing():
    for longest in (1, 7, 64):

        def run(arrays, longest=longest):
            state = Slots(arrays["slot_keys"], arrays["slot_values"])
            call = Call(*(arrays[name] for name in ("q", "k", "v", "log_decay")), state)
            out_BTNE, end = xla.run(Config(6**-0.5, longest), call)
            return {"out": out_BTNE, "end_keys": end.keys_BNMH, "end_values": end.values_BNME}

        rounding.assert_within(gradients(run)(small()), gradients_wanted(), str(longest))


@both
def test_a_slot_that_is_not_written_keeps_every_bit(implementation):
    arrays = small()
    # Slot 2 is never written, slot 0 before step 20 alone.
    log_decay = arrays["log_decay"].at[..., 2].set(0.0).at[:, 20:, :, 0].set(0.0)
    arrays = {name: 1e3 * x for name, x in arrays.items()} | {"log_decay": log_decay}
    run = functools.partial(SUITE.call, SMALL, implementation=implementation)
    half, whole = run(head(arrays, slice(0, 20))), run(arrays)
    for kind in ("keys", "values"):
        np.testing.assert_array_equal(
            whole[f"end_{kind}"][:, :, 2], arrays[f"slot_{kind}"][:, :, 2]
        )
        rest = head(arrays, slice(20, 37))
        rest |= {f"slot_{each}": half[f"end_{each}"] for each in ("keys", "values")}
        np.testing.assert_array_equal(
            run(rest)[f"end_{kind}"][:, :, 0], half[f"end_{kind}"][:, :, 0]
        )
        assert (whole[f"end_{kind}"][:, :, 1] != arrays[f"slot_{kind}"][:, :, 1]).all()


@both
def test_a_slot_for_each_token_is_attention_with_empty_slots(implementation):
    """Token t overwrites slot t, so that reading is causal attention over T - 1 - t zeros too."""
    T = 21
    arrays = small(T=T, M=T)
    erased_TM = jnp.where(jnp.eye(T) > 0, -1e4, 0.0)
    log_decay = jnp.broadcast_to(erased_TM[None, :, None], (2, T, 2, T))
    q, k, v = (np.asarray(arrays[name], np.float64) for name in "qkv")
    scores_BNTS = np.tril(np.einsum("btnh,bsnh->bnts", q, k))
    weights_BNTS = np.tril(special.softmax(scores_BNTS, -1))

    def run(q, k, v, implementation):
        return gated_slots(q, k, v, log_decay, implementation=implementation)

    drive = [arrays[name] for name in "qkv"]
    wanted = rounding.expected(lambda *drive: run(*drive, "reference"), *drive)
    result = jax.jit(run, static_argnums=3)(*drive, implementation)
    values = np.einsum("bnts,bsne->btne", weights_BNTS, v)
    rounding.assert_within(result, wanted._replace(values=values))


def test_no_output_depends_on_a_later_input():
    arrays, others = (jax.tree.map(np.asarray, small(seed)) for seed in (0, 1))
    run = jax.jit(XLA)
    before = np.asarray(run(arrays)["out"])
    for name in ("q", "k", "v", "log_decay"):
        for t in (0, 11, 12, 13, 36):
            changed = arrays[name].copy()
            changed[:, t] = others[name][:, t]
            after = np.asarray(run(arrays | {name: changed})["out"])
            np.testing.assert_array_equal(after[:, :t], before[:, :t])
            assert (after[:, t] != before[:, t]).any(), name


@pytest.mark.parametrize("prompt", [1, 29])
def test_prompt_then_single_steps_equals_the_parallel_form(prompt):
    arrays, run = small(), jax.jit(XLA)
    result = run(head(arrays, slice(0, prompt)))
    out = [result["out"]]
    for t in range(prompt, 37):
        state = {f"slot_{kind}": result[f"end_{kind}"] for kind in ("keys", "values")}
        result = run(head(arrays, slice(t, t + 1)) | state)
        out.append(result["out"])
    rounding.assert_within(result | {"out": jnp.concatenate(out, 1)}, values_wanted())


def test_outputs_keep_the_dtype_of_v_and_the_state_is_float32():
    arrays = small()
    arrays |= {name: arrays[name].astype(jnp.bfloat16) for name in ("q", "k", "v")}
    result = jax.eval_shape(XLA, arrays)
    assert result["out"].dtype == jnp.bfloat16
    assert result["end_keys"].dtype == result["end_values"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"q": jnp.zeros((2, 37, 6))}, ValueError, r"gated_slots: q has shape \(2, 37, 6\)"),
        ({"v": jnp.zeros((2, 36, 2, 3))}, ValueError, "gated_slots: v has T = 36"),
        ({"log_decay": jnp.zeros((2, 37, 3, 4))}, ValueError, "log_decay has N = 3"),
        ({"slot_keys": jnp.zeros((2, 2, 5, 6))}, ValueError, "initial_keys has M = 5"),
        ({"log_decay": jnp.zeros((2, 37, 2, 4), int)}, TypeError, "log_decay is int32; cast it"),
        ({"slot_values": jnp.zeros((2, 2, 4, 3), "bfloat16")}, TypeError, "initial_values is bflo"),
    ],
)
def test_an_error_names_the_argument(changed, error, text):
    with pytest.raises(error, match=text):
        XLA(small() | changed)


def test_an_empty_sequence_is_refused():
    with pytest.raises(ValueError, match="gated_slots: T = 0 steps"):
        XLA(head(small(), slice(0, 0)))
