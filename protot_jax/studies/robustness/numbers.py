"""Statistics over pairs: the content of `summary.json` from the rows of `rows.parquet`.

`results.py` documents each field. Pairs of one sentence are not independent, and no more are the
fillings of one frame of a built sentence, so that intervals and tests are over sentences or frames.
Both are of one statistic, a ratio of sums over clusters (Cochran, Sampling Techniques, 6.4).
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math

import numpy as np
import pyarrow as pa
from scipy import stats

from lm_jax import statistics
from lm_jax.run.results import finite
from protot_jax.studies.interventions.models import SubjectModel
from protot_jax.studies.interventions.results import Interval
from protot_jax.studies.robustness import divergence, meaning, mediation
from protot_jax.studies.robustness.pairs import Pairs
from protot_jax.studies.robustness.results import (
    SCHEMA,
    VERSION,
    Clamp,
    Comparison,
    Kind,
    Measured,
    Mediation,
    Model,
    ReleasedClamp,
    RobustnessReport,
    Settings,
    SliceResult,
)
from protot_jax.studies.robustness.settings import PERTURBATIONS, RobustnessConfig

# Sentences above the floor, of which a resample has none in exp(-10) of cases.
_ENOUGH = 10
# Fewer clusters than these make a bootstrap's interval of a ratio too narrow.
_BOOTSTRAP = 30
_JS_RANGE = 0.0, float(divergence.LARGEST)
_ANY = -math.inf, math.inf

Columns = Mapping[str, np.ndarray]


def summarise(
    config: RobustnessConfig,
    subjects: Sequence[SubjectModel],
    made: Pairs,
    table: pa.Table,
    *,
    sentences: str,
    held: Sequence[tuple[int, int]],
    too_long: int,
) -> RobustnessReport:
    """The content of `summary.json`.

    Args:
      config: settings.
      subjects: the models, as the rows number them.
      made: the pairs, and what was left out.
      table: rows of all pairs and models (`results.ROWS`).
      sentences: name of the file, or of the corpus.
      held: layer and prototype of each that is held; empty for all.
      too_long: number of pairs that a model cannot read.
    """
    columns = {name: np.asarray(table[name].to_pylist()) for name in table.column_names}
    order = list(dict.fromkeys(pair.slice for pair in made.pairs))
    slices = [
        _slice(name, columns, len(subjects), made, config)
        for name in order
        if (columns["slice"] == name).any()
    ]
    return RobustnessReport(
        schema=SCHEMA,
        version=VERSION,
        settings=Settings(
            sentences=sentences,
            given=bool(config.sentences),
            pairs=config.pairs,
            seed=config.seed,
            least_similarity=config.least_similarity,
            held=tuple(f"L{layer}P{prototype}" for layer, prototype in held),
            floor=mediation.FLOOR,
            too_long=too_long,
        ),
        models=tuple(
            one.model.described(Model, run=one.run, trained=trained)
            for one, trained in zip(subjects, made.models, strict=True)
        ),
        slices=corrected(slices),
        skipped=made.skipped,
    )


def _slice(
    name: str, columns: Columns, models: int, made: Pairs, config: RobustnessConfig
) -> SliceResult:
    by_model = [
        {
            key: values[(columns["slice"] == name) & (columns["model"] == m)]
            for key, values in columns.items()
        }
        for m in range(models)
    ]
    first = by_model[0]
    kind: Kind = (
        "noise" if name in PERTURBATIONS else "meaning" if name in meaning.SLICES else "given"
    )
    return SliceResult(
        name=name,
        kind=kind,
        pairs=len(first["text"]),
        sentences=len(np.unique(first["text"])),
        distance=float(first["distance"].mean()),
        similarity=float(first["similarity"].mean()) if made.similarity else None,
        frames=len(np.unique(first["frame"][first["frame"] != ""])),
        dissimilar=made.dissimilar.get(name, 0),
        trained=made.trained.get(name, 0),
        example=(str(first["text"][0]), str(first["perturbed"][0])),
        models=tuple(measured(rows, seed=config.seed) for rows in by_model),
        comparison=compared([rows["js"] for rows in by_model], clusters(first)),
    )


def clusters(rows: Columns) -> np.ndarray:
    """What is independent: the frame of each row's sentence, or the sentence where it has none."""
    return np.where(rows["frame"] == "", rows["text"], rows["frame"])


def interval(
    values: np.ndarray, sentences: np.ndarray, within: tuple[float, float] = _ANY
) -> Interval:
    """Mean over pairs with its 95 % interval over clusters; NaN values are left out.

    The interval is Student's of the linearised mean. It has no ends where clusters are fewer than
    `statistics.FEWEST_CLUSTERS` or do not differ, and 0 is outside of it where `p_value` is below
    0.05.

    Args:
      values: value of each pair.
      sentences: the cluster of each pair, its sentence or frame.
      within: the values that a mean may have, which the ends do not leave.
    """
    known = np.isfinite(values)
    values, sentences = values[known], sentences[known]
    n = len(np.unique(sentences))
    if not n:
        return Interval(None, None, None, 0)
    return _student(values, np.ones(len(values)), sentences, within)


def mean_js(rows: Columns, name: str) -> Interval:
    """The mean of a column of JS."""
    return interval(rows[name], clusters(rows), _JS_RANGE)


def measured(rows: Columns, *, seed: int) -> Measured:
    """One model on one slice, whose rows are given by column."""
    spearman = rows["spearman"][np.isfinite(rows["spearman"])]
    return Measured(
        js=mean_js(rows, "js"),
        js_aligned=mean_js(rows, "js_aligned"),
        ag=finite(rows["ag"].mean()),
        overlap=float(rows["overlap"].mean()),
        spearman=float(spearman.mean()) if spearman.size else None,
        same_top=float(rows["same_top"].mean()),
        mass=float(rows["mass"].mean()),
        same_tokens=int(rows["same_tokens"].sum()),
        clamp=_clamp(rows, seed) if np.isfinite(rows["js_clamped"]).any() else None,
    )


def compared(js_MP: Sequence[np.ndarray], sentences: np.ndarray) -> Comparison | None:
    """Every model against the first, with paired intervals and p-values.

    The first was named so before anything was measured: the least of the same data would be least
    by chance too. `corrected` fills in the corrected p-values.

    Args:
      js_MP: JS by model and pair, in nats; NaN where there is none.
      sentences: the cluster of each pair, its sentence or frame.

    Returns:
      None for one model, or where fewer than two have a JS.
    """
    if sum(bool(np.isfinite(js_P).any()) for js_P in js_MP) < 2:
        return None
    excess_MP = [js_P - js_MP[0] for js_P in js_MP]
    p = tuple(
        1.0 if m == 0 else p_value(excess_P, sentences) for m, excess_P in enumerate(excess_MP)
    )
    excess = tuple(interval(excess_P, sentences) for excess_P in excess_MP)
    return Comparison(excess, p, p)


def p_value(values: np.ndarray, sentences: np.ndarray) -> float | None:
    """Two-sided p-value of a mean over pairs of 0, by a t test over clusters.

    It is that of `interval`: None where that has no ends.
    """
    known = np.isfinite(values)
    if not known.any():
        return None
    each = _linearised(values[known], np.ones(known.sum()), sentences[known])
    return None if each is None else float(stats.ttest_1samp(each, 0.0).pvalue)


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
        js=mean_js(rows, "js_clamped"),
        js_aligned=mean_js(rows, "js_aligned_clamped"),
        pmr=mediated(base, clamped, sentences, seed),
        control_js=mean_js(rows, "js_control"),
        control_pmr=(
            mediated(base[known], control[known], sentences[known], seed) if known.any() else None
        ),
        gain=interval(control - clamped, sentences),
        released=_released(rows, seed) if "js_released_write" in rows else None,
    )


def _released(rows: Columns, seed: int) -> ReleasedClamp:
    sentences = clusters(rows)
    write, read = rows["js_released_write"], rows["js_released_read"]
    smaller = np.minimum(write, read)
    return ReleasedClamp(
        write_js=mean_js(rows, "js_released_write"),
        read_js=mean_js(rows, "js_released_read"),
        js=interval(smaller, sentences, _JS_RANGE),
        pmr=mediated(rows["js"], smaller, sentences, seed),
    )


def mediated(base: np.ndarray, clamped: np.ndarray, sentences: np.ndarray, seed: int) -> Mediation:
    """PMR with its spread over pairs."""
    found = mediation.pmr(base, clamped)
    each = mediation.ratios(base, clamped)
    each = each[np.isfinite(each)]
    n = len(np.unique(sentences))
    ratio = Interval(finite(found.ratio_of_means), None, None, n)
    above = base >= mediation.FLOOR
    # Otherwise a resample may hold nothing but pairs of equal tokens, whose ratio is 0 / 0.
    if n >= 2 and (above.all() or len(np.unique(sentences[above])) >= _ENOUGH):
        if n < _BOOTSTRAP:
            left = _student(clamped, base, sentences)
            ratio = Interval(finite(found.ratio_of_means), _from_1(left.high), _from_1(left.low), n)
        else:
            left = statistics.clustered_ratio(clamped, base, sentences, seed=seed)
            ratio = Interval(1 - left.estimate, 1 - left.high, 1 - left.low, n)
    return Mediation(
        mean_of_ratios=finite(found.mean_of_ratios),
        deviation=float(each.std(ddof=1)) if each.size > 1 else None,
        ratio_of_means=ratio,
        median=finite(found.median),
        positive=float((each > 0).mean()) if each.size else None,
        below_floor=found.below_floor,
        pairs=len(base),
    )


def _student(
    above: np.ndarray,
    below: np.ndarray,
    sentences: np.ndarray,
    within: tuple[float, float] = _ANY,
) -> Interval:
    """sum(above) / sum(below) with Student's interval over clusters, if it has one."""
    ratio, n = float(above.sum() / below.sum()), len(np.unique(sentences))
    each = _linearised(above, below, sentences)
    if each is None:
        return Interval(ratio, None, None, n)
    found = statistics.student_interval(each)
    low, high = np.clip([found.low, found.high], *within).tolist()
    return Interval(ratio, low, high, n)


def _linearised(above: np.ndarray, below: np.ndarray, sentences: np.ndarray) -> np.ndarray | None:
    """A value of each cluster, whose mean is sum(above) / sum(below), by the delta method.

    Their standard error is that of the ratio. None where there are fewer clusters than
    `statistics.FEWEST_CLUSTERS`, or where all have one ratio but for rounding.
    """
    _, index = np.unique(sentences, return_inverse=True)
    tops, bottoms = np.bincount(index, above), np.bincount(index, below)
    ratio = above.sum() / below.sum()
    residuals = tops - ratio * bottoms
    # A sum of N terms is off by at most N eps times the sum of their sizes.
    rounding = 2 * len(above) * np.finfo(float).eps * np.abs(above).sum()
    if len(tops) < statistics.FEWEST_CLUSTERS or np.abs(residuals).max() <= rounding:
        return None
    return ratio + residuals / bottoms.mean()


def _from_1(value: float | None) -> float | None:
    return None if value is None else 1 - value
