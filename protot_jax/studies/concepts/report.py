"""The concept report: an explorer of prototypes, figures and tables, and lines for a terminal.

After the paper's Figs. 3 to 6 and 10 to 14 (words coloured by gate, half-life badge), Fig. 3 right
(write, read and memory over a text) and Figs. 15 to 18 (score cards). The page shows a
`results.ConceptReport`, which it holds whole, and measures nothing. `page.js` builds the explorer,
`prototype.js`, `ablation.js` and `curves.js` the open prototype, `report_sections.py` and
`units_section.py` the figures and tables; the prose is in `report.html.j2`.
"""

import dataclasses
import importlib.resources
import math
from pathlib import Path

from markupsafe import Markup
import numpy as np

from lm_jax import report
from lm_jax.report import Report, Section, section
from lm_jax.report.markup import ENVIRONMENT, json_script, number
from lm_jax.report.prose import Prose
from lm_jax.run.files import to_jsonable
from protot_jax.studies.concepts import report_sections, units_section
from protot_jax.studies.concepts.results import ConceptReport, Prototype, Statistic
from protot_jax.studies.concepts.settings import ConceptConfig

_PROSE = Prose("protot_jax.studies.concepts")
_WORDS = 3
_SCRIPTS = ("page.js", "prototype.js", "ablation.js", "curves.js")


def build(config: ConceptConfig, summary: ConceptReport, folder: Path) -> Report:
    """The report of a summary, which holds its settings itself."""
    del config, folder
    return Report(
        "What the prototypes of a language model hold",
        lambda: [
            explorer(summary),
            report_sections.half_lives(summary),
            report_sections.reading_first(summary),
            report_sections.layers(summary),
            units_section.compared_units(summary),
            report_sections.labels(summary),
            section("Model and texts", _lead(summary)),
            section("Terms", _PROSE("terms")),
        ],
        lead=[report.verdict(answer(summary))],
        lines=[answer(summary), *format_lines(summary)],
        facts={
            "model": dataclasses.asdict(summary.model),
            "settings": dataclasses.asdict(summary.settings),
        },
        script=report.script("protot_jax.studies.concepts", *_SCRIPTS),
        style=_asset("page.css"),
    )


def answer(result: ConceptReport) -> str:
    """What the prototypes hold: by the clearest theme of a judge, or by the most selective gate."""
    count, dead = len(result.prototypes), sum(one.write.dead for one in result.layers)
    labelled = [(one, one.label) for one in result.prototypes if one.label is not None]
    ending = f" ({number(dead)} of {number(count)} dead)." if dead else "."
    if labelled:
        one, label = max(labelled, key=lambda each: (each[1].disentanglement, each[1].coverage))
        return (
            f"The judge ({result.settings.judge}) finds a theme in {number(len(labelled))} of "
            f"{number(count)} prototypes, the clearest “{label.theme}” in {_name(one)}, with "
            f"disentanglement {number(label.disentanglement, 'g')} of 10{ending}"
        )
    one = max(result.prototypes, key=lambda each: each.write.peak_over_mean or 0.0)
    words = ", ".join(f"“{each.token.strip() or each.token}”" for each in one.top_tokens[:_WORDS])
    if not words:
        return f"No prototype writes a token{ending}"
    return (
        f"{_name(one)} is the most selective of {number(count)} prototypes: it writes {words} most"
        f"{ending}"
    )


def _name(one: Prototype) -> str:
    return f"L{one.layer} P{one.prototype}"


def format_lines(result: ConceptReport) -> list[str]:
    """The text of the terminal."""
    model, settings = result.model, result.settings
    half_lives = [
        math.inf if each.half_life is None else each.half_life for each in result.prototypes
    ]
    quartiles = np.quantile(half_lives, [0.0, 0.25, 0.5, 0.75, 1.0], method="nearest")
    lines = [
        f"{settings.texts:,} texts of the {settings.split} split, {settings.tokens:,} "
        f"tokens, perplexity {model.perplexity:.1f}; {model.layers} layers of "
        f"{model.prototypes} prototypes",
        "half-life in tokens, minimum, quartiles, maximum: {:.2f}, {:.2f}, {:.2f}, {:.2f}, "
        "{:.2f}".format(*quartiles),
    ]
    lines += [
        "layer {layer}, write gates: largest {top_1:.2f}, L1 ratio {l1_ratio:.1f}, "
        "Gini {gini:.2f}, entropy {entropy:.2f}, MI {mutual_information:.2f} (by chance "
        "{mutual_information_by_chance:.2f}), dead {dead}".format(
            layer=layer.layer, **dataclasses.asdict(layer.write)
        )
        for layer in result.layers
    ]
    lag, related = result.lag, result.half_life_repetition
    lines.append(f"reading one token before writing, lead over lag 0: {_tested(lag.lead)}")
    lines.append(f"the same, lead over other prototypes: {_tested(lag.own_lead)}")
    if lag.peaks_one_before is not None:
        peak = lag.lags[int(np.argmax(np.asarray(lag.mean, float)))]
        lines.append(
            f"reading peaks one token before writing for {lag.peaks_one_before:.0%} of prototypes, "
            f"in the mean over prototypes at lag {peak:+d}"
        )
    lines.append(
        f"half-life and token repetition, within layers: Spearman {_tested(related.spearman)}"
    )
    return lines


def _tested(result: Statistic) -> str:
    counts = f"{result.prototypes} prototypes, {result.texts:,} texts"
    if result.value is None:
        return f"none ({counts})"
    value, p, low, high = (
        "?" if each is None else f"{each:.3f}"
        for each in (result.value, result.p, result.low, result.high)
    )
    return f"{value} ({low} to {high}, p {p}; {counts})"


def explorer(result: ConceptReport) -> Section:
    """The interactive part, with the data in it."""
    template = ENVIRONMENT.from_string(_asset("explorer.html.j2"))
    return section(
        "Explore the prototypes",
        report.details(
            "How to read this",
            _PROSE("explorer", left_out=any(one.ablation for one in result.prototypes)),
        ),
        Markup(template.render(data=json_script(to_jsonable(result)))),
    )


def _lead(result: ConceptReport) -> Markup:
    dead = sum(one.write.dead for one in result.layers)
    return _PROSE("lead", model=result.model, settings=result.settings, dead=dead)


def _asset(name: str) -> str:
    return (
        importlib.resources.files("protot_jax.studies.concepts").joinpath(name).read_text("utf-8")
    )
