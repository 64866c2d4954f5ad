"""The page of a transcoder's training: its numbers, and how they came about.

Every number comes from the files of the run, or from those by `numbers`.
"""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from lm_jax import report
from lm_jax.report import Column, Report, Section, Series, rate, section, table
from lm_jax.report.markup import Markup, number
from lm_jax.report.page import Part
from lm_jax.report.prose import Prose
from lm_jax.train.metrics import EVALUATIONS, METRICS
from sparse_jax.studies.transcoders import numbers
from sparse_jax.studies.transcoders.report_text import format_summary
from sparse_jax.studies.transcoders.results import Control, Reconstruction, TranscoderSummary
from sparse_jax.studies.transcoders.settings import TranscoderTraining

_PROSE = Prose("sparse_jax.studies.transcoders")


def build(config: TranscoderTraining, summary: TranscoderSummary, folder: Path) -> Report:
    """The report of a training; its curves are read from the work folder."""
    window = summary.window
    kind = "cross-layer" if window is None else "per-layer" if window == 1 else "windowed"
    return Report(
        f"A {kind} transcoder",
        lambda: [results(summary), controls(summary), training(config, summary, folder)],
        lead=[conclusion(summary)],
        lines=[answer(summary), format_summary(summary)],
    )


def answer(summary: TranscoderSummary) -> str:
    """How many features it uses, what they explain, and whether they may stand for the MLPs."""
    result, replaced = summary.reconstruction, summary.substitution
    return (
        f"In {summary.model}, {result.l0:.1f} features are active per token and leave "
        f"{result.unexplained:.1%} of the variance of MLP outputs unexplained; in place of every "
        f"MLP they keep the next token at {replaced.agreement:.1%} of {replaced.tokens:,} tokens "
        "(one run)."
    )


def conclusion(summary: TranscoderSummary) -> Markup:
    """What it explains, with how many features, and whether a control explains more with those."""
    result = summary.reconstruction
    better = numbers.better_control(summary)
    against = []
    if better is not None:
        against.append(
            f"The control “{CONTROLS[better.name]}” leaves less with no more of them active: "
            f"{better.unexplained:.1%} with {better.l0:.1f}."
        )
    return report.verdict(
        answer(summary),
        *against,
        tone="good" if result.unexplained < 0.5 and better is None else "warn",
    )


def results(summary: TranscoderSummary) -> Section:
    """A row per layer, and one for all."""
    result = summary.reconstruction
    rows: list[list[Any]] = [
        [layer, l0, 100 * left]
        for layer, (l0, left) in enumerate(
            zip(result.l0_by_layer, result.unexplained_by_layer, strict=True)
        )
    ]
    rows.append(["all", result.l0, 100 * result.unexplained])
    replaced = summary.substitution
    return section(
        "Held-out text",
        _PROSE(
            "transcoder",
            number(summary.parameters),
            number(summary.features),
            summary.kind,
            summary.model,
            summary.family,
        ),
        table(
            ["Layer", Column("Active per token", ".1f"), Column("Variance unexplained, %", ".1f")],
            rows,
            caption="Features of each layer, and MLP outputs that all features reconstruct.",
            n=f"{number(summary.validation_tokens)} tokens",
        ),
        _PROSE(
            "replaced",
            number(replaced.tokens),
            f"{replaced.divergence:.3f}",
            f"{100 * replaced.agreement:.1f}",
        ),
        _PROSE("thresholds", *_change(summary.batch_topk, result), *_replacement_change(summary))
        if summary.batch_topk
        else "",
    )


def _change(before: Reconstruction, after: Reconstruction) -> tuple[str, ...]:
    return (
        f"{before.l0:.1f}",
        f"{after.l0:.1f}",
        f"{100 * before.unexplained:.1f}",
        f"{100 * after.unexplained:.1f}",
    )


def _replacement_change(summary: TranscoderSummary) -> tuple[str, str]:
    """Replacement scores before and after; empty where either has no graph."""
    before, after = summary.batch_topk_graphs, summary.graphs
    if before is None or before.mean is None or after.mean is None:
        return "", ""
    return f"{before.mean.unpruned.replacement:.3f}", f"{after.mean.unpruned.replacement:.3f}"


def controls(summary: TranscoderSummary) -> Section:
    """The transcoder and what it is compared with, a row each."""
    rows = [_row("this transcoder", numbers.as_control(summary))]
    rows += [_row(CONTROLS[each.name], each) for each in summary.controls]
    graphs = summary.graphs
    return section(
        "Transcoder against controls",
        _PROSE(
            "controls",
            [each.name for each in summary.controls],
            [summary.steps, *(each.steps for each in summary.controls if each.steps is not None)],
        ),
        table(
            [
                "",
                "Features a layer",
                "Parameters",
                Column("Active per token", ".1f"),
                Column("Variance unexplained, %", ".1f"),
                Column("KL, nats", ".3f"),
                Column("Same next token, %", ".1f"),
                Column("Replacement", ".3f"),
                Column("Pruned", ".3f"),
                Column("Completeness", ".3f"),
                Column("Pruned", ".3f"),
            ],
            rows,
            caption=_PROSE("controls_caption"),
            n=f"{number(summary.substitution.tokens)} tokens, {graphs.prompts} prompts",
        ),
        _differences(summary),
        _PROSE(
            "graphs",
            *(graphs.prompts, graphs.tokens, graphs.sha256[:16], graphs.max_features),
            graphs.without_features,
        ),
    )


def _differences(summary: TranscoderSummary) -> Part:
    """Replacement scores less those of each control that has any on the same prompts."""
    own = summary.graphs
    differences = [
        (each, numbers.replacement_over(own, each.graphs))
        for each in summary.controls
        if each.graphs is not None
    ]
    rows = [
        [CONTROLS[each.name], rate(difference, spec="+.3f", scale=1.0)]
        for each, difference in differences
        if difference is not None
    ]
    if not rows:
        return ""
    return table(
        ["Control", "Replacement of this transcoder less the control's"],
        rows,
        caption=_PROSE("paired_caption"),
    )


# Names of `results.Control`, as the page and the terminal have them.
CONTROLS = {
    "per_layer": "per-layer",
    "shuffled": "decoders shuffled",
    "neurons": "neurons",
    "largest_neurons": "largest neurons",
}


def _row(label: str, each: Control) -> list[Any]:
    substitution, graphs = each.substitution, each.graphs
    moved: list[Any] = ["none"] * 2
    scores: list[Any] = ["none"] * 4
    if graphs is None:
        # All neurons: nothing is replaced, and nothing is an error before pruning.
        moved, scores = [0.0, 100.0], [1.0, None, 1.0, None]
    if substitution is not None:
        moved = [substitution.divergence, 100 * substitution.agreement]
    if graphs is not None and graphs.mean is not None:
        whole, pruned = graphs.mean.unpruned, graphs.mean.pruned
        scores = [whole.replacement, pruned.replacement, whole.completeness, pruned.completeness]
        if interval := numbers.replacement(graphs):
            scores[0] = rate(interval, spec=".3f", scale=1.0)._replace(note="")
    return [label, each.features, each.parameters, each.l0, 100 * each.unexplained, *moved, *scores]


# Fields of `Scores` as the curves name them.
_SCORES = {
    "replacement": "replacement",
    "completeness": "completeness",
    "completeness_with_inputs": "completeness, nodes with inputs",
}


def training(config: TranscoderTraining, summary: TranscoderSummary, folder: Path) -> Section:
    """Features, errors and dead features by tokens seen."""
    steps = pq.read_table(folder / METRICS)
    tokens = steps["tokens"].to_numpy().cumsum()
    evaluations = pq.read_table(folder / EVALUATIONS).to_pylist()
    layers = range(len(summary.reconstruction.l0_by_layer))

    def evaluated(name: str, label: str, factor: float = 1.0) -> Series:
        rows = [row for row in evaluations if row["name"] == f"validation/{name}"]
        return Series(
            label,
            [int(tokens[row["step"] - 1]) for row in rows],
            [factor * row["value"] for row in rows],
        )

    def by_layer(name: str, factor: float = 1.0) -> list[Series]:
        return [evaluated(f"{name}/layer_{layer}", f"layer {layer}", factor) for layer in layers]

    def stepwise(column: str, label: str, factor: float = 1.0) -> Series:
        every = max(len(tokens) // 200, 1)
        values = steps[column].to_numpy()[::every] * factor
        return Series(label, tokens[::every].tolist(), values.tolist())

    def curves(series: list[Series], caption: str, y_label: str, n: str = "", **lines: Any) -> Part:
        n = n or f"{number(summary.tokens_seen)} tokens seen"
        return report.curves(
            series, caption=caption, x_label="tokens seen", y_label=y_label, n=n, **lines
        )

    batch_topk = config.kind == "batchtopk"
    return section(
        "Training",
        _PROSE("penalty", config.kind, config.penalties, summary.ended, number(summary.steps)),
        curves(
            [stepwise("sparsity", "features kept" if batch_topk else "coefficient")],
            "Features that BatchTopK keeps per token and layer."
            if batch_topk
            else "Coefficient of the sparsity penalty.",
            "features" if batch_topk else "coefficient",
        ),
        curves(
            [evaluated("l0", "all layers"), *by_layer("l0")],
            "Active features per token on held-out text.",
            "active features",
        ),
        curves(
            [evaluated("unexplained", "all layers", 100), *by_layer("unexplained", 100)],
            "Variance of MLP outputs unexplained on held-out text.",
            "unexplained, %",
        ),
        curves(
            [stepwise("dead", "dead features", 100), evaluated("top1", "same next token", 100)],
            f"Features without activity in {config.penalties.silent_steps} updates, and tokens "
            "with the same next token when all MLPs are replaced.",
            "%",
        ),
        curves(
            [evaluated("kl", "all MLPs replaced")],
            "Next-token distributions with all MLPs replaced, from those of the model.",
            "KL, nats per token",
        ),
        curves(
            [
                each
                for kind, label in (("graph", ""), ("pruned_graph", ", pruned"))
                for name, words in _SCORES.items()
                if (each := evaluated(f"{kind}/{name}", words + label)).x
            ],
            "Scores of attribution graphs on the fixed prompts, and replacement scores of the "
            "controls at the end of training (horizontal lines).",
            "score",
            n=f"{summary.graphs.prompts} prompts",
            h_lines=[
                (each.graphs.mean.unpruned.replacement, CONTROLS[each.name])
                for each in summary.controls
                if each.graphs is not None and each.graphs.mean is not None
            ],
        )
        if summary.graphs.mean is not None
        else "",
    )
