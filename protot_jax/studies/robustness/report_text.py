"""Sentences of the robustness report, for its page and for the terminal."""

from typing import Literal

from lm_jax.console import terminal
from protot_jax.studies.interventions.results import Interval
from protot_jax.studies.robustness.results import (
    Comparison,
    Kind,
    RobustnessReport,
    SliceResult,
)

# Of corrected p-values.
_LEVEL = 0.05


def findings(result: RobustnessReport) -> list[str]:
    """The divergences by slice and model, and what follows the first sentence of the conclusion."""
    rows = [
        [one.name, str(one.pairs), *map(_mean, (own.js.mean for own in one.models))]
        for one in result.slices
    ]
    heads = ["JS, nats", "pairs", *names(result)]
    lines = [terminal.format_table(heads, rows, left=(0,)), "", *conclusion(result)[1:]]
    lines += [f"not measured: {one.name}; {one.reason}" for one in result.skipped]
    lines += trained(result)
    return lines


def _mean(value: float | None) -> str:
    return "no number" if value is None else f"{value:.4f}"


def names(result: RobustnessReport) -> list[str]:
    """Run and seed of each model."""
    return [f"{model.run}, seed {model.seed}" for model in result.models]


def conclusion(result: RobustnessReport) -> list[str]:
    """The finding in sentences: which model moves least, and what holding the routing does.

    Models are compared with the one that was named first, and by corrected p-values.
    """
    lines = []
    noise = of_kind(result, "noise") or of_kind(result, "given")
    own = names(result)
    comparisons = [one.comparison for one in noise if one.comparison is not None]
    for m, name in enumerate(own[1:] if comparisons else (), start=1):
        found = [difference(one, m) for one in comparisons]
        lines.append(
            f"{name} against {own[0]}, of {len(found)} slices: less divergence on "
            f"{found.count('less')}, more on {found.count('more')}, undecided on "
            f"{found.count('')} (p below 0.05 after Holm's correction)."
        )
    for m, name in enumerate(own):
        clamps = [one.models[m].clamp for one in noise]
        clamps = [clamp for clamp in clamps if clamp is not None]
        if clamps:
            gains = sum(_above(clamp.gain) for clamp in clamps)
            falls = sum(_above(clamp.pmr.ratio_of_means) for clamp in clamps)
            lines.append(
                f"{name}: holding the routing lowers the divergence on {falls} of {len(clamps)} "
                f"slices; another sentence's routing leaves more divergence than the right one on "
                f"{gains} (intervals above 0)."
            )
        forced = [clamp.released for clamp in clamps if clamp.released is not None]
        if forced:
            falls = sum(_above(clamp.pmr.ratio_of_means) for clamp in forced)
            lines.append(
                f"{name}: forced as in the released code, the routing of the last token lowers the "
                f"divergence on {falls} of {len(forced)} slices (the smaller of two, intervals "
                "above 0)."
            )
    if not lines:
        lines.append(f"{len(result.slices)} slices were measured on {own[0]}.")
    return lines


def difference(comparison: Comparison, m: int) -> Literal["less", "more", ""]:
    """Whether model m moves less or more than the first by its corrected p-value; "" if neither."""
    p, excess = comparison.corrected[m], comparison.excess[m].mean
    if p is None or excess is None or not p < _LEVEL:
        return ""
    return "less" if excess < 0 else "more"


def trained(result: RobustnessReport) -> list[str]:
    """Sentences of how much each model was trained on, and that those pairs are left out."""
    lines = []
    for name, model in zip(names(result), result.models, strict=True):
        if model.trained.unknown:
            lines.append(
                f"{name}: whether it was trained on any of the sentences is not known "
                f"({model.trained.unknown})."
            )
        elif model.trained.sentences:
            lines.append(
                f"{name}: {model.trained.sentences} of the sentences stand in its training text; "
                "their pairs are left out for all models."
            )
    if left_out := sum(one.trained for one in result.slices):
        lines.append(f"{left_out} pairs of the slices shown were left out for that.")
    return lines


def _above(value: Interval) -> bool:
    return value.low is not None and value.low > 0


def of_kind(result: RobustnessReport, kind: Kind) -> list[SliceResult]:
    """The slices of one kind."""
    return [one for one in result.slices if one.kind == kind]
