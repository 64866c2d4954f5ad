"""Tables of perturbed sentences: divergences of models, and what held routing takes of them."""

from collections.abc import Iterator
from typing import Any

from tools.page_blocks.sources import MODELS, interval, summary, table


def _slices(names: tuple[str, ...], kind: str) -> list[dict[str, Any]]:
    """The slices of a kind, each from the last of the results that has it."""
    found = {each["name"]: each for name in names for each in summary(name)["slices"]}
    return [each for each in found.values() if each["kind"] == kind]


def _bracketed(value: dict[str, float], spec: str) -> str:
    """A mean with its interval, as `interval` writes it."""
    return interval(value | {"estimate": value["mean"]}, spec)


def divergences(*names: str, kind: str) -> str:
    """Jensen-Shannon divergence after the last token by slice and model, and PMR of ProtoT.

    Args:
      names: stored results of one list of models; where two have a slice, the last one's.
      kind: noise, or meaning.
    """
    models = [MODELS[each["kind"]] for each in summary(names[0])["models"]]
    rows = []
    for each in _slices(names, kind):
        clamp = each["models"][0]["clamp"]
        count = f"{each['pairs']}" + (f" of {each['frames']} frames" if each["frames"] else "")
        values = [_bracketed(model["js"], ".4f") for model in each["models"]]
        pmr, control = clamp["pmr"]["ratio_of_means"], clamp["gain"]
        rows.append(
            (each["name"], count, *values, _bracketed(pmr, ".3f"), _bracketed(control, ".4f"))
        )
    heads = ("slice", "pairs", *(f"{name}, nats" for name in models))
    return table((*heads, "PMR of ProtoT", "right routing over another's, nats"), rows)


def sizes(name: str) -> str:
    """How far each kind of noise changes a sentence, beside an example (Table 12)."""
    rows = (
        (each["name"], str(each["pairs"]), f"{each['distance']:.1f}", *each["example"])
        for each in _slices((name,), "noise")
    )
    return table(("slice", "pairs", "edit distance, characters", "sentence", "perturbed"), rows)


def comparisons(*names: str) -> str:
    """One sentence for each baseline: in how many slices of noise it diverges less or more."""
    first = summary(names[0])["models"][0]["kind"]
    return (
        "\n".join(
            f"- {MODELS[model]} against {MODELS[first]}, of {less + more + open_} kinds of noise: "
            f"less divergence in {less}, more in {more}, undecided in {open_}."
            for model, less, more, open_ in _counts(names)
        )
        + "\n"
    )


def _counts(names: tuple[str, ...]) -> Iterator[tuple[str, int, int, int]]:
    """Model, and the slices of noise in which it diverges less, more and undecidedly."""
    slices = _slices(names, "noise")
    for index, model in enumerate(summary(names[0])["models"][1:], 1):
        signs = [
            each["comparison"]["excess"][index]["mean"]
            * (each["comparison"]["corrected"][index] < 0.05)
            for each in slices
        ]
        less, more = sum(sign < 0 for sign in signs), sum(sign > 0 for sign in signs)
        yield model["kind"], less, more, len(signs) - less - more
