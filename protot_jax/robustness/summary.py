"""Statistics over pairs: the content of `summary.json` from the rows of `rows.parquet`.

`results.py` documents each field. Pairs of one sentence are not independent, and no more are the
fillings of one frame of a built sentence, so that intervals and tests are over sentences or frames.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math

import numpy as np
from scipy import stats

from lm_jax import statistics
from protot_jax.interventions.results import Interval
from protot_jax.robustness import mediation
from protot_jax.robustness.results import (
    Clamp,
    Comparison,
    Measured,
    Mediation,
    ReleasedClamp,
    SliceResult,
)

# Sentences above the floor, of which a resample has none in exp(-10) of cases.
_ENOUGH = 10
# Fewer clusters than these make a bootstrap's interval too narrow.
_BOOTSTRAP = 30

Columns = Mapping[str, np.ndarray]


def clusters(rows: Columns) -> np.ndarray:
    """What is independent: the frame of each row's sentence, or the sentence where it has none."""
    return np.where(rows["frame"] == "", rows["text"], rows["frame"])


def interval(values: np.ndarray, sentences: np.ndarray, seed: int) -> Interval:
    """Mean over pairs with an interval over clusters; NaN values are left out.

    A bootstrap of clusters, or Student's interval of their means, weighted by their pairs, where
    there are fewer than 30.

    Args:
      values: of each pair.
      sentences: the cluster of each pair, its sentence or frame.
      seed: of the bootstrap.
    """
    known = np.isfinite(values)
    values, sentences = values[known], sentences[known]
    _, index, counts = np.unique(sentences, return_inverse=True, return_counts=True)
    n = len(counts)
    if n < 2:
        return Interval(float(values.mean()) if n else None, None, None, n)
    if n < _BOOTSTRAP:
        means = np.bincount(index, values) / counts
        found = statistics.student_interval(means, weights=counts)
    else:
        found = statistics.clustered_bootstrap(values, sentences, seed=seed)
    return Interval(found.estimate, found.low, found.high, found.n)


def measured(rows: Columns, *, seed: int) -> Measured:
    """One model on one slice, whose rows are given by column."""
    sentences = clusters(rows)
    clamp = None
    if np.isfinite(rows["js_clamped"]).any():
        clamp = _clamp(rows, seed)
    spearman = rows["spearman"][np.isfinite(rows["spearman"])]
    ag = float(rows["ag"].mean())
    return Measured(
        js=interval(rows["js"], sentences, seed),
        js_aligned=interval(rows["js_aligned"], sentences, seed),
        ag=ag if math.isfinite(ag) else None,
        overlap=float(rows["overlap"].mean()),
        spearman=float(spearman.mean()) if spearman.size else None,
        same_top=float(rows["same_top"].mean()),
        mass=float(rows["mass"].mean()),
        same_tokens=int(rows["same_tokens"].sum()),
        clamp=clamp,
    )


def compared(js_MP: Sequence[np.ndarray], sentences: np.ndarray, *, seed: int) -> Comparison | None:
    """Every model against the first, with paired intervals and p-values.

    The first was named so before anything was measured: the least of the same data would be least
    by chance too. `corrected` fills in the corrected p-values.

    Args:
      js_MP: JS by model and pair, in nats; NaN where there is none.
      sentences: the cluster of each pair, its sentence or frame.
      seed: of the bootstrap.

    Returns:
      None for one model, or where fewer than two have a JS.
    """
    if sum(bool(np.isfinite(js_P).any()) for js_P in js_MP) < 2:
        return None
    excess_MP = [js_P - js_MP[0] for js_P in js_MP]
    p = tuple(
        1.0 if m == 0 else p_value(excess_P, sentences) for m, excess_P in enumerate(excess_MP)
    )
    excess = tuple(interval(excess_P, sentences, seed) for excess_P in excess_MP)
    return Comparison(excess, p, p)


def p_value(values: np.ndarray, sentences: np.ndarray) -> float | None:
    """Two-sided p-value of a mean of 0, by a t test of the clusters' means; None below two."""
    known = np.isfinite(values)
    _, index, counts = np.unique(sentences[known], return_inverse=True, return_counts=True)
    if len(counts) < 2:
        return None
    means = np.bincount(index, values[known]) / counts
    if not np.ptp(means):
        # A t statistic of 0 / 0, or one without an error.
        return 1.0 if means[0] == 0 else 0.0
    return float(stats.ttest_1samp(means, 0.0).pvalue)


def corrected(slices: Sequence[SliceResult]) -> tuple[SliceResult, ...]:
    """The slices with p-values corrected by Holm over all slices and models of their kind."""
    result = list(slices)
    for kind in dict.fromkeys(one.kind for one in slices):
        tests = [
            (s, m, p)
            for s, one in enumerate(slices)
            if one.kind == kind and one.comparison is not None
            for m, p in enumerate(one.comparison.p)
            if m and p is not None
        ]
        for (s, m, _), value in zip(tests, statistics.holm([p for *_, p in tests]), strict=True):
            own = result[s].comparison
            if own is not None:
                values = (*own.corrected[:m], value, *own.corrected[m + 1 :])
                own = dataclasses.replace(own, corrected=values)
                result[s] = dataclasses.replace(result[s], comparison=own)
    return tuple(result)


def _clamp(rows: Columns, seed: int) -> Clamp:
    sentences, base = clusters(rows), rows["js"]
    clamped, control = rows["js_clamped"], rows["js_control"]
    known = np.isfinite(control)
    return Clamp(
        js=interval(clamped, sentences, seed),
        js_aligned=interval(rows["js_aligned_clamped"], sentences, seed),
        pmr=mediated(base, clamped, sentences, seed),
        control_js=interval(control, sentences, seed),
        control_pmr=(
            mediated(base[known], control[known], sentences[known], seed) if known.any() else None
        ),
        gain=interval(control - clamped, sentences, seed),
        released=_released(rows, seed) if "js_released_write" in rows else None,
    )


def _released(rows: Columns, seed: int) -> ReleasedClamp:
    sentences = clusters(rows)
    write, read = rows["js_released_write"], rows["js_released_read"]
    smaller = np.minimum(write, read)
    return ReleasedClamp(
        write_js=interval(write, sentences, seed),
        read_js=interval(read, sentences, seed),
        js=interval(smaller, sentences, seed),
        pmr=mediated(rows["js"], smaller, sentences, seed),
    )


def mediated(base: np.ndarray, clamped: np.ndarray, sentences: np.ndarray, seed: int) -> Mediation:
    """PMR with its spread over pairs."""
    found = mediation.pmr(base, clamped)
    each = mediation.ratios(base, clamped)
    each = each[np.isfinite(each)]
    n = len(np.unique(sentences))
    ratio = Interval(_finite(found.ratio_of_means), None, None, n)
    above = base >= mediation.FLOOR
    # Otherwise a resample may hold nothing but pairs of equal tokens, whose ratio is 0 / 0.
    if n >= 2 and (above.all() or len(np.unique(sentences[above])) >= _ENOUGH):
        if n < _BOOTSTRAP:
            ratio = _linearised(base, clamped, sentences)
        else:
            left = statistics.clustered_ratio(clamped, base, sentences, seed=seed)
            ratio = Interval(1 - left.estimate, 1 - left.high, 1 - left.low, n)
    return Mediation(
        mean_of_ratios=_finite(found.mean_of_ratios),
        deviation=float(each.std(ddof=1)) if each.size > 1 else None,
        ratio_of_means=ratio,
        median=_finite(found.median),
        positive=float((each > 0).mean()) if each.size else None,
        below_floor=found.below_floor,
        pairs=len(base),
    )


def _linearised(base: np.ndarray, clamped: np.ndarray, sentences: np.ndarray) -> Interval:
    """1 - sum(clamped) / sum(base) with Student's interval over clusters, by the delta method."""
    _, index = np.unique(sentences, return_inverse=True)
    left, whole = np.bincount(index, clamped), np.bincount(index, base)
    ratio = left.sum() / whole.sum()
    found = statistics.student_interval(1 - ratio - (left - ratio * whole) / whole.mean())
    return Interval(float(1 - ratio), found.low, found.high, found.n)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
