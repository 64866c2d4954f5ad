"""The report of robustness: divergences, held routing, flips, pairs.

It shows a `results.RobustnessReport` and measures nothing; prose is in `report.html.j2`.
"""

from collections.abc import Sequence
import math
from pathlib import Path
from typing import Literal

from lm_jax import report
from lm_jax.console import terminal
from lm_jax.report import Bar, Cell, Report, Section, cell, section, table
from lm_jax.report.markup import number
from lm_jax.report.page import Part
from lm_jax.report.prose import Prose
from protot_jax.studies.interventions.results import Interval
from protot_jax.studies.robustness import paper
from protot_jax.studies.robustness.results import (
    Comparison,
    Kind,
    Measured,
    Mediation,
    RobustnessReport,
    SliceResult,
)
from protot_jax.studies.robustness.settings import RobustnessConfig

# Of corrected p-values.
_LEVEL = 0.05
_PROSE = Prose("protot_jax.studies.robustness")
# Heads of the cells of `_ratios`.
_PMR = (
    *("Pairs", "Ratio of means", "Mean of ratios", "sd of ratios", "Median", "Above 0"),
    "Below the floor",
)


def build(config: RobustnessConfig, summary: RobustnessReport, folder: Path) -> Report:
    """The report of a summary."""
    del config, folder
    return Report(
        "Robustness of predictions to perturbed sentences",
        lambda: [
            _divergence(summary),
            _clamp(summary),
            _meaning(summary),
            _perturbations(summary),
            section("Terms", _PROSE("terms")),
        ],
        lead=[_verdict(summary)],
        lines=findings(summary),
        facts=_models(summary),
    )


def findings(result: RobustnessReport) -> list[str]:
    """The divergences by slice and model, and what holding the routing does, for a terminal."""
    rows = [
        [one.name, str(one.pairs), *map(_mean, (own.js.mean for own in one.models))]
        for one in result.slices
    ]
    heads = ["JS, nats", "pairs", *names(result)]
    lines = [terminal.format_table(heads, rows, left=(0,)), "", *conclusion(result)]
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


def _verdict(result: RobustnessReport) -> Part:
    first, *others = conclusion(result)
    skipped = [f"Not measured: {one.name}; {one.reason}." for one in result.skipped]
    lines = [*others, *skipped, *trained(result)]
    unknown = any(model.trained.unknown for model in result.models)
    return report.verdict(first, *lines, tone="warn" if skipped or unknown else "none")


def _models(result: RobustnessReport) -> dict[str, object]:
    return {
        f"model {i}": f"{one.run}, seed {one.seed}, step {one.step}; {one.kind}, "
        f"{one.layers} layers, width {one.hidden_size}, "
        f"{'no' if one.prototypes is None else one.prototypes} prototypes, trained on {one.corpus}"
        for i, one in enumerate(result.models)
    }


def _divergence(result: RobustnessReport) -> Section | None:
    shown = [one for one in result.slices if one.kind != "meaning"]
    if not shown:
        return None
    settings = result.settings
    return section(
        "Divergence under noise",
        _PROSE("divergence", settings.given, settings.sentences, settings.too_long),
        _by_model(
            result,
            shown,
            [[_beside_paper(result, one, m) for m in _range(result)] for one in shown],
            _PROSE("js_caption"),
        ),
        report.grid(*(_bars(result, one) for one in shown)),
        _PROSE("differences"),
        _compared(result, shown),
        report.details(
            "At aligned tokens, and the arithmetic-geometric divergence",
            _by_model(
                result,
                shown,
                [[_interval(one.models[m].js_aligned) for m in _range(result)] for one in shown],
                "Mean JS at aligned tokens after the first change, nats; n sentences have any.",
            ),
            _by_model(
                result,
                shown,
                [[cell(one.models[m].ag, spec=".4f") for m in _range(result)] for one in shown],
                "Arithmetic-geometric divergence after the last token, nats.",
            ),
        ),
    )


def _compared(result: RobustnessReport, slices: Sequence[SliceResult]) -> Part:
    """What each model moves more than the first one, if models were compared."""
    pairs = [(one, one.comparison) for one in slices if one.comparison is not None]
    if not pairs:
        return ""
    return _by_model(
        result,
        [one for one, _ in pairs],
        [
            [Cell("reference", numeric=True) if m == 0 else _excess(own, m) for m in _range(result)]
            for _, own in pairs
        ],
        _PROSE("compared_caption"),
    )


def _excess(own: Comparison, m: int) -> Cell:
    p = own.corrected[m]
    return _interval(own.excess[m], *([] if p is None else [f"p = {number(p, '.2g')}"]))


def _range(result: RobustnessReport) -> range:
    return range(len(result.models))


def _by_model(
    result: RobustnessReport,
    slices: Sequence[SliceResult],
    cells: Sequence[Sequence[Cell]],
    caption: str,
) -> Part:
    return table(
        ["Slice", "Pairs", *names(result)],
        [[one.name, one.pairs, *row] for one, row in zip(slices, cells, strict=True)],
        caption=caption,
    )


def _beside_paper(result: RobustnessReport, one: SliceResult, m: int) -> Cell:
    printed = paper.divergence(result.models[m].kind, one.name)
    notes = [f"{one.models[m].same_tokens} of the same tokens"] * bool(one.models[m].same_tokens)
    return _interval(one.models[m].js, *notes, *_printed(printed, ".4f"))


def _printed(value: float | None, spec: str = ".3f") -> list[str]:
    return [] if value is None else [f"paper {number(value, spec)}"]


def _beside(value: float | None, printed: float | None, spec: str = ".3f") -> Cell:
    """Our value with the paper's in small print."""
    return cell(value, spec=spec, note=" ".join(_printed(printed, spec)))


def _interval(value: Interval, *notes: str, digits: int = 4) -> Cell:
    """A mean with its interval, and notes in small print."""
    if value.mean is None:
        return Cell("–", "", numeric=True)
    # Without a minus before zeros.
    mean, low, high = (
        "" if end is None else number(round(end, digits) + 0.0, f".{digits}f")
        for end in (value.mean, value.low, value.high)
    )
    text = f"{mean} [{low}, {high}]" if low and high else mean
    return Cell(text, " · ".join([f"n = {value.n}", *notes]), numeric=True)


def _bars(result: RobustnessReport, one: SliceResult) -> Part:
    return report.bars(
        [
            Bar(
                name,
                math.nan if js.mean is None else js.mean,
                js.low,
                js.high,
                paper.divergence(model.kind, one.name),
            )
            for name, model, js in zip(
                names(result), result.models, [each.js for each in one.models], strict=True
            )
        ],
        caption=f"{one.name}: JS after the last token.",
        x_label="JS (nats)",
        n=one.sentences,
        spec=".3f",
    )


def _clamp(result: RobustnessReport) -> Section | None:
    tables = []
    for m, name in enumerate(names(result)):
        held = [(one, one.models[m]) for one in result.slices if one.models[m].clamp is not None]
        if held:
            tables += [
                table(
                    ["Slice", "JS", "JS, held", "JS, control", "Gain"],
                    [[one.name, *_held_row(one, own)] for one, own in held],
                    caption=_PROSE("clamp_caption", name),
                ),
                table(
                    ["Slice", *_PMR, "Control, ratio of means"],
                    [[one.name, *_pmr_row(one, own)] for one, own in held],
                    caption=_PROSE("pmr_caption", name, f"{result.settings.floor:g}"),
                ),
                *_released(name, held),
            ]
    if not tables:
        return None
    return section("Routing held", _PROSE("clamp", result.settings.held), *tables)


def _released(name: str, held: Sequence[tuple[SliceResult, Measured]]) -> list[Part]:
    """The paragraph and the tables of the released code's clamp, if it was measured."""
    forced, ratios = [], []
    for one, own in held:
        clamp = own.clamp.released if own.clamp else None
        if clamp is not None:
            forced.append([one.name, *map(_interval, (clamp.write_js, clamp.read_js, clamp.js))])
            ratios.append([one.name, *_ratios(one, clamp.pmr)])
    if not forced:
        return []
    heads = ["Slice", "JS, write forced", "JS, read forced", "JS, the smaller"]
    return [
        _PROSE("released"),
        table(heads, forced, caption=_PROSE("released_caption", name)),
        table(["Slice", *_PMR], ratios, caption=_PROSE("released_pmr_caption", name)),
    ]


def _held_row(one: SliceResult, own: Measured) -> list[Cell]:
    clamp, printed = own.clamp, paper.mediated(one.name)
    if clamp is None:
        return []
    return [
        _interval(own.js, *_printed(printed.get("js_base"))),
        _interval(clamp.js, *_printed(printed.get("js_clamped"))),
        _interval(clamp.control_js),
        _interval(clamp.gain),
    ]


def _pmr_row(one: SliceResult, own: Measured) -> list[Cell]:
    clamp = own.clamp
    if clamp is None:
        return []
    control = clamp.control_pmr
    return [
        *_ratios(one, clamp.pmr),
        _interval(control.ratio_of_means, digits=3) if control else cell("–"),
    ]


def _ratios(one: SliceResult, pmr: Mediation) -> list[Cell]:
    """The cells of `_PMR`, with those of Table 4 in small print."""
    printed = paper.mediated(one.name)
    return [
        cell(pmr.pairs),
        _interval(pmr.ratio_of_means, *_printed(printed.get("ratio_of_means")), digits=3),
        _beside(pmr.mean_of_ratios, printed.get("mean")),
        _beside(pmr.deviation, printed.get("deviation")),
        cell(pmr.median, spec=".3f"),
        _beside(pmr.positive, printed.get("positive")),
        cell(pmr.below_floor, spec=".1%"),
    ]


def _meaning(result: RobustnessReport) -> Section | None:
    shown = of_kind(result, "meaning")
    if not shown:
        return None
    rows = []
    for one in shown:
        for name, model, own in zip(names(result), result.models, one.models, strict=True):
            printed = paper.flip(model.kind, one.name)
            rows.append(
                [
                    one.name.replace("_tag", ", tag"),
                    name,
                    _interval(own.js, *_printed(printed.get("js"))),
                    cell(own.ag, spec=".4f"),
                    _beside(own.overlap, printed.get("overlap")),
                    _beside(own.spearman, printed.get("spearman")),
                    _beside(own.same_top, printed.get("same_top")),
                    _beside(own.mass, None),
                ]
            )
    return section(
        "Meaning flipped",
        _PROSE("meaning", min(one.frames for one in shown)),
        table(
            [
                *("Flip", "Model", "JS, nats", "AG, nats", "Overlap", "Spearman", "Same first"),
                "Mass of first ten",
            ],
            rows,
            caption="What is left of the predictions for the original sentence.",
            n=f"{shown[0].pairs} pairs of a flip",
        ),
    )


def _perturbations(result: RobustnessReport) -> Section:
    rows = []
    for one in result.slices:
        printed = paper.strength(one.name)
        rows.append(
            [
                one.name,
                one.pairs,
                one.sentences,
                one.frames or "–",
                _beside(one.distance, printed.get("distance"), ".2f"),
                _beside(one.similarity, printed.get("similarity")),
                one.dissimilar,
                one.trained,
                Cell(one.example[0], one.example[1]),
            ]
        )
    return section(
        "The perturbations",
        _PROSE("perturbations", result.settings.least_similarity),
        table(
            [
                *("Slice", "Pairs", "Sentences", "Frames", "Edit distance", "Similarity"),
                *("Dissimilar", "Trained on", "First pair"),
            ],
            rows,
            caption="Strength of the slices: mean edit distance in characters, mean similarity.",
        ),
        _PROSE("sources"),
    )
