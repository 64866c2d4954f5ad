"""The page of several graphs: their scores, and how few heads and pairs carry their edges.

Every number comes from the files of the run; nothing is measured here.
"""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lm_jax import report
from lm_jax.report import Cell, Column, Report, Section, Series, cell, section, table, table_of
from lm_jax.report.markup import Markup, element, number
from lm_jax.report.prose import Prose
from lm_jax.statistics import Interval
from sparse_jax.studies.graphs import case_study, comparison, page
from sparse_jax.studies.graphs.mass import COMPONENTS, KINDS, Component
from sparse_jax.studies.graphs.page import MODE_NAMES
from sparse_jax.studies.graphs.report_text import (
    EDGES,
    NAMES,
    format_counted,
    format_interval,
    format_left_out,
    format_ratio,
    strongest_supernode,
    summary_lines,
)
from sparse_jax.studies.graphs.results import MASSES, GraphResult, GraphSummary
from sparse_jax.studies.graphs.settings import COMPARED, GraphConfig

_PROSE = Prose("sparse_jax.studies.graphs")
# Graphs whose answers are said above the sections; each has a page of its own.
_ANSWERS = 3
# Points of a curve, near to even in the logarithm.
_POINTS = 200
# Columns that say which mass a row is about.
_KIND = (
    Column("Components", value=lambda each: NAMES[each.component]),
    Column("Shares", value=lambda each: each.sign),
    Column("Edges", value=lambda each: EDGES[each.positions]),
)


def build(config: GraphConfig, summary: GraphSummary, folder: Path) -> Report:
    """The report: of a single graph its viewer, else the page of all.

    Args:
      config: settings, which the summary has too.
      summary: numbers of all graphs.
      folder: work folder, whose graphs and masses are read.
    """
    del config
    # A copy of a run of several graphs may have its summary and its masses alone.
    there = [each.file for each in summary.graphs if (folder / each.file).is_file()]
    answers = {file: page.answer_of_file(folder, file) for file in there}
    if len(summary.graphs) == 1:
        lines = summary_lines(summary, answers, ())
        return page.of_folder(folder, summary.graphs[0].file)._replace(lines=lines)
    compared = " and ".join(each.role for each in summary.models)
    what = "Attribution graphs" if len(summary.models) == 1 else f"Attribution graphs: {compared}"
    opening = conclusion(summary) if summary.ratios else answer(summary)

    def sections() -> list[Section]:
        rows = comparison.counted(pq.read_table(folder / MASSES), summary.compared)
        return all_sections(summary, rows)

    lines = summary_lines(summary, answers, opening)
    shown = [*opening, *list(answers.values())[:_ANSWERS]]
    return Report(what, sections, lead=[report.verdict(*shown)], lines=lines)


def all_sections(summary: GraphSummary, rows: pa.Table) -> list[Section]:
    """The sections of the page of all graphs.

    Args:
      summary: numbers of all graphs.
      rows: mean cumulative masses of those that are compared.
    """
    return [
        *([compared_prompts(summary)] if summary.compared else []),
        *(graphs(summary), mass(summary, rows)),
        *([ratios(summary)] if summary.ratios else []),
        *([stability(summary)] if summary.stability else []),
        *([one_prompt(summary)] if len(summary.models) > 1 else []),
        *([supernodes(summary)] if any(each.supernodes for each in summary.graphs) else []),
    ]


def answer(summary: GraphSummary) -> list[str]:
    """How much of each model's graphs passes through features, in sentences."""
    sentences = []
    for role in dict.fromkeys(each.role for each in summary.graphs):
        scores = [each.scores.unpruned.replacement for each in summary.graphs if each.role == role]
        what = "neurons" if summary.config.neurons else "features"
        ends = dict.fromkeys(number(100 * end, ".0f") for end in (min(scores), max(scores)))
        sentences.append(
            f"{role.capitalize()}: in {number(len(scores))} graphs {what} carry "
            f"{' to '.join(ends)} % of the "
            "influence of tokens and errors on the logits; the rest passes through what they leave "
            "out."
        )
    worst = max(max(each.row_error) for each in summary.graphs)
    return [*sentences, f"Rows of the graphs miss the forward pass by at most {number(worst)}."]


def conclusion(summary: GraphSummary) -> list[str]:
    """Ratios of the absolute mass of all edges, beside the paper's, in sentences."""
    sentences = [
        format_ratio(each)
        for each in summary.ratios
        if (each.sign, each.positions) == ("absolute", "any")
    ]
    return [*sentences, format_counted(summary)]


def compared_prompts(summary: GraphSummary) -> Section:
    """Prompts that count in the comparison, and why others do not."""
    roles = [each.role for each in summary.models]
    return section(
        "Which prompts are compared?",
        _PROSE("compared"),
        table(
            ["Prompt", *(f"{role.capitalize()} answers" for role in roles), "Target", "Left out"],
            [
                [
                    each.slug,
                    *(f"{each.answers[role]!r}" for role in roles),
                    f"{each.target!r}" if each.target else "–",
                    each.why or "–",
                ]
                for each in summary.compared
            ],
            caption="The most probable next token of each model, and the token explained.",
            n=f"{number(len(summary.compared))} prompts",
        ),
    )


def graphs(summary: GraphSummary) -> Section:
    """A row per graph."""
    columns = [
        Column("Graph", value=_link),
        Column("Kind", value=lambda graph: graph.kind),
        Column("Next token", value=lambda graph: str(graph.logits[0])),
        Column("Features", value=lambda graph: graph.sizes.kept_features),
        Column("Edges", value=lambda graph: graph.sizes.kept_edges),
        Column("Replacement", value=lambda graph: _score(graph, "replacement")),
        Column("Completeness", value=lambda graph: _score(graph, "completeness")),
        Column("Row error", ".1e", lambda graph: max(graph.row_error)),
        Column("Mediation error", ".1e", lambda graph: max(graph.mediation_error)),
        Column("Over-count", ".2f", lambda graph: graph.over_count),
    ]
    return section(
        "Graphs",
        _PROSE("graphs", summary.config.neurons),
        table_of(
            summary.graphs,
            columns,
            caption="Scores, sizes after pruning, and errors of each graph.",
            n=f"{number(len(summary.graphs))} graphs",
        ),
    )


def _link(graph: GraphResult) -> Markup:
    """A link to the viewer of a graph."""
    page = PurePosixPath(graph.file).with_suffix(".html").as_posix()
    return element("a", {"href": page}, PurePosixPath(page).stem)


def _score(graph: GraphResult, name: str) -> Cell:
    """A score of the whole graph, with that of the pruned one below it."""
    whole, pruned = (getattr(each, name) for each in (graph.scores.unpruned, graph.scores.pruned))
    return cell(whole, note=f"pruned {pruned:.3f}", spec=".3f")


def supernodes(summary: GraphSummary) -> Section:
    """The supernode of each graph with the largest effect."""
    rows = [
        [
            *(PurePosixPath(graph.file).stem, one.label, len(one.members), one.factor),
            *(MODE_NAMES[each.mode], one.predicted, each.change, 100 * each.probability),
            str(each.top[0]),
        ]
        for graph in summary.graphs
        for one in strongest_supernode(graph)
        for each in one.outcomes
    ]
    columns = [
        *("Graph", "Supernode", "Nodes", "Times", "Frozen", "Predicted", "Measured"),
        *(Column("Probability, %", ".1f"), "Next token"),
    ]
    return section(
        "Interventions on supernodes",
        _PROSE("supernodes", summary.config.supernodes),
        table(
            columns,
            rows,
            caption="Change of the first logit, the probability of its token, and the next token.",
            n=f"{number(len(summary.graphs))} graphs",
        ),
    )


def mass(summary: GraphSummary, rows: pa.Table) -> Section:
    """Mean cumulative masses and counts of each model."""
    config = summary.config
    fraction = f"{config.fraction:.0%}"
    charts = []
    for kind in (each for each in KINDS if each.positions == "any"):
        series, prompts = [], {}
        for each in summary.models:
            mass_PRC, _ = comparison.curves(rows, [each.role], kind)
            prompts[each.role] = len(mass_PRC)
            if not len(mass_PRC):
                continue
            mean_C = mass_PRC[:, 0].mean(0)
            at = np.unique(np.geomspace(1, len(mean_C), _POINTS).astype(int))
            series.append(Series(each.role, at, mean_C[at - 1]))
        charts.append(
            report.curves(
                series,
                caption=f"Mean cumulative mass of {NAMES[kind.component]}, {kind.sign}.",
                x_label=f"{NAMES[kind.component]}, largest share first",
                y_label="mean cumulative mass",
                n=_prompts(prompts),
                log_x=True,
                h_lines=[(config.fraction, fraction)],
            )
        )
    columns = [
        Column("Model", value=lambda each: each.role),
        *_KIND,
        Column(
            f"Mean curve at {fraction}", value=lambda each: format_interval(each.needed_of_mean)
        ),
        Column("Mean per edge", value=lambda each: format_interval(each.needed)),
        Column("Prompts", value=lambda each: _n(each.needed)),
        Column("Left out", value=lambda each: format_left_out(each.edges)),
    ]
    return section(
        "What carries an edge",
        _PROSE("mass", fraction, config.mediated),
        report.grid(*charts),
        table_of(
            summary.masses,
            columns,
            caption=f"Components that have {fraction} of the mass, with 95 % intervals over "
            "prompts, and edges that no head carries.",
        ),
    )


def _prompts(counts: Mapping[str, int]) -> str:
    """How many prompts are behind curves, of each model where they differ."""
    if len(set(counts.values())) == 1:
        return f"{next(iter(counts.values()))} prompts"
    return ", ".join(f"{role} {count} prompts" for role, count in counts.items())


def _n(interval: Interval | None) -> int | None:
    return None if interval is None else interval.n


def ratios(summary: GraphSummary) -> Section:
    """Dense over sparse, beside the paper."""
    fraction = f"{summary.config.fraction:.0%}"
    columns = [
        *_KIND,
        Column(f"Mean curve at {fraction}", value=lambda each: format_interval(each.of_mean)),
        Column("Mean per edge", value=lambda each: format_interval(each.per_edge)),
        Column("Prompts", value=lambda each: _n(each.of_mean)),
        Column("Paper", value=lambda each: "–" if each.paper is None else f"{each.paper:g}"),
        Column("Left out, dense", value=lambda each: format_left_out(each.dense)),
        Column("Left out, sparse", value=lambda each: format_left_out(each.sparse)),
    ]
    return section(
        "Dense against sparse",
        _PROSE("ratios", fraction),
        table_of(
            summary.ratios,
            columns,
            caption="Components of the dense model for each of the sparse one, with 95 % "
            "intervals over prompts, and edges that no head carries.",
        ),
    )


def stability(summary: GraphSummary) -> Section:
    """How much of the heads' mass rephrasings have in common."""
    counted = comparison.counted_graphs(summary.graphs, summary.compared)
    graphs = [each for each in counted if each.meaning]
    which = ", of the prompts that are compared" if summary.compared else ""
    return section(
        "The same in other words",
        _PROSE("stability"),
        table_of(
            summary.stability,
            [
                Column("Model", value=lambda each: each.role.capitalize()),
                Column("Kind", value=lambda each: each.kind or "all"),
                Column("Of one meaning", value=lambda each: format_interval(each.within)),
                Column("Of other kinds", value=lambda each: format_interval(each.across)),
                Column("Meanings", value=lambda each: _n(each.within)),
            ],
            caption="Mean overlap of two graphs' mass over heads, from 0 to 1, with 95 % intervals "
            f"over meanings{which}.",
            n=f"{len({each.meaning for each in graphs})} meanings, {len(graphs)} graphs",
        ),
    )


def one_prompt(summary: GraphSummary) -> Section:
    """One prompt in both models beside the paper's case study (`case_study`)."""
    graphs = case_study.chosen(summary)
    papers = [case_study.PAPER[role] for role in COMPARED]
    own = [graphs[role] for role in COMPARED]
    fractions = sorted({case_study.FRACTION, summary.config.fraction})
    rows: list[list[Any]] = [
        ["First logit", *(str(each.logits[0]) for each in own), *map(_paper_logit, papers)],
        [
            "Active features",
            *(each.sizes.features for each in own),
            *(each.features for each in papers),
        ],
        [
            "Features after pruning",
            *(each.sizes.kept_features for each in own),
            *(each.kept_features for each in papers),
        ],
        [
            "Replacement score",
            *(number(each.scores.unpruned.replacement, ".3f") for each in own),
            *(each.replacement for each in papers),
        ],
    ]
    for component in COMPONENTS:
        for fraction in fractions:
            published = [getattr(each, component) for each in papers]
            rows.append(
                [
                    f"{NAMES[component]} with {fraction:.0%} of the key edge".capitalize(),
                    *(_carriers(each, component, fraction) for each in own),
                    *(published if fraction == case_study.FRACTION else [None, None]),
                ]
            )
    models = {each.role: each for each in summary.models}
    return section(
        "One prompt beside the paper's case study",
        _PROSE(
            "one_prompt",
            prompt=own[0].prompt,
            paper_prompt=case_study.PROMPT,
            model=models[COMPARED[0]],
            edges=[(each.role, each.key_edge) for each in own],
        ),
        table(
            ["", "Dense", "Sparse", "Dense, paper", "Sparse, paper"],
            [[row[0], *("–" if cell is None else cell for cell in row[1:])] for row in rows],
            caption="Sizes and scores of one graph of each model.",
            n="one prompt, one pair of models",
        ),
    )


def _paper_logit(paper: case_study.PaperStudy) -> str:
    probability = "" if paper.probability is None else f", {100 * paper.probability:.1f} %"
    return f"{paper.token!r}{probability}"


def _carriers(graph: GraphResult, component: Component, fraction: float) -> int | None:
    """Number of components that carry the key edge; None without such an edge or carrier."""
    carriers = graph.key_edge.carriers if graph.key_edge else ()
    counts = [c.needed for c in carriers if (c.component, c.fraction) == (component, fraction)]
    return counts[0] if counts else None
