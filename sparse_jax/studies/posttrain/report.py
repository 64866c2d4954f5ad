"""The page of a post-training: losses and open edges, training, attention before and after.

Every number comes from the files of the run; nothing is measured here. Paragraphs are in
`report.html.j2`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from lm_jax import report
from lm_jax.report import (
    Column,
    Points,
    Report,
    Section,
    section,
    table,
    table_of,
)
from lm_jax.report.markup import Markup, number
from lm_jax.report.prose import Prose
from lm_jax.run.results import load_result
from lm_jax.train.metrics import EVALUATIONS, METRICS
from sparse_jax.studies.posttrain import export
from sparse_jax.studies.posttrain.kinds import KINDS
from sparse_jax.studies.posttrain.paper import TABLE_1
from sparse_jax.studies.posttrain.report_text import (
    ONE_RUN,
    format_rounding,
    format_signed,
    format_summary,
    interval_cell,
    range_text,
    terms,
)
from sparse_jax.studies.posttrain.report_training import Run, training
from sparse_jax.studies.posttrain.results import (
    BoundSummary,
    PosttrainSummary,
    RunResult,
    TextPatterns,
)
from sparse_jax.studies.posttrain.settings import PosttrainConfig
from sparse_jax.studies.posttrain.task import control_folder, control_losses, controls_of

_PROSE = Prose("sparse_jax.studies.posttrain")
# Heads that keep the most edges.
_MOST_HEADS = 6


def read(folder: Path, moving: tuple[float, ...] = ()) -> Run:
    """Reads a run from its folder; `moving` is its bound by update.

    Raises:
      CorruptError: a file is damaged.
    """
    return Run(
        load_result(folder / export.RESULT, RunResult),
        pq.read_table(folder / METRICS).to_pydict(),
        pq.read_table(folder / EVALUATIONS).to_pylist(),
        pq.read_table(folder / export.EDGES).to_pydict(),
        load_result(folder / export.PATTERNS, tuple[TextPatterns, ...]),
        moving,
        _kinds(folder / export.KINDS),
    )


def _kinds(file: Path) -> dict[str, list[Any]] | None:
    """The table of edges by kind; None of a run of before there was one."""
    return pq.read_table(file).to_pydict() if file.exists() else None


def build(config: PosttrainConfig, summary: PosttrainSummary, folder: Path) -> Report:
    """The report of a post-training; curves and patterns are read from the work folder."""
    return Report(
        f"Sparse attention: {Path(summary.model).name}",
        lambda: sections(config, summary, read_runs(config, summary, folder)),
        lead=[conclusion(config, summary)],
        lines=[answer(summary, config), format_summary(summary)],
    )


def read_runs(config: PosttrainConfig, summary: PosttrainSummary, folder: Path) -> list[Run]:
    """Every run of a work folder, with its bound by update where that follows its control.

    Raises:
      CorruptError: a file is damaged.
    """
    results = []
    for run in summary.runs:
        moving: tuple[float, ...] = ()
        if config.paired:
            control = control_folder(controls_of(folder), run.seed)
            losses = control_losses(control, config.steps)
            moving = tuple(loss + config.slacks[run.bound] for loss in losses)
        results.append(read(folder / run.folder, moving))
    return results


def sections(
    config: PosttrainConfig, summary: PosttrainSummary, result: Sequence[Run]
) -> list[Section]:
    """All sections; the runs of the first seed are shown in detail."""
    parts = [losses(summary), over_seeds(summary), frontier(config, summary, result)]
    for run in result:
        if run.result.seed == summary.seeds[0]:
            parts += [training(config, run, summary), by_head(run), by_kind(run), attention(run)]
    parts += [paper(summary), section("Terms", report.key_values(terms(config)))]
    return [part for part in parts if part is not None]


def _best(summary: PosttrainSummary, config: PosttrainConfig) -> tuple[BoundSummary, bool]:
    """The sparsest bound that is kept, or the sparsest of all if none is; whether it is kept."""
    kept = [bound for bound in summary.bounds if is_kept(bound, config)]
    return min(kept or summary.bounds, key=lambda bound: bound.edges.mean), bool(kept)


def answer(summary: PosttrainSummary, config: PosttrainConfig) -> str:
    """How many edges stay open, and at what loss; means over seeds."""
    best, _ = _best(summary, config)
    several = len(summary.seeds) > 1
    seeds = f"means of {len(summary.seeds)} seeds" if several else ONE_RUN
    away = ""
    if config.constraint == "divergence" and best.divergence is not None:
        away = f", its divergence from it {best.divergence.mean:.4f}"
    return (
        f"The sparse {summary.model} keeps {best.edges.mean:.2%} of its attention edges open, and "
        f"its loss minus the dense model's is {number(best.difference.mean, '+.4f')} nats per "
        f"token{away} ({seeds})."
    )


def conclusion(config: PosttrainConfig, summary: PosttrainSummary) -> Markup:
    """The answer, with its bound and its control."""
    best, kept = _best(summary, config)
    on_divergence = config.constraint == "divergence"
    # The bound is on the training text; held-out text may be a little harder.
    slack, than = best.slack, "dense model"
    if config.slack_over == "control" and not config.targets:
        slack, than = config.slacks[summary.bounds.index(best)], "control"
    bound_text = f"{number(slack, '+.4f')} against the {than}"
    if on_divergence:
        bound_text = f"{slack:.4f} nats of divergence from the {than}"
    reason = f"The bound was {bound_text}, " + (
        "and it is kept."
        if kept
        else "and no run keeps it on held-out text: train longer, or set a lower slack."
    )
    if best.over_control:
        reason += (
            " The loss minus that of a control, trained as long with all gates open, is "
            f"{number(best.over_control.mean, '+.4f')}."
        )
    return report.verdict(answer(summary, config), reason, tone="good" if kept else "warn")


def is_kept(bound: BoundSummary, config: PosttrainConfig) -> bool:
    """Whether the mean over seeds is within the bound on held-out text."""
    if config.constraint == "divergence":
        return bound.divergence is not None and bound.divergence.mean <= bound.target
    return bound.loss.mean <= bound.target


def losses(summary: PosttrainSummary) -> Section:
    """A row per run."""
    columns = [
        Column("Seed", value=lambda run: str(run.seed)),
        Column("Bound", ".3f", lambda run: run.target),
        Column("Loss", value=lambda run: interval_cell(run.loss, ".4f")),
        Column("Minus dense", value=lambda run: interval_cell(run.difference, "+.4f")),
        Column("Minus control", value=lambda run: interval_cell(run.over_control, "+.4f")),
        Column("Divergence", value=lambda run: interval_cell(run.divergence, ".4f")),
        Column("Open, %", value=lambda run: interval_cell(run.edges, ".2f", scale=100)),
        Column("Per head", ".1f", lambda run: run.open_edges_per_head),
        Column("Strength", ".3g", lambda run: run.strength),
    ]
    first = summary.runs[0]
    notes: list[str | Markup] = []
    if summary.controls:
        less = "; ".join(format_signed(each.difference) for each in summary.controls)
        notes.append(_PROSE("control", less))
    notes += [
        f"Seed {run.seed}, {run.folder}: {line}."
        for run in (*summary.runs, *summary.controls)
        if (line := format_rounding(run.rounding))
    ]
    return section(
        "Result",
        _PROSE(
            "result",
            f"{summary.dense_loss:.4f}",
            number(summary.validation_tokens),
            summary.corpus.source,
            summary.context,
            number(summary.trained_parameters),
            first.steps,
            number(first.tokens_seen),
        ),
        *notes,
        table_of(
            summary.runs,
            _shown_columns(columns, summary),
            caption="Each run after training: losses in nats per token, on the same windows as the "
            "dense model; open edges in total, and per head and window. Intervals are over "
            "documents, for the trained model.",
            n=f"{number(first.windows)} windows of {first.edges.n} documents",
        ),
    )


def over_seeds(summary: PosttrainSummary) -> Section:
    """Spread of the results over seeds."""
    count = len(summary.seeds)
    if count == 1:
        return section("Comparison of seeds", _PROSE("one_seed"))
    columns = [
        Column("Bound", ".3f", lambda bound: bound.target),
        Column("Loss", value=lambda bound: range_text(bound.loss, ".4f")),
        Column("Minus dense", value=lambda bound: range_text(bound.difference, "+.4f")),
        Column("Open, %", value=lambda bound: range_text(bound.edges, ".2f", scale=100)),
        Column("Minus control", value=lambda bound: range_text(bound.over_control, "+.4f")),
        Column("Divergence", value=lambda bound: range_text(bound.divergence, ".4f")),
    ]
    return section(
        "Comparison of seeds",
        table_of(
            summary.bounds,
            _shown_columns(columns, summary),
            caption="Mean over seeds, with the lowest and the highest.",
            n=f"{count} seeds",
        ),
    )


def _shown_columns(columns: list[Column], summary: PosttrainSummary) -> list[Column]:
    """The columns of a table, without those of the control and the divergence if there are none."""
    absent = set() if summary.controls else {"Minus control"}
    if all(run.divergence is None for run in summary.runs):
        absent.add("Divergence")
    return [each for each in columns if each.title not in absent]


def frontier(
    config: PosttrainConfig, summary: PosttrainSummary, result: Sequence[Run]
) -> Section | None:
    """Loss against open edges, at every evaluation of every run."""
    trajectories = []
    for run in result:
        steps, loss = run.evaluated("validation/loss")
        _, edges = run.evaluated("validation/edges")
        excess = np.subtract(loss, summary.dense_loss)
        titles = [f"step {step}" for step in steps]
        label = f"bound {number(run.result.target - summary.dense_loss, '+.3f')}"
        if config.constraint == "divergence":
            label = f"divergence up to {run.result.target:.3f}"
        label += f", seed {run.result.seed}" * (len(summary.seeds) > 1)
        trajectories.append(Points(label, 100 * np.asarray(edges), excess, titles))
    return section(
        "Loss against edges",
        _PROSE("frontier"),
        report.scatter(
            trajectories,
            caption="Loss minus the dense model's, against open edges.",
            x_label="open edges, %",
            y_label="loss - dense loss, nats per token",
            log_x=True,
            n=f"{sum(np.size(each.x) for each in trajectories)} evaluations",
        ),
    )


def by_head(run: Run) -> Section:
    """Share of open edges of every head."""
    layers, heads = max(run.edges["layer"]) + 1, max(run.edges["head"]) + 1
    share = np.divide(run.edges["open"], run.edges["pairs"]).reshape(layers, heads)
    closed = int((np.asarray(run.edges["open"]) == 0).sum())
    return section(
        f"Heads under the bound {run.result.target:.4f}",
        f"{closed} of {layers * heads} heads have no open edge in any window.",
        report.heat_map(
            100 * share,
            value_label="open edges, %",
            caption="Open edges of each head, % of visible pairs.",
            x_label="head",
            y_label="layer",
            scale="sequential",
            spec=".1f",
            show_values=heads <= 16,
            n=f"{number(sum(run.edges['pairs']))} pairs",
        ),
    )


def by_kind(run: Run) -> Section | None:
    """What the open edges lead to: over all heads, and in those that keep the most."""
    if run.kinds is None:
        return None
    layers, heads = max(run.kinds["layer"]) + 1, max(run.kinds["head"]) + 1
    shape = layers, heads, len(KINDS)
    open_LNK, weight_LNK = (np.reshape(run.kinds[name], shape) for name in ("open", "weight"))
    total, weight = max(open_LNK.sum(), 1), max(weight_LNK.sum(), np.finfo(float).tiny)
    rows: list[list[object]] = [
        ["all", 100.0, *100 * open_LNK.sum((0, 1)) / total],
        ["all, by weight", 100.0, *100 * weight_LNK.sum((0, 1)) / weight],
    ]
    for place in np.argsort(-open_LNK.sum(2), axis=None, kind="stable")[:_MOST_HEADS]:
        layer, head = divmod(int(place), heads)
        of_head_K = open_LNK[layer, head]
        if of_head_K.sum():
            name = f"layer {layer}, head {head}"
            share_K = 100 * of_head_K / of_head_K.sum()
            rows.append([name, 100 * of_head_K.sum() / total, *share_K])
    return section(
        "What open edges lead to",
        _PROSE("kinds"),
        table(
            ["Heads", Column("Of all edges, %", ".1f"), *(Column(k, ".1f") for k in KINDS)],
            rows,
            caption="Kinds of open edges, in % of those of the row; an edge is of the first kind "
            "that it fits.",
            n=f"{number(int(open_LNK.sum()))} open edges",
        ),
    )


def attention(run: Run) -> Section | None:
    """Attention patterns of the chosen heads on the chosen texts."""
    drawn: list[str | Markup] = []
    for text in run.patterns:
        labels = [token.strip() or repr(token) for token in text.tokens]
        drawn.append(f"“{text.text.strip()}”")
        for head in text.heads:
            name = f"Layer {head.layer}, head {head.head}"
            pictures = [
                report.heat_map(
                    weights,
                    value_label="weight",
                    caption=f"{name}: {when}.",
                    x_label="key",
                    y_label="query",
                    row_labels=labels,
                    column_labels=labels,
                    scale="sequential",
                    value_range=(0.0, 1.0),
                    n=count,
                )
                for weights, when, count in (
                    (head.dense, "before", f"{head.pairs} edges"),
                    (head.sparse, "after", f"{head.open} open edges"),
                )
            ]
            drawn.append(report.grid(*pictures))
    if not drawn:
        return None
    return section(
        f"Attention before and after, under the bound {run.result.target:.4f}",
        _PROSE("attention"),
        *drawn,
    )


def paper(summary: PosttrainSummary) -> Section:
    """The published numbers beside ours."""
    rows: list[list[object]] = [
        [each.model, each.dense_loss, each.sparse_loss - each.dense_loss, 100 * each.edges]
        for each in TABLE_1
    ]
    of = f"mean of {len(summary.seeds)} seeds" if len(summary.seeds) > 1 else ONE_RUN
    name = f"{Path(summary.model).name}, context {summary.context}, ours, {of}"
    for bound in summary.bounds:
        edges = 100 * bound.edges.mean
        rows.append([name, summary.dense_loss, bound.difference.mean, edges])
    tokens = number(max(run.tokens_seen for run in summary.runs))
    return section(
        "Comparison with the paper",
        table(
            [
                "Model",
                Column("Dense loss", ".3f"),
                Column("Sparse - dense", "+.3f"),
                Column("Open edges, %", ".2f"),
            ],
            rows,
            caption="Table 1 of the paper, and this run.",
        ),
        _PROSE("paper", tokens),
    )
