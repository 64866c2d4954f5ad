"""`selective_scan`: the recurrence against float64, and the chunked form against the recurrence."""

import dataclasses
import functools
import itertools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from iaj_kernels import selective_scan
from iaj_kernels.core import cases, dispatch
from iaj_kernels.selective_scan import xla
from iaj_kernels.selective_scan.cases import SUITE
from iaj_kernels.selective_scan.config import GPU_UNROLL, Call, Config, config_for
from tests import rounding, traced
from tests.kernels import comparison

SMALL = cases.Case("small", {"B": 2, "T": 40, "I": 6, "J": 4}, options={"initial_state": True})
NAMES = ("u", "delta", "A", "B", "C", "D", "state")

XLA = functools.partial(SUITE.call, SMALL, implementation="xla")
REFERENCE = functools.partial(SUITE.call, SMALL, implementation="reference")


def by_loops(u, delta, A, B, C, D, state):
    """The recurrence written out for every batch, step, channel and state entry, in float64."""
    y, h = np.zeros(u.shape), np.array(state, np.float64)
    for b, t, i in np.ndindex(*u.shape):
        for j in range(A.shape[1]):
            decay = np.exp(delta[b, t, i] * A[i, j])
            h[b, i, j] = decay * h[b, i, j] + delta[b, t, i] * B[b, t, j] * u[b, t, i]
            y[b, t, i] += C[b, t, j] * h[b, i, j]
        y[b, t, i] += D[i] * u[b, t, i]
    return {"y": y, "end": h}


def small(seed=0, **sizes):
    case = cases.Case("small", {**SMALL.sizes, **sizes}, options=SMALL.options)
    return SUITE.make(case, jax.random.key(seed))


def head(arrays, steps):
    """The arrays of those steps alone."""
    return {k: v[:, steps] if k in ("u", "delta", "B", "C") else v for k, v in arrays.items()}


def gradients(run):
    return jax.jit(jax.grad(lambda a: sum(jnp.sin(x).sum() for x in run(a).values())))


# Compiled once for each shape, and most tests take the same.
JITTED, GRADIENTS = jax.jit(XLA), gradients(XLA)


@functools.cache
def values_wanted(**sizes):
    return rounding.expected(REFERENCE, small(**sizes))


@functools.cache
def gradients_wanted(**sizes):
    return rounding.expected(gradients(REFERENCE), small(**sizes))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_values_equal_loops_in_float64(implementation):
    arrays = small(T=19)
    doubles = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
    got = jax.jit(functools.partial(SUITE.call, SMALL, implementation=implementation))(arrays)
    want = by_loops(*(doubles[name] for name in NAMES))
    rounding.assert_within(got, values_wanted(T=19)._replace(values=want))


def test_gradients_of_the_reference_equal_finite_differences():
    arrays = small(B=1, T=5, I=2, J=3)
    comparison.assert_slopes(SUITE, SMALL, arrays, by_loops)


@pytest.mark.parametrize("case", SUITE.using("test"), ids=lambda case: case.name)
def test_value_and_gradients_equal_the_reference(case):
    result = comparison.deviations(SUITE, case, "xla")
    assert all(each.ok for each in result), result


def test_chunk_and_unroll_change_nothing():
    for config in (Config(7, 4), Config(64, 1)):

        def run(arrays, config=config):
            u, delta, A, B, C, D, state = (arrays[name] for name in NAMES)
            y_BTI, end_BIJ = xla.run(config, Call(u, delta, A, B, C, state))
            return {"y": y_BTI + D[None, None] * u, "end": end_BIJ}

        rounding.assert_within(gradients(run)(small()), gradients_wanted(), str(config))


def test_a_gpu_has_its_steps_unrolled():
    sizes = {"T": 2048, "J": 16}
    gpu, cpu = (
        config_for(sizes, jnp.float32, target)
        for target in (dispatch.Target("gpu", "NVIDIA H200"), dispatch.INTERPRETER)
    )
    assert gpu == dataclasses.replace(cpu, unroll=GPU_UNROLL)
    arrays = small(T=64)
    with dispatch.on(dispatch.Target("gpu", "NVIDIA H200")):
        # A function of its own, or the one that was traced for a CPU would be taken.
        unrolled = jax.jit(lambda arrays: XLA(arrays))(arrays)
    rounding.assert_within(unrolled, values_wanted(T=64))


@pytest.mark.optimised
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_constant_input_reaches_the_fixed_point(implementation):
    """h = sum_k exp(k delta A) delta B u, a geometric series."""
    # The step of float32 that is nearest to 0.1, in both.
    delta, rate, T = float(np.float32(0.1)), -0.5, 60

    def run(one, implementation):
        y_BTI, state_BIJ = selective_scan(
            3.0 * one,
            delta * one,
            jnp.full((1, 1), rate),
            2.0 * one,
            one,
            return_state=True,
            implementation=implementation,
        )
        return y_BTI[0, :, 0], state_BIJ[0, 0, 0]

    one = jnp.ones((1, T, 1))
    y_T, state = jax.jit(run, static_argnums=1)(one, implementation)
    decay = np.exp(delta * rate)
    values_T = delta * 2.0 * 3.0 * (1 - decay ** np.arange(1, T + 1)) / (1 - decay)
    _, bounds = rounding.expected(lambda one: run(one, "reference"), one)
    rounding.assert_within(y_T, rounding.Expected(values_T, bounds[0]))
    assert state == y_T[-1]


def test_a_step_of_size_zero_leaves_the_state_to_the_bit():
    arrays = small() | {"delta": jnp.zeros((2, 40, 6))}
    np.testing.assert_array_equal(JITTED(arrays)["end"], arrays["state"])


def test_a_decay_that_underflows_forgets_and_has_finite_gradients():
    arrays = small()
    arrays["delta"] = arrays["delta"].at[:, 20].set(1e4)
    changed = {**arrays, "state": arrays["state"] + 100.0, "u": arrays["u"].at[:, :20].set(7.0)}
    y, other = JITTED(arrays)["y"], JITTED(changed)["y"]
    np.testing.assert_array_equal(y[:, 20:], other[:, 20:])
    assert jnp.abs(y[:, :20] - other[:, :20]).max() > 1.0
    assert all(np.isfinite(gradient).all() for gradient in GRADIENTS(arrays).values())


def test_no_output_depends_on_a_later_input():
    arrays, others = (jax.tree.map(np.asarray, small(seed)) for seed in (0, 1))
    before = np.asarray(JITTED(arrays)["y"])
    for name, t in itertools.product(("u", "delta", "B", "C"), range(40)):
        changed = arrays[name].copy()
        changed[:, t] = others[name][:, t]
        after = np.asarray(JITTED(arrays | {name: changed})["y"])
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (after[:, t] != before[:, t]).any(), name


@pytest.mark.parametrize("prompt", [1, 33])
def test_prompt_then_single_steps_equals_the_parallel_form(prompt):
    arrays = small()
    result = JITTED(head(arrays, slice(0, prompt)))
    y = [result["y"]]
    for t in range(prompt, 40):
        now = head(arrays, slice(t, t + 1)) | {"state": result["end"]}
        result = JITTED(now)
        y.append(result["y"])
    rounding.assert_within({"y": jnp.concatenate(y, 1), "end": result["end"]}, values_wanted())


def test_a_chunked_prompt_has_the_values_and_gradients_of_the_whole():
    arrays = small()

    def halves(arrays):
        first = XLA(head(arrays, slice(0, 23)))
        second = XLA(head(arrays, slice(23, 40)) | {"state": first["end"]})
        return {"y": jnp.concatenate([first["y"], second["y"]], 1), "end": second["end"]}

    rounding.assert_within(jax.jit(halves)(arrays), values_wanted())
    rounding.assert_within(gradients(halves)(arrays), gradients_wanted())


def test_no_state_of_the_whole_sequence_is_kept():
    B, T, I, J = 2, 256, 6, 4  # noqa: E741
    arrays = small(T=T)

    def peak(implementation):
        def loss(arrays):
            return SUITE.call(SMALL, arrays, implementation)["y"].sum()

        return traced.largest(jax.make_jaxpr(jax.grad(loss))(arrays).jaxpr)

    assert peak("reference") == T * B * I * J
    # The largest that is left: 16 states, or the sequence of inputs.
    assert peak("xla") == max(T // 16 * B * I * J, T * B * I)


def test_vmap_equals_a_loop():
    stacked, wanted = (
        jax.tree.map(lambda *x: np.stack(x), of(seed=0), of(seed=1))
        for of in (small, gradients_wanted)
    )
    rounding.assert_within(jax.vmap(gradients(XLA))(stacked), wanted)


def test_checkpoint_changes_no_gradient():
    rounding.assert_within(gradients(jax.checkpoint(XLA))(small()), gradients_wanted())


def test_sharding_over_the_batch_changes_nothing():
    arrays = small(B=4)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    split, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    specs = {name: whole if name in ("A", "D") else split for name in arrays}
    wanted = gradients_wanted(B=4)
    mapped = jax.shard_map(XLA, mesh=mesh, in_specs=(specs,), out_specs=split, check_vma=False)
    rounding.assert_within(gradients(mapped)(arrays), wanted)
    placed = {k: jax.device_put(x, jax.NamedSharding(mesh, specs[k])) for k, x in arrays.items()}
    compiled = GRADIENTS.lower(placed).compile()
    rounding.assert_within(compiled(placed), wanted)
    assert "all-gather" not in compiled.as_text()


def test_gradients_are_exported_for_both_platforms():
    exported = jax.export.export(GRADIENTS, platforms=("cpu", "cuda"))(small())
    rounding.assert_within(exported.call(small()), gradients_wanted())


def test_outputs_keep_the_dtype_of_u_and_the_state_is_float32():
    arrays = {
        k: v if k in ("A", "D", "state") else v.astype("bfloat16") for k, v in small().items()
    }
    arrays["delta"] = arrays["delta"].astype(jnp.float32)
    result = jax.eval_shape(XLA, arrays)
    assert result["y"].dtype == jnp.bfloat16
    assert result["end"].dtype == jnp.float32
    gradients = jax.eval_shape(jax.grad(lambda a: XLA(a)["y"].astype("float32").sum()), arrays)
    assert jax.tree.map(lambda x: x.dtype, gradients) == jax.tree.map(lambda x: x.dtype, arrays)


def test_second_derivatives_are_the_references_alone():
    arrays = small(B=1, T=3)

    def curvature(run):
        slope = jax.grad(lambda u: run({**arrays, "u": u})["y"].sum() ** 2)
        return jax.grad(lambda u: slope(u).sum())(arrays["u"])

    assert jnp.abs(curvature(REFERENCE)).max() > 0
    with pytest.raises(NotImplementedError, match="selective_scan: its fast implementations"):
        curvature(XLA)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"u": jnp.zeros((2, 40))}, ValueError, r"selective_scan: u has shape \(2, 40\)"),
        ({"B": jnp.zeros((2, 39, 4))}, ValueError, "selective_scan: B has T = 39"),
        ({"A": jnp.zeros((6, 5))}, ValueError, "selective_scan: B has J = 4 .* but A has J = 5"),
        ({"state": jnp.zeros((2, 4, 6))}, ValueError, "selective_scan: initial_state has I = 4"),
        ({"delta": jnp.zeros((2, 40, 6), jnp.float16)}, TypeError, "delta is float16; cast it"),
        ({"A": jnp.zeros((6, 4), jnp.bfloat16)}, TypeError, "A is bfloat16; cast it to float32$"),
    ],
)
def test_an_error_names_the_argument(changed, error, text):
    with pytest.raises(error, match=text):
        XLA(small() | changed)


def test_an_empty_sequence_is_refused():
    with pytest.raises(ValueError, match="selective_scan: u has T = 0 steps"):
        XLA(head(small(), slice(0, 0)))


def test_the_implementations_are_xla_and_the_reference():
    drive = [small()[name] for name in NAMES[:5]]
    with pytest.raises(ValueError, match="'pallas' is none of triton, xla, reference"):
        selective_scan(*drive, implementation="pallas")
    named = selective_scan(*drive, implementation="xla")
    np.testing.assert_array_equal(selective_scan(*drive), named)
