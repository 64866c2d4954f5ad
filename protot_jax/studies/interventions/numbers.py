"""Statistics of an intervention: the content of `summary.json` and `interventions.parquet`.

`results.py` documents each field.
"""

from collections.abc import Sequence
import dataclasses
from typing import TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike
import pyarrow as pa
from scipy import stats

from lm_jax.statistics import FEWEST_CLUSTERS, holm
from protot_jax.studies.interventions.effects import MODES, REINITIALISE, Measured, percent
from protot_jax.studies.interventions.gates import Ranked
from protot_jax.studies.interventions.matching import Match
from protot_jax.studies.interventions.results import (
    ROWS,
    Control,
    Effect,
    Interval,
    Mode,
    ModeResult,
    OtherPrototype,
    Replication,
    SeedResult,
    SentenceResult,
    SkippedSentence,
    TextPerplexity,
)
from protot_jax.studies.interventions.sentences import occurrences

# The edit that removes the prototype's contribution without giving its share to the others.
ABLATION = "zero_write"
# Significance level of the test among controls.
LEVEL = 0.05
# An interval of the effects on fewer texts decides nothing.
LEAST_TEXTS = 10
AnyInterval = TypeVar("AnyInterval", bound=Interval)
# Number of prototypes of the ranking and of strongest controls in the report.
MOST_LISTED = 10


def mean_interval(values: np.ndarray) -> Interval:
    """Mean, its Student's 95 % interval (None for fewer than two values), and n."""
    n = len(values)
    return Interval(float(values.mean()) if n else None, *_ends(values, np.arange(n)), n)


def clustered_interval(values: np.ndarray, clusters: np.ndarray) -> Effect:
    """Mean of clustered values with its interval; only different clusters are independent.

    Student's 95 % interval with the standard error of a ratio of sums over clusters (Cochran,
    Sampling Techniques, 6.4) and one degree of freedom less than there are clusters. With one value
    per cluster it equals `mean_interval`. The ends are None of fewer than `FEWEST_CLUSTERS`, whose
    interval would rest on a shape of the effects that nobody has seen. `n` counts the clusters,
    `sentences` the values.
    """
    n = len(np.unique(clusters))
    low, high = _ends(values, clusters) if n >= FEWEST_CLUSTERS else (None, None)
    return Effect(
        mean=float(values.mean()) if len(values) else None,
        low=low,
        high=high,
        n=n,
        sentences=len(values),
    )


def as_change(interval: AnyInterval) -> AnyInterval:
    """An interval of mean log ratios as the change of the geometric mean, in percent."""
    mean, low, high = (
        None if end is None else float(percent(np.asarray(end)))
        for end in (interval.mean, interval.low, interval.high)
    )
    return dataclasses.replace(interval, mean=mean, low=low, high=high)


def _mean_change(changes: ArrayLike) -> float:
    """The geometric mean of changes, all in percent."""
    return float(percent(np.log1p(np.divide(changes, 100.0)).mean()))


def _ends(values: np.ndarray, clusters: np.ndarray) -> tuple[float | None, float | None]:
    _, place_N = np.unique(clusters, return_inverse=True)
    n = place_N.max() + 1 if len(values) else 0
    if n < 2:
        return None, None
    mean = float(values.mean())
    deviations = np.bincount(place_N, values - mean)
    error = np.sqrt(n / (n - 1) * np.square(deviations).sum()) / len(values)
    reach = float(stats.t.ppf(0.975, n - 1) * error)
    return mean - reach, mean + reach


def sources(measured: Measured) -> np.ndarray:
    """Cluster index of each sentence: those of one text are not independent and share it."""
    texts = [sentence.text for sentence in measured.cases.sentences]
    return np.unique(texts, return_inverse=True)[1]


def of_mode(measured: Measured, mode: str) -> ModeResult:
    """Effect of one intervention, and its rank among those on other prototypes."""
    own = measured.layer, measured.prototype
    kept_N = measured.kept_N
    source_N = sources(measured)[kept_N]
    ratio_DN = measured.log_ratio(mode)[own]
    loss_DN = measured.log_perplexity_ratio(mode)[own]
    text = None
    if measured.text is not None:
        result = measured.text.change[mode]
        text = Interval(result.estimate, result.low, result.high, result.n)
    return ModeResult(
        mode=cast(Mode, mode),
        effect=as_change(clustered_interval(ratio_DN.mean(0)[kept_N], source_N)),
        sentences=tuple(as_change(mean_interval(ratio_D)) for ratio_D in ratio_DN.T),
        sentence_perplexity=as_change(clustered_interval(loss_DN.mean(0)[kept_N], source_N)),
        text_perplexity=text,
        control=control(measured, mode),
    )


def control(measured: Measured, mode: str) -> Control | None:
    """Rank of the chosen prototype's effect among those of all others; None without others."""
    if not measured.kept_N.any():
        return None
    effect_LR = measured.effects(mode)
    own = measured.layer, measured.prototype
    others = np.ones(effect_LR.shape, bool)
    others[own] = False
    others &= np.isfinite(effect_LR)
    values, chosen = effect_LR[others], float(effect_LR[own])
    if not values.size:
        return None
    as_low, as_high = int((values <= chosen).sum()), int((values >= chosen).sum())
    strongest = sorted(zip(values.tolist(), np.argwhere(others).tolist(), strict=True))
    return Control(
        chosen=chosen,
        percentile=float(stats.percentileofscore(values, chosen, kind="mean")),
        as_low=as_low,
        p=min(1.0, 2 * (1 + min(as_low, as_high)) / (1 + values.size)),
        n=int(values.size),
        mean=_mean_change(values),
        low=float(np.quantile(values, 0.025)),
        high=float(np.quantile(values, 0.975)),
        effects=tuple(map(tuple, effect_LR.tolist())),
        strongest=tuple(
            OtherPrototype(layer, prototype, effect)
            for effect, (layer, prototype) in strongest[:MOST_LISTED]
        ),
    )


def specific(effect: Effect, p: float | None) -> bool | None:
    """Whether a prototype changes the targets more than others do.

    Its interval must exclude 0, and p of its rank among the others be at most 0.05. None,
    undecided, where one of the two is missing or not finite or there are fewer than `LEAST_TEXTS`
    texts.
    """
    if effect.low is None or effect.high is None or p is None or effect.n < LEAST_TEXTS:
        return None
    # NaN compares as outside of everything.
    if not np.isfinite([effect.low, effect.high, p]).all():
        return None
    return not effect.low <= 0.0 <= effect.high and p <= LEVEL


def _verdict(modes: Sequence[ModeResult]) -> bool | None:
    (one,) = (one for one in modes if one.mode == ABLATION)
    return specific(one.effect, None if one.control is None else one.control.p)


def of_seed(
    measured: Measured,
    *,
    run: str,
    seed: int,
    step: int,
    match: Match | None = None,
    ranking: Sequence[Ranked] = (),
) -> SeedResult:
    """Everything measured on one model.

    Args:
      measured: measurements on its prototype.
      run: name of the run (`saved_run.run_names`).
      seed: seed of the model.
      step: training step of the model.
      match: match with the prototype of the first model; None for the first model.
      ranking: ranks of all prototypes by the words; empty without words.
    """
    kept_N = measured.kept_N
    tokens_N = measured.cases.target_NT.sum(1)
    text = measured.text
    modes = tuple(of_mode(measured, mode) for mode in MODES)
    return SeedResult(
        run=run,
        seed=seed,
        step=step,
        match=match,
        place=place(ranking, measured.layer, measured.prototype),
        ranking=tuple(ranking[:MOST_LISTED]),
        layer=measured.layer,
        prototype=measured.prototype,
        sentences=tuple(
            SentenceResult(
                concept=sentence.concept,
                target=sentence.target,
                text=sentence.text,
                where=sentence.where,
                earlier=len(occurrences(sentence.text, sentence.target)) - 1,
                target_tokens=int(tokens),
                baseline=float(baseline),
                perplexity=float(np.exp(loss)),
                kept=bool(kept),
            )
            for sentence, tokens, baseline, loss, kept in zip(
                measured.cases.sentences,
                tokens_N,
                measured.baseline_N,
                measured.baseline_loss_N,
                kept_N,
                strict=True,
            )
        ),
        kept=int(kept_N.sum()),
        excluded=int((~kept_N).sum()),
        text=None if text is None else TextPerplexity(text.perplexity, text.tokens),
        modes=modes,
        specific=_verdict(modes),
    )


def replication(seeds: Sequence[SeedResult]) -> Replication | None:
    """What the other models say of the first one's prototype; None without others."""
    others = seeds[1:]
    if not others:
        return None
    effects = [_ablation(one).effect.mean for one in seeds]
    known = [effect for effect in effects if effect is not None]
    p_holm = holm([one.match.p_value for one in others if one.match is not None])
    matched = [one for one, p in zip(others, p_holm, strict=True) if p <= LEVEL]
    sign = np.sign(effects[0] or 0.0)
    repeated = [
        one
        for one in matched
        if one.specific and np.sign(_ablation(one).effect.mean or 0.0) == sign
    ]
    return Replication(
        models=len(others),
        p_holm=tuple(p_holm),
        matched=len(matched),
        repeated=len(repeated),
        mean=_mean_change(known) if known else None,
        lowest=min(known, default=None),
        highest=max(known, default=None),
    )


def _ablation(seed: SeedResult) -> ModeResult:
    (one,) = (one for one in seed.modes if one.mode == ABLATION)
    return one


def place(ranking: Sequence[Ranked], layer: int, prototype: int) -> int | None:
    """Rank of a prototype, from 1; None without a ranking."""
    order = [(one.layer, one.prototype) for one in ranking]
    return order.index((layer, prototype)) + 1 if order else None


def skipped(measured: Measured) -> tuple[SkippedSentence, ...]:
    """The sentences that could not be used, each with the reason."""
    return tuple(
        SkippedSentence(one.sentence.where, one.sentence.target, one.reason)
        for one in measured.cases.skipped
    )


def rows(measured: Measured, *, run: str, seed: int) -> pa.Table:
    """A row for each sentence, prototype, intervention and draw that was measured."""
    columns: dict[str, list[np.ndarray]] = {name: [] for name in ROWS.names}
    sentences = measured.cases.sentences
    for mode in MODES:
        probability = measured.probability[mode]
        layer, prototype, draw, n = np.nonzero(np.isfinite(probability))
        at = layer, prototype, draw, n
        values = {
            "run": np.full(len(n), run),
            "seed": np.full(len(n), seed),
            "concept": np.array([s.concept for s in sentences])[n],
            "target": np.array([s.target for s in sentences])[n],
            "sentence": n,
            "layer": layer,
            "prototype": prototype,
            "chosen": (layer == measured.layer) & (prototype == measured.prototype),
            "mode": np.full(len(n), mode),
            "draw": draw if mode == REINITIALISE else np.full(len(n), -1),
            "kept": measured.kept_N[n],
            "baseline": measured.baseline_N[n],
            "probability": probability[at],
            "change": measured.change(mode)[at],
            "perplexity": np.exp(measured.loss[mode][at]),
            "perplexity_change": measured.perplexity_change(mode)[at],
        }
        for name, column in values.items():
            columns[name].append(column)
    return pa.table({name: np.concatenate(parts) for name, parts in columns.items()}, schema=ROWS)
