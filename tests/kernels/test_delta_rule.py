"""`delta_rule`: the recurrence against float64, the chunked form against it, and what it stores."""

import functools
import itertools

import jax
import jax.export
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import cases, delta_rule
from kernels.delta_rule import xla
from tests.kernels import comparison

SUITE = cases.suite("delta_rule")
SMALL = cases.Case(
    "small", {"B": 2, "T": 100, "N": 2, "H": 6, "E": 4}, options={"initial_state": True}
)
NAMES = ("q", "k", "v", "beta", "state")

XLA = functools.partial(SUITE.call, SMALL, implementation="xla")
REFERENCE = functools.partial(SUITE.call, SMALL, implementation="reference")
both = pytest.mark.parametrize("implementation", ["reference", "xla"])


def by_matrices(q, k, v, beta, state):
    """The paper's transition matrices, multiplied out in float64 on its S, `[E, H]`."""
    out, end = np.zeros(v.shape), np.array(state, np.float64)
    for b, n in np.ndindex(*end.shape[:2]):
        S = end[b, n].T
        for t in range(q.shape[1]):
            key, strength = k[b, t, n], beta[b, t, n]
            S = S @ (np.eye(len(key)) - strength * np.outer(key, key))
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


def agree(got, want, bound=1e-5):
    errors = jax.tree.map(cases.relative_error, got, want)
    assert max(jax.tree.leaves(errors)) <= bound, errors


def gradients(run):
    return jax.jit(jax.grad(lambda a: sum(jnp.sin(x).sum() for x in run(a).values())))


# Compiled once for each shape, and most tests take the same.
JITTED, GRADIENTS = jax.jit(XLA), gradients(XLA)


@both
def test_values_equal_transition_matrices_in_float64(implementation):
    arrays = small()
    doubles = [np.asarray(arrays[name], np.float64) for name in NAMES]
    run = JITTED if implementation == "xla" else jax.jit(REFERENCE)
    agree(run(arrays), by_matrices(*doubles), 2e-6)


def test_gradients_of_the_reference_equal_finite_differences():
    arrays = small(B=1, T=5, N=1, H=3, E=2)
    cts = cases.cotangents(SUITE, SMALL, arrays, jax.random.key(1))
    found = jax.jit(cases.outputs_and_gradients(SUITE, SMALL, "reference"))(arrays, cts)
    doubles = {name: np.asarray(x, np.float64) for name, x in arrays.items()}

    def loss(**changed):
        out = by_matrices(*(changed.get(name, doubles[name]) for name in NAMES))
        return sum((out[name] * np.asarray(ct, np.float64)).sum() for name, ct in cts.items())

    for name in NAMES:
        wanted = np.zeros(doubles[name].shape)
        for at in np.ndindex(wanted.shape):
            step = np.zeros(wanted.shape)
            step[at] = 1e-5
            up, down = (loss(**{name: doubles[name] + sign * step}) for sign in (1, -1))
            wanted[at] = (up - down) / 2e-5
        assert cases.relative_error(found[f"d_{name}"], wanted) <= 1e-5, name


@pytest.mark.parametrize("case", SUITE.using("test"), ids=lambda case: case.name)
def test_value_and_gradients_equal_the_reference(case):
    found = comparison.deviations(SUITE, case, "xla")
    assert all(each.ok for each in found), found


def test_the_longest_chunk_changes_nothing():
    arrays = small()

    def loss(longest, arrays):
        out_BTNE, end_BNHE = xla.delta_rule(*(arrays[name] for name in NAMES), longest)
        return jnp.sin(out_BTNE).sum() + jnp.sin(end_BNHE).sum()

    run = jax.jit(jax.value_and_grad(loss, argnums=1), static_argnums=0)
    wanted = run(xla.LONGEST_CHUNK, arrays)
    for longest in (1, 7, 128):
        agree(run(longest, arrays), wanted)


@both
def test_values_under_orthonormal_keys_are_stored_exactly(implementation):
    """After T <= H writes of strength 1, the memory is K^T V and reading key t gives value t."""
    T, H, E = 70, 96, 8
    keys = jax.random.split(jax.random.key(0), 2)
    k_TH = jnp.linalg.qr(jax.random.normal(keys[0], (H, H)))[0][:T]
    v_TE = jax.random.normal(keys[1], (T, E))
    k_BTNH, v_BTNE = k_TH[None, :, None], v_TE[None, :, None]
    run = functools.partial(delta_rule, implementation=implementation, scale=1.0, return_state=True)
    _, state_BNHE = run(k_BTNH, k_BTNH, v_BTNE, jnp.ones((1, T, 1)))
    agree(state_BNHE[0, 0], k_TH.T @ v_TE, 2e-6)
    # A strength of zero reads and writes nothing.
    read_BTNE, after_BNHE = run(
        k_BTNH, k_BTNH, 9.0 * v_BTNE, jnp.zeros((1, T, 1)), initial_state=state_BNHE
    )
    agree(read_BTNE, v_BTNE, 2e-6)
    np.testing.assert_array_equal(after_BNHE, state_BNHE)


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
    """What is held moves as h_t = (1 - beta) h_{t-1} + beta v, so h_t = (1 - (1 - beta)^t) v."""
    T, beta_B = 130, np.array([0.5, 1.0, 1.5, 2.0])
    k_BTNH = jnp.tile(jnp.array([0.6, 0.0, 0.8])[None, None, None], (4, T, 1, 1))
    out_BTNE = delta_rule(
        k_BTNH,
        k_BTNH,
        jnp.ones((4, T, 1, 1)),
        jnp.tile(jnp.float32(beta_B)[:, None, None], (1, T, 1)),
        scale=1.0,
        implementation=implementation,
    )
    held_BT = 1.0 - (1.0 - beta_B[:, None]) ** np.arange(1, T + 1)[None]
    np.testing.assert_allclose(out_BTNE[..., 0, 0], held_BT, atol=2e-5)


def test_reflections_keep_the_length_of_the_memory():
    """With v = 0 and beta = 2 every step is a Householder reflection."""
    arrays = small(T=500)
    arrays |= {"v": jnp.zeros_like(arrays["v"]), "beta": jnp.full_like(arrays["beta"], 2.0)}
    length = jnp.linalg.norm(JITTED(arrays)["end"], axis=(-2, -1))
    np.testing.assert_allclose(length, jnp.linalg.norm(arrays["state"], axis=(-2, -1)), rtol=1e-4)


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
    found = JITTED(head(arrays, slice(0, prompt)))
    out = [found["out"]]
    for t in range(prompt, 100):
        found = JITTED(head(arrays, slice(t, t + 1)) | {"state": found["end"]})
        out.append(found["out"])
    agree({"out": jnp.concatenate(out, 1), "end": found["end"]}, JITTED(arrays))


def test_a_chunked_prompt_has_the_values_and_gradients_of_the_whole():
    arrays = small()

    def halves(arrays):
        first = XLA(head(arrays, slice(0, 33)))
        second = XLA(head(arrays, slice(33, 100)) | {"state": first["end"]})
        return {"out": jnp.concatenate([first["out"], second["out"]], 1), "end": second["end"]}

    agree(jax.jit(halves)(arrays), JITTED(arrays))
    agree(gradients(halves)(arrays), GRADIENTS(arrays))


def largest(jaxpr):
    """The size of the largest array that a jaxpr, or one within it, computes."""
    found = max((out.aval.size for eqn in jaxpr.eqns for out in eqn.outvars), default=0)
    within = (sub for eqn in jaxpr.eqns for sub in jax.extend.core.jaxprs_in_params(eqn.params))
    return max([found, *map(largest, within)])


def test_no_memory_of_every_step_is_kept():
    B, T, N, H, E = 2, 256, 2, 6, 4
    arrays = small(T=T)

    def peak(implementation):
        def loss(arrays):
            return SUITE.call(SMALL, arrays, implementation)["out"].sum()

        return largest(jax.make_jaxpr(jax.grad(loss))(arrays).jaxpr)

    assert peak("reference") == T * B * N * H * E
    # The largest that is left: the sequence of keys, or the products of keys within one chunk.
    assert peak("xla") == max(T * B * N * H, B * N * 64 * 64)


def test_vmap_equals_a_loop():
    two = small(0), small(1)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *two)
    looped = jax.tree.map(lambda *x: jnp.stack(x), *map(GRADIENTS, two))
    agree(jax.vmap(gradients(XLA))(stacked), looped)


def test_checkpoint_changes_no_gradient():
    agree(gradients(jax.checkpoint(XLA))(small()), GRADIENTS(small()), 1e-6)


def test_sharding_over_the_batch_changes_nothing():
    halves = small(0), small(1)
    arrays, wanted = (
        jax.tree.map(lambda *x: jnp.concatenate(x), *each)
        for each in (halves, [GRADIENTS(half) for half in halves])
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    split = jax.sharding.PartitionSpec("data")
    mapped = jax.shard_map(XLA, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    agree(gradients(mapped)(arrays), wanted)
    placed = jax.device_put(arrays, jax.NamedSharding(mesh, split))
    compiled = GRADIENTS.lower(placed).compile()
    agree(compiled(placed), wanted)
    assert "all-gather" not in compiled.as_text()


def test_gradients_are_exported_for_both_platforms():
    exported = jax.export.export(GRADIENTS, platforms=("cpu", "cuda"))(small())
    agree(exported.call(small()), GRADIENTS(small()), 1e-6)


def test_second_derivatives_equal_the_references():
    arrays = small(B=1, T=9)

    def curvature(run, beta):
        slope = jax.grad(lambda beta: run({**arrays, "beta": beta})["out"].sum() ** 2)
        return jax.grad(lambda beta: slope(beta).sum())(beta)

    second = jax.jit(curvature, static_argnums=0)
    agree(second(XLA, arrays["beta"]), second(REFERENCE, arrays["beta"]))


def test_outputs_keep_the_dtype_of_v_and_the_state_is_float32():
    arrays = small()
    arrays |= {name: arrays[name].astype(jnp.bfloat16) for name in ("q", "k", "v")}
    found = jax.eval_shape(XLA, arrays)
    assert found["out"].dtype == jnp.bfloat16
    assert found["end"].dtype == jnp.float32


def test_the_default_scale_is_one_over_the_root_of_the_key_width():
    arrays = small()
    drive = [arrays[name] for name in NAMES[:4]]
    agree(delta_rule(*drive), delta_rule(*drive, scale=1.0) / jnp.sqrt(6.0), 1e-6)


@pytest.mark.parametrize(
    ("changed", "error", "told"),
    [
        ({"q": jnp.zeros((2, 100, 6))}, ValueError, r"delta_rule: q has shape \(2, 100, 6\)"),
        ({"v": jnp.zeros((2, 99, 2, 4))}, ValueError, "delta_rule: v has T = 99"),
        ({"k": jnp.zeros((2, 100, 2, 5))}, ValueError, "delta_rule: k has H = 5 .* but q has H"),
        ({"beta": jnp.zeros((2, 100, 3))}, ValueError, "delta_rule: beta has N = 3"),
        ({"state": jnp.zeros((2, 2, 4, 6))}, ValueError, "delta_rule: initial_state has H = 4"),
        ({"beta": jnp.zeros((2, 100, 2), jnp.int32)}, TypeError, "beta is int32; cast it"),
        ({"state": jnp.zeros((2, 2, 6, 4), jnp.bfloat16)}, TypeError, "initial_state is bfloat16"),
    ],
)
def test_an_error_names_the_argument(changed, error, told):
    with pytest.raises(error, match=told):
        XLA(small() | changed)


def test_an_empty_sequence_is_refused():
    with pytest.raises(ValueError, match="delta_rule: q has T = 0 steps"):
        XLA(head(small(), slice(0, 0)))


def test_the_implementations_are_xla_and_the_reference():
    drive = [small()[name] for name in NAMES[:4]]
    with pytest.raises(ValueError, match="'pallas' is none of xla, reference"):
        delta_rule(*drive, implementation="pallas")
    np.testing.assert_array_equal(delta_rule(*drive), delta_rule(*drive, implementation="xla"))
