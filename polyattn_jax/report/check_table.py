"""The result of a check as a table for a terminal or a pipe."""

from collections.abc import Sequence
import textwrap

from lm_jax import statistics
from lm_jax.run.terminal import format_table
from polyattn_jax.audit import bias_tables
from polyattn_jax.audit.results import CheckResult, PromptResults
from polyattn_jax.recipes.linear_state import sentence as linear_sentence
from polyattn_jax.recipes.row_maps import parse_recipe
from polyattn_jax.report import findings

WIDTH = 80
# Label, value, interval and count; the last ones may be missing.
Row = tuple[str, ...]


def format_result(result: CheckResult) -> str:
    """The result of a check as plain text of at most 80 columns."""
    head = f"{result.recipe} in every head of {result.model}"
    lines: list[str | Row] = [*textwrap.wrap(head, WIDTH), ""]
    if not result.measured:
        text = (
            "S was not measured: it is measured for recipes that divide by the sum of a row's "
            "weights, none of them negative."
        )
        lines += textwrap.wrap(text, WIDTH)
    else:
        lines += _row_lines(result)
    probe = f"needle found, {result.length} tokens"
    lines += [
        "",
        (probe, "share", "95 % interval", "prompts"),
        _share("  softmax", result.softmax),
        _share("  the recipe", result.substituted),
        _share("  change (paired)", result.delta),
        "",
        *_prompt_lines(result.prompts),
        *_text_lines(result),
        ("prompts that could be lost", f"{result.could_decide}"),
        ("prompts lost, won", f"{result.lost}, {result.won}"),
        ("preserve takes, none being lost", f"{result.least_prompts}"),
        ("McNemar, exact, two-sided", f"p = {result.p_value:.2g}"),
        ("dead rows per prompt", f"{result.dead_rows_per_prompt:.1f}"),
        *_bias_lines(result),
        "",
    ]
    for label, text in (
        ("verdict", result.verdict.upper()),
        ("reason", result.reason),
        ("next", result.next),
        ("linear", linear_sentence(result.linear)),
    ):
        indent = " " * 10
        lines += textwrap.wrap(text, WIDTH, initial_indent=f"{label:10}", subsequent_indent=indent)
    return "\n".join(_aligned(lines))


def _row_lines(result: CheckResult) -> list[str | Row]:
    """Unsafe rows under the recipe and under softmax, and where the two differ."""
    unsafe, against, name = result.unsafe, result.against_softmax, _statistic(result)
    ranked_by = "S_2" if parse_recipe(result.recipe).degree is not None else name
    lines: list[str | Row] = [
        (f"rows with {name} >= 1, dead or not", "share", "95 % interval", "prompts"),
        _share("  all heads", unsafe.recipe),
        _share("    dead, that is of no weight", unsafe.dead),
        _share("    softmax on the same rows", unsafe.softmax),
        _share(f"  the {result.heads} heads of greatest {ranked_by}", unsafe.recipe_top),
        _share("    dead in these heads", unsafe.dead_top),
        _share("    softmax in the same heads", unsafe.softmax_top),
    ]
    if against is None:
        return lines
    return [
        *lines,
        "",
        ("against softmax, all rows", "share", "95 % interval", "prompts"),
        _share("  only softmax concentrates: lost", against.lost),
        _share("    of all that it concentrates", against.lost_of_concentrated),
        _share("  only the recipe does: sharpened", against.sharpened),
        _share("  median change of a head's output", against.change),
        ("rows left open by rounding", f"{against.undecided} of {against.rows}"),
    ]


def _statistic(result: CheckResult) -> str:
    """The statistic of a row: S_p by its degree, or S_phi of any other map."""
    return "S_phi" if result.degree is None else f"S_{result.degree:g}"


def _bias_lines(result: CheckResult) -> list[str | Row]:
    """The bias; where it was calibrated, its interval and its values at other lengths."""
    calibration = result.calibration
    if calibration is None or parse_recipe(result.recipe).bias != "auto":
        one = isinstance(result.bias, float)
        return [("bias", f"{result.bias:g}" if one else bias_tables.describe(result.bias))]
    bias, _, ends = findings.b_auto(calibration).partition(" ")
    ends = ends.strip("[]").replace(", ", " to ")
    lines: list[str | Row] = [("b_auto", bias, ends, f"{calibration.texts} texts")]
    text = f"b_auto is {findings.b_auto_by_length(calibration)}"
    return [*lines, *textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ")]


def _prompt_lines(own: PromptResults | None) -> list[str | Row]:
    """The answers to prompts of the user, with a verdict that the exit code does not follow."""
    if own is None:
        return []
    return [
        ("your prompts answered", "share", "95 % interval", "prompts"),
        _share("  with softmax", own.softmax.accuracy),
        _share("  with the recipe", own.recipe.accuracy),
        _share("  change on yours (paired)", own.recipe.delta),
        ("verdict on your prompts alone", own.recipe.verdict.upper()),
        "",
    ]


def _text_lines(result: CheckResult) -> list[str | Row]:
    """Loss on the user's texts and the rows that the recipe loses there."""
    texts = result.texts
    if texts is None:
        return []
    lines: list[str | Row] = [
        ("your texts, nats per token", "loss", "95 % interval", "texts"),
        _loss("  with softmax", texts.softmax.loss, ".3f"),
        _loss("  with the recipe", texts.recipe.loss, ".3f"),
        _loss("  change on them (paired)", texts.recipe.change, "+.3f"),
    ]
    if result.measured:
        lines += [
            _share(f"  rows with {_statistic(result)} >= 1", texts.unsafe.recipe),
            _share("    dead among these", texts.unsafe.dead),
            _share("    that softmax spreads", texts.unsafe.softmax),
        ]
    if against := texts.against_softmax:
        lines.append(_share("  rows only softmax concentrates", against.lost))
    return [*lines, ""]


def _loss(label: str, interval: statistics.Interval, spec: str) -> Row:
    ends = f"{interval.low:{spec}} to {interval.high:{spec}}"
    ends = findings.NO_INTERVAL if findings.unknown_ends(interval) else ends
    return label, f"{interval.estimate:{spec}}", ends, f"{interval.n}"


def _share(label: str, interval: statistics.Interval | None) -> Row:
    if interval is None:
        return label, "no such row", "", ""
    ends = f"{100 * interval.low:.1f} to {100 * interval.high:.1f} %"
    ends = findings.NO_INTERVAL if findings.unknown_ends(interval) else ends
    return label, f"{100 * interval.estimate:.1f} %", ends, f"{interval.n}"


def _aligned(lines: Sequence[str | Row]) -> list[str]:
    """The lines, with all rows of cells aligned as one table."""
    rows = [(*line, *[""] * (4 - len(line))) for line in lines if isinstance(line, tuple)]
    table = iter(format_table(None, rows).splitlines())
    return [next(table) if isinstance(line, tuple) else line for line in lines]
