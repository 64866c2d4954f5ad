"""Tables of attribution graphs: components that carry an edge in two models."""

from typing import Any

from tools.page_blocks.sources import BRACKETS, interval, summary, table

_COMPONENTS = {"heads": "heads", "pairs": "key-query pairs"}
_EDGES = {"any": "all", "different": "between different positions"}


def carriers(name: str, *, reference: str) -> str:
    """Components that carry 90 % of an edge's mass in two models, and their ratio.

    Args:
      name: stored result of `iaj sparse graph` with `--dense` and `--sparse`.
      reference: what the model given as `--dense` is called on the page.
    """
    masses = {_key(each, each["role"]): each["needed_of_mean"] for each in summary(name)["masses"]}
    rows = [
        (
            _COMPONENTS[each["component"]],
            each["sign"],
            _EDGES[each["positions"]],
            *(interval(masses[_key(each, role)], ".1f") for role in ("dense", "sparse")),
            interval(each["of_mean"], ".2f"),
            *(
                f"{each[role]['unmediated']:,} of {each[role]['total']:,}"
                for role in ("dense", "sparse")
            ),
            str(each["of_mean"]["n"]),
        )
        for each in summary(name)["ratios"]
    ]
    heads = ("components", "mass", "edges", reference, "sparse", f"{reference} : sparse")
    left_out = (f"no head carries, {reference}", "no head carries, sparse")
    return table((*heads, *left_out, "prompts"), rows)


def fewer_carriers(name: str, component: str) -> str:
    """Ratio of one kind of component by absolute mass, over all edges and between positions."""
    found = [
        f"{interval(each['of_mean'], '.2f', form=BRACKETS)} "
        f"({_EDGES[each['positions']]}, n = {each['of_mean']['n']} prompts)"
        for each in summary(name)["ratios"]
        if (each["component"], each["sign"]) == (component, "absolute")
    ]
    return f"{_COMPONENTS[component]}, control : sparse, {' and '.join(found)}"


def _key(entry: dict[str, Any], role: str) -> tuple[str, ...]:
    return (role, entry["component"], entry["sign"], entry["positions"])
