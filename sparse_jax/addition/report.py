"""The page of the study: accuracies, edges, layer graphs, and what the edges lead to.

Every number comes from the summary, every curve from the evaluations; nothing is measured here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lm_jax import report
from lm_jax.report import Section, section
from lm_jax.report.markup import number
from sparse_jax.addition import graph, sections
from sparse_jax.addition.graph import Drawn
from sparse_jax.addition.models import DENSE, SPARSE
from sparse_jax.addition.sections import GOAL, Summary

_BEGINNINGS = {
    "dense": "the sparse model begins as the trained dense one, as in Fig. 1 "
    "(“Sparsity-Regularised Finetuning”); Appendix A says only that both are trained",
    "drawn": "the sparse model begins from drawn weights, as the dense one",
}


def build(
    summary: Summary,
    evaluations: Mapping[str, Mapping[str, Sequence[float]]],
    drawn: Mapping[str, Sequence[Drawn]],
    *,
    provenance: Mapping[str, Any],
) -> str:
    """The whole page.

    Args:
      summary: of `study.run`, or as read back from `summary.json`.
      evaluations: of each model, columns by name and `step`.
      drawn: of each model, the sums to draw.
      provenance: of `runs.record_provenance`.
    """
    parts = (
        sections.accuracy(summary),
        sections.training(evaluations, summary),
        sections.graphs(drawn),
        sections.edges(summary),
        sections.digits(summary),
        sections.carries(summary),
        sections.needed(summary),
        differences(summary),
    )
    return report.page(
        "Two-digit addition, dense and sparse",
        parts,
        provenance=report.facts(provenance)
        | {
            f"training seconds, {name}": own["training_seconds"]
            for name, own in summary["models"].items()
        },
        lead=[
            report.verdict(*findings(summary), tone="good" if reached(summary) else "bad"),
        ],
        style=graph.STYLE,
    )


def findings(summary: Summary) -> list[str]:
    """The findings in four sentences."""
    held = {name: one["accuracy"]["all"] for name, one in summary["models"].items()}
    count = {name: one["edges"]["all"]["estimate"] for name, one in summary["models"].items()}
    good = reached(summary)
    return [
        f"The sparse model {'adds' if good else 'answers'} with {count[SPARSE]:.1f} open edges a "
        f"sum, the dense one with {count[DENSE]:.0f}.",
        f"Exact sums on {number(held[DENSE]['n'])} problems that neither was trained on: "
        f"{_percent(held[DENSE])} dense, {_percent(held[SPARSE])} sparse "
        f"({'both' if good else 'not both'} reach {100 * GOAL:g} %; 95 % Wilson intervals).",
        _operands_told(summary),
        _carry_told(summary),
    ]


def reached(summary: Summary) -> bool:
    """Whether both models add as well as they are to."""
    held = [one["accuracy"]["all"]["estimate"] for one in summary["models"].values()]
    return min(held) >= GOAL


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
    told = "In layer 0 the sparse model's digits attend to both of their operands: "
    return _spaced(told + ", ".join(shares) + ".")


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
    told = "Its tens attend to where a carry can be told from, in sums with a carry (and without): "
    return _spaced(told + ", ".join(shares) + ".")


def _spaced(text: str) -> str:
    return text.replace("%", " %")


def _percent(given: Mapping[str, Any]) -> str:
    low, high = (f"{100 * given[end]:.1f}" for end in ("low", "high"))
    return f"{100 * given['estimate']:.2f} % [{low}, {high}]"
