"""The Triton kernels in Triton's interpreter, against the reference in float64.

The interpreter runs a kernel program by program on numpy arrays, outputs filled with NaN at first:
what a kernel leaves out, or reads outside of its arrays, shows. It checks neither races nor what
the compiler makes of the kernel; `tools/compile_kernels.py` and a GPU do.
"""

import importlib.util
import itertools

import jax
import numpy as np
import pytest

from iaj_kernels.core import cases, dispatch
from iaj_kernels.core.chunks import LOG_ZERO
from iaj_kernels.delta_rule import tile as delta_rule_tile
from iaj_kernels.suites import SUITES


def small(op, dtype="float32", options=(), **sizes):
    text = "_".join(f"{letter.lower()}{size}" for letter, size in sizes.items())
    name = "_".join([text, dtype, *dict(options)])
    return pytest.param(
        SUITES[op], cases.Case(name, sizes, dtype, dict(options)), id=f"{op}-{name}"
    )


# Small, for a program of the interpreter takes milliseconds. Lengths and widths that fill no tile,
# some that fill them, and several programs along every axis of a grid.
CASES = (
    small("delta_rule", B=2, T=35, N=2, H=6, E=40, options={"initial_state": True}),
    small("delta_rule", B=1, T=32, N=1, H=64, E=32),
    small("delta_rule", B=1, T=2, N=2, H=96, E=17, options={"beta": 2.0}),
    small("delta_rule", B=1, T=65, N=1, H=16, E=24, options={"keys": "same", "beta": 2.0}),
    small("delta_rule", B=1, T=70, N=1, H=16, E=24, dtype="bfloat16"),
    small("delta_rule", B=2, T=35, N=2, H=6, E=40, options={"initial_state": True, "decay": 0.3}),
    small("delta_rule", B=1, T=70, N=1, H=16, E=24, options={"decay": 60.0, "initial_state": True}),
    small("delta_rule", B=1, T=65, N=1, H=16, E=24, dtype="bfloat16", options={"decay": 0.3}),
    small("selective_scan", B=2, T=35, I=40, J=5, options={"initial_state": True}),
    small("selective_scan", B=1, T=32, I=32, J=16, options={"decay": (1e-4, 50.0)}),
    small("selective_scan", B=1, T=2, I=3, J=32, options={"skip": False}),
    small("selective_scan", B=1, T=18, I=33, J=1, dtype="bfloat16"),
)


@pytest.mark.triton
@pytest.mark.parametrize(("suite", "case"), CASES)
def test_value_and_gradients_equal_the_reference(suite, case):
    with dispatch.on(dispatch.INTERPRETER):
        result = cases.compare(suite, case, "triton")
    assert all(each.ok for each in result), result


@pytest.mark.triton
@pytest.mark.parametrize(
    "case",
    [
        # Whole segments, and a last one that is not full.
        cases.Case("whole", {"B": 2, "T": 128, "N": 1, "H": 6, "E": 20}),
        cases.Case(
            "filled up",
            {"B": 1, "T": 150, "N": 2, "H": 16, "E": 24},
            options={"decay": 0.05, "initial_state": True},
        ),
    ],
    ids=lambda case: case.name,
)
def test_a_row_of_the_delta_rule_that_is_cut_into_segments_is_whole(case, monkeypatch):
    monkeypatch.setattr(delta_rule_tile, "_STEPS", 32)
    columns = delta_rule_tile.default_tiles(case.sizes, "float32")["columns"]
    assert delta_rule_tile.segments(case.sizes, columns) == 4
    with dispatch.on(dispatch.INTERPRETER):
        result = cases.compare(SUITES["delta_rule"], case, "triton")
    assert all(each.ok for each in result), result


def test_rows_are_cut_where_they_leave_most_of_a_gpu_idle():
    def segments(columns, **sizes):
        return delta_rule_tile.segments(sizes, columns)

    assert segments(32, B=1, T=32_768, N=4, E=64) == 32
    assert segments(16, B=1, T=32_768, N=8, E=128) == 4
    # Two segments would take longer than none; so do rows that fill a GPU, and short ones.
    assert segments(16, B=2, T=32_768, N=8, E=128) == 1
    assert segments(32, B=32, T=4_096, N=4, E=64) == 1
    assert segments(32, B=1, T=1_024, N=4, E=64) == 1


@pytest.mark.triton
def test_documents_of_a_packed_row_do_not_read_one_another():
    """A reset is a decay that leaves nothing: by it a row is its parts, gradients too."""
    suite, case = (
        SUITES["delta_rule"],
        cases.Case("packed", {"B": 1, "T": 40, "N": 1, "H": 6, "E": 5}),
    )
    arrays = suite.make(
        cases.Case("decaying", case.sizes, options={"decay": 0.2}), jax.random.key(0)
    )
    starts = [0, 9, 17, 18, 40]
    log_decay_BTN = arrays["log_decay"].at[:, starts[1:-1]].set(LOG_ZERO)

    def total(arrays):
        return (suite.call(case, arrays, "triton")["out"] ** 2).sum()

    with dispatch.on(dispatch.INTERPRETER):
        whole = jax.grad(total)(arrays | {"log_decay": log_decay_BTN})
        parts = [
            jax.grad(total)({name: x[:, first:last] for name, x in arrays.items()})
            for first, last in itertools.pairwise(starts)
        ]
    for name, x in whole.items():
        expected = np.concatenate([part[name] for part in parts], 1)
        if name == "log_decay":
            # Of what there was before a part, nothing is left.
            expected[:, starts[:-1]] = 0
        size = max(np.abs(expected).max(), 1e-3)
        np.testing.assert_allclose(x, expected, rtol=0, atol=40 * 2.0**-22 * size, err_msg=name)
        if name == "log_decay":
            np.testing.assert_array_equal(x[:, starts[1:-1]], 0)


OF_TWO = {
    "delta_rule": {"B": 1, "T": 2, "N": 1, "H": 4, "E": 4},
    "selective_scan": {"B": 1, "T": 2, "I": 4, "J": 2},
}
operations = pytest.mark.parametrize("op", OF_TWO)


def of_two(op):
    """An operation of two arguments, its own case, and a case of twice the rows."""
    suite = SUITES[op]
    single, double = (cases.Case(op, OF_TWO[op] | {"B": B}) for B in (1, 2))
    return suite, single, suite.make(double, jax.random.key(0))


@pytest.mark.triton
@operations
def test_a_mapped_call_is_one_of_more_rows(op):
    """The rate A of a scan has no rows; it is mapped over nothing."""
    suite, single, arrays = of_two(op)
    rows = [name for name in arrays if name not in ("A", "D")]
    stacked = arrays | {name: arrays[name][:, None] for name in rows}
    axes = {name: 0 if name in rows else None for name in arrays}

    def gradient(arrays):
        out = suite.call(single, arrays, "triton")
        return sum((x**2).sum() for x in out.values())

    with dispatch.on(dispatch.INTERPRETER):
        whole = jax.grad(gradient)(arrays)
        mapped = jax.vmap(jax.grad(gradient), in_axes=(axes,))(stacked)
    for name in rows:
        np.testing.assert_array_equal(mapped[name][:, 0], whole[name])


@pytest.mark.triton
@operations
def test_a_second_derivative_is_refused(op):
    suite, single, arrays = of_two(op)
    name = next(iter(arrays))

    def slope(x):
        run = lambda x: suite.call(single, arrays | {name: x}, "triton")  # noqa: E731
        return jax.grad(lambda x: sum(y.sum() for y in run(x).values()))(x).sum()

    with (
        dispatch.on(dispatch.INTERPRETER),
        pytest.raises(NotImplementedError, match="implementation='reference'"),
    ):
        jax.eval_shape(jax.grad(slope), arrays[name])


def chosen(op, target, implementation=None, **sizes):
    """Runs `op` on zeros for `target`, without computing anything."""
    suite = SUITES[op]
    case = cases.Case(op, OF_TWO[op] | sizes)
    arrays = jax.eval_shape(lambda key: suite.make(case, key), jax.random.key(0))
    with dispatch.on(target):
        return jax.make_jaxpr(lambda a: suite.call(case, a, implementation))(arrays)


GPU = dispatch.Target("gpu", "NVIDIA H200")


@operations
def test_a_gpu_without_triton_falls_back_and_a_named_kernel_says_what_to_install(op, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(dispatch, "_FALLBACKS", [])
    with pytest.warns(dispatch.FallbackWarning, match="needs jax-triton: pip install"):
        by_default = chosen(op, GPU)
    assert str(by_default) == str(chosen(op, GPU, "xla"))
    text = rf"{op}: implementation='triton' needs jax-triton: pip install .*\[cuda13\]"
    with pytest.raises(dispatch.UnavailableError, match=text):
        chosen(op, GPU, "triton")


@operations
def test_a_cpu_never_chooses_triton(op, monkeypatch):
    cpu = dispatch.Target("cpu", "cpu")
    assert str(chosen(op, cpu)) == str(chosen(op, cpu, "xla"))
    with pytest.raises(dispatch.UnavailableError, match="needs an NVIDIA GPU and this is cpu"):
        chosen(op, cpu, "triton")
    with pytest.raises(dispatch.UnavailableError, match="unset TRITON_INTERPRET"):
        chosen(op, GPU, "triton")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(dispatch.UnavailableError, match="needs TRITON_INTERPRET=1"):
        chosen(op, dispatch.INTERPRETER, "triton")


@pytest.mark.parametrize(
    ("op", "letter", "most"), [("delta_rule", "H", 256), ("selective_scan", "J", 32)]
)
def test_what_no_register_file_holds_is_refused(op, letter, most):
    with pytest.raises(dispatch.UnavailableError, match=f"at most {most} numbers, not {most + 1}"):
        chosen(op, GPU, "triton", **{letter: most + 1})
