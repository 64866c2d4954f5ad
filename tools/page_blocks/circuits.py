"""Tables of circuits: sizes that explain a task, and ratios beside those of random orders."""

from collections.abc import Mapping
from typing import Any

from tools.page_blocks.sources import BRACKETS, interval, summary, table

_COMPONENTS = {"heads": "heads", "token_edges": "token edges", "component_edges": "component edges"}


def circuits(name: str, *, model: str, reference: str, scope: str = "prompt") -> str:
    """Components that explain the task in two models by ranking, their ratio and that of chance.

    Args:
      name: stored result of `iaj sparse circuits`.
      model: role of the model whose circuits are counted against the reference's.
      reference: role of the other.
      scope: prompt, where each has a ranking of its own, or task, where it has one.
    """
    rows = [
        (
            each["task"],
            _COMPONENTS[each["component"]],
            each["ranking"],
            _crossing(name, each, reference),
            _crossing(name, each, model),
            interval(each["ratio"], ".2f") if each["ratio"] else "",
            interval(each["random"], ".2f") if each["random"] else "",
        )
        for each in _ratios(name, model, reference, scope)
    ]
    heads = ("task", "components", "ranking", reference, model, f"{reference} : {model}")
    return table((*heads, "of random orders"), rows)


def ratios_of_seeds(
    names: Mapping[str, str], task: str, *, model: str = "sparse", scope: str = "prompt"
) -> str:
    """Ratios of the dense model's circuits to those of models of several seeds.

    Args:
      names: stored result by seed.
      task: name of the task.
      model: role of the model in every result.
      scope: prompt, where each has a ranking of its own, or task, where it has one.
    """
    cells: dict[tuple[str, str], list[str]] = {}
    for name in names.values():
        for each in _ratios(name, model, "dense", scope):
            if each["task"] == task:
                ratio = interval(each["ratio"], ".2f") if each["ratio"] else "none"
                random = f"{each['random']['estimate']:.2f}" if each["random"] else "none"
                key = _COMPONENTS[each["component"]], each["ranking"]
                cells.setdefault(key, []).append(f"{ratio}; random {random}")
    heads = ("components", "ranking", *(f"seed {seed}" for seed in names))
    return table(heads, [(*key, *row) for key, row in cells.items()])


def fewer(name: str, component: str, *, scope: str = "prompt", ranking: str = "absolute") -> str:
    """How many times fewer components the sparse model needs than its control, task by task."""
    found = [
        f"{each['task']} "
        f"{interval(each['ratio'], '.2f', form=BRACKETS) if each['ratio'] else 'no ratio'} (random "
        f"orders {each['random']['estimate']:.2f})"
        for each in _ratios(name, "sparse", "control", scope)
        if (each["component"], each["ranking"]) == (component, ranking)
    ]
    return f"control : sparse, by {ranking} effect: {', '.join(found)}"


_PLACES = {"query": "queries", "key": "keys", "value": "values", "mlp_out": "MLP outputs"}
_ESTIMATES = {"atp": "gradient", "atp_star": "AtP*, softmax", "graddrop": "AtP*, GradDrop"}


def place_agreements(name: str, *places: str) -> str:
    """How estimates rank places beside exact patching in the tasks that a model solves.

    Ranges are over tasks; what is missed, and the share of places in which, of the worst of them.

    Args:
      name: stored result of `iaj sparse circuits --patch=...`.
      *places: names of the patched places to show.
    """
    found: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for result in summary(name)["results"]:
        for own in result["places"] if result["solved"] else ():
            if own["place"] in places:
                by_method = found.setdefault((result["model"], own["place"]), {})
                for each in own["agreements"]:
                    by_method.setdefault(each["method"], []).append(each)
    rows = []
    for (model, place), by_method in found.items():
        for method, own in by_method.items():
            ranks = [each["spearman"]["estimate"] for each in own if each["spearman"]]
            worst = max(own, key=lambda each: each["missed"])
            rows.append(
                (
                    model,
                    str(len(own)),
                    _PLACES[place],
                    _ESTIMATES[method],
                    f"{min(ranks):.2f} to {max(ranks):.2f}",
                    f"{100 * worst['lower']:.0f} %",
                    f"{100 * worst['missed']:.1f} %",
                )
            )
    heads = ("model", "tasks", "patched", "estimate", "rank correlation", "lower half", "missed")
    return table(heads, rows)


def _ratios(name: str, model: str, reference: str, scope: str) -> list[dict[str, Any]]:
    wanted = (model, reference, scope)
    ratios = summary(name)["ratios"]
    return [each for each in ratios if (each["model"], each["reference"], each["scope"]) == wanted]


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
