"""`delta_rule`: the recurrence against float64, the chunked form against it, and its memory."""

import dataclasses
import functools
import itertools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import linalg

from iaj_kernels import delta_rule
from iaj_kernels.core import cases
from iaj_kernels.delta_rule import xla
from iaj_kernels.delta_rule.cases import SUITE
from iaj_kernels.delta_rule.config import Call, Config
from tests import rounding, traced
from tests.kernels import comparison

SMALL = cases.Case(
    "small", {"B": 2, "T": 100, "N": 2, "H": 6, "E": 4}, options={"initial_state": True}
)
NAMES = ("q", "k", "v", "beta", "state")
GATED = cases.Case("gated", {**SMALL.sizes, "T": 5}, options={"initial_state": True, "decay": 0.3})

XLA = functools.partial(SUITE.call, SMALL, implementation="xla")
REFERENCE = functools.partial(SUITE.call, SMALL, implementation="reference")
both = pytest.mark.parametrize("implementation", ["reference", "xla"])


def by_matrices(q, k, v, beta, state, log_decay=None):
    """The papers' transition matrices, multiplied out in float64 on their S, `[E, H]`."""
    out, end = np.zeros(v.shape), np.array(state, np.float64)
    for b, n in np.ndindex(*end.shape[:2]):
        S = end[b, n].T
        for t in range(q.shape[1]):
            key, strength = k[b, t, n], beta[b, t, n]
            kept = 1.0 if log_decay is None else np.exp(log_decay[b, t, n])
            S = S @ (kept * (np.eye(len(key)) - strength * np.outer(key, key)))
            S = S + strength * np.outer(v[b, t, n], key)
            out[b, t, n] = S @ q[b, t, n] / np.sqrt(len(key))
        end[b, n] = S.T
    return {"out": out, "end": end}


def small(seed=0, **sizes):
    case = cases.Case("small", {**SMALL.sizes, **sizes}, options=SMALL.options)
    return SUITE.make(case, jax.random.key(seed))


def head(arrays, steps):
    """The arrays of those steps alone."""
    return {k: v if k == "state" else v[:, steps] for k, v in arrays.items()}


def gradients(run):
    return jax.jit(jax.grad(lambda a: sum(jnp.sin(x).sum() for x in run(a).values())))


# Compiled once for each shape, and most tests take the same.
JITTED, GRADIENTS = jax.jit(XLA), gradients(XLA)


@functools.cache
def values_wanted(seed=0):
    return rounding.expected(REFERENCE, small(seed))


@functools.cache
def gradients_wanted(seed=0):
    return rounding.expected(gradients(REFERENCE), small(seed))


@both
def test_values_equal_transition_matrices_in_float64(implementation):
    arrays = small()
    doubles = [np.asarray(arrays[name], np.float64) for name in NAMES]
    run = JITTED if implementation == "xla" else jax.jit(REFERENCE)
    wanted = values_wanted()._replace(values=by_matrices(*doubles))
    rounding.assert_within(run(arrays), wanted)


@pytest.mark.parametrize("case", [SMALL, GATED], ids=["delta", "gated"])
def test_gradients_of_the_reference_equal_finite_differences(case):
    sizes = {"B": 1, "T": 5, "N": 1, "H": 3, "E": 2}
    arrays = SUITE.make(dataclasses.replace(case, sizes=sizes), jax.random.key(0))
    comparison.assert_slopes(SUITE, case, arrays, by_matrices)


def compared(case):
    # 1, 64, 65 and 200 steps without a decay and 1 and 65 with one are every way to end a chunk.
    ends = (63, 200) if "decay" in case.options else (2, 63)
    return comparison.parameter(case, nightly=case.sizes["T"] in ends)


@pytest.mark.parametrize(
    "case", comparison.thinned([compared(case) for case in SUITE.using("test")])
)
def test_value_and_gradients_equal_the_reference(case):
    result = comparison.deviations(SUITE, case, "xla")
    assert all(each.ok for each in result), result


def test_the_longest_chunk_changes_nothing():
    for config in (Config(1), Config(7), Config(64), Config(128)):

        def run(arrays, config=config):
            out_BTNE, end_BNHE = xla.run(config, Call(*(arrays[name] for name in NAMES)))
            return {"out": out_BTNE * 6**-0.5, "end": end_BNHE}

        rounding.assert_within(gradients(run)(small()), gradients_wanted(), str(config))


@both
def test_values_under_orthonormal_keys_are_stored_exactly(implementation):
    """After T <= H writes of strength 1, the memory is K^T V and reading key t returns value t."""
    T, E = 70, 8
    # Multiples of 1/8: orthonormal to the bit.
    k_TH = linalg.block_diag(linalg.hadamard(64) / 8, *[linalg.hadamard(16) / 4] * 2)[:T]
    v_TE = jax.random.normal(jax.random.key(1), (T, E))
    k_BTNH, v_BTNE = jnp.float32(k_TH)[None, :, None], v_TE[None, :, None]

    def run(v_BTNE, implementation):
        write = functools.partial(
            delta_rule, implementation=implementation, scale=1.0, return_state=True
        )
        _, state_BNHE = write(k_BTNH, k_BTNH, v_BTNE, jnp.ones((1, T, 1)))
        # A strength of zero reads and writes nothing.
        read_BTNE, after_BNHE = write(
            k_BTNH, k_BTNH, 9.0 * v_BTNE, jnp.zeros((1, T, 1)), initial_state=state_BNHE
        )
        return {"state": state_BNHE, "read": read_BTNE, "after": after_BNHE}

    result = jax.jit(run, static_argnums=1)(v_BTNE, implementation)
    stored = (k_TH.T @ np.float64(v_TE))[None, None]
    wanted = rounding.expected(lambda v_BTNE: run(v_BTNE, "reference"), v_BTNE)
    values = {"state": stored, "read": np.float64(v_BTNE), "after": stored}
    rounding.assert_within(result, wanted._replace(values=values))
    np.testing.assert_array_equal(result["after"], result["state"])


@both
def test_a_second_write_replaces_the_first_and_spares_other_keys(implementation):
    k_TH = jnp.eye(4)[jnp.array([0, 1, 0])]
    v_TE = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    _, state_BNHE = delta_rule(
        k_TH[None, :, None],
        k_TH[None, :, None],
        v_TE[None, :, None],
        jnp.ones((1, 3, 1)),
        return_state=True,
        implementation=implementation,
    )
    np.testing.assert_array_equal(state_BNHE[0, 0], [[5.0, 6.0], [3.0, 4.0], [0, 0], [0, 0]])


@both
def test_one_key_written_again_and_again(implementation):
    """The held value moves as h_t = (1 - beta) h_{t-1} + beta v, so h_t = (1 - (1 - beta)^t) v."""
    T, beta_B = 130, np.array([0.5, 1.0, 1.5, 2.0])
    # Of length one to the bit.
    k_BTNH = jnp.tile(jnp.array([0.5, -0.5, 0.5, 0.5])[None, None, None], (4, T, 1, 1))
    beta_BTN = jnp.tile(jnp.float32(beta_B)[:, None, None], (1, T, 1))

    def run(beta_BTN, implementation):
        one = jnp.ones((4, T, 1, 1))
        return delta_rule(k_BTNH, k_BTNH, one, beta_BTN, scale=1.0, implementation=implementation)

    held_BT = 1.0 - (1.0 - beta_B[:, None]) ** np.arange(1, T + 1)[None]
    wanted = rounding.expected(lambda beta_BTN: run(beta_BTN, "reference"), beta_BTN)
    result = jax.jit(run, static_argnums=1)(beta_BTN, implementation)
    rounding.assert_within(result, wanted._replace(values=held_BT[..., None, None]))


def test_reflections_keep_the_length_of_the_memory():
    """With v = 0 and beta = 2 every step is a Householder reflection."""
    arrays = small(T=500, H=4)
    # Keys of length one to the bit.
    arrays |= {"k": jnp.sign(arrays["k"]) / 2, "v": jnp.zeros_like(arrays["v"])}
    arrays |= {"beta": jnp.full_like(arrays["beta"], 2.0)}

    def length(run):
        return lambda arrays: jnp.linalg.norm(run(arrays)["end"], axis=(-2, -1))

    kept = np.linalg.norm(np.float64(arrays["state"]), axis=(-2, -1))
    wanted = rounding.expected(length(REFERENCE), arrays)._replace(values=kept)
    rounding.assert_within(jax.jit(length(XLA))(arrays), wanted)


@both
def test_values_with_a_decay_equal_transition_matrices_in_float64(implementation):
    case = dataclasses.replace(GATED, sizes=SMALL.sizes)
    arrays = SUITE.make(case, jax.random.key(0))
    run = functools.partial(SUITE.call, case, implementation=implementation)
    doubles = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
    wanted = rounding.expected(
        functools.partial(SUITE.call, case, implementation="reference"), arrays
    )
    rounding.assert_within(jax.jit(run)(arrays), wanted._replace(values=by_matrices(**doubles)))


@both
def test_a_constant_decay_gives_a_geometric_sum(implementation):
    """Under one key h_t = a (1 - beta) h_{t-1} + beta v, a geometric sum."""
    T, beta, kept = 130, 0.25, np.exp(-0.5)
    k_BTNH = jnp.tile(jnp.array([0.5, -0.5, 0.5, 0.5])[None, None, None], (1, T, 1, 1))
    one, half = jnp.ones((1, T, 1, 1)), jnp.full((1, T, 1), -0.5)

    def run(log_decay_BTN, implementation):
        strength = jnp.full((1, T, 1), beta)
        options = {"scale": 1.0, "implementation": implementation, "log_decay": log_decay_BTN}
        return delta_rule(k_BTNH, k_BTNH, one, strength, **options)

    ratio = kept * (1.0 - beta)
    held_T = beta * (1.0 - ratio ** np.arange(1, T + 1)) / (1.0 - ratio)
    wanted = rounding.expected(lambda half: run(half, "reference"), half)
    result = jax.jit(run, static_argnums=1)(half, implementation)
    rounding.assert_within(result, wanted._replace(values=held_T[None, :, None, None]))


def test_a_decay_of_one_changes_nothing():
    arrays = small()
    gated = arrays | {"log_decay": jnp.zeros_like(arrays["beta"])}
    rounding.assert_within(jax.jit(XLA)(gated), values_wanted())
    found = gradients(XLA)(gated)
    del found["log_decay"]
    rounding.assert_within(found, gradients_wanted())


def test_no_output_depends_on_a_later_input():
    arrays, others = (jax.tree.map(np.asarray, small(seed)) for seed in (0, 1))
    before = np.asarray(JITTED(arrays)["out"])
    for name, t in itertools.product(("q", "k", "v", "beta"), range(100)):
        changed = arrays[name].copy()
        changed[:, t] = others[name][:, t]
        after = np.asarray(JITTED(arrays | {name: changed})["out"])
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (after[:, t] != before[:, t]).any(), name


@pytest.mark.parametrize("prompt", [1, 77])
def test_prompt_then_single_steps_equals_the_parallel_form(prompt):
    arrays = small()
    result = JITTED(head(arrays, slice(0, prompt)))
    out = [result["out"]]
    for t in range(prompt, 100):
        result = JITTED(head(arrays, slice(t, t + 1)) | {"state": result["end"]})
        out.append(result["out"])
    whole = {"out": jnp.concatenate(out, 1), "end": result["end"]}
    rounding.assert_within(whole, values_wanted())


def test_a_chunked_prompt_has_the_values_and_gradients_of_the_whole():
    arrays = small()

    def halves(arrays):
        first = XLA(head(arrays, slice(0, 33)))
        second = XLA(head(arrays, slice(33, 100)) | {"state": first["end"]})
        return {"out": jnp.concatenate([first["out"], second["out"]], 1), "end": second["end"]}

    rounding.assert_within(jax.jit(halves)(arrays), values_wanted())
    rounding.assert_within(gradients(halves)(arrays), gradients_wanted())


def test_no_memory_of_every_step_is_kept():
    B, T, N, H, E = 2, 256, 2, 6, 4
    arrays = small(T=T)

    def peak(implementation):
        def loss(arrays):
            return SUITE.call(SMALL, arrays, implementation)["out"].sum()

        return traced.largest(jax.make_jaxpr(jax.grad(loss))(arrays).jaxpr)

    assert peak("reference") == T * B * N * H * E
    # The largest that is left: the sequence of keys, or the products of keys within one chunk.
    assert peak("xla") == max(T * B * N * H, B * N * 64 * 64)


def test_vmap_equals_a_loop():
    stacked, wanted = (
        jax.tree.map(lambda *x: np.stack(x), of(0), of(1)) for of in (small, gradients_wanted)
    )
    rounding.assert_within(jax.vmap(gradients(XLA))(stacked), wanted)


def test_checkpoint_changes_no_gradient():
    rounding.assert_within(gradients(jax.checkpoint(XLA))(small()), gradients_wanted())


def test_sharding_over_the_batch_changes_nothing():
    arrays, wanted = (
        jax.tree.map(lambda *x: np.concatenate(x), of(0), of(1)) for of in (small, gradients_wanted)
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    split = jax.sharding.PartitionSpec("data")
    mapped = jax.shard_map(XLA, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    rounding.assert_within(gradients(mapped)(arrays), wanted)
    placed = jax.device_put(arrays, jax.NamedSharding(mesh, split))
    compiled = GRADIENTS.lower(placed).compile()
    rounding.assert_within(compiled(placed), wanted)
    assert "all-gather" not in compiled.as_text()


def test_gradients_are_exported_for_both_platforms():
    exported = jax.export.export(GRADIENTS, platforms=("cpu", "cuda"))(small())
    rounding.assert_within(exported.call(small()), gradients_wanted())


def test_second_derivatives_equal_the_references():
    arrays = small(B=1, T=9)

    def curvature(run, beta):
        slope = jax.grad(lambda beta: run({**arrays, "beta": beta})["out"].sum() ** 2)
        return jax.grad(lambda beta: slope(beta).sum())(beta)

    wanted = rounding.expected(functools.partial(curvature, REFERENCE), arrays["beta"])
    result = jax.jit(curvature, static_argnums=0)(XLA, arrays["beta"])
    rounding.assert_within(result, wanted)


def test_outputs_keep_the_dtype_of_v_and_the_state_is_float32():
    arrays = small()
    arrays |= {name: arrays[name].astype(jnp.bfloat16) for name in ("q", "k", "v")}
    result = jax.eval_shape(XLA, arrays)
    assert result["out"].dtype == jnp.bfloat16
    assert result["end"].dtype == jnp.float32


def test_the_default_scale_is_one_over_the_root_of_the_key_width():
    arrays = small()
    drive = [arrays[name] for name in NAMES[:4]]
    unscaled = functools.partial(delta_rule, scale=1.0, implementation="reference")
    wanted = rounding.expected(lambda *drive: unscaled(*drive) / jnp.sqrt(6.0), *drive)
    rounding.assert_within(delta_rule(*drive), wanted)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"q": jnp.zeros((2, 100, 6))}, ValueError, r"delta_rule: q has shape \(2, 100, 6\)"),
        ({"v": jnp.zeros((2, 99, 2, 4))}, ValueError, "delta_rule: v has T = 99"),
        ({"k": jnp.zeros((2, 100, 2, 5))}, ValueError, "delta_rule: k has H = 5 .* but q has H"),
        ({"beta": jnp.zeros((2, 100, 3))}, ValueError, "delta_rule: beta has N = 3"),
        ({"state": jnp.zeros((2, 2, 4, 6))}, ValueError, "delta_rule: initial_state has H = 4"),
        ({"log_decay": jnp.zeros((2, 100, 3))}, ValueError, "delta_rule: log_decay has N = 3"),
        ({"beta": jnp.zeros((2, 100, 2), jnp.int32)}, TypeError, "beta is int32; cast it"),
        ({"state": jnp.zeros((2, 2, 6, 4), jnp.bfloat16)}, TypeError, "initial_state is bfloat16"),
    ],
)
def test_an_error_names_the_argument(changed, error, text):
    with pytest.raises(error, match=text):
        XLA(small() | changed)


def test_an_empty_sequence_is_refused():
    with pytest.raises(ValueError, match="delta_rule: q has T = 0 steps"):
        XLA(head(small(), slice(0, 0)))


def test_the_implementation_on_a_cpu_is_xla():
    drive = [small()[name] for name in NAMES[:4]]
    with pytest.raises(ValueError, match="'pallas' is none of triton, xla, reference"):
        delta_rule(*drive, implementation="pallas")
    np.testing.assert_array_equal(delta_rule(*drive), delta_rule(*drive, implementation="xla"))
