"""The page of the study: accuracies, edges, graphs, and attention to operands and carries.

Every number comes from the summary, curves and graphs from files; nothing is measured here.
Paragraphs are in `report.html.j2`.
"""

from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lm_jax import report
from lm_jax.report import Column, Report, Section, section, table
from lm_jax.report.markup import number
from lm_jax.report.prose import Prose
from lm_jax.run.results import load_result
from lm_jax.statistics import Interval
from lm_jax.train.metrics import EVALUATIONS
from sparse_jax.studies.addition import graph, report_sections
from sparse_jax.studies.addition.graph import SumGraph
from sparse_jax.studies.addition.report_sections import GOAL
from sparse_jax.studies.addition.results import (
    DENSE,
    GRAPHS,
    SPARSE,
    AdditionSummary,
    DrawnSum,
    SeedSummary,
    seed_folder,
)
from sparse_jax.studies.addition.settings import LEAST, AdditionConfig
from sparse_jax.studies.posttrain.report_text import ONE_RUN
from sparse_jax.studies.posttrain.results import Spread

_PROSE = Prose("sparse_jax.studies.addition")

_BEGIN = {
    "dense": "the sparse model starts from the trained dense one, as in Fig. 1 "
    "(“Sparsity-Regularised Finetuning”); Appendix A says only that both are trained",
    "drawn": "the sparse model starts from random weights, as the dense one does",
}

_ATTENTION = {
    "causal": "causal, and no answer digit attends to another's prediction; the paper does not say",
    "bidirectional": "bidirectional, so that the answer's tens can attend to its ones; the paper "
    "does not say, and its carries seem to need it",
}


def build(config: AdditionConfig, summary: AdditionSummary, folder: Path) -> Report:
    """The report of a study: the first seed in detail, and a comparison of all seeds.

    Curves and graphs are read from the work folder.
    """
    del config
    found = findings(summary)
    return Report(
        "Two-digit addition by a dense and a sparse model",
        lambda: _sections(summary, seed_folder(folder, summary.seeds[0].seed)),
        lead=[report.verdict(*map(_unbreak, found), tone="good" if reached(summary) else "bad")],
        lines=found,
        facts={
            f"training seconds, {name}": f"{own.training_seconds:.1f}"
            for name, own in summary.seeds[0].models.items()
        },
        style=graph.STYLE,
    )


def _sections(summary: AdditionSummary, folder: Path) -> list[Section]:
    first = summary.seeds[0]
    evaluated = {name: read_evaluations(folder / name) for name, _ in first.models.items()}
    return [
        report_sections.accuracy(first),
        seeds(summary),
        report_sections.training(evaluated, first),
        report_sections.graphs(read_graphs(folder)),
        report_sections.edges(first),
        report_sections.operands(first),
        report_sections.carries(first),
        report_sections.needed(first),
        differences(first),
    ]


def read_evaluations(folder: Path) -> dict[str, list[float]]:
    """Metrics of a model's evaluations by name, and `step`, in the order of steps."""
    table = pq.read_table(folder / EVALUATIONS)
    results: dict[str, list[float]] = {}
    for row in sorted(table.to_pylist(), key=lambda row: row["step"]):
        results.setdefault(row["name"], []).append(row["value"])
    return {"step": pc.unique(table["step"]).sort().to_pylist()} | results


def read_graphs(folder: Path) -> dict[str, list[SumGraph]]:
    """The sums to draw, by model.

    Raises:
      CorruptError: the file is damaged.
    """
    graphs: dict[str, list[SumGraph]] = {DENSE: [], SPARSE: []}
    for each in load_result(folder / GRAPHS, tuple[DrawnSum, ...]):
        arrays = np.array(each.open), np.array(each.weights), np.array(each.answer)
        graphs[each.model].append(SumGraph(each.problem, *arrays))
    return graphs


def seeds(summary: AdditionSummary) -> Section:
    """A row per seed."""
    rows = [
        [
            str(each.seed),
            *(report.rate(own.accuracy.all, spec=".2f") for _, own in each.models.items()),
            each.models.sparse.edges.all.estimate,
        ]
        for each in summary.seeds
    ]
    return section(
        "Comparison of seeds",
        _PROSE("seeds", _comparison(summary)),
        table(
            ["Seed", "Dense, exact, %", "Sparse, exact, %", Column("Open edges of a sum", ".1f")],
            rows,
            caption="Exact sums among held-out problems, and open edges of the sparse model.",
        ),
    )


def _comparison(summary: AdditionSummary) -> str:
    count = len(summary.seeds)
    if count == 1:
        return f"Seed {summary.seeds[0].seed}, {ONE_RUN}."
    dense, sparse = summary.between_seeds.dense, summary.between_seeds.sparse
    return _space_percent(
        f"Over {count} seeds, mean and range: exact sums {_range(dense.exact)} dense and "
        f"{_range(sparse.exact)} sparse, open edges of a sum {sparse.edges.mean:.1f} "
        f"({sparse.edges.least:.1f} to {sparse.edges.most:.1f})."
    )


def _range(result: Spread) -> str:
    return f"{result.mean:.1%} ({result.least:.1%} to {result.most:.1%})"


def findings(summary: AdditionSummary) -> list[str]:
    """The findings in sentences: of the first seed, and of all seeds if there are more."""
    first = summary.seeds[0]
    dense, sparse = first.models.dense, first.models.sparse
    good = reached(summary)
    several = len(summary.seeds) > 1
    return [
        f"The sparse model {'adds' if good else 'answers'} with {sparse.edges.all.estimate:.1f} "
        f"open edges per sum, the dense one with {dense.edges.all.estimate:.0f}"
        f"{'' if good else f'; not all models reach {100 * GOAL:g} % exact sums'} (seed "
        f"{first.seed}{'' if several else f', {ONE_RUN}'}).",
        *[_comparison(summary)] * several,
        f"Exact sums on {number(dense.accuracy.all.n)} problems that neither was trained on: "
        f"{_percent(dense.accuracy.all)} dense, {_percent(sparse.accuracy.all)} sparse "
        f"(95 % Wilson intervals; the goal is {100 * GOAL:g} %).",
        _operand_finding(first),
        _carry_finding(first),
    ]


def reached(summary: AdditionSummary) -> bool:
    """Whether both models of every seed reach `GOAL`."""
    return all(
        own.accuracy.all.estimate >= GOAL
        for each in summary.seeds
        for _, own in each.models.items()
    )


def differences(summary: SeedSummary) -> Section:
    """What the paper leaves open, and what was chosen."""
    config = summary.config
    return section(
        "Differences from the paper",
        _PROSE("differences"),
        report.key_values(
            {
                "Model": "blocks with RMS norm and a gated MLP, learned positions; width "
                f"{config.hidden_size}, {number(summary.parameters)} parameters",
                "Loss": "on the five digits of the answer, each at its question mark",
                "Attention": _ATTENTION[config.attention],
                "Gates": f"logit = score + {config.bias:g}, so that they are open at first; "
                "sampled in training, open where the logit is above 0 in evaluation",
                "Strength": f"{config.strength:g}, fixed from the first step to the last"
                if not config.bound
                else f"from {LEAST:g} to at most {config.strength:g}: it rises while the loss is "
                f"below {config.bound:g} nats per token, and falls above it",
                "Initial weights": _BEGIN[config.begin],
                "Training": " and ".join(
                    f"{own.steps} updates of {config.batch_size} sums ({name})"
                    for name, own in summary.models.items()
                ),
            }
        ),
    )


def _operand_finding(summary: SeedSummary) -> str:
    rates = [
        f"the {each.place} in {each.both.estimate:.1%} of the sums (by chance "
        f"{each.both_by_chance:.1%})"
        for each in summary.models.sparse.operands
    ]
    text = "In layer 0, digits of the sparse model's answer attend to both of their operands: "
    return _space_percent(text + ", ".join(rates) + ".")


def _carry_finding(summary: SeedSummary) -> str:
    tens = {
        (each.layer, each.carry): f"{each.attends.estimate:.1%}"
        for each in summary.models.sparse.carry
        if each.place == "tens"
    }
    rates = [
        f"{tens.get((layer, True), '–')} ({tens.get((layer, False), '–')}) in layer {layer}"
        for layer in range(summary.config.num_layers)
    ]
    text = (
        "Its tens attend to a position from which a carry can be known, in sums with a carry "
        "(without one): "
    )
    return _space_percent(text + ", ".join(rates) + ".")


def _space_percent(text: str) -> str:
    return text.replace("%", " %")


def _unbreak(text: str) -> str:
    """The text with its numbers and their % on the same line."""
    return text.replace(" %", "\u00a0%")


def _percent(share: Interval) -> str:
    low, high = (f"{100 * end:.1f}" for end in (share.low, share.high))
    return f"{100 * share.estimate:.2f} % [{low}, {high}]"
