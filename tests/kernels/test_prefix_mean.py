"""`prefix_mean`: the recurrence against float64, and the chunked form against the recurrence."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest

from iaj_kernels import prefix_mean
from iaj_kernels.core import cases, dispatch
from iaj_kernels.prefix_mean import baselines
from iaj_kernels.prefix_mean.cases import SUITE
from iaj_kernels.prefix_mean.state import State, empty_state
from tests import rounding
from tests.kernels import comparison
from tests.kernels import prefix_mean_oracle as oracle

NAMES = ("write", "value", "decay", "read", "total", "mass")
TINY = {"B": 2, "T": 19, "R": 4, "E": 3}


def _tiny(seed: int = 0, **options) -> tuple[cases.Case, cases.Arrays]:
    case = cases.Case("tiny", TINY, "float32", {"half_life": (0.3, 30.0), **options})
    return case, SUITE.make(case, jax.random.key(seed))


OPTIONS = (
    {},
    {"initial_state": True},
    {"mass_normalisation": False, "initial_state": True},
    {"gates": "one_hot"},
)


def _option_id(options) -> str:
    return "-".join(f"{k}={v}" for k, v in options.items()) or "plain"


def _oracle(case: cases.Case, arrays: cases.Arrays) -> cases.Arrays:
    named = {"mass_normalisation"} & set(case.options)
    return oracle.quadratic(
        *(arrays.get(name) for name in NAMES), **{name: case.options[name] for name in named}
    )


@pytest.mark.parametrize("options", OPTIONS, ids=_option_id)
def test_the_recurrence_is_the_float64_formula(options):
    case, arrays = _tiny(**options)
    wanted = rounding.expected(functools.partial(_oracle, case), arrays)
    rounding.assert_within(jax.jit(lambda a: SUITE.call(case, a, "reference"))(arrays), wanted)


@pytest.mark.parametrize("options", OPTIONS[:3], ids=_option_id)
def test_gradients_of_the_recurrence_are_those_of_the_float64_formula(options):
    case, arrays = _tiny(**options)
    cotangents = cases.cotangents(SUITE, case, arrays, jax.random.key(1))
    run = jax.jit(cases.outputs_and_gradients(SUITE, case, "reference"))

    def of_the_formula(arrays, cotangents):
        outputs, pull = jax.vjp(functools.partial(_oracle, case), arrays)
        return outputs | {f"d_{name}": each for name, each in pull(cotangents)[0].items()}

    wanted = rounding.expected(of_the_formula, arrays, cotangents)
    rounding.assert_within(run(arrays, cotangents), wanted)


# Each takes seconds to compile.
CASES = SUITE.using("test") + SUITE.using("resets")


def _compared(case: cases.Case):
    # The others go through every line of the chunked form.
    further = case.sizes["T"] in (2, 63, 64, 200) or case.sizes["R"] == 64
    return comparison.parameter(case, nightly=further)


@pytest.mark.parametrize("case", comparison.thinned([_compared(case) for case in CASES]))
def test_value_and_gradients_equal_the_reference(case):
    result = comparison.deviations(SUITE, case, "xla")
    assert all(each.ok for each in result), result


def _compared_optimised(case: cases.Case):
    here = case.sizes["T"] == 200 or set(case.options) == {"resets", "initial_state"}
    return comparison.parameter(case, nightly=not here)


@pytest.mark.long
@pytest.mark.optimised
@pytest.mark.parametrize("case", [_compared_optimised(case) for case in CASES])
def test_value_and_gradients_equal_the_reference_as_training_compiles_them(case):
    result = comparison.deviations(SUITE, case, "xla")
    assert all(each.ok for each in result), result


def test_the_materialised_form_is_right():
    """The baseline of speed and memory computes the same function."""
    case, arrays = _tiny(initial_state=True)
    wanted = rounding.expected(functools.partial(_oracle, case), arrays)
    form = jax.jit(lambda *a: baselines.materialised(*a[:4], State(*a[4:])))
    out_BTE, state = form(*(arrays[n] for n in NAMES))
    rounding.assert_within(
        {"out": out_BTE, "total": state.total_BRE, "mass": state.mass_BR}, wanted
    )


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_prefill_and_decoding_equal_the_parallel_form(implementation):
    """A prompt in two chunks, then token by token, carries the state of one long call."""
    case, arrays = _tiny()
    names = ("write", "value", "read")

    @jax.jit
    def run(parts, decay_R, state):
        write, value, read = parts
        return prefix_mean(
            write,
            value,
            decay_R,
            read,
            initial_state=state,
            return_state=True,
            implementation=implementation,
        )

    state = empty_state(2, 4, 3)
    outs = []
    edges = (0, 9, 17, 18, 19)
    for start, stop in itertools.pairwise(edges):
        parts = [arrays[name][:, start:stop] for name in names]
        out_BTE, state = run(parts, arrays["decay"], state)
        outs.append(out_BTE)
    results = {"out": jnp.concatenate(outs, 1), "total": state[0], "mass": state[1]}
    rounding.assert_within(results, rounding.expected(functools.partial(_oracle, case), arrays))


def _call(**changes):
    B, T, R, E = 2, 5, 4, 3
    named = {
        "write_BTR": jnp.ones((B, T, R)),
        "value_BTE": jnp.ones((B, T, E)),
        "decay_R": jnp.full((R,), 0.9),
        "read_BTR": jnp.ones((B, T, R)),
    }
    return prefix_mean(**(named | changes))


@pytest.mark.parametrize(
    ("error", "text", "changes"),
    [
        (ValueError, r"read has R = 5 .* but write has R = 4", {"read_BTR": jnp.ones((2, 5, 5))}),
        (ValueError, r"decay has shape \(4, 1\); expected \[R\]", {"decay_R": jnp.ones((4, 1))}),
        (TypeError, "write is int32; cast it to", {"write_BTR": jnp.ones((2, 5, 4), jnp.int32)}),
        (TypeError, "decay is bfloat16", {"decay_R": jnp.ones((4,), jnp.bfloat16)}),
        (
            ValueError,
            "state has E = 7",
            {"initial_state": State(jnp.zeros((2, 4, 7)), jnp.zeros((2, 4)))},
        ),
        (ValueError, "did you mean 'pallas'", {"implementation": "palas"}),
        (dispatch.UnavailableError, "needs an NVIDIA GPU", {"implementation": "pallas"}),
    ],
)
def test_errors_name_the_field_and_the_remedy(error, text, changes):
    with pytest.raises(error, match=text) as result:
        _call(**changes)
    assert str(result.value).startswith("prefix_mean: ")
