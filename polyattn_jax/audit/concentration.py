"""Shares of score rows that a recipe concentrates on their target, and softmax on the same rows.

A row is unsafe if all other keys together outweigh the target, S >= 1 (Remark 4.5). A dead row,
whose weights are all zero, concentrates on nothing: it is unsafe too, and every share is of all
rows that have a target, dead ones among them. The paper's tables are of active rows alone; shares
of those are named `..._active`, and the share of dead rows stands beside each. Softmax is a
row map like any other, so its own S (Appendix T) says which rows were concentrated to begin with: a
row that softmax spreads and the recipe spreads too is no loss. So each share of S_p comes with that
of softmax on the same rows, and two shares say what a substitution does,

    lost        rows that softmax concentrates and the recipe does not (dead rows among them)
    sharpened   rows that the recipe concentrates and softmax does not

Statistics of rows are float32. Where their proved error bound (`diagnostic.relative_error_bound`,
`softmax_error_bound`, which take the float32 scores as exact) does not decide whether
S >= 1, the row is undecided: the estimate of a share counts it as computed, the low end of the
interval as no member, the high end as a member. Intervals resample
prompts, because the rows of one prompt are not independent; windows of one document count as one
(`clusters`).
"""

from collections.abc import Callable
import functools
import math
from typing import NamedTuple

import numpy as np

from lm_jax import statistics
from polyattn_jax.audit.audit_suites import TEXTS
from polyattn_jax.audit.columns import Columns, degrees, take, where
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.audit.results import ActiveMedians, Prevalence, RowShares, SoftmaxComparison
from polyattn_jax.recipes.diagnostic import (
    Safety,
    Status,
    classify,
    relative_error_bound,
    softmax_error_bound,
)
from polyattn_jax.recipes.feature_maps import FeatureMap
from polyattn_jax.recipes.row_maps import Map


class Rows(NamedTuple):
    """Membership of rows, some of them undecided: `sure` implies `computed` implies `possible`."""

    computed: np.ndarray
    sure: np.ndarray
    possible: np.ndarray

    def __invert__(self) -> "Rows":
        return Rows(~self.computed, ~self.possible, ~self.sure)

    def __and__(self, other: "Rows") -> "Rows":
        return Rows(*(ours & theirs for ours, theirs in zip(self, other, strict=True)))

    @property
    def undecided(self) -> np.ndarray:
        """The rows that may or may not be members."""
        return self.possible & ~self.sure


def visible_keys(c: Columns) -> np.ndarray:
    """How many keys each row's query sees, at most: its position, or the layer's window."""
    causal = c["query"].astype(int) + 1
    return np.where(c["window"] > 0, np.minimum(causal, c["window"]), causal)


def unsafe(c: Columns, degree: float, epsilon: float = 0.0) -> Rows:
    """The rows with S_p >= 1 + epsilon. A dead row, of which no key gets weight, has S_p = inf."""
    # Two equal keys and no other are a tie exactly; any other S_p that rounds to 1 is undecided.
    tie = (c["active"] == 1) & (c["margin"] == 0)
    return _unsafe(c, f"s_{degree}", lambda n: relative_error_bound(degree, n), tie, epsilon)


def softmax_unsafe(c: Columns) -> Rows:
    """The rows with S >= 1 under softmax itself."""
    tie = (visible_keys(c) == 2) & (c["margin"] == 0)
    return _unsafe(c, "s_softmax", softmax_error_bound, tie)


def own_unsafe(c: Columns, row_map: Map) -> Rows:
    """The rows of `recipe_rows` with S >= 1 under the recipe's own weights.

    The weights of a feature map are a softmax. Of maps that are no power of max(u, 0) either, such
    as the sigmoid, no error bound is proved: their S is taken as computed.
    """
    if isinstance(row_map, FeatureMap):
        tie = (visible_keys(c) == 2) & (c["margin"] == 0)
        return _unsafe(c, "s_own", softmax_error_bound, tie)
    tie, degree = (c["active"] == 1) & (c["margin"] == 0), row_map.degree
    bound = (lambda n: 0.0) if degree is None else lambda n: relative_error_bound(degree, n)
    return _unsafe(c, "s_own", bound, tie)


def _unsafe(
    c: Columns,
    name: str,
    bound: Callable[[int], float],
    tie: np.ndarray,
    epsilon: float = 0.0,
) -> Rows:
    counts, place = np.unique(visible_keys(c), return_inverse=True)
    bounds = np.array([bound(int(n)) for n in counts], np.float32)[place]
    safety = np.asarray(classify(c[name], bound=bounds, epsilon=epsilon))
    sure = (safety == Safety.UNSAFE) | ((safety == Safety.TIE) & tie)
    return Rows(c[name] >= 1.0 + epsilon, sure, safety != Safety.SAFE)


def clusters(c: Columns, config: AuditConfig) -> np.ndarray:
    """What intervals resample, by row: its prompt, or the document of a window.

    Windows of one plain text are not independent of each other, so that all are one cluster.
    """
    windows = (c["suite"] == TEXTS) & config.one_document
    return np.where(windows, TEXTS, c["prompt"])


def share(
    values: np.ndarray,
    prompts: np.ndarray,
    config: AuditConfig,
    span: tuple[float, float] = (0.0, 1.0),
) -> statistics.Interval:
    """The mean of `values` (one per row), with an interval that resamples prompts.

    Where all rows are of one prompt nothing is known of other prompts: the interval is `span`, the
    values that such a mean may have. Where all values are 0, or all 1, resampling cannot move the
    mean: the interval is Wilson's over prompts, as if each were one row.
    """
    n = len(set(prompts))
    if n == 1:
        return statistics.Interval(float(values.mean()), *span, 1)
    if span == (0.0, 1.0) and values.min() == values.max() and values[0] in (0.0, 1.0):
        return statistics.wilson(n * int(values[0]), n)
    return statistics.clustered_bootstrap(
        values, prompts, resamples=config.resamples, within=span, seed=config.seed
    )


def decided_share(members: Rows, prompts: np.ndarray, config: AuditConfig) -> statistics.Interval:
    """The share of rows that are members; undecided ones widen the interval at both ends."""
    interval = share(members.computed.astype(float), prompts, config)
    if not members.undecided.any():
        return interval
    low = share(members.sure.astype(float), prompts, config).low
    high = share(members.possible.astype(float), prompts, config).high
    return statistics.Interval(interval.estimate, low, high, interval.n)


def cells(rows: Columns) -> list[tuple[str, str]]:
    """Every suite and kind of bias, in order of appearance."""
    return list(dict.fromkeys(zip(rows["suite"], rows["bias_kind"], strict=True)))


def prevalence(rows: Columns, config: AuditConfig) -> tuple[Prevalence, ...]:
    """Unsafe rates per suite and bias over argmax rows: of all, and of active ones (Table 1)."""
    results = []
    for suite, kind in cells(rows):
        c = where(rows, suite=suite, bias_kind=kind, target="argmax")
        targeted, a = with_target(c), where(c, status=int(Status.ACTIVE))
        members, of_active = by_map(targeted), by_map(a)
        rates, active_rates = (
            {name: decided_share(m, clusters(part, config), config) for name, m in each.items()}
            for each, part in ((members, targeted), (of_active, a))
        )

        of_all = functools.partial(share, prompts=clusters(c, config), config=config)

        results.append(
            Prevalence(
                suite=suite,
                bias_kind=kind,
                bias=float(c["bias"][0]),
                rows=len(c["status"]),
                active_rows=len(a["status"]),
                prompts=len(set(clusters(c, config))),
                dead=of_all((c["status"] == Status.DEAD).astype(float)),
                invalid=int(np.sum(c["status"] == Status.INVALID)),
                argmax_is_answer=of_all((c["argmax"] == c["answer"]).astype(float))
                if (c["answer"] >= 0).any()
                else None,
                softmax=rates.pop("softmax", None),
                unsafe=rates,
                softmax_active=active_rates.pop("softmax", None),
                unsafe_active=active_rates,
                ties={str(p): int(np.sum(a[f"s_{p}"] == 1.0)) for p in degrees(a) if of_active},
                undecided={name: int(m.undecided.sum()) for name, m in members.items()},
                by_window=_by_window(targeted, members, config),
                median=_medians(a) if of_active else None,
            )
        )
    return tuple(results)


def by_map(c: Columns) -> dict[str, Rows]:
    """The unsafe rows under softmax and at each degree; empty without rows."""
    if not len(c["status"]):
        return {}
    return {"softmax": softmax_unsafe(c), **{str(p): unsafe(c, p) for p in degrees(c)}}


def _by_window(
    c: Columns, by_name: dict[str, Rows], config: AuditConfig
) -> dict[str, dict[str, statistics.Interval]]:
    """The unsafe rates of layers with a window and of full ones; empty without both."""
    windowed = c["window"] > 0
    if windowed.all() or not windowed.any():
        return {}
    return {
        kind: {
            name: decided_share(
                Rows(*(member[own] for member in members)), clusters(c, config)[own], config
            )
            for name, members in by_name.items()
        }
        for kind, own in (("window", windowed), ("full", ~windowed))
    }


def _medians(active: Columns) -> ActiveMedians:
    names = ("s_2", "s_softmax", "relative_margin", "active", "u_star")
    return ActiveMedians(**{name: float(np.median(active[name])) for name in names})


def of_heads(c: Columns, heads: np.ndarray | None, width: int) -> Columns:
    """The rows of the given flat head numbers, of layers of `width` heads; None takes all."""
    if heads is None:
        return c
    return take(c, np.isin(c["layer"].astype(int) * width + c["head"], heads))


def safe_fraction(
    rows: Columns,
    suite: str,
    degree: float | None,
    kind: str,
    config: AuditConfig,
    heads: np.ndarray | None,
) -> statistics.Interval | None:
    """Share of rows with S_p < 1, over all heads or the given flat head numbers.

    A dead row counts, and is not safe. A `degree` of None is softmax, read on the same rows. None
    where the degree was not diagnosed, or no row has a target.
    """
    if degree is not None and degree not in degrees(rows):
        return None
    c = _of_suite(rows, suite, kind, heads)
    if not len(c["layer"]):
        return None
    members = softmax_unsafe(c) if degree is None else unsafe(c, degree)
    return decided_share(~members, clusters(c, config), config)


def dead_fraction(
    rows: Columns, suite: str, kind: str, config: AuditConfig, heads: np.ndarray | None
) -> statistics.Interval | None:
    """Share of the rows of `safe_fraction` that are dead."""
    return dead_share(_of_suite(rows, suite, kind, heads), config)


def row_shares(
    rows: Columns, suite: str, degree: float, kind: str, config: AuditConfig, top: np.ndarray
) -> RowShares:
    """The safe and the dead rows of one degree, over all heads and the flat head numbers `top`."""
    safe = (safe_fraction(rows, suite, degree, kind, config, heads) for heads in (None, top))
    dead = (dead_fraction(rows, suite, kind, config, heads) for heads in (None, top))
    names = ("recipe", "recipe_top", "dead", "dead_top")
    return RowShares(**dict(zip(names, (*safe, *dead), strict=True)))


def dead_share(c: Columns, config: AuditConfig) -> statistics.Interval | None:
    """Share of the rows `c` whose weights are all zero; None without rows."""
    if not len(c["status"]):
        return None
    return share((c["status"] == Status.DEAD).astype(float), clusters(c, config), config)


def _of_suite(rows: Columns, suite: str, kind: str, heads: np.ndarray | None) -> Columns:
    c = with_target(where(rows, suite=suite, bias_kind=kind, target="argmax"))
    return of_heads(c, heads, int(rows["head"].max()) + 1)


def with_target(c: Columns) -> Columns:
    """The rows that have a target, dead ones among them."""
    return take(c, np.isin(c["status"], (Status.ACTIVE, Status.DEAD, Status.SATURATED)))


def against_softmax(rows: Columns, config: AuditConfig) -> tuple[SoftmaxComparison, ...]:
    """What r^p loses and what it sharpens, by suite, bias and degree."""
    results = []
    for suite, kind in cells(rows):
        c = with_target(where(rows, suite=suite, bias_kind=kind, target="argmax"))
        if not len(c["status"]):
            continue
        spread = softmax_unsafe(c)
        results += [
            comparison((suite, kind, p), unsafe(c, p), c[f"change_{p}"], c, spread, config)
            for p in degrees(c)
        ]
    return tuple(results)


def comparison(
    place: tuple[str, str, int | float],
    missed: Rows,
    change: np.ndarray,
    c: Columns,
    spread: Rows,
    config: AuditConfig,
) -> SoftmaxComparison:
    """What a recipe loses and sharpens on the rows `c`.

    Args:
      place: suite, kind of bias and degree of the result.
      missed: rows that the recipe does not concentrate.
      change: relative change of the head's output, per row.
      c: rows that have a target.
      spread: rows that softmax does not concentrate.
      config: settings of the audit.
    """
    suite, kind, p = place
    prompts = clusters(c, config)
    lost, sharpened = ~spread & missed, spread & ~missed
    sharp = ~spread.computed

    def difference(first: np.ndarray, second: np.ndarray) -> statistics.Interval:
        return share(first.astype(float) - second, prompts, config, (-1.0, 1.0))

    balance = difference(lost.computed, sharpened.computed)
    undecided = lost.undecided | sharpened.undecided
    if undecided.any():
        ends = (
            difference(lost.sure, sharpened.possible).low,
            difference(lost.possible, sharpened.sure).high,
        )
        balance = statistics.Interval(balance.estimate, *ends, balance.n)
    of_sharp = None
    if sharp.any():
        part = Rows(*(member[sharp] for member in missed))
        of_sharp = decided_share(part, prompts[sharp], config)
    # A head whose softmax output is 0 changes by inf, which no bootstrap takes.
    change = np.minimum(change.astype(float), np.finfo(np.float32).max)
    return SoftmaxComparison(
        suite=suite,
        bias_kind=kind,
        p=p,
        rows=len(c["status"]),
        lost=decided_share(lost, prompts, config),
        sharpened=decided_share(sharpened, prompts, config),
        lost_of_concentrated=of_sharp,
        concentrated=int(sharp.sum()),
        balance=balance,
        change=_median(change, prompts, config),
        change_90=float(np.quantile(change, 0.9)),
        undecided=int(undecided.sum()),
    )


def _median(values: np.ndarray, prompts: np.ndarray, config: AuditConfig) -> statistics.Interval:
    """The median of values from 0 with an interval that resamples prompts.

    The whole range for a single prompt.
    """
    if len(set(prompts)) == 1:
        return statistics.Interval(
            float(np.median(values)), float(values.min()), float(values.max()), 1
        )
    return statistics.clustered_bootstrap(
        values,
        prompts,
        np.median,
        resamples=config.resamples,
        within=(0.0, math.inf),
        seed=config.seed,
    )
