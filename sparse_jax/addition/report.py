"""The page of the study: accuracies, edges, layer graphs, and what the edges lead to.

Every number comes from the summary, every curve from the evaluations; nothing is measured here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lm_jax import report
from lm_jax.report import Column, Section, section, table
from lm_jax.report.markup import number
from sparse_jax.addition import graph, measures, report_sections
from sparse_jax.addition.graph import Drawn
from sparse_jax.addition.models import DENSE, SPARSE
from sparse_jax.addition.report_sections import GOAL, Summary
from sparse_jax.summary import ONE_RUN, Spread, spread

_BEGINNINGS = {
    "dense": "the sparse model begins as the trained dense one, as in Fig. 1 "
    "(“Sparsity-Regularised Finetuning”); Appendix A says only that both are trained",
    "drawn": "the sparse model begins from drawn weights, as the dense one",
}


def build(
    summary: Mapping[str, Any],
    evaluations: Mapping[str, Mapping[str, Sequence[float]]],
    drawn: Mapping[str, Sequence[Drawn]],
    *,
    provenance: Mapping[str, Any],
) -> str:
    """The whole page: the first seed in detail, and all seeds beside each other.

    Args:
      summary: of `study.run`, as read back from `summary.json`.
      evaluations: of each model of the first seed, columns by name and `step`.
      drawn: of each model of the first seed, the sums to draw.
      provenance: of `record_provenance`.
    """
    first = summary["seeds"][0]
    parts = (
        report_sections.accuracy(first),
        seeds(summary),
        report_sections.training(evaluations, first),
        report_sections.graphs(drawn),
        report_sections.edges(first),
        report_sections.digits(first),
        report_sections.carries(first),
        report_sections.needed(first),
        differences(first),
    )
    return report.page(
        "Two-digit addition, dense and sparse",
        parts,
        provenance=report.facts(provenance)
        | {
            f"training seconds, {name}": own["training_seconds"]
            for name, own in first["models"].items()
        },
        lead=[
            report.verdict(*findings(summary), tone="good" if reached(summary) else "bad"),
        ],
        style=graph.STYLE,
    )


def between_seeds(result: Sequence[Summary]) -> dict[str, dict[str, Spread]]:
    """Exact sums, as a share, and open edges of a sum of each model, over seeds."""
    return {
        name: {
            "exact": spread(
                [each["models"][name]["accuracy"]["all"]["estimate"] for each in result]
            ),
            "edges": spread([each["models"][name]["edges"]["all"]["estimate"] for each in result]),
        }
        for name in result[0]["models"]
    }


def seeds(summary: Mapping[str, Any]) -> Section:
    """A row per seed."""
    rows = [
        [
            str(each["seed"]),
            *(
                report.rate(measures.interval(each["models"][name]["accuracy"]["all"]), spec=".2f")
                for name in (DENSE, SPARSE)
            ),
            each["models"][SPARSE]["edges"]["all"]["estimate"],
        ]
        for each in summary["seeds"]
    ]
    return section(
        "Between seeds",
        _told_between(summary) + " Intervals are over held-out sums, for the models that were "
        "trained. Another seed trains others, and so does another processor or number of threads, "
        "which add up in another order. What follows is of the first seed.",
        table(
            ["Seed", "Dense, exact, %", "Sparse, exact, %", Column("Open edges of a sum", ".1f")],
            rows,
            caption="Exact sums among held-out problems, and open edges of the sparse model.",
        ),
    )


def _told_between(summary: Mapping[str, Any]) -> str:
    count = len(summary["seeds"])
    if count == 1:
        return f"Seed {summary['seeds'][0]['seed']}, {ONE_RUN}."
    dense, sparse = (summary["between_seeds"][name] for name in (DENSE, SPARSE))
    return _spaced(
        f"Over {count} seeds, mean and range: exact sums {_range(dense['exact'])} dense and "
        f"{_range(sparse['exact'])} sparse, open edges of a sum {sparse['edges']['mean']:.1f} "
        f"({sparse['edges']['least']:.1f} to {sparse['edges']['most']:.1f})."
    )


def _range(result: Mapping[str, Any]) -> str:
    return f"{result['mean']:.1%} ({result['least']:.1%} to {result['most']:.1%})"


def findings(summary: Mapping[str, Any]) -> list[str]:
    """The findings in sentences: of the first seed, and of all if there are more."""
    first = summary["seeds"][0]
    held = {name: one["accuracy"]["all"] for name, one in first["models"].items()}
    count = {name: one["edges"]["all"]["estimate"] for name, one in first["models"].items()}
    good = reached(summary)
    several = len(summary["seeds"]) > 1
    return [
        f"The sparse model {'adds' if good else 'answers'} with {count[SPARSE]:.1f} open edges a "
        f"sum, the dense one with {count[DENSE]:.0f} (seed {first['seed']}"
        f"{'' if several else f', {ONE_RUN}'}).",
        *[_told_between(summary)] * several,
        f"Exact sums on {number(held[DENSE]['n'])} problems that neither was trained on: "
        f"{_percent(held[DENSE])} dense, {_percent(held[SPARSE])} sparse "
        f"({'all' if good else 'not all'} models reach {100 * GOAL:g} %; 95 % Wilson intervals).",
        _operands_told(first),
        _carry_told(first),
    ]


def reached(summary: Mapping[str, Any]) -> bool:
    """Whether both models of every seed add as well as they are to."""
    return all(
        one["accuracy"]["all"]["estimate"] >= GOAL
        for each in summary["seeds"]
        for one in each["models"].values()
    )


def differences(summary: Summary) -> Section:
    """What the paper leaves open, and what was chosen."""
    config = summary["config"]
    return section(
        "What differs from the paper",
        "The paper gives four layers, one head, 13 symbols and a fixed strength. Here, besides:",
        report.key_values(
            {
                "Model": "blocks with RMS norm and a gated MLP, learned positions; width "
                f"{config['hidden_size']}, {number(summary['parameters'])} parameters",
                "Loss": "on the five digits of the answer, each at its question mark",
                "Attention": "causal, every digit of the answer by itself; the paper does not say",
                "Gates": f"logit = score + {config['bias']:g}, so that they begin open; drawn in "
                "training, open or closed by rule when measured",
                "Strength": f"{config['strength']:g}, fixed from the first step to the last",
                "Beginning": _BEGINNINGS[config["begin"]],
                "Training": " and ".join(
                    f"{own['steps']} updates of {config['batch_size']} sums ({name})"
                    for name, own in summary["models"].items()
                ),
            }
        ),
    )


def _operands_told(summary: Summary) -> str:
    shares = [
        f"the {one['place']} in {one['both']['estimate']:.1%} (by chance "
        f"{one['both_by_chance']:.1%})"
        for one in summary["models"][SPARSE]["operands"]
    ]
    text = "In layer 0 the sparse model's digits attend to both of their operands: "
    return _spaced(text + ", ".join(shares) + ".")


def _carry_told(summary: Summary) -> str:
    tens = {
        (one["layer"], one["carry"]): f"{one['attends']['estimate']:.1%}"
        for one in summary["models"][SPARSE]["carry"]
        if one["place"] == "tens"
    }
    shares = [
        f"{tens.get((layer, True), '–')} ({tens.get((layer, False), '–')}) in layer {layer}"
        for layer in range(summary["config"]["num_layers"])
    ]
    text = "Its tens attend to where a carry can be told from, in sums with a carry (and without): "
    return _spaced(text + ", ".join(shares) + ".")


def _spaced(text: str) -> str:
    return text.replace("%", " %")


def _percent(given: Mapping[str, Any]) -> str:
    low, high = (f"{100 * given[end]:.1f}" for end in ("low", "high"))
    return f"{100 * given['estimate']:.2f} % [{low}, {high}]"
