"""Shares of rows against float64 on synthetic scores; rows left open by rounding are counted."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats as oracle

from polyattn_jax.audit import concentration
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.recipes import row_maps
from polyattn_jax.recipes.diagnostic import Status, relative_error_bound, row_stats
from polyattn_jax.recipes.probe import DEGREES
from polyattn_jax.studies.audit import numbers

CONFIG = AuditConfig(model="none", resamples=200)
PROMPTS = 12


def table(scores, bias, prompts, kind="auto", suite="synthetic"):
    """The columns that `schema.row_columns` would write for rows `scores[rows, keys]`."""
    stats = row_stats(jnp.asarray(scores), degrees=DEGREES, bias=np.float32(bias))
    soft = row_stats(jnp.asarray(scores), row_map=row_maps.softmax)
    rows, keys = scores.shape
    measured = {
        "suite": np.full(rows, suite),
        "bias_kind": np.full(rows, kind),
        "bias": np.full(rows, bias),
        "target": np.full(rows, "argmax"),
        "prompt": prompts,
        "layer": np.zeros(rows, int),
        "head": np.arange(rows) % 2,
        "window": np.zeros(rows, int),
        "query": np.full(rows, keys - 1),
        "answer": np.zeros(rows, int),
        **{f"s_{p}": np.asarray(stats.s_p[:, i]) for i, p in enumerate(DEGREES)},
        **{f"change_{p}": np.full(rows, p / 10) for p in DEGREES},
        "s_softmax": np.asarray(soft.s_p[:, 0]),
    }
    names = ("margin", "active", "status", "argmax", "relative_margin", "u_star")
    return measured | {name: np.asarray(getattr(stats, name)) for name in names}


def scores_of(rows=600, keys=24, seed=0):
    """Rows of every kind: flat and sharp, far above the threshold, near it, and dead."""
    rng = np.random.default_rng(seed)
    scale = rng.choice([0.2, 1.0, 4.0], (rows, 1))
    level = rng.choice([-12.0, -1.0, 2.0, 8.0], (rows, 1))
    return (rng.standard_normal((rows, keys)) * scale + level).astype(np.float32)


def float64_sums(row, bias):
    """S_2, S_4, S_8, S_16 and S of softmax for one row, in float64; inf on a dead row."""
    z = row.astype(np.float64)
    others = np.delete(np.arange(len(z)), z.argmax())
    r = np.maximum(z + bias, 0.0)
    top = r[z.argmax()]
    powers = [((r[others] / top) ** p).sum() if top > 0 else math.inf for p in DEGREES]
    return [*powers, np.exp(z[others] - z.max()).sum()]


@pytest.fixture(scope="module")
def measured():
    scores = scores_of()
    prompts = np.repeat(np.arange(PROMPTS), len(scores) // PROMPTS).astype(str)
    return table(scores, 1.5, prompts), np.array([float64_sums(row, 1.5) for row in scores])


def test_lost_and_sharpened_rows_are_those_of_float64(measured):
    rows, sums = measured
    assert (rows["status"] == Status.DEAD).sum() > 50
    soft = sums[:, 4] >= 1
    results = {entry.p: entry for entry in concentration.against_softmax(rows, CONFIG)}
    assert sorted(results) == sorted(DEGREES)
    for i, p in enumerate(DEGREES):
        unsafe, entry = sums[:, i] >= 1, results[p]
        assert entry.rows == len(rows["prompt"])
        assert entry.undecided == 0
        assert entry.concentrated == (~soft).sum()
        lost, sharpened = ~soft & unsafe, soft & ~unsafe
        assert entry.lost.estimate == pytest.approx(lost.mean())
        assert entry.sharpened.estimate == pytest.approx(sharpened.mean())
        assert entry.lost_of_concentrated.estimate == pytest.approx(unsafe[~soft].mean())
        assert entry.balance.estimate == pytest.approx(unsafe.mean() - soft.mean())
        assert entry.change.estimate == pytest.approx(p / 10)
        for name in ("lost", "sharpened", "balance"):
            interval = getattr(entry, name)
            assert interval.low <= interval.estimate <= interval.high
            assert interval.n == PROMPTS
    assert all(results[p].lost.estimate > 0 for p in DEGREES)
    assert results[16].sharpened.estimate > 0


def test_dead_rows_are_unsafe_and_the_paper_s_shares_are_of_active_rows(measured):
    rows, sums = measured
    (entry,) = concentration.prevalence(rows, CONFIG)
    active = np.isfinite(sums[:, 0])
    assert 0.05 < active.mean() < 0.95
    assert (entry.rows, entry.active_rows) == (len(active), active.sum())
    assert entry.dead.estimate == pytest.approx((~active).mean())
    assert entry.softmax.estimate == pytest.approx((sums[:, 4] >= 1).mean())
    assert entry.softmax_active.estimate == pytest.approx((sums[active, 4] >= 1).mean())
    for i, p in enumerate(DEGREES):
        unsafe = sums[:, i] >= 1
        assert unsafe[~active].all()
        assert entry.unsafe[str(p)].estimate == pytest.approx(unsafe.mean())
        assert entry.unsafe_active[str(p)].estimate == pytest.approx(unsafe[active].mean())
        assert entry.unsafe[str(p)].estimate >= entry.dead.estimate
    safe = concentration.safe_fraction(rows, "synthetic", None, "auto", CONFIG, np.array([1]))
    assert safe.estimate == pytest.approx((sums[rows["head"] == 1, 4] < 1).mean())


def test_a_bias_that_kills_nearly_every_row_is_not_safe():
    """Of 100 rows 90 are dead and 10 safe: 10 % are safe, not all."""
    scores = np.full((100, 8), -3.0, np.float32)
    scores[:, 0] = np.where(np.arange(100) < 90, -2.0, 6.0)
    rows = table(scores, 0.0, np.arange(100).astype(str))
    args = (rows, "synthetic", 2, "auto", CONFIG, None)
    assert concentration.safe_fraction(*args).estimate == pytest.approx(0.1)
    dead = concentration.dead_fraction(rows, "synthetic", "auto", CONFIG, None)
    assert dead.estimate == pytest.approx(0.9)
    (entry,) = concentration.prevalence(rows, CONFIG)
    assert entry.unsafe["2"].estimate == pytest.approx(0.9)
    assert entry.unsafe_active["2"].estimate == 0.0


def boundary_rows(offsets, keys=16, p=2):
    """Rows of r = (1, x, ..., x) whose S_p is 1 + offset in exact arithmetic, nearly."""
    rows = np.zeros((len(offsets), keys), np.float32)
    for row, offset in zip(rows, offsets, strict=True):
        row[:] = np.float32(((1 + offset) / (keys - 1)) ** (1 / p))
        row[0] = 1.0
    return rows


def test_rows_within_the_error_bound_are_undecided_and_widen_the_interval_only():
    bound = relative_error_bound(2, 16)
    offsets = np.array([0.3, -0.3, 0.2 * bound, -0.2 * bound, 0.0, 0.4, -0.4, -0.5])
    rows = table(boundary_rows(offsets), 0.0, np.arange(8).astype(str))
    members = concentration.unsafe(rows, 2)
    near = np.abs(offsets) < bound / 2
    np.testing.assert_array_equal(members.undecided, near)
    np.testing.assert_array_equal(members.sure, offsets >= 0.3)
    np.testing.assert_array_equal(members.possible, (offsets >= 0.3) | near)
    result = concentration.decided_share(members, rows["prompt"], CONFIG)
    assert result.estimate == members.computed.mean()
    sure, possible = (
        concentration.share(part.astype(float), rows["prompt"], CONFIG)
        for part in (members.sure, members.possible)
    )
    assert (result.low, result.high) == (sure.low, possible.high)
    assert result.high - result.low > max(sure.high - sure.low, possible.high - possible.low)
    (entry,) = concentration.prevalence(rows, CONFIG)
    assert entry.undecided["2"] == near.sum()
    compared = next(e for e in concentration.against_softmax(rows, CONFIG) if e.p == 2)
    # Softmax spreads all of these rows, so that a row is sharpened or neither.
    assert compared.undecided == near.sum()
    assert compared.sharpened.high > compared.sharpened.estimate


@pytest.mark.parametrize("p_star", [0.0, math.inf])
def test_the_sufficient_degree_is_judged_on_the_rows_that_rounding_decides(p_star):
    """Of rows all predicted safe, or all unsafe, those too near to S_2 = 1 are counted apart."""
    bound = relative_error_bound(2, 16)
    offsets = np.array([0.3, -0.3, 0.2 * bound, -0.2 * bound, 0.0, 0.4, -0.4, -0.5])
    rows = table(boundary_rows(offsets), 0.0, np.arange(8).astype(str))
    rows |= {"p_star": np.full(8, p_star)}
    near, above = np.abs(offsets) < bound / 2, offsets >= 0.3
    # rounding puts some of the open rows on either side
    assert {*(rows["s_2"][near] >= 1)} == {True, False}
    entry = next(e for e in numbers.bound(rows, CONFIG) if e.p == 2)
    predicted = p_star <= 2
    wrong = above if predicted else ~above & ~near
    assert entry.n == 8 and entry.undecided == near.sum() == 3
    assert entry.false_negative == entry.false_negative_eps == (2 if predicted else 0)
    assert entry.false_positive == (0 if predicted else 3)
    assert entry.agree.estimate == np.mean((rows["s_2"] < 1) == predicted)
    ends = [
        concentration.share(agree.astype(float), rows["prompt"], CONFIG)
        for agree in (~(wrong | near), ~wrong)
    ]
    assert (entry.agree.low, entry.agree.high) == (ends[0].low, ends[1].high)


def test_what_lies_beyond_the_tolerance_of_ties_is_so_within_the_error_bound():
    """S_2 just above 1 + 1e-6 is not known to be there; a tie of two keys is known not to be."""
    bound = relative_error_bound(2, 64)
    assert bound > 3 * numbers.EPSILON
    scores = boundary_rows([0.5 * bound, 3 * bound, 0.0], keys=64)
    scores[2] = -5.0
    scores[2, :2] = 2.0
    rows = table(scores, 0.0, np.arange(3).astype(str)) | {"p_star": np.zeros(3)}
    assert rows["s_2"][0] > 1 + numbers.EPSILON and rows["s_2"][2] == 1
    entry = next(e for e in numbers.bound(rows, CONFIG) if e.p == 2)
    counts = ("false_negative", "false_negative_eps", "undecided")
    assert [getattr(entry, name) for name in counts] == [2, 1, 1]


def test_an_exact_tie_is_unsafe_and_not_undecided():
    tie = np.full((1, 16), -5.0, np.float32)
    tie[0, :2] = 2.0
    members = concentration.unsafe(table(tie, 0.0, np.array(["a"])), 4)
    assert members.sure.all() and not members.undecided.any()
    # The same S_4 = 1 from sixteen keys is one rounding among others.
    flat = boundary_rows([0.0], keys=17, p=4)
    rows = table(flat, 0.0, np.array(["a"])) | {"s_4": np.float32([1.0])}
    assert concentration.unsafe(rows, 4).undecided.all()


def test_keys_outside_the_window_do_not_count():
    rows = {"query": np.array([9, 9, 2]), "window": np.array([0, 4, 4])}
    np.testing.assert_array_equal(concentration.visible_keys(rows), [10, 4, 3])


def test_one_prompt_tells_nothing_of_others():
    scores = scores_of(rows=8)
    rows = table(scores, 1.5, np.full(8, "only"))
    for entry in concentration.against_softmax(rows, CONFIG):
        assert (entry.lost.low, entry.lost.high) == (0.0, 1.0)
        assert entry.balance.high == 1.0


def test_windows_of_one_plain_text_are_one_text():
    """Of a plain text there is no interval; the texts of a .jsonl file are independent."""
    rows = table(scores_of(rows=80), 1.5, np.repeat(np.arange(8), 10).astype(str), suite="texts")
    of_file = {
        name: dataclasses.replace(CONFIG, text=f"a/speech.{name}") for name in ("txt", "jsonl")
    }
    assert of_file["txt"].one_document and not of_file["jsonl"].one_document
    assert dataclasses.replace(CONFIG, text="essays").one_document and not CONFIG.one_document
    for name, n in (("txt", 1), ("jsonl", 8)):
        (entry,) = concentration.prevalence(rows, of_file[name])
        assert entry.prompts == entry.dead.n == entry.unsafe["2"].n == n
        assert ((entry.unsafe["2"].low, entry.unsafe["2"].high) == (0.0, 1.0)) == (n == 1)
        (first, *_) = concentration.against_softmax(rows, of_file[name])
        assert first.lost.n == first.balance.n == n
    other = rows | {"suite": np.full(80, "niah_64")}
    (entry,) = concentration.prevalence(other, of_file["txt"])
    assert entry.prompts == 8


def test_intervals_resample_whole_prompts():
    # Half of the prompts are lost in all of their rows: rows alone would give a narrow interval.
    scores = np.full((400, 8), -3.0, np.float32)
    scores[:, 0] = 6.0
    scores[:200, 1] = 5.0  # S_2 = (6.5 / 7.5)^2 < 1 once, but twice it is not
    scores[:200, 2] = 5.0
    rows = table(scores, 1.5, np.repeat(np.arange(20), 20).astype(str))
    entry = next(e for e in concentration.against_softmax(rows, CONFIG) if e.p == 2)
    assert entry.lost.estimate == 0.5
    clustered = entry.lost.high - entry.lost.low
    alone = rows | {"prompt": np.arange(400).astype(str)}
    by_row = next(e for e in concentration.against_softmax(alone, CONFIG) if e.p == 2).lost
    assert clustered > 3 * (by_row.high - by_row.low)


def test_rows_that_no_prompt_gives_are_left_out(measured):
    rows, _ = measured
    invalid = rows | {"status": np.full(len(rows["prompt"]), Status.INVALID)}
    assert concentration.against_softmax(invalid, CONFIG) == ()
    (entry,) = concentration.prevalence(invalid, CONFIG)
    assert (entry.active_rows, entry.softmax, entry.unsafe) == (0, None, {})
    assert (entry.softmax_active, entry.unsafe_active) == (None, {})


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_share_without_exception_keeps_a_width(value):
    """A bootstrap of equal values has none: of 20 prompts the interval is that of 0 or 20 of 20."""
    result = concentration.share(np.full(60, value), np.repeat(np.arange(20), 3), CONFIG)
    low, high = oracle.binomtest(int(20 * value), 20).proportion_ci(method="wilson")
    assert (result.estimate, result.n) == (value, 20)
    assert (result.low, result.high) == pytest.approx((low, high))


def test_a_median_change_has_no_interval_below_0():
    """Of five prompts, whose interval is Student's and so of the same reach on either side."""
    prompts = np.repeat(np.arange(5), 4).astype(str)
    rows = table(scores_of(20), 1.5, prompts)
    rows["change_2"] = np.repeat([0.0, 0.1, 0.2, 3.0, 9.0], 4)
    entry = next(each for each in concentration.against_softmax(rows, CONFIG) if each.p == 2)
    assert entry.change.estimate == pytest.approx(0.2)
    assert entry.change.low == 0.0 < entry.change.high
