"""The Pallas kernels of `prefix_mean`, interpreted: equal to the reference however they are cut."""

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec
import numpy as np
import pytest

from iaj_kernels.core import cases, dispatch, tuning
from iaj_kernels.prefix_mean import pallas
from iaj_kernels.prefix_mean.cases import SUITE
from iaj_kernels.prefix_mean.config import Call, Config
from iaj_kernels.prefix_mean.state import State
from tests import rounding
from tests.kernels import comparison
from tools.gpu_code import target

CONFIG = Config(mass_normalisation=True, target=dispatch.INTERPRETER)

SMALL = cases.Case("small", {"B": 4, "T": 40, "R": 16, "E": 32}, "float32", {"initial_state": True})
# Segments of two chunks, the last of each partial.
SMALL_TILES = {"segment": 32, "backward_segment": 32}


def _compared(case: cases.Case):
    """The parameter of a comparison."""
    # Each takes seven seconds to compile, and the rest go through every line of the kernels: 65 and
    # 130 steps end within a chunk, and 130 with 32 prototypes.
    T, R = case.sizes["T"], case.sizes["R"]
    further = T in (2, 63, 64, 200) or R == 64 or (T, R) == (65, 32)
    return comparison.parameter(case, nightly=further)


def _inputs(case: cases.Case) -> tuple[cases.Arrays, cases.Arrays]:
    arrays = SUITE.make(case, jax.random.key(0))
    return arrays, cases.cotangents(SUITE, case, arrays, jax.random.key(1))


def _values_and_gradients(case: cases.Case, tiles: dict[str, int]) -> Callable:
    """A new function of (arrays, cotangents), jitted for the interpreter with these tiles."""
    run = cases.outputs_and_gradients(SUITE, case, "pallas")

    def traced(arrays: cases.Arrays, cotangents: cases.Arrays) -> cases.Arrays:
        with dispatch.on(dispatch.INTERPRETER), tuning.trying("prefix_mean", tiles):
            return run(arrays, cotangents)

    return jax.jit(traced)


@functools.cache
def _small_results() -> tuple[Callable, cases.Arrays, cases.Arrays, cases.Arrays]:
    """The function, arguments and results that most tests compare with."""
    run = _values_and_gradients(SMALL, SMALL_TILES)
    arrays, cotangents = _inputs(SMALL)
    return run, arrays, cotangents, run(arrays, cotangents)


def _wanted(case: cases.Case, *inputs: cases.Arrays) -> rounding.Expected:
    return rounding.expected(cases.outputs_and_gradients(SUITE, case, "reference"), *inputs)


@functools.cache
def _small_wanted() -> rounding.Expected:
    return _wanted(SMALL, *_inputs(SMALL))


@pytest.mark.parametrize(
    "case", comparison.thinned([_compared(case) for case in SUITE.using("test")])
)
def test_value_and_gradients_equal_the_reference(case):
    with dispatch.on(dispatch.INTERPRETER):
        result = comparison.deviations(SUITE, case, "pallas")
    assert all(each.ok for each in result), result


def test_what_the_tests_below_compare_with_equals_the_reference():
    rounding.assert_within(_small_results()[-1], _small_wanted())


@pytest.mark.parametrize(
    "tiles",
    [
        {"chunk": 32, "backward_chunk": 32, "segment": 64, "backward_segment": 64},
        {"segment": 16, "backward_segment": 16, "block_e": 16},
    ],
    ids=["one segment", "chunk-long segments and two blocks of the width"],
)
def test_every_tiling_gives_the_same_results(tiles):
    got = _values_and_gradients(SMALL, tiles)(*_inputs(SMALL))
    rounding.assert_within(got, _small_wanted())


@pytest.mark.slow
def test_a_long_sequence_keeps_the_running_sum_over_many_segments():
    # More segments than are loaded at once, and not a multiple of them.
    case = cases.Case("long", {"B": 1, "T": 16 * 19 + 5, "R": 16, "E": 16})
    arrays, cotangents = _inputs(case)
    run = _values_and_gradients(case, {"segment": 16, "backward_segment": 16})
    rounding.assert_within(run(arrays, cotangents), _wanted(case, arrays, cotangents))


@pytest.mark.slow
def test_gradient_of_bfloat16_is_not_rounding_where_half_lives_are_short():
    # Every half-life by itself: the largest gradients, of long ones, would hide the others.
    case = cases.Case("decay", {"B": 2, "T": 256, "R": 32, "E": 32}, "bfloat16")
    arrays, cotangents = _inputs(case)
    run = _values_and_gradients(case, {"backward_segment": 256})
    reference = jax.jit(cases.outputs_and_gradients(SUITE, case, "reference"))
    want = np.asarray(reference(*map(cases.widened, (arrays, cotangents)))["d_decay"], np.float64)
    error = np.abs(np.asarray(run(arrays, cotangents)["d_decay"], np.float64) - want)
    assert np.median(error / np.abs(want)) < 1e-4
    assert np.max(error / np.abs(want)) < 0.02


def test_repeated_runs_are_bitwise_equal():
    run, arrays, cotangents, want = _small_results()
    got = run(arrays, cotangents)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def test_vmap_and_checkpoint_change_nothing():
    arrays, cotangents = _inputs(SMALL)
    # Two copies that differ in one argument of every rank, the decay included.
    second = {**arrays, "decay": 0.9 * arrays["decay"], "value": 2.0 * arrays["value"]}
    stacked = jax.tree.map(lambda *x: jnp.stack(x), arrays, second)

    def rematerialised(arrays, cotangents):
        with dispatch.on(dispatch.INTERPRETER), tuning.trying("prefix_mean", SMALL_TILES):
            call = jax.checkpoint(lambda a: SUITE.call(SMALL, a, "pallas"))
            outputs, pull = jax.vjp(call, arrays)
            (gradients,) = pull(cotangents)
        return {**outputs, **{f"d_{name}": gradient for name, gradient in gradients.items()}}

    got = jax.jit(jax.vmap(rematerialised, in_axes=(0, None)))(stacked, cotangents)
    first_wanted, second_wanted = _small_wanted(), _wanted(SMALL, second, cotangents)
    rounding.assert_within({name: x[0] for name, x in got.items()}, first_wanted)
    rounding.assert_within({name: x[1] for name, x in got.items()}, second_wanted)


def test_sharding_over_the_batch_changes_nothing():
    run, arrays, cotangents, want = _small_results()
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",), axis_types=(AxisType.Auto,))
    batch, whole = PartitionSpec("data"), PartitionSpec()
    specs = {name: whole if name == "decay" else batch for name in arrays}

    def each(arrays, cotangents):
        results = run(arrays, cotangents)
        return {**results, "d_decay": jax.lax.psum(results["d_decay"], "data")}

    sharded = jax.shard_map(
        each,
        mesh=mesh,
        in_specs=(specs, batch),
        out_specs={name: whole if name == "d_decay" else batch for name in want},
        check_vma=False,
    )
    rounding.assert_within(jax.jit(sharded)(arrays, cotangents), _small_wanted())


def test_a_second_derivative_is_refused_with_the_remedy():
    arrays, _ = _inputs(SMALL)

    def loss(value):
        with dispatch.on(dispatch.INTERPRETER):
            return jnp.sum(SUITE.call(SMALL, {**arrays, "value": value}, "pallas")["out"] ** 2)

    with pytest.raises(NotImplementedError, match="implementation='reference'"):
        jax.eval_shape(jax.grad(lambda v: jnp.sum(jax.grad(loss)(v))), arrays["value"])


@pytest.mark.compiled
def test_one_segment_whose_state_is_unused_is_one_launch(tmp_path):
    case = cases.Case("one segment", {"B": 2, "T": 64, "R": 32, "E": 64}, "bfloat16")
    arrays = jax.eval_shape(lambda key: SUITE.make(case, key), jax.random.key(0))
    compiled = target.compile_(
        lambda arrays: SUITE.call(case, arrays, "pallas")["out"], arrays, dump=tmp_path
    )
    assert compiled.as_text().count('"__gpu$xla.gpu.triton"') == 1


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"R": 24, "E": 64}, "R = 24"),
        ({"R": 32, "E": 512}, "E = 512"),
        ({"R": 8, "E": 64}, "R = 8"),
        ({"R": 32, "E": 64}, ""),
    ],
)
def test_sizes_that_are_not_served_are_named(sizes, text):
    case = cases.Case("sizes", {"B": 1, "T": 7, **sizes}, "float32", {"initial_state": True})
    write, value, decay, read, total, mass = SUITE.make(case, jax.random.key(0)).values()
    call = Call(write, value, decay, read, State(total, mass))
    reason = pallas.unsupported_reason(CONFIG, call)
    assert text in reason and bool(reason) == bool(text)


def test_traces_with_64_bit_types_on():
    arrays, cotangents = _inputs(SMALL)
    with jax.enable_x64(True):
        run = _values_and_gradients(SMALL, SMALL_TILES)
        shapes = jax.eval_shape(run, arrays, cotangents)
    assert {str(each.dtype) for each in shapes.values()} == {"float32"}
