"""The verdict of a check as a page, and as a table for a terminal or a pipe."""

from collections.abc import Iterator, Sequence
import itertools
import math
from pathlib import Path
import re
import textwrap

from lm_jax import report, statistics
from lm_jax.console.terminal import format_table
from lm_jax.errors import EXIT_FINISHED, EXIT_NO_GO, EXIT_UNDECIDED
from lm_jax.report import Report, section
from lm_jax.report.markup import Markup
from polyattn_jax.audit import bias_tables
from polyattn_jax.audit.results import CheckResult, TaskResult
from polyattn_jax.recipes.linear_state import sentence as linear_sentence
from polyattn_jax.recipes.row_maps import DISTANCE, parse_recipe
from polyattn_jax.report import findings
from polyattn_jax.studies.check import decisions, tasks
from polyattn_jax.suites import control

WIDTH = 80
EXIT_CODES = {"preserve": EXIT_FINISHED, "no-go": EXIT_NO_GO, "undecided": EXIT_UNDECIDED}
ENDS = "95 % interval"
_MINUS = re.compile(r"(?<![\w.])-(?=\d)")
# Label, value, interval and count; the last ones may be missing.
Row = tuple[str, ...]


def build(result: CheckResult) -> Report:
    """The report of a check."""
    return Report(
        f"May {result.recipe} replace softmax in {Path(result.model).name}?",
        lambda: [
            section("Tasks", *_drawn(_task_lines(result))),
            section("Rows", *_drawn(_measured_lines(result))),
            *[section("Your texts", *_drawn(_text_lines(result)))] * bool(result.texts),
            section("Bias", *_drawn(_bias_lines(result))),
        ],
        lead=[
            report.verdict(
                answer(result),
                f"Next: {result.next}.",
                f"As linear attention: {linear_sentence(result.linear)}.",
                tone=findings.TONES[result.verdict],
            )
        ],
        lines=[format_result(result)],
        facts={"config_hash": result.provenance.config_hash},
        exit_code=EXIT_CODES[result.verdict],
    )


def answer(result: CheckResult) -> str:
    """Whether the recipe may replace softmax in the model, and why."""
    what = f"replace softmax in {_heads(result)}{Path(result.model).name}"
    match result.verdict:
        case "preserve":
            return f"{result.recipe} may {what}: {result.reason}."
        case "no-go":
            return f"{result.recipe} may not {what}: {result.reason}."
    return f"Whether {result.recipe} may {what} is undecided: {result.reason}."


def _heads(result: CheckResult) -> str:
    """Which heads have the recipe, if not all of them."""
    if result.replaced is None:
        return ""
    return f"{result.replaced} of {result.of_heads} heads{' (trained)' * result.trained} of "


def _drawn(lines: Sequence[str | Row]) -> Iterator[str | Markup]:
    """The lines of the terminal as parts of a page: rows under a head of four titles, and text."""
    for is_table, group in itertools.groupby(lines, key=lambda line: isinstance(line, tuple)):
        if not is_table:
            text = " ".join(str(line).strip() for line in group).strip()
            yield from [text] * bool(text)
            continue
        # A pipe reads hyphens; a page has the minus sign.
        rows = [[_MINUS.sub("−", cell.strip()) for cell in (*row, "", "", "")[:4]] for row in group]
        if rows[0][2] == ENDS:
            (title, *heads), rows = rows[0], rows[1:]
            yield report.table(["", *heads], rows, caption=f"{title}.")
        else:
            yield report.key_values(
                {name: " ".join(filter(None, values)) for name, *values in rows}
            )


def format_result(result: CheckResult) -> str:
    """The result of a check as plain text of at most 80 columns."""
    head = f"{result.recipe} in {_heads(result) or 'every head of '}{result.model}"
    lines: list[str | Row] = [
        *textwrap.wrap(answer(result), WIDTH),
        "",
        *textwrap.wrap(head, WIDTH),
        "",
        *_measured_lines(result),
        "",
        *_task_lines(result),
        *_text_lines(result),
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


def _measured_lines(result: CheckResult) -> list[str | Row]:
    if result.measured and result.trained:
        text = (
            "The heads were trained, and all answers are given with what was trained. What follows "
            "of rows is of the recipe without it."
        )
        return [*textwrap.wrap(text, WIDTH), *_row_lines(result)]
    if result.measured and result.gated:
        text = (
            "The model has gates, which all answers are given with. What follows of rows is of the "
            "recipe and of softmax themselves, as if all edges were open."
        )
        return [*textwrap.wrap(text, WIDTH), *_row_lines(result)]
    if result.measured:
        return _row_lines(result)
    text = (
        "S was not measured: it is measured for recipes that divide by the sum of a row's "
        "weights, none of them negative."
    )
    return [*textwrap.wrap(text, WIDTH)]


_CONTROL = {
    control.LEFT_OUT: "  softmax, answer left out",
    control.OTHERS: "  softmax, answer to another",
}


def _control(task: TaskResult, accuracy: statistics.Interval) -> Row:
    if task.control_answers == tasks.GUESSED:
        return "  guessing", f"{100 * accuracy.estimate:.1f} %"
    return _share(_CONTROL[task.control_answers], accuracy)


def _short(name: str) -> str:
    """The name of a task without the folder of its file."""
    kind, colon, source = name.partition(":")
    return f"{kind}:{Path(source).name}" if colon else name


def _task_lines(result: CheckResult) -> list[str | Row]:
    """What each task shows, and those that cannot be asked."""
    lines: list[str | Row] = []
    several = len(result.tasks) > 1 or bool(result.refused)
    for task in result.tasks:
        size = f", {task.tokens} tokens" if task.tokens else ""
        lines += [
            (f"{_short(task.name)}{size}", "right", ENDS, "prompts"),
            _share("  softmax", task.softmax),
        ]
        # What the recipe does where softmax solves nothing is no finding of several.
        decides = not several or task.verdict != decisions.UNDECIDABLE
        if decides:
            lines += [
                _share("  the recipe", task.recipe),
                _share("  change (paired)", task.delta),
            ]
        if task.control is not None:
            lines.append(_control(task, task.control))
        if not decides:
            lines += [("verdict by this task", task.verdict.upper()), ""]
            continue
        lines += [
            ("prompts that could be lost", f"{task.could_decide}"),
            ("prompts lost, won", f"{task.lost}, {task.won}"),
            ("preserve takes, none being lost", f"{task.least_prompts}"),
            ("McNemar, exact, two-sided", f"p = {task.p_value:.2g}"),
        ]
        if several:
            lines.append(("  by Holm for all that decide", f"p = {task.p_holm:.2g}"))
        if math.isfinite(task.dead_rows_per_prompt):
            lines.append(("dead rows per prompt", f"{task.dead_rows_per_prompt:.1f}"))
        if several:
            lines.append(("verdict by this task", task.verdict.upper()))
        lines.append("")
    for name, why in result.refused.items():
        lines += [*textwrap.wrap(f"{name} cannot be asked: {why}", WIDTH), ""]
    return lines


def _row_lines(result: CheckResult) -> list[str | Row]:
    """Unsafe rows under the recipe and under softmax, and where the two differ."""
    unsafe, against, name = result.unsafe, result.against_softmax, _statistic(result)
    several = len(result.tasks) > 1
    whose = f"of {result.rows_of.partition(':')[0]}" if several else "dead or not"
    ranked_by = "S_2" if parse_recipe(result.recipe).degree is not None else name
    lines: list[str | Row] = [
        (f"rows with {name} >= 1, {whose}", "share", ENDS, "prompts"),
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
        ("against softmax, all rows", "share", ENDS, "prompts"),
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
    recipe = parse_recipe(result.recipe)
    if calibration is None or recipe.bias != "auto":
        one = isinstance(result.bias, float)
        text = f"{result.bias:g}" if one else bias_tables.describe(result.bias)
        return [("mean distance, tokens" if recipe.option == DISTANCE else "bias", text)]
    bias, _, ends = findings.b_auto(calibration).partition(" ")
    ends = ends.strip("[]").replace(", ", " to ")
    lines: list[str | Row] = [("b_auto", bias, ends, f"{calibration.texts} texts")]
    if calibration.documents:
        plural = "s" * (calibration.documents != 1)
        lines[0] = ("b_auto", bias, ends, f"{calibration.texts} pieces")
        lines.append(f"  of {calibration.documents} text{plural}: the interval is too narrow")
    text = f"b_auto is {findings.b_auto_by_length(calibration)}"
    return [*lines, *textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ")]


def _text_lines(result: CheckResult) -> list[str | Row]:
    """Loss on the user's texts and the rows that the recipe loses there."""
    texts = result.texts
    if texts is None:
        return []
    lines: list[str | Row] = [
        ("your texts, nats per token", "loss", ENDS, "texts"),
        _loss("  with softmax", texts.softmax.loss, ".3f"),
        _loss("  with the recipe", texts.recipe.loss, ".3f"),
        _loss("  change on them (paired)", texts.recipe.change, "+.3f"),
    ]
    if result.measured and not result.trained:
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
