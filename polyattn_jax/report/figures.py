"""The figures of an audit's report: charts, each a function of the summary, the rows or the heads.

After the figures of "When Does Polynomial Attention Concentrate?": the phase plot (its Figure 2),
the histogram of p* and predicted against measured (1 and 6), the group ablation (3 and 4). The bars
of accuracy and the map of heads are ours.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lm_jax import report
from lm_jax.report.markup import number
from lm_jax.statistics import Interval
from polyattn_jax.audit.columns import Columns
from polyattn_jax.audit.columns import degrees as degrees_of
from polyattn_jax.audit.head_sets import groups as head_set_groups
from polyattn_jax.audit.head_types import TYPES, UNKNOWN
from polyattn_jax.audit.results import ConditionResult, SoftmaxComparison, SuiteResult
from polyattn_jax.recipes.calibrate import Calibration
from polyattn_jax.recipes.diagnostic import Status
from polyattn_jax.report.findings import by_recipe, softmax_of
from polyattn_jax.report.paper import PaperModel

if TYPE_CHECKING:
    import altair as alt

# More points than this add bytes to the page and nothing to the picture.
MOST_ROWS = 2000


def argmax_rows(rows: pa.Table, suite: str, bias_kind: str) -> Columns:
    """`p_star` and `s_2` of the active rows of one suite and bias, target argmax."""
    wanted = (
        (pc.field("suite") == suite)
        & (pc.field("bias_kind") == bias_kind)
        & (pc.field("target") == "argmax")
        & (pc.field("status") == int(Status.ACTIVE))
    )
    chosen = rows.select(["suite", "bias_kind", "target", "status", "p_star", "s_2"]).filter(wanted)
    return {name: chosen[name].to_numpy(zero_copy_only=False) for name in ("p_star", "s_2")}


def phase_plot(by_head: Columns, *, caption: str) -> "alt.LayerChart":
    """Median relative margin against median active count of each head, in groups by type."""
    groups = []
    for kind in (*TYPES, UNKNOWN):
        own = {name: column[by_head["type"] == kind] for name, column in by_head.items()}
        titles = [
            f"layer {layer}, head {head} ({kind}): ρ {number(float(rho))}, A {number(float(a))}, "
            f"S₂ {number(float(s))}"
            for layer, head, rho, a, s in zip(
                own["layer"],
                own["head"],
                own["relative_margin"],
                own["active"],
                own["s_2"],
                strict=True,
            )
        ]
        if titles:
            label = f"{'heads' if kind == UNKNOWN else kind} ({len(titles)})"
            points = report.Points(label, own["relative_margin"], own["active"], titles)
            groups.append(points)
    rho = np.linspace(0.0, 0.995, 400)
    walls = [report.Series(f"p = {p}", rho, (1 - rho) ** -p) for p in degrees_of(by_head)]
    return report.scatter(
        groups,
        boundaries=walls,
        log_y=True,
        x_range=(0.0, 1.0),
        caption=caption,
        x_label="median relative margin ρ",
        y_label="median active distractors A (keys)",
        n=f"{number(len(by_head['type']))} heads",
    )


def calibration_curve(calibration: Calibration, *, n: str) -> "alt.LayerChart":
    """b_auto against the length of the texts, with its interval and the range of single texts."""
    curve = calibration.curve
    lengths = [one.length for one in curve]
    pooled = ([one.bias for one in curve], [one.low for one in curve], [one.high for one in curve])
    return report.curves(
        [
            report.Series("all texts, 95 % interval", lengths, *pooled),
            report.Series("smallest of one text", lengths, [one.least for one in curve]),
            report.Series("largest of one text", lengths, [one.most for one in curve]),
        ],
        log_x=True,
        x_ticks=lengths,
        caption="b_auto of the first tokens of the calibration texts, read off a grid of step "
        f"{number(calibration.step)}. The audit uses that of {number(calibration.length)} tokens "
        "for all of its suites.",
        x_label="tokens of each text",
        y_label="b_auto",
        n=n,
    )


def banded(
    label: str, x: Sequence[float], results: Sequence[Interval], *, scale: float = 100.0
) -> report.Series:
    """A curve with its intervals as a band: by default in percent."""
    ends = ([scale * getattr(one, end) for one in results] for end in ("estimate", "low", "high"))
    return report.Series(label, x, *ends)


def lost_and_sharpened(
    entries: Sequence[SoftmaxComparison], *, where: str, top: float
) -> "alt.LayerChart":
    """Shares of rows that softmax, only softmax, and only r^p concentrates, against the degree."""
    degrees = [entry.p for entry in entries]
    sharp = [100 * entry.concentrated / entry.rows for entry in entries]
    return report.curves(
        [
            banded("lost: only softmax concentrates", degrees, [e.lost for e in entries]),
            banded("sharpened: only rᵖ does", degrees, [e.sharpened for e in entries]),
            report.Series("all that softmax concentrates", degrees, sharp),
        ],
        log_x=True,
        x_ticks=degrees,
        y_range=(0.0, top),
        caption=f"Rows that rᵖ loses and sharpens ({where}); bands: 95 % bootstrap over prompts.",
        x_label="degree p",
        y_label="rows (%)",
        n=f"{number(entries[0].rows)} rows" if entries else None,
    )


def degree_edges(
    parts: Sequence[np.ndarray], tested: Sequence[float], bins: int = 30
) -> np.ndarray:
    """Edges of equal width in log10 that hold every positive finite p* and the tested degrees."""
    joined = np.concatenate([*parts, np.array(tested)]).astype(float)
    on_axis = joined[(joined > 0) & np.isfinite(joined)]
    # rounding of the logarithm must not push the extremes out of their bins
    return np.geomspace(0.999 * on_axis.min(), 1.001 * on_axis.max(), bins + 1)


def degree_histogram(
    p_star: np.ndarray, edges: np.ndarray, tested: Sequence[float], *, where: str
) -> "alt.LayerChart":
    """How many rows need which degree; what has no place on a log axis is counted in words."""
    none_needed, never = int(np.sum(p_star == 0)), int(np.sum(np.isinf(p_star)))
    return report.histogram(
        p_star,
        log_x=True,
        bins=edges.tolist(),
        markers=[(p, str(p)) for p in tested],
        caption=f"Sufficient degree p* per active row, {where}; dashed: the tested degrees. Not in "
        f"the bars: {number(none_needed)} rows that need no degree (p* = 0: at most one active "
        f"distractor), {number(never)} for which none suffices (p* = ∞: a tie at the top).",
        x_label="sufficient degree p*",
    )


def bound_scatter(columns: Columns, *, degree: int, seed: int, where: str) -> "alt.LayerChart":
    """Scatter of predicted (p*) against measured (S_2), at most `MOST_ROWS` rows, a point each."""
    total = len(columns["p_star"])
    if total > MOST_ROWS:
        chosen = np.random.default_rng(seed).choice(total, MOST_ROWS, replace=False)
        columns = {name: column[np.sort(chosen)] for name, column in columns.items()}
    p_star, s = columns["p_star"].astype(float), columns["s_2"].astype(float)
    certified, safe, tie = p_star <= degree, s < 1.0, s == 1.0
    groups = {
        "certified and safe": certified & safe,
        "not certified, yet safe (slack of the bound)": ~certified & safe,
        "not certified, unsafe": ~certified & ~safe & ~tie,
        "tie (S₂ = 1)": tie,
        "certified, unsafe": certified & ~safe & ~tie,
    }
    on_axis = p_star[(p_star > 0) & np.isfinite(p_star)]
    across = (float(on_axis.min()), float(on_axis.max())) if on_axis.size else (0.1, 100.0)
    level = np.geomspace(across[0] / 10, across[1] * 10, 50)
    upright = np.geomspace(1e-9, 1e9, 400)
    sample = f"a fixed random {number(MOST_ROWS)} of {number(total)} rows"
    return report.scatter(
        [report.Points(name, p_star[mask], s[mask]) for name, mask in groups.items() if mask.any()],
        boundaries=[
            report.Series("S₂ = 1", level, np.ones_like(level)),
            report.Series(f"p* = {degree}", np.full_like(upright, degree), upright),
        ],
        log_x=True,
        log_y=True,
        caption=f"Predicted against measured at p = {degree}, {where}: "
        f"{sample if total > MOST_ROWS else f'all {number(total)} rows'}. The bound holds where "
        "no row is left of the upright line and above the level one.",
        x_label="predicted: sufficient degree p*",
        y_label="measured: S₂",
        n=f"{number(min(total, MOST_ROWS))} rows",
    )


def accuracy_bars(
    sweep: Sequence[ConditionResult], model: PaperModel | None, n: str
) -> "alt.LayerChart":
    """Accuracy of every recipe with its Wilson interval, and the paper's where it has the model."""
    rows = []
    for entry in sweep:
        result = entry.accuracy
        reference = model.needle_accuracy(entry.recipe) if model else None
        ends = 100 * result.estimate, 100 * result.low, 100 * result.high
        rows.append(report.Bar(entry.recipe, *ends, reference))
    return report.bars(
        rows,
        x_range=(0.0, 100.0),
        spec=".0f",
        caption="Needle accuracy with softmax and with each recipe in all heads; whiskers are "
        "95 % Wilson intervals.",
        x_label="prompts answered (%)",
        reference_label=f"paper, {model.name}" if model else "paper",
        n=n,
    )


def accuracy_by_length(entries: Sequence[SuiteResult], *, name: str, n: str) -> "alt.LayerChart":
    """Accuracy of every recipe on one suite against the length of its prompts."""
    results = {
        condition.recipe: [
            next(c.accuracy for c in entry.conditions if c.cell == condition.cell)
            for entry in entries
        ]
        for condition in by_recipe(entries[0].conditions)
    }
    caption = f"{name}: answers by length, softmax and each recipe in all heads; bands: Wilson."
    return _by_length(entries, results, caption, "prompts answered (%)", n)


def safe_by_length(entries: Sequence[SuiteResult], *, name: str, n: str) -> "alt.LayerChart":
    """Share of safe rows of every recipe on one suite against the length of its prompts."""
    results = {}
    for condition in by_recipe(entries[0].conditions):
        shares = [entry.safe[condition.cell] for entry in entries]
        measured = [share for share in shares if share is not None]
        if len(measured) == len(shares):
            results[condition.recipe] = measured
    caption = f"{name}: safe rows of the same prompts by length; bands: bootstrap over prompts."
    return _by_length(entries, results, caption, "safe rows (%)", n)


def _by_length(
    entries: Sequence[SuiteResult],
    results: Mapping[str, Sequence[Interval]],
    caption: str,
    y_label: str,
    n: str,
) -> "alt.LayerChart":
    lengths = [entry.length for entry in entries]
    return report.curves(
        [banded(label, lengths, shares) for label, shares in results.items()],
        log_x=True,
        x_ticks=lengths,
        y_range=(-4.0, 104.0),
        caption=caption,
        x_label="tokens of a prompt",
        y_label=y_label,
        n=n,
    )


def ablation_curves(ablation: Sequence[ConditionResult], *, caption: str) -> "alt.LayerChart":
    """Accuracy against the number of replaced heads: top, bottom, and the range of random sets."""
    series, groups = [], head_set_groups(ablation)
    for kind, cells in groups.items():
        results = [[100 * e.accuracy.estimate for e in own] for own in cells.values()]
        sizes, middle = list(cells), [float(np.mean(own)) for own in results]
        if kind == "random":
            ends = [min(own) for own in results], [max(own) for own in results]
            series.append(report.Series("random K: mean and range", sizes, middle, *ends))
        else:
            label = f"{kind} K: {'highest' if kind == 'top' else 'lowest'} S₂"
            series.append(report.Series(label, sizes, middle))
    base = softmax_of(ablation).accuracy
    sizes = sorted({size for cells in groups.values() for size in cells})
    return report.curves(
        series,
        x_range=(0.0, 1.06 * max(sizes)),
        y_range=(-4.0, 104.0),
        x_ticks=[0, *sizes],
        h_lines=[(100 * base.estimate, "softmax in all heads")],
        caption=caption,
        x_label="replaced heads K",
        y_label="prompts answered (%)",
        n=f"{number(base.n)} prompts per point",
    )


def change_map(
    by_head: Columns, shape: tuple[int, int], *, degree: int, caption: str
) -> "alt.LayerChart":
    """Median relative change of every head's output: layers from left to right, heads downwards."""
    layers, heads = shape
    change = np.full((heads, layers), np.nan)
    change[by_head["head"], by_head["layer"]] = by_head[f"change_{degree}"]
    return report.heat_map(
        change,
        value_label="relative change",
        scale="sequential",
        value_range=(0.0, 2.0),
        caption=caption,
        x_label="layer",
        y_label="head",
        n=f"{number(layers * heads)} heads",
    )


def head_map(by_head: Columns, shape: tuple[int, int], *, caption: str) -> "alt.LayerChart":
    """log10 of the median S_2 of every head: layers from left to right, heads downwards."""
    layers, heads = shape
    median = np.full((heads, layers), np.nan)
    titles = [[""] * layers for _ in range(heads)]
    for layer, head, s, kind, rank in zip(
        by_head["layer"],
        by_head["head"],
        by_head["s_2"],
        by_head["type"],
        by_head["rank"],
        strict=True,
    ):
        # log10 of 0 is shown at the safe end, a head without active rows has no value
        median[head, layer] = np.log10(max(s, 1e-30)) if np.isfinite(s) else np.nan
        titles[head][layer] = (
            f"layer {layer}, head {head} ({kind}): median S₂ {number(float(s))}, "
            f"place {number(int(rank) + 1)} of {number(layers * heads)}"
        )
    return report.heat_map(
        median,
        value_label="log₁₀ median S₂",
        scale="diverging",
        value_range=(-2.0, 2.0),
        titles=titles,
        caption=caption,
        x_label="layer",
        y_label="head",
        n=f"{number(layers * heads)} heads",
    )
