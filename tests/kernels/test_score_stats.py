"""`score_stats`: every implementation against the reference, and that against the definition.

The definition (`score_stats_oracle`) gets the rows of the same q.k in float64.
"""

import functools
import math

import jax
import numpy as np
import pytest

from iaj_kernels.attention.visibility import visibility
from iaj_kernels.core import dispatch
from iaj_kernels.score_stats.api import score_stats
from iaj_kernels.score_stats.cases import SUITE
from iaj_kernels.score_stats.config import RowStats, Status
from polyattn_jax.recipes.diagnostic import relative_error_bound
from tests.kernels import comparison
from tests.kernels import score_stats_oracle as oracle

ALL = ("reference", "xla", "pallas")
# Of scores that are equal, equal.
EXACT = ("status", "active", "argmax")


@pytest.fixture(autouse=True)
def _interpreter():
    with dispatch.on(dispatch.INTERPRETER):
        yield


@functools.cache
def _arrays(name):
    return SUITE.make(SUITE.named(name), jax.random.key(0))


@functools.cache
def _fields(name, implementation):
    """Every field of a case, computed once for all the tests that read it."""
    run = functools.partial(SUITE.call, SUITE.named(name), implementation=implementation)
    return comparison.result(run, _arrays(name))


def _named(case):
    return case.name


def _scores(case, arrays, dtype):
    """The whole scores and mask of a case, `[B, T, N, S]`, by numpy."""
    B, T, S, N, K, H = (case.sizes[letter] for letter in "BTSNKH")
    q, k = (np.asarray(arrays[name], dtype) for name in "qk")
    z = np.einsum("BTNH,BSNH->BTNS", q, np.repeat(k, N // K, axis=2))
    # The factor is rounded to float32; all later numbers are not.
    z = z * dtype(np.float32(case.options.get("scale", H**-0.5)))
    if cap := case.options.get("soft_cap"):
        z = dtype(cap) * np.tanh(z / dtype(cap))
    visible = visibility(
        "test",
        B,
        T,
        S,
        causal=case.options.get("causal", True),
        window=case.options.get("window"),
        segment_ids=arrays.get("segments"),
        start=arrays.get("start"),
    )
    mask = np.asarray(visible.mask_BTS(T, S))[:, :, None, :]
    return z, np.broadcast_to(mask, z.shape)


def _rows(case, arrays, z, mask):
    """The definition at each bias, stacked as the op stacks them."""
    target = arrays.get("target")
    if target is not None:
        target = np.asarray(target)
        target = target if target.ndim == 3 else target[..., None]
    options = {name: case.options[name] for name in ("degrees", "cap") if name in case.options}
    at = [
        oracle.statistics(z, mask, bias=b, target=target, **options)
        for b in np.atleast_1d(np.asarray(arrays["bias"])).astype(z.dtype)
    ]
    stacked = jax.tree.map(lambda *x: np.stack(x), *at)
    return stacked if arrays["bias"].ndim else jax.tree.map(lambda x: x[0], stacked)


# Head widths, and sizes between others, are the kernel's own concern.
CROSSED = comparison.crossed(
    SUITE,
    xla=(
        "b1_t63_s63_n2_k1_h64_float32",
        "b1_t200_s200_n2_k2_h128_float32",
        "b1_t130_s130_n2_k2_h256_bfloat16",
    ),
    pallas=("b1_t63_s63_n2_k1_h64_float32",),
)


@pytest.mark.parametrize(("case", "implementation"), CROSSED)
def test_every_field_equals_the_reference(case, implementation):
    result = comparison.deviations(SUITE, case, implementation)
    assert all(each.ok for each in result), result


@pytest.mark.parametrize("case", SUITE.using("test"), ids=_named)
def test_the_reference_equals_the_definition_on_the_same_scores(case):
    """In float64, where two ways to add up a score differ by a thousandth of 1e-9."""
    arrays, _, expected = comparison.expected(SUITE.op, case.name)
    got = _fields(case.name, "reference")
    want = _rows(case, arrays, *_scores(case, arrays, np.float64))
    for name in RowStats._fields:
        wanted, value = getattr(want, name), expected.values[name]
        assert got[name].shape == wanted.shape, name
        if name in EXACT:
            assert got[name].dtype == wanted.dtype, name
            np.testing.assert_array_equal(value, wanted, err_msg=name)
        else:
            assert got[name].dtype == np.float32, name
            np.testing.assert_allclose(value, wanted, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize(
    "name", ["b2_t65_s65_n4_k2_h64_biases_float32", "b2_t3_s200_n4_k1_h64_start_degrees_float32"]
)
def test_s_p_is_within_the_proved_bound_of_its_value_in_float64(name, implementation):
    case, arrays = SUITE.named(name), _arrays(name)
    got = np.asarray(_fields(name, implementation)["s_p"])
    z, mask = _scores(case, arrays, np.float64)
    want = _rows(case, arrays, z, mask).s_p
    for i, p in enumerate(case.options.get("degrees", (2, 4, 8, 16))):
        bound = relative_error_bound(p, z.shape[-1])
        # Below the normal numbers of float32, which may be flushed, the bound does not hold.
        sure = np.isfinite(want[..., i]) & (want[..., i] > 1e-30)
        assert sure.any()
        error = np.abs(got[..., i][sure] / want[..., i][sure] - 1)
        assert error.max() <= bound, (p, error.max(), bound)


def _rows_of(scores_BS, H=16, **options):
    """The statistics of one query per row of scores, which are the first features of the keys."""
    scores_BS = np.asarray(scores_BS, np.float32)
    B, S = scores_BS.shape
    k_BSKH = np.zeros((B, S, 1, H), np.float32)
    k_BSKH[:, :, 0, 0] = scores_BS
    q_BTNH = np.zeros((B, 1, 1, H), np.float32)
    q_BTNH[..., 0] = 1.0
    stats = jax.jit(lambda q, k: score_stats(q, k, scale=1.0, **options))(q_BTNH, k_BSKH)
    axis = 1 + np.ndim(options.get("bias", 0.0))
    return jax.tree.map(lambda x: np.asarray(x).squeeze((axis, axis + 1)), stats)


@pytest.mark.parametrize("implementation", ALL)
def test_a_tie_counts_exactly_one_and_the_first_key_wins(implementation):
    # 47 (1 / 47) is below 1 in float32: a reciprocal alone would call these rows safe.
    assert np.float32(47) * (np.float32(1) / np.float32(47)) < 1
    places = ((3, 40), (69,), (0, 17, 18, 69), (64, 65))
    scores = np.full((4, 70), -10.0)
    for row, keys in zip(scores, places, strict=True):
        row[list(keys)] = 40.0
    stats = _rows_of(scores, bias=7.0, implementation=implementation)
    distractors = np.array([len(keys) - 1 for keys in places])
    np.testing.assert_array_equal(stats.argmax, [keys[0] for keys in places])
    np.testing.assert_array_equal(stats.s_p, np.repeat(distractors[:, None], 4, axis=1))
    np.testing.assert_array_equal(stats.active, distractors)
    np.testing.assert_array_equal(stats.margin, np.where(distractors > 0, 0.0, 50.0))


NAN, INF = math.nan, math.inf
SCORES = np.float32(
    [
        [-1, -2, -3],
        [1, 2, -3],
        [1, 9, 7],
        [1, NAN, 7],
        [1, INF, 7],
        [-INF, 2, 7],
        [-INF, -INF, -INF],
        [NAN, 3, 3],
        [0, 0, 0],
    ]
)


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize(
    ("options", "statuses"),
    [
        ({"bias": [0.0, 4.5, INF, NAN, -INF]}, {*Status} - {Status.SATURATED}),
        ({"cap": 4.0, "bias": [0.5]}, {*Status}),
        # The NaN of [NAN, 3, 3] is hidden from its query, that of [1, NAN, 7] is all it sees.
        ({"window": 1, "start": [0, 1, 2, 1, 2, 0, 2, 2, 9]}, {*Status} - {Status.SATURATED}),
        # Targets below and past the row, behind the window, and at a NaN.
        ({"target": [0, -1, 2, 1, 1, 1, 0, 0, 3], "window": 2}, {*Status} - {Status.SATURATED}),
    ],
    ids=lambda x: "_".join(x) if isinstance(x, dict) else "",
)
def test_rows_of_every_status_are_those_of_the_definition(options, statuses, implementation):
    arrays = {name: np.float32(x) for name, x in options.items() if name == "bias"}
    arrays |= {name: np.int32(x) for name, x in options.items() if name == "start"}
    if "target" in options:
        arrays["target"] = np.int32(options["target"])[:, None]
    got = _rows_of(SCORES, **{**options, **arrays, "implementation": implementation})
    distance = arrays.get("start", np.full(len(SCORES), 2))[:, None] - np.arange(3)
    mask = (distance >= 0) & (distance < options.get("window", 3))

    def at(bias):
        target, cap = options.get("target"), options.get("cap", INF)
        target = None if target is None else np.array(target)
        return oracle.statistics(SCORES, mask, bias=bias, target=target, cap=cap)

    want = at(0.0)
    if "bias" in arrays:
        want = jax.tree.map(lambda *x: np.stack(x), *map(at, arrays["bias"]))
    assert {Status(x) for x in np.unique(got.status)} == statuses
    for name in RowStats._fields:
        rtol = relative_error_bound(16, 3)
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=rtol, err_msg=name)
        assert not np.isnan(getattr(got, name)).any(), name
