"""The report of robustness: divergences, held routing, flips, pairs.

It shows a `results.RobustnessReport` and measures nothing; prose is in `report.html.j2`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import math
from pathlib import Path
from typing import Any, NamedTuple

from lm_jax import report
from lm_jax.report import Bar, Cell, Column, Report, Section, cell, section, table_of
from lm_jax.report.markup import number
from lm_jax.report.page import Part
from lm_jax.report.prose import Prose
from protot_jax.studies.interventions.results import Interval
from protot_jax.studies.robustness import paper
from protot_jax.studies.robustness.report_text import conclusion, findings, names, of_kind, trained
from protot_jax.studies.robustness.results import (
    Clamp,
    Comparison,
    Measured,
    RobustnessReport,
    SliceResult,
)
from protot_jax.studies.robustness.settings import RobustnessConfig

_PROSE = Prose("protot_jax.studies.robustness")
_SLICE = Column("Slice", value=lambda one: one.name)
_PAIRS = Column("Pairs", value=lambda one: one.pairs)


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
        lines=[conclusion(summary)[0], *findings(summary)],
        facts=_models(summary),
    )


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

    def beside_paper(one: SliceResult, m: int) -> Cell:
        own, printed = one.models[m], paper.divergence(result.models[m].kind, one.name)
        notes = [f"{own.same_tokens} of the same tokens"] * bool(own.same_tokens)
        return _interval(own.js, *notes, *_printed(printed, ".4f"))

    return section(
        "Divergence under noise",
        _PROSE("divergence", settings.given, settings.sentences, settings.too_long),
        _by_model(result, shown, beside_paper, _PROSE("js_caption")),
        report.grid(*(_bars(result, one) for one in shown)),
        _PROSE("differences"),
        _compared(result, shown),
        report.details(
            "At aligned tokens, and the arithmetic-geometric divergence",
            _by_model(
                result,
                shown,
                lambda one, m: _interval(one.models[m].js_aligned),
                "Mean JS at aligned tokens after the first change, nats; n sentences have any.",
            ),
            _by_model(
                result,
                shown,
                lambda one, m: cell(one.models[m].ag, spec=".4f"),
                "Arithmetic-geometric divergence after the last token, nats.",
            ),
        ),
    )


def _compared(result: RobustnessReport, slices: Sequence[SliceResult]) -> Part:
    """What each model moves more than the first one, if models were compared."""
    compared = {one.name: one.comparison for one in slices if one.comparison is not None}
    if not compared:
        return ""

    def excess(one: SliceResult, m: int) -> Cell:
        own = compared[one.name]
        return _excess(own, m) if m else Cell("reference", numeric=True)

    shown = [one for one in slices if one.name in compared]
    return _by_model(result, shown, excess, _PROSE("compared_caption"))


def _excess(own: Comparison, m: int) -> Cell:
    p = own.corrected[m]
    return _interval(own.excess[m], *([] if p is None else [f"p = {number(p, '.2g')}"]))


def _by_model(
    result: RobustnessReport,
    slices: Iterable[SliceResult],
    of_model: Callable[[SliceResult, int], Cell],
    caption: str,
) -> Part:
    def column(m: int, name: str) -> Column:
        return Column(name, value=lambda one: of_model(one, m))

    models = [column(m, name) for m, name in enumerate(names(result))]
    return table_of(slices, [_SLICE, _PAIRS, *models], caption=caption)


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
                math.nan if own.js.mean is None else own.js.mean,
                own.js.low,
                own.js.high,
                paper.divergence(model.kind, one.name),
            )
            for name, model, own in zip(names(result), result.models, one.models, strict=True)
        ],
        caption=f"{one.name}: JS after the last token.",
        x_label="JS (nats)",
        n=one.sentences,
        spec=".3f",
    )


class _Held(NamedTuple):
    """A model on a slice, with its routing held."""

    slice: SliceResult
    own: Measured
    clamp: Any

    @property
    def name(self) -> str:
        return self.slice.name


def _clamp(result: RobustnessReport) -> Section | None:
    tables = []
    for m, name in enumerate(names(result)):
        own = [(one, one.models[m]) for one in result.slices]
        held = [_Held(one, each, each.clamp) for one, each in own if each.clamp is not None]
        if held:
            tables += [
                table_of(
                    held,
                    [
                        _SLICE,
                        Column("JS", value=lambda row: _js(row, row.own.js, "js_base")),
                        Column("JS, held", value=lambda row: _js(row, row.clamp.js, "js_clamped")),
                        Column("JS, control", value=lambda row: _interval(row.clamp.control_js)),
                        Column("Gain", value=lambda row: _interval(row.clamp.gain)),
                    ],
                    caption=_PROSE("clamp_caption", name),
                ),
                table_of(
                    held,
                    [
                        _SLICE,
                        *_PMR,
                        Column("Control, ratio of means", value=lambda row: _control(row.clamp)),
                    ],
                    caption=_PROSE("pmr_caption", name, f"{result.settings.floor:g}"),
                ),
                *_released(name, held),
            ]
    if not tables:
        return None
    return section("Routing held", _PROSE("clamp", result.settings.held), *tables)


def _released(name: str, held: Sequence[_Held]) -> list[Part]:
    """The paragraph and the tables of the released code's clamp, if it was measured."""
    forced = [one._replace(clamp=one.clamp.released) for one in held if one.clamp.released]
    if not forced:
        return []
    return [
        _PROSE("released"),
        table_of(
            forced,
            [
                _SLICE,
                Column("JS, write forced", value=lambda row: _interval(row.clamp.write_js)),
                Column("JS, read forced", value=lambda row: _interval(row.clamp.read_js)),
                Column("JS, the smaller", value=lambda row: _interval(row.clamp.js)),
            ],
            caption=_PROSE("released_caption", name),
        ),
        table_of(forced, [_SLICE, *_PMR], caption=_PROSE("released_pmr_caption", name)),
    ]


def _js(row: _Held, value: Interval, printed: str) -> Cell:
    return _interval(value, *_printed(paper.mediated(row.name).get(printed)))


def _control(clamp: Clamp) -> Cell:
    control = clamp.control_pmr
    return _interval(control.ratio_of_means, digits=3) if control else cell("–")


def _ratio_of_means(row: _Held) -> Cell:
    printed = _printed(paper.mediated(row.name).get("ratio_of_means"))
    return _interval(row.clamp.pmr.ratio_of_means, *printed, digits=3)


def _ratio(title: str, field: str, printed: str) -> Column:
    """A number of the PMR of a row, with that of Table 4 in small print."""

    def beside(row: _Held) -> Cell:
        return _beside(getattr(row.clamp.pmr, field), paper.mediated(row.name).get(printed))

    return Column(title, value=beside)


_PMR = (
    Column("Pairs", value=lambda row: row.clamp.pmr.pairs),
    Column("Ratio of means", value=_ratio_of_means),
    _ratio("Mean of ratios", "mean_of_ratios", "mean"),
    _ratio("sd of ratios", "deviation", "deviation"),
    Column("Median", ".3f", lambda row: row.clamp.pmr.median),
    _ratio("Above 0", "positive", "positive"),
    Column("Below the floor", ".1%", lambda row: row.clamp.pmr.below_floor),
)


class _Flip(NamedTuple):
    """A model on a slice of flipped meaning, and Table 5's entries of both."""

    slice: str
    model: str
    own: Measured
    printed: Mapping[str, float]


def _meaning(result: RobustnessReport) -> Section | None:
    shown = of_kind(result, "meaning")
    if not shown:
        return None
    rows = [
        _Flip(one.name.replace("_tag", ", tag"), name, own, paper.flip(model.kind, one.name))
        for one in shown
        for name, model, own in zip(names(result), result.models, one.models, strict=True)
    ]

    def share(title: str, field: str) -> Column:
        def beside(row: _Flip) -> Cell:
            return _beside(getattr(row.own, field), row.printed.get(field))

        return Column(title, value=beside)

    return section(
        "Meaning flipped",
        _PROSE("meaning", min(one.frames for one in shown)),
        table_of(
            rows,
            [
                Column("Flip", value=lambda row: row.slice),
                Column("Model", value=lambda row: row.model),
                Column(
                    "JS, nats",
                    value=lambda row: _interval(row.own.js, *_printed(row.printed.get("js"))),
                ),
                Column("AG, nats", ".4f", lambda row: row.own.ag),
                share("Overlap", "overlap"),
                share("Spearman", "spearman"),
                share("Same first", "same_top"),
                share("Mass of first ten", "mass"),
            ],
            caption="What is left of the predictions for the original sentence.",
            n=f"{shown[0].pairs} pairs of a flip",
        ),
    )


def _perturbations(result: RobustnessReport) -> Section:
    def strength(title: str, field: str, spec: str) -> Column:
        def beside(one: SliceResult) -> Cell:
            return _beside(getattr(one, field), paper.strength(one.name).get(field), spec)

        return Column(title, value=beside)

    return section(
        "The perturbations",
        _PROSE("perturbations", result.settings.least_similarity),
        table_of(
            result.slices,
            [
                _SLICE,
                _PAIRS,
                Column("Sentences", value=lambda one: one.sentences),
                Column("Frames", value=lambda one: one.frames or "–"),
                strength("Edit distance", "distance", ".2f"),
                strength("Similarity", "similarity", ".3f"),
                Column("Dissimilar", value=lambda one: one.dissimilar),
                Column("Trained on", value=lambda one: one.trained),
                Column("First pair", value=lambda one: Cell(*one.example)),
            ],
            caption="Strength of the slices: mean edit distance in characters, mean similarity.",
        ),
        _PROSE("sources"),
    )
