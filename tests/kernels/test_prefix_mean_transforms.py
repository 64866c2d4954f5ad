"""`prefix_mean` under JAX's transformations, and the sizes of its arrays."""

import functools

import jax
from jax import export
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from iaj_kernels import prefix_mean
from iaj_kernels.core import cases
from iaj_kernels.prefix_mean import baselines, linear_chunk, xla
from iaj_kernels.prefix_mean.cases import SUITE
from iaj_kernels.prefix_mean.state import State
from tests import rounding
from tests.kernels import prefix_mean_oracle as oracle
from tests.traced import largest

CASE = cases.Case(
    "transforms",
    {"B": 4, "T": 48, "R": 4, "E": 8},
    "float32",
    {"half_life": (0.5, 100.0), "initial_state": True},
)
NAMES = ("write", "value", "decay", "read", "total", "mass")


def _operation(arrays: cases.Arrays) -> cases.Arrays:
    out_BTE, state = prefix_mean(
        *(arrays[name] for name in NAMES[:4]),
        initial_state=State(arrays["total"], arrays["mass"]),
        return_state=True,
        implementation="xla",
    )
    return {"out": out_BTE, "total": state.total_BRE, "mass": state.mass_BR}


def _gradients(run, arrays, cotangents):
    outputs, pull = jax.vjp(run, arrays)
    return outputs | {f"d_{name}": each for name, each in pull(cotangents)[0].items()}


@functools.cache
def _inputs() -> tuple[cases.Arrays, cases.Arrays]:
    arrays = SUITE.make(CASE, jax.random.key(0))
    return arrays, cases.cotangents(SUITE, CASE, arrays, jax.random.key(1))


def _formula(arrays: cases.Arrays) -> cases.Arrays:
    return oracle.quadratic(*(arrays[name] for name in NAMES))


@functools.cache
def _expected() -> rounding.Expected:
    return rounding.expected(functools.partial(_gradients, _formula), *_inputs())


def test_checkpoint_changes_no_bit():
    with_checkpoint, without = (
        jax.jit(functools.partial(_gradients, run))(*_inputs())
        for run in (jax.checkpoint(_operation), _operation)
    )
    jax.tree.map(np.testing.assert_array_equal, with_checkpoint, without)


def test_vmap_over_everything_and_over_decays():
    arrays, cotangents = _inputs()
    twice = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), (arrays, cotangents))
    got = jax.jit(jax.vmap(functools.partial(_gradients, _operation)))(*twice)
    rounding.assert_within({name: each[0] for name, each in got.items()}, _expected())

    decays = jnp.stack([arrays["decay"], arrays["decay"] ** 2])
    outs = jax.jit(jax.vmap(lambda decay: _operation(arrays | {"decay": decay})["out"]))(decays)
    wanted = rounding.expected(
        lambda arrays: _formula(arrays)["out"], arrays | {"decay": decays[1]}
    )
    rounding.assert_within(outs[1], wanted)


def test_a_batch_sharded_over_devices():
    specs = {name: P("data") for name in NAMES} | {"decay": P()}
    sharded = jax.shard_map(
        _operation,
        mesh=jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,)),
        in_specs=(specs,),
        out_specs=P("data"),
        check_vma=False,
    )
    got = jax.jit(functools.partial(_gradients, sharded))(*_inputs())
    rounding.assert_within(got, _expected())


def test_export():
    """Value and gradient, lowered for a CPU and a GPU at once, and called back here."""
    exported = export.export(
        jax.jit(functools.partial(_gradients, _operation)), platforms=("cpu", "cuda")
    )(*_inputs())
    rounding.assert_within(jax.jit(exported.call)(*_inputs()), _expected())


def test_second_derivatives_and_forward_mode_say_what_to_do():
    arrays, _ = _inputs()

    def loss(value_BTE):
        return _operation(arrays | {"value": value_BTE})["out"].sum()

    with pytest.raises(NotImplementedError, match="pass implementation='reference' for second"):
        jax.grad(lambda value: jax.grad(loss)(value).sum())(arrays["value"])
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(loss, (arrays["value"],), (arrays["value"],))


def test_the_reference_has_second_derivatives():
    """Linear in the values, so the second derivative is zero; not so in the gates."""
    arrays, _ = _inputs()

    def loss(write_BTR):
        return (
            prefix_mean(write_BTR, *(arrays[n] for n in NAMES[1:4]), implementation="reference")
            ** 2
        ).sum()

    def slope_and_curve(write):
        return jax.jvp(jax.grad(loss), (write,), (write,))

    wanted = rounding.expected(slope_and_curve, arrays["write"])
    rounding.assert_within(jax.jit(slope_and_curve)(arrays["write"]), wanted)
    # The output does not change when all gates grow alike: the first derivative falls as 1 / size.
    slope, curve = wanted.values
    np.testing.assert_allclose(curve, -slope, atol=1e-12 * np.abs(slope).max())


@pytest.mark.parametrize("T", [1, 64, 1000])
def test_no_array_of_size_btre(T):
    """At B 2, R 32, E 64 even a [B, T, R, R] or [B, T, C, R] of all steps would be found."""
    B, R, E = 2, 32, 64
    case = cases.Case("sizes", {"B": B, "T": T, "R": R, "E": E}, "float32", {"initial_state": True})
    arrays = jax.eval_shape(lambda key: SUITE.make(case, key), jax.random.key(0))
    both = functools.partial(_gradients, _operation)
    forward = jax.make_jaxpr(_operation)(arrays)
    gradient = jax.make_jaxpr(both)(arrays, jax.eval_shape(_operation, arrays))
    # The states of all chunks, the pairs of the chunks of one group, or an argument.
    chunks = B * -(-T // xla.CHUNK)
    states = chunks * R * E
    pairs = min(chunks, linear_chunk.TOGETHER) * min(T, xla.CHUNK) ** 2 * R
    for traced in (forward, gradient):
        size = largest(traced.jaxpr)
        assert size <= max(states, pairs, B * T * E)
        assert T == 1 or size < B * T * R * E
    materialised = functools.partial(baselines.materialised_call, case)
    if T > 1:
        assert largest(jax.make_jaxpr(materialised)(arrays).jaxpr) >= B * T * R * E


@pytest.mark.slow
@pytest.mark.parametrize("name", ["b8_t256_r32_e128_float32", "b1_t4096_r32_e128_float32"])
def test_temporary_memory_is_a_tenth_of_the_materialised_form(name):
    case = SUITE.named(name)
    arrays = jax.eval_shape(lambda key: SUITE.make(case, key), jax.random.key(0))
    forms = (
        lambda arrays: SUITE.call(case, arrays, "xla"),
        functools.partial(baselines.materialised_call, case),
    )
    cotangents = jax.eval_shape(forms[0], arrays)
    for gradient in (False, True):
        ours, theirs = (
            jax.jit(functools.partial(_gradients, form) if gradient else form)
            .lower(*((arrays, cotangents) if gradient else (arrays,)))
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
            for form in forms
        )
        assert ours <= theirs / 10, (ours, theirs)


def test_one_step_of_decoding_is_one_update_of_the_state():
    """No chunk of sixteen, no loop: as many multiplications as the recurrence itself needs."""
    B, R, E = 2, 32, 64
    case = cases.Case("step", {"B": B, "T": 1, "R": R, "E": E}, "float32", {"initial_state": True})
    arrays = jax.eval_shape(lambda key: SUITE.make(case, key), jax.random.key(0))
    compiled = jax.jit(_operation).lower(arrays).compile()
    # Read, write, decay: three products of B R E, two of them added up.
    assert compiled.cost_analysis()["flops"] < 8 * B * R * E
    assert "while(" not in compiled.as_text()


def test_nothing_is_divided_by_a_power_of_the_decay():
    """Half-lives of a hundredth: beta^-16 is 10^481."""
    arrays, cotangents = _inputs()
    arrays = arrays | {"decay": jnp.full_like(arrays["decay"], np.exp2(-100.0))}
    got = jax.jit(functools.partial(_gradients, _operation))(arrays, cotangents)
    assert all(np.isfinite(each).all() for each in got.values())
