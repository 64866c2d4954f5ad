"""Sentences on which rows a degree blurs and sharpens in comparison with softmax."""

from lm_jax.statistics import Interval
from polyattn_jax.audit.results import AuditSummary, SoftmaxComparison
from polyattn_jax.recipes.row_maps import parse_recipe
from polyattn_jax.report import findings


def entries(summary: AuditSummary, kind: str) -> list[SoftmaxComparison]:
    """The comparisons with softmax on the needle rows of the sweep, ascending by degree."""
    place = (summary.config.probe, kind)
    own = [e for e in summary.against_softmax if (e.suite, e.bias_kind) == place]
    return sorted(own, key=lambda entry: entry.p)


def of_recipe(summary: AuditSummary, recipe: str) -> SoftmaxComparison | None:
    """The comparison of one recipe with softmax; None where its S_p was not measured."""
    by_name = {one.name: one for one in map(parse_recipe, summary.config.recipes)}
    parsed = by_name.get(recipe)
    if parsed is None:
        return None
    result = entries(summary, parsed.bias_kind)
    return next((entry for entry in result if entry.p == parsed.degree), None)


def softmax_safe(summary: AuditSummary) -> Interval | None:
    """The share of safe rows under softmax itself."""
    probe = summary.config.probe, "auto"
    for entry in summary.prevalence:
        if (entry.suite, entry.bias_kind) == probe and entry.softmax:
            unsafe = entry.softmax
            return Interval(1 - unsafe.estimate, 1 - unsafe.high, 1 - unsafe.low, unsafe.n)
    return None


def sentence(summary: AuditSummary) -> str:
    """Which degrees spread more rows than softmax does, and how many of its sharp rows are lost.

    A degree blurs or sharpens where the interval of its balance excludes 0.
    """
    result = entries(summary, "auto")
    if not result:
        return ""
    first, config = result[0], summary.config
    spread = 100 * (1 - first.concentrated / first.rows)
    suite = findings.suite_label(first.suite, config)
    text = (
        f"Softmax itself lets the other keys outweigh the best one in {spread:.1f} % of the "
        f"{first.rows:,} rows ({suite}), so an unsafe row is not a fault of the recipe by "
        "itself."
    )
    groups = {
        "more rows than softmax": [e.p for e in result if e.balance.low > 0],
        "as many as softmax, within the interval,": [
            e.p for e in result if e.balance.low <= 0 <= e.balance.high
        ],
        "fewer than softmax": [e.p for e in result if e.balance.high < 0],
    }
    parts = [f"{name} at p = {_listed(degrees)}" for name, degrees in groups.items() if degrees]
    text += f" At b_auto rᵖ spreads {', '.join(parts)}."
    lost = [
        f"{100 * e.lost_of_concentrated.estimate:.1f} % (p = {e.p})"
        for e in result
        if e.lost_of_concentrated
    ]
    if lost:
        text += f" Of the rows that softmax concentrates it loses {_listed(lost)}."
    moved = [f"{100 * e.change.estimate:.0f} % (p = {e.p})" for e in result]
    return f"{text} Half of the rows see their head's output change by more than {_listed(moved)}."


def _listed(items: list) -> str:
    *first, last = map(str, items)
    return f"{', '.join(first)} and {last}" if first else last
