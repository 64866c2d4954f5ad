"""The page of the circuit study: sizes, ratios, patterns and edges.

Every number comes from the summary and the drawn prompts; nothing is measured here. Paragraphs are
in `report.html.j2`.
"""

from collections.abc import Mapping
from pathlib import Path
import textwrap

from lm_jax import report
from lm_jax.report import Cell, Column, Report, Section, cell, rate, section, table, table_of
from lm_jax.report.markup import number
from lm_jax.report.page import Part
from lm_jax.report.prose import Prose
from lm_jax.report.tables import interval_text
from lm_jax.run.results import load_result
from sparse_jax.studies.circuits import paper, report_figures, report_text
from sparse_jax.studies.circuits.kinds import KINDS
from sparse_jax.studies.circuits.pruned import pruned
from sparse_jax.studies.circuits.report_curves import curves
from sparse_jax.studies.circuits.report_lead import lead, ratio_cell
from sparse_jax.studies.circuits.report_places import places
from sparse_jax.studies.circuits.report_text import (
    COMPONENT,
    SCOPE,
    count_spec,
    format_random,
    format_size,
)
from sparse_jax.studies.circuits.results import (
    CircuitSummary,
    DrawnPrompt,
    TaskFacts,
    TaskResult,
    drawn_file,
)
from sparse_jax.studies.circuits.settings import CircuitConfig

_PROSE = Prose("sparse_jax.studies.circuits")
_WIDTH = 100
_METHOD = {"attribution": "attribution patching", "eap": "EAP", "eap_ig": "EAP-IG"}


def build(config: CircuitConfig, summary: CircuitSummary, folder: Path) -> Report:
    """The report.

    Args:
      config: settings, which the summary has too.
      summary: every number.
      folder: work folder, whose drawn prompts are read.
    """
    del config
    lines = [
        line
        for finding in [*report_text.left_out(summary), *report_text.findings(summary)]
        for line in textwrap.wrap(finding, _WIDTH, subsequent_indent="  ")
    ]
    return Report(
        "Circuits of attention heads and token edges",
        lambda: all_sections(summary, read_drawn(summary, folder)),
        lead=lead(summary, _tasks(summary)),
        lines=lines,
        style=report_figures.STYLE,
    )


def _tasks(summary: CircuitSummary) -> list[str]:
    """Tasks that are no other wording of one."""
    return [task.name for task in summary.tasks if task.rephrases is None]


def read_drawn(summary: CircuitSummary, folder: Path) -> dict[tuple[str, str], DrawnPrompt]:
    """Patterns and edges of one prompt, by model and task."""
    return {
        (model.role, task.name): load_result(drawn_file(folder, model.role, task.name), DrawnPrompt)
        for model in summary.models
        for task in summary.tasks
    }


def all_sections(
    summary: CircuitSummary, drawn: Mapping[tuple[str, str], DrawnPrompt]
) -> list[Section]:
    """The sections of the page.

    Args:
      summary: every number.
      drawn: patterns and edges of one prompt, by model and task.
    """
    components, own = summary.config.components, _tasks(summary)
    return [
        prompts(summary),
        solved(summary),
        *(curves(summary, task, introduced=task != own[0]) for task in own),
        sizes(summary),
        areas(summary),
        agreement(summary),
        *([places(summary, drawn)] if summary.config.patch else []),
        *([pruned(summary)] if summary.config.pruned else []),
        *([transfers(summary)] if summary.transfers else []),
        *([patterns(summary, drawn, own)] if "heads" in components else []),
        *([edges(summary, drawn, own)] if "token_edges" in components else []),
        *([published(summary)] if any(each.model == "sparse" for each in summary.ratios) else []),
    ]


def prompts(summary: CircuitSummary) -> Section:
    """Tasks with their prompts, and models."""
    columns = [
        Column("Task", value=_task_name),
        Column("Clean", value=lambda task: task.clean),
        Column("Corrupt", value=lambda task: task.corrupt),
        Column("Right", value=lambda task: _continuations(task.answers)),
        Column("Wrong", value=lambda task: _continuations(task.wrong_answers)),
        Column("Metric", value=lambda task: task.metric.replace("_", " ")),
        Column("Tokens", value=_lengths),
        Column("Kept", value=lambda task: task.kept),
        Column("Dropped", value=_drop_reasons),
    ]
    models = [
        Column("Model", value=lambda model: model.role),
        Column("Source", value=lambda model: model.source),
        Column("Family", value=lambda model: model.family),
        Column("Layers", value=lambda model: model.layers),
        Column("Heads per layer", value=lambda model: model.heads),
        Column("Weights, sha256", value=lambda model: model.sha256[:12]),
    ]
    return section(
        "Prompts and models",
        _PROSE("prompts", len(summary.config.trained_on)),
        table_of(summary.tasks, columns, caption="Tasks, each with its first example."),
        table_of(summary.models, models, caption="Models."),
    )


def _task_name(task: TaskFacts) -> str:
    return task.name if task.rephrases is None else f"{task.name} (rephrases {task.rephrases})"


def _lengths(task: TaskFacts) -> str:
    return " to ".join(map(str, sorted({task.shortest, task.longest})))


def _drop_reasons(task: TaskFacts) -> str:
    return "; ".join(f"{count} × {reason}" for reason, count in task.dropped.items()) or "none"


def solved(summary: CircuitSummary) -> Section:
    """Accuracy and metric of every model on every task."""
    columns = [
        Column("Task", value=lambda each: each.task),
        Column("Model", value=lambda each: each.model),
        Column("Right, %", value=lambda each: rate(each.accuracy, spec=".0f")),
        Column("Solved", value=_solved_cell),
        Column("Metric, clean", value=lambda each: interval_text(each.clean)),
        Column("Metric, corrupt", value=lambda each: interval_text(each.corrupt)),
        Column("Change", value=lambda each: interval_text(each.change)),
    ]
    return section(
        "Do the models solve the tasks?",
        _PROSE("solved", f"{100 * summary.config.accuracy_bar:g}"),
        table_of(
            summary.results,
            columns,
            caption="Accuracy with Wilson intervals, and mean metric with intervals over prompts.",
        ),
    )


def _solved_cell(result: TaskResult) -> Cell:
    return cell("yes" if result.solved else "no", tone="good" if result.solved else "bad")


def sizes(summary: CircuitSummary) -> Section:
    """Sizes of circuits and their ratios."""
    rows = []
    for each in summary.results:
        for own in each.curves:
            rows.append(
                [
                    each.task,
                    COMPONENT[own.component],
                    own.ablation,
                    _ranking_name(own.ranking, own.scope),
                    each.model,
                    format_size(own.crossing),
                    each.components[own.component],
                    cell(each.open[own.component], spec=count_spec(each.open[own.component])),
                ]
            )
    tables = [
        table(
            ["Task", "Components", "Ablation", "Ranked", "Model", "Needed", "Of", "With weight"],
            rows,
            caption=f"Components that explain {100 * summary.config.fraction:g}\u00a0%.",
        )
    ]
    if summary.ratios:
        columns = [
            Column("Task", value=lambda each: each.task),
            Column("Components", value=lambda each: COMPONENT[each.component]),
            Column("Ablation", value=lambda each: each.ablation),
            Column("Ranked", value=lambda each: _ranking_name(each.ranking, each.scope)),
            Column("Models", value=lambda each: f"{each.reference} : {each.model}"),
            Column("Times smaller", value=ratio_cell),
        ]
        tables.append(
            table_of(
                summary.ratios,
                columns,
                caption="Size of one model's circuit over that of another's; above 1 where the "
                "second is smaller. Below each, the same in random order.",
            )
        )
    return section(
        "Sizes of circuits", _PROSE("sizes", f"{100 * summary.config.fraction:g}"), *tables
    )


def areas(summary: CircuitSummary) -> Section:
    """CPR, CMD and the log-k area of both rankings, of the circuits of the curves."""
    rows = [
        [
            each.task,
            COMPONENT[own.component],
            own.ablation,
            each.model,
            own.ranking,
            *(cell(value, spec=".3f") for value in (own.cpr, own.cmd, own.log_area)),
        ]
        for each in summary.results
        for own in each.curves
        if own.scope == "task" or own.ranking == "random"
    ]
    return section(
        "CPR and CMD",
        _PROSE("areas"),
        table(
            ["Task", "Components", "Ablation", "Model", "Ranking", "CPR", "CMD", "Mean over ln k"],
            rows,
            caption="Circuit performance ratio, circuit-model distance, and mean explained effect "
            "over ln k.",
        ),
    )


def agreement(summary: CircuitSummary) -> Section:
    """Rank correlations of exact patching and of every method and rules of attribution."""
    config = summary.config
    rows = [
        [
            result.task,
            result.model,
            COMPONENT[each.component],
            each.direction,
            _METHOD[each.method],
            each.rules,
            "yes" if (each.method, each.rules) == KINDS[each.component].ranked_by(config) else "",
            each.compared,
            interval_text(each.spearman, ".3f"),
        ]
        for result in summary.results
        for each in result.agreements
    ]
    return section(
        "Does attribution agree with exact patching?",
        _PROSE("agreement", number(config.edge_sample), number(config.ig_steps)),
        table(
            [
                *("Task", "Model", "Components", "Direction", "Method", "Gradient rules"),
                *("Ranks circuits", "Compared", "Spearman"),
            ],
            rows,
            caption="Rank correlation of effects, averaged over prompts, with 95\u00a0% intervals "
            "over the components compared.",
        ),
    )


def transfers(summary: CircuitSummary) -> Section:
    """Circuits on another wording, of models that solve both."""
    solved = {(each.task, each.model) for each in summary.results if each.solved}
    rows: list[list[object]] = []
    for each in summary.transfers:
        missing = [name for name in (each.source, each.task) if (name, each.model) not in solved]
        if missing:
            model = cell(each.model, tone="bad", note=f"not solved: {', '.join(missing)}")
            rows.append([each.source, each.task, model, *[None] * 5])
            continue
        overlap = cell(each.jaccard, spec=".2f", note=f"by chance {each.jaccard_by_chance:.2f}")
        explained = [interval_text(value, ".2f") for value in (each.transferred, each.own)]
        numbers = [each.size, overlap, cell(each.spearman, spec=".2f"), *explained]
        rows.append([each.source, each.task, each.model, *numbers])
    heads = ["Found on", "Evaluated on", "Model", "Heads", "Jaccard", "Spearman"]
    return section(
        "Does the circuit hold on rephrased prompts?",
        _PROSE("transfer"),
        table(
            [*heads, "Explained by it", "By their own circuit"],
            rows,
            caption="Overlap of the heads of two wordings, rank correlation of the importance of "
            "all heads, and explained effect on the second wording.",
        ),
    )


def patterns(
    summary: CircuitSummary, drawn: Mapping[tuple[str, str], DrawnPrompt], tasks: list[str]
) -> Section:
    """Patterns of the needed heads, dense beside sparse."""
    parts: list[Part] = []
    for task in tasks:
        own = [drawn[model.role, task] for model in summary.models]
        parts.append(report_figures.prompt_text(own[0]))
        parts += [report_figures.thumbnails(each) for each in own]
        parts.append(report.grid(*(report_figures.pattern(each) for each in own if each.heads)))
    fraction = f"{100 * summary.config.fraction:g}"
    return section("Attention patterns of the needed heads", _PROSE("patterns", fraction), *parts)


def edges(
    summary: CircuitSummary, drawn: Mapping[tuple[str, str], DrawnPrompt], tasks: list[str]
) -> Section:
    """The needed token edges of one prompt as graphs."""
    parts: list[Part] = []
    layers = {model.role: model.layers for model in summary.models}
    for task in tasks:
        own = [drawn[model.role, task] for model in summary.models]
        parts.append(report_figures.prompt_text(own[0]))
        parts += [report_figures.edge_graph(each, layers[each.model]) for each in own if each.edges]
    fraction = f"{100 * summary.config.fraction:g}"
    return section("Graph of the needed token edges", _PROSE("edges", fraction), *parts)


def published(summary: CircuitSummary) -> Section:
    """The paper's ratios beside ours (a user's file is never one of the paper's tasks)."""
    generated = {task.name for task in summary.tasks if task.seed is not None}
    own: dict[tuple[str, str, str, str], dict[str, str]] = {}
    first = {
        each.component: summary.config.ablations_of(each.component)[0] for each in summary.ratios
    }
    for each in summary.ratios:
        if (each.model, each.ablation) == ("sparse", first[each.component]):
            by_reference = own.setdefault((each.task, each.component, each.ranking, each.scope), {})
            ratio = interval_text(each.ratio, ".2f") if each.ratio else f"none: {each.why}"
            by_reference[each.reference] = f"{ratio} (random order: {format_random(each)})"
    known = set().union(*own.values())
    references = [name for name in ("dense", "control") if name in known]
    rows = []
    for (task, component, ranking, scope), by_reference in own.items():
        printed = paper.published(task, component, scope) if task in generated else None
        rows.append(
            [
                task,
                COMPONENT[component],
                _ranking_name(ranking, scope),
                f"{printed.ratio:.3g} (Fig. {printed.figure}, {printed.model})"
                if printed
                else "not compared: other wordings"
                if task in paper.OTHER_WORDINGS
                else "–",
                *(by_reference.get(name, "–") for name in references),
                first[component],
            ]
        )
    ours = [f"Ours, {name} : sparse" for name in references]
    return section(
        "Beside the paper",
        _PROSE("paper", "control" in references),
        table(
            ["Task", "Components", "Ranked", "Paper, dense : sparse", *ours, "Our ablation"],
            rows,
            caption="Ratios of circuit sizes at 90\u00a0% in the paper, and at our fraction.",
        ),
    )


def _ranking_name(ranking: str, scope: str) -> str:
    if ranking == "random":
        return ranking
    return f"{SCOPE[scope]}, by absolute effect" if ranking == "absolute" else SCOPE[scope]


def _continuations(texts: tuple[str, ...]) -> str:
    """The first few continuations, with their spaces visible."""
    shown = ", ".join(f"“{text}”" for text in texts[:3])
    return shown + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")
