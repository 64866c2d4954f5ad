"""Findings in words: what the report and the console say, and in which order.

Takes the summary as `summary.summarise` makes it or as it is read back from JSON, where NaN is null
and infinities are strings.
"""

from collections.abc import Mapping, Sequence
import math
from pathlib import Path
import re
from typing import Any, Literal, NamedTuple

from lm_jax import assets, stats
from polyattn_jax.row_maps import RECIPES, SOFTMAX

Summary = Mapping[str, Any]
Entry = Mapping[str, Any]

_MEMBER = re.compile(r"(top|bottom|random)-(\d+)(?:-\d+)?")


class Finding(NamedTuple):
    """A sentence with the tone of a banner."""

    text: str
    tone: Literal["good", "warn", "bad"]


def finite(value: Any) -> float:
    """A number of the summary as a float; absent ones are NaN."""
    return math.nan if value is None else float(value)


def interval(entry: Entry) -> stats.Interval:
    """An interval as the summary holds it."""
    return stats.Interval(**{name: entry[name] for name in ("estimate", "low", "high", "n")})


def counted(accuracy: Entry) -> str:
    """An accuracy as a count: "9 of 10"."""
    return f"{round(accuracy['estimate'] * accuracy['n']):,} of {accuracy['n']:,}"


def ends(accuracy: Entry) -> str:
    """The interval of an accuracy: "60 to 98 %"."""
    return f"{100 * accuracy['low']:.0f} to {100 * accuracy['high']:.0f} %"


def model_name(summary: Summary) -> str:
    """The model by its own name: of the manifest, or of its folder or file."""
    asset = assets.manifest().get(summary["model"])
    if asset is not None:
        return re.split("[,:]", asset.description)[0]
    return Path(summary["model"]).name or summary["model"]


def suite_tokens(suite: str, config: Entry) -> str:
    """The length of a suite's prompts: "256 tokens"; empty where the settings do not say."""
    if suite.startswith("niah_"):
        length = int(suite[5:])
    else:
        first = config["niah_lengths"][0]
        length = first if suite == "control" else config.get(f"{suite}_length")
    return "" if length is None else f"{length:,} tokens"


def suite_name(suite: str) -> str:
    """A suite by its own name, without the length."""
    if suite.startswith("niah_"):
        return "needle"
    return {"control": "needle left out", "mqar": "MQAR"}.get(suite, suite)


def suite_label(suite: str, config: Entry) -> str:
    """A suite with the length of its prompts: "needle, 256 tokens"."""
    return ", ".join(filter(None, (suite_name(suite), suite_tokens(suite, config))))


def bias_label(kind: str) -> str:
    """A kind of bias as it is written in tables."""
    return "b = 0" if kind == "zero" else "b_auto"


def by_suite(entries: Sequence[Entry]) -> list[Entry]:
    """Entries in reading order: induction, MQAR, needles by length; b = 0 before b_auto."""

    def place(entry: Entry) -> tuple[Any, ...]:
        name, _, length = entry["suite"].partition("_")
        return name, int(length or 0), entry["bias_kind"] != "zero"

    return sorted(entries, key=place)


def by_recipe(sweep: Sequence[Entry]) -> list[Entry]:
    """Entries in reading order: softmax, the recipes of the paper as it lists them, others."""
    order = {name: place for place, name in enumerate((SOFTMAX.name, *RECIPES))}
    return sorted(sweep, key=lambda entry: order.get(entry["recipe"], len(order)))


def softmax_of(cells: Sequence[Entry]) -> Entry:
    """The cell without any substitution."""
    return next(entry for entry in cells if entry["cell"] == SOFTMAX.name)


def best_of(cells: Sequence[Entry]) -> Entry:
    """The cell of highest accuracy; among equals, of lowest loss."""
    return max(cells, key=lambda e: (e["accuracy"]["estimate"], -finite(e["loss"])))


def ablation_groups(ablation: Sequence[Entry]) -> dict[str, dict[int, list[Entry]]]:
    """The cells of the ablation by kind of head set, then by its size K, ascending."""
    groups: dict[str, dict[int, list[Entry]]] = {"top": {}, "bottom": {}, "random": {}}
    for entry in ablation:
        if member := _MEMBER.fullmatch(entry["cell"]):
            groups[member[1]].setdefault(int(member[2]), []).append(entry)
    return {kind: dict(sorted(cells.items())) for kind, cells in groups.items()}


def controls(summary: Summary) -> Finding:
    """Whether softmax does what the probes need, which everything else stands on."""
    found, config = summary["controls"], summary["config"]
    length = config["sweep_length"]
    given = found["accuracy"][f"niah_{length}"]
    without = found["accuracy"].get("control")
    first, second = (finite(found[copy]["loss"]) for copy in ("first_copy", "second_copy"))
    text = f"softmax finds the needle in {counted(given)} prompts at {length:,} tokens"
    for other in config["niah_lengths"]:
        if other != length:
            text += f", {counted(found['accuracy'][f'niah_{other}'])} at {other:,}"
    if without is not None:
        text += f", and in {counted(without)} where it was left out"
    text += (
        f"; on random tokens written twice the loss goes from {first:.1f} to {second:.1f} nats per "
        "token."
    )
    retrieves = given["low"] >= 0.5
    honest = without is None or without["high"] < given["low"]
    if retrieves and honest and second < first / 2:
        return Finding(f"The controls hold: {text}", "good")
    if given["estimate"] >= 0.5 and second < first / 2 and (without or given)["n"] < 10:
        return Finding(f"Too few prompts for the controls: {text}", "warn")
    return Finding(f"The controls do not hold: {text}", "bad")


def overall(summary: Summary) -> Finding:
    """The sentence to quote: which recipes may replace softmax in every head of this model."""
    base = softmax_of(summary["sweep"])
    others = [entry for entry in summary["sweep"] if entry is not base]
    length, heads = summary["config"]["sweep_length"], summary["layers"] * summary["heads"]
    where = f"in all {heads:,} heads of {model_name(summary)}"
    right = counted(base["accuracy"])
    if base["accuracy"]["low"] < 0.5:
        return Finding(
            f"No verdict on {model_name(summary)}: softmax itself is right in {right} needle "
            f"prompts at {length:,} tokens, which does not show that it solves the probe.",
            "warn",
        )
    preserving = {v["recipe"] for v in summary["verdicts"] if v["verdict"] == "preserve"}
    kept = [entry for entry in by_recipe(others) if entry["recipe"] in preserving]
    if kept:
        names = ", ".join(f"{e['recipe']} ({counted(e['accuracy'])})" for e in kept)
        tolerated = all(e["delta"]["low"] >= -summary["config"]["tolerance"] for e in kept) and len(
            kept
        ) == len(others)
        return Finding(
            f"{len(kept)} of {len(others)} recipes can replace softmax {where} without a measured "
            f"loss of needle accuracy at {length:,} tokens: {names}; softmax {right}.",
            "good" if tolerated else "warn",
        )
    if not others:
        return Finding(f"No recipe was tried on {model_name(summary)}; softmax: {right}.", "warn")
    best = best_of(others)
    which = "The recipe tried" if len(others) == 1 else f"None of the {len(others)} recipes tried"
    verb = "does not preserve" if len(others) == 1 else "preserves"
    return Finding(
        f"{which} {verb} needle retrieval at {length:,} tokens when it replaces softmax {where}: "
        f"{'' if len(others) == 1 else 'the best, '}{best['recipe']}, is right in "
        f"{counted(best['accuracy'])} prompts, softmax in {right}.",
        "bad",
    )


def in_part(summary: Summary) -> str:
    """What the ablation adds: how many heads may be replaced, and which may not."""
    if not summary["ablation"]:
        return ""
    base, groups = softmax_of(summary["ablation"]), ablation_groups(summary["ablation"])
    floor = base["accuracy"]["estimate"] - summary["config"]["tolerance"]

    def holds(cells: Sequence[Entry]) -> bool:
        return all(entry["accuracy"]["estimate"] >= floor for entry in cells)

    low = [size for size, cells in groups["bottom"].items() if holds(cells)]
    high = [size for size, cells in groups["top"].items() if not holds(cells)]
    if not low and not high:
        return ""
    # Both ends at one size: the most heads that can be spared, else the fewest that cannot.
    size = max(low) if low else min(high)
    parts = [
        f"in the {_heads(size)} of {end} median S₂ it leaves "
        f"{counted(groups[group][size][0]['accuracy'])} right"
        for end, group in (("lowest", "bottom"), ("highest", "top"))
        if size in groups[group]
    ]
    recipe = summary["config"]["ablation_recipe"]
    right = counted(base["accuracy"])
    return f"With {recipe} in only some heads: {', '.join(parts)}; softmax {right}."


def _heads(count: int) -> str:
    return "head" if count == 1 else f"{count:,} heads"


def next_step(summary: Summary) -> str:
    """What to do with the best recipe."""
    base = softmax_of(summary["sweep"])
    others = [entry for entry in summary["sweep"] if entry is not base]
    if not others:
        return ""
    best = best_of(others)["recipe"]
    step = next(v["next"] for v in summary["verdicts"] if v["recipe"] == best)
    return f"Next, for {best}: {step}."


def resolution(summary: Summary) -> str:
    """What the number of prompts cannot tell."""
    delta = softmax_of(summary["sweep"])["delta"]
    return (
        f"With n = {delta['n']:,} prompts a loss of up to {-100 * delta['low']:.0f} points stays "
        "possible even where no prompt is lost."
    )
