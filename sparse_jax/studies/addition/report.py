"""The page of the study: accuracies, edges, graphs, and attention to operands and carries.

Every number comes from the summary, every curve from the evaluations; nothing is measured here.
Paragraphs are in `report.html.j2`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lm_jax import report
from lm_jax.report import Column, Section, section, table
from lm_jax.report.markup import number
from lm_jax.report.prose import Prose
from lm_jax.statistics import Interval
from sparse_jax.studies.addition import graph, report_sections
from sparse_jax.studies.addition.config import LEAST
from sparse_jax.studies.addition.graph import SumGraph
from sparse_jax.studies.addition.report_sections import GOAL
from sparse_jax.studies.addition.results import AdditionSummary, SeedSummary
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


def build(
    summary: AdditionSummary,
    evaluations: Mapping[str, Mapping[str, Sequence[float]]],
    graphs: Mapping[str, Sequence[SumGraph]],
    *,
    provenance: Mapping[str, Any],
) -> str:
    """The whole page: the first seed in detail, and a comparison of all seeds.

    Args:
      summary: from `study.run`.
      evaluations: of each model of the first seed, columns by name and `step`.
      graphs: of each model of the first seed, the sums to draw.
      provenance: from `record_provenance`.
    """
    first = summary.seeds[0]
    parts = (
        report_sections.accuracy(first),
        seeds(summary),
        report_sections.training(evaluations, first),
        report_sections.graphs(graphs),
        report_sections.edges(first),
        report_sections.operands(first),
        report_sections.carries(first),
        report_sections.needed(first),
        differences(first),
    )
    return report.page(
        "Two-digit addition by a dense and a sparse model",
        parts,
        provenance=report.facts(provenance)
        | {
            f"training seconds, {name}": f"{own.training_seconds:.1f}"
            for name, own in first.models.items()
        },
        lead=[
            report.verdict(
                *map(_unbroken, findings(summary)), tone="good" if reached(summary) else "bad"
            ),
        ],
        style=graph.STYLE,
    )


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
    return _spaced(
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
    return _spaced(text + ", ".join(rates) + ".")


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
    return _spaced(text + ", ".join(rates) + ".")


def _spaced(text: str) -> str:
    return text.replace("%", " %")


def _unbroken(text: str) -> str:
    """The text with its numbers and their % on the same line."""
    return text.replace(" %", "\u00a0%")


def _percent(share: Interval) -> str:
    low, high = (f"{100 * end:.1f}" for end in (share.low, share.high))
    return f"{100 * share.estimate:.2f} % [{low}, {high}]"
