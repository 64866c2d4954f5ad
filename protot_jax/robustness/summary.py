"""Statistics over pairs: the content of `summary.json` from the rows of `rows.parquet`.

`results.py` documents each field. Pairs of one sentence are not independent, so that the bootstrap
draws sentences.
"""

from collections.abc import Mapping, Sequence
import math

import numpy as np

from lm_jax import statistics
from protot_jax.interventions.results import Interval
from protot_jax.robustness import mediation
from protot_jax.robustness.results import Clamp, Comparison, Measured, Mediation, ReleasedClamp

# Sentences above the floor, of which a resample has none in exp(-10) of cases.
_ENOUGH = 10

Columns = Mapping[str, np.ndarray]


def interval(values: np.ndarray, sentences: np.ndarray, seed: int) -> Interval:
    """Mean over pairs with a bootstrap interval over sentences; NaN values are left out."""
    known = np.isfinite(values)
    values, sentences = values[known], sentences[known]
    n = len(np.unique(sentences))
    if n < 2:
        return Interval(float(values.mean()) if n else None, None, None, n)
    found = statistics.clustered_bootstrap(values, sentences, seed=seed)
    return Interval(found.estimate, found.low, found.high, found.n)


def measured(rows: Columns, *, seed: int) -> Measured:
    """One model on one slice, whose rows are given by column."""
    sentences = rows["text"]
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
    """Every model against the one with the least mean JS, with paired intervals.

    Args:
      js_MP: JS by model and pair, in nats; NaN where there is none.
      sentences: of each pair.
      seed: of the bootstrap.

    Returns:
      None for one model, or where fewer than two have a JS.
    """
    known = {m: js_P[np.isfinite(js_P)] for m, js_P in enumerate(js_MP)}
    means = {m: js_P.mean() for m, js_P in known.items() if js_P.size}
    if len(means) < 2:
        return None
    least = min(means, key=means.__getitem__)
    excess = tuple(interval(js_P - js_MP[least], sentences, seed) for js_P in js_MP)
    others = [one for m, one in enumerate(excess) if m != least]
    return Comparison(least, excess, all(one.low is not None and one.low > 0 for one in others))


def _clamp(rows: Columns, seed: int) -> Clamp:
    sentences, base = rows["text"], rows["js"]
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
    sentences = rows["text"]
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


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
