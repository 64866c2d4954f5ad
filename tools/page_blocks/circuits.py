"""Tables of circuits: sizes that explain a task, and ratios beside those of random orders."""

from typing import Any

from tools.page_blocks.sources import interval, summary, table

_COMPONENTS = {"heads": "heads", "token_edges": "token edges", "component_edges": "component edges"}
_SCOPES = {"prompt": "by prompt", "task": "one for all"}


def circuits(name: str, *, model: str, reference: str) -> str:
    """Components that explain the task in two models by ranking, their ratio and that of chance.

    Args:
      name: stored result of `iaj sparse circuits`.
      model: role of the model whose circuits are counted against the reference's.
      reference: role of the other.
    """
    rows = [
        (
            each["task"],
            _COMPONENTS[each["component"]],
            f"{each['ranking']}, {_SCOPES[each['scope']]}",
            _crossing(name, each, reference),
            _crossing(name, each, model),
            interval(each["ratio"], ".2f") if each["ratio"] else "",
            interval(each["random"], ".2f") if each["random"] else "",
            each["why"],
        )
        for each in summary(name)["ratios"]
        if (each["model"], each["reference"]) == (model, reference)
    ]
    ratio = f"{reference} : {model}"
    heads = (
        "task",
        "components",
        "ranking",
        reference,
        model,
        ratio,
        "of random orders",
        "no ratio",
    )
    return table(heads, rows)


def _crossing(name: str, ratio: dict[str, Any], role: str) -> str:
    """Size of a model's circuit with its interval, of the curve that the ratio is from."""
    keys = ("component", "ablation", "ranking", "scope")
    (result,) = (
        each
        for each in summary(name)["results"]
        if (each["task"], each["model"]) == (ratio["task"], role)
    )
    (curve,) = (each for each in result["curves"] if all(each[key] == ratio[key] for key in keys))
    return interval(curve["crossing"], ".1f") if curve["crossing"] else ""
