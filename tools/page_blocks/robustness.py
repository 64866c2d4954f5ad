"""Tables of perturbed sentences: divergences of models, and what held routing takes of them."""

from typing import Any

from tools.page_blocks.sources import BRACKETS, MODELS, interval, summary, table


def _slices(name: str, kind: str) -> list[dict[str, Any]]:
    return [each for each in summary(name)["slices"] if each["kind"] == kind]


def divergences(name: str, *, kind: str) -> str:
    """Jensen-Shannon divergence after the last token by slice and model, and PMR of ProtoT.

    Args:
      name: stored result of `iaj protot robustness`, whose first model is a ProtoT.
      kind: noise, or meaning.
    """
    models = [MODELS[each["kind"]] for each in summary(name)["models"]]
    rows = []
    for each in _slices(name, kind):
        clamp = each["models"][0]["clamp"]
        of = f" of {each['frames']} frames" if kind == "meaning" else ""
        rows.append(
            (
                each["name"],
                f"{each['pairs']}{of}",
                f"{each['distance']:.1f}",
                *(interval(model["js"], ".4f") for model in each["models"]),
                interval(clamp["pmr"]["ratio_of_means"], ".3f"),
                interval(clamp["gain"], ".4f"),
            )
        )
    heads = ("slice", "pairs", "edit distance", *(f"{model}, nats" for model in models))
    return table((*heads, "PMR of ProtoT", "another routing minus the right one, nats"), rows)


def comparisons(name: str) -> str:
    """One line for each baseline: on which kinds of noise it diverges less and more."""
    lines = compared_models(name).split("; ")
    return "".join(f"- {line[0].upper()}{line[1:]}.\n" for line in lines)


def compared_models(name: str) -> str:
    """Every model but the first against the first, at 5 % after Holm's correction."""
    found = _slices(name, "noise")
    first, *others = summary(name)["models"]
    parts = []
    for index, model in enumerate(others, 1):
        signs: dict[int, list[str]] = {-1: [], 0: [], 1: []}
        for each in found:
            compared = each["comparison"]
            above = 1 if compared["excess"][index]["mean"] > 0 else -1
            signs[above if compared["corrected"][index] < 0.05 else 0].append(each["name"])
        less, more = (_listed(signs[sign]) for sign in (-1, 1))
        parts.append(
            f"{MODELS[model['kind']]} diverges less than {MODELS[first['kind']]} on {less}, "
            f"more on {more}, undecidedly on {len(signs[0])}"
        )
    return "; ".join(parts)


def _listed(names: list[str]) -> str:
    return ", ".join(names) if names else "none"


def lowered(name: str) -> tuple[int, int]:
    """The number of slices of noise where holding the routing lowers the divergence, and of all."""
    found = [each["models"][0]["clamp"]["pmr"]["ratio_of_means"] for each in _slices(name, "noise")]
    return sum(each["low"] > 0 for each in found), len(found)


def greatest_held(name: str) -> str:
    """The greatest PMR of a slice of noise, with its interval, and the slice."""
    found = {
        each["name"]: each["models"][0]["clamp"]["pmr"]["ratio_of_means"]
        for each in _slices(name, "noise")
    }
    best = max(found, key=lambda each: found[each]["mean"])
    return f"{interval(found[best], '.3f', form=BRACKETS)} ({best})"


def least_and_most(name: str, model: str, slices: str) -> str:
    """The least and the greatest divergence, in nats, over slices whose name ends in `slices`."""
    (at,) = (i for i, each in enumerate(summary(name)["models"]) if each["kind"] == model)
    found = [
        each["models"][at]["js"]["mean"]
        for each in summary(name)["slices"]
        if each["name"].endswith(slices)
    ]
    return f"{min(found):.4f} to {max(found):.4f}"
