"""The report of an intervention: the conclusion, every sentence, the controls and the paper.

Every number is from `summary.json` (the paper's from `published/protot.toml`), the prose from
`report.html.j2`.
"""

from collections.abc import Sequence
from pathlib import Path
import textwrap
from typing import cast

from lm_jax import report
from lm_jax.report import Cell, Column, Report, Section, cell, section, table
from lm_jax.report.prose import Prose
from protot_jax.studies.interventions import comparison, paper, report_text
from protot_jax.studies.interventions.matching import Match
from protot_jax.studies.interventions.numbers import ABLATION
from protot_jax.studies.interventions.results import (
    Comparison,
    Interval,
    InterventionReport,
    SeedResult,
)
from protot_jax.studies.interventions.settings import InterventionConfig

_PROSE = Prose("protot_jax.studies.interventions")
# Of a line on the terminal.
_WIDTH = 100


def build(
    config: InterventionConfig, summary: InterventionReport | Comparison, folder: Path
) -> Report:
    """The report of one concept, or of the comparison of several."""
    del config, folder
    if isinstance(summary, Comparison):
        return comparison.report_of(summary)
    text, tone = report_text.conclusion(summary)
    return Report(
        f"Effect of prototype {report_text.name(summary.seeds[0])} on {report_text.about(summary)}",
        lambda: [
            prototype(summary),
            effects(summary),
            sentences(summary),
            controls(summary.seeds[0]),
            seeds(summary),
            paper_comparison(summary),
            section("Terms", _PROSE("terms")),
        ],
        lead=[report.verdict(text, *report_text.reasons(summary), tone=tone)],
        lines=findings(summary),
    )


def findings(result: InterventionReport) -> list[str]:
    """The finding for a terminal."""
    lines = textwrap.wrap(report_text.conclusion(result)[0], _WIDTH)
    lines += textwrap.wrap(report_text.replication(result), _WIDTH)
    for seed in result.seeds:
        head = f"{seed.run}, seed {seed.seed}: {report_text.name(seed)}"
        if match := seed.match:
            head += (
                f", matched with correlation {match.similarity:.2f} (median of all pairs "
                f"{match.median:.2f}; percentile {match.percentile:.0f} of different "
                f"prototypes, p {match.p_value:.3f})"
            )
        if seed.ranking:
            head += f", rank {seed.place} by the words"
        lines += ["", head, _columns("", "targets [95 %]", "p", "validation perplexity")]
        for one in seed.modes:
            control = one.control
            lines.append(
                _columns(
                    report_text.LABELS[one.mode],
                    report_text.percent(one.effect),
                    f"{control.p:.2g}" if control else "–",
                    report_text.percent(one.text_perplexity),
                )
            )
    if skipped := result.skipped:
        lines += ["", f"{report_text.count(len(skipped), 'sentence')} skipped:"]
        lines += [f"  {one.where}: {one.reason}" for one in skipped[:5]]
    return lines


def _columns(*cells: str) -> str:
    first, second, third, fourth = cells
    return f"  {first:<20}{second:>26}{third:>12}{fourth:>26}".rstrip()


def prototype(result: InterventionReport) -> Section:
    """How the prototype was chosen, and the runners-up."""
    seed, settings = result.seeds[0], result.settings
    own, words = report_text.name(seed), ", ".join(settings.words)
    if not seed.ranking:
        return section("The prototype", _PROSE("named_prototype", name=own, place=seed))
    occurrences = ", ".join(
        f"{word} {report_text.count(n, 'time')}" for word, n in settings.occurrences.items()
    )
    rows = [
        [report_text.name(one), one.score, 100 * one.on_words, 100 * one.elsewhere]
        for one in seed.ranking
    ]
    return section(
        "The prototype",
        _PROSE(
            "prototype",
            name=own,
            at=seed,
            words=words,
            occurrences=occurrences,
            gate_tokens=settings.gate_tokens,
            place=seed.place,
            chosen_by_words=settings.found,
        ),
        table(
            [
                "Prototype",
                Column("d", ".2f"),
                Column("On the words, %", ".1f"),
                Column("Elsewhere, %", ".1f"),
            ],
            rows,
            caption="Prototypes by how specifically they write the words, and their mean write "
            "gates.",
        ),
    )


def effects(result: InterventionReport) -> Section:
    """Effect on targets, rank among controls, and change of perplexities, by intervention."""
    seed, settings = result.seeds[0], result.settings
    rows = []
    for one in seed.modes:
        control = one.control
        rows.append(
            [
                report_text.LABELS[one.mode],
                _change(one.effect),
                cell(control and control.percentile, spec=".0f"),
                cell(control and control.p, spec=".3f"),
                _change(one.sentence_perplexity),
                _change(one.text_perplexity),
            ]
        )
    return section(
        "Effect on the targets, and on other text",
        _PROSE("effects", text=seed.text),
        table(
            [
                "Intervention",
                "Targets",
                "Percentile",
                "p, two-sided",
                "Perplexity of the sentences",
                "Perplexity of validation text",
            ],
            rows,
            caption=_PROSE(
                "effects_caption", draws=settings.draws, control_draws=settings.control_draws
            ),
            n=f"{report_text.cases(seed.modes[0].effect)} kept, {seed.excluded} excluded",
        ),
    )


def sentences(result: InterventionReport) -> Section:
    """The change of every target."""
    seed = result.seeds[0]
    modes = report_text.by_mode(seed)
    rows = []
    for i, sentence in enumerate(seed.sentences):
        changes = [
            _change(modes[mode].sentences[i] if sentence.kept else None)
            for mode in report_text.LABELS
        ]
        note = "" if sentence.kept else "excluded"
        rows.append(
            [
                report_text.bracketed(sentence.text, sentence.target),
                cell(100 * sentence.baseline, spec=".2f", note=note),
                *changes,
            ]
        )
    return section(
        "Sentence by sentence",
        "The target is in brackets. The interval of a new vector is over draws.",
        table(
            ["Sentence", "p, %", *report_text.LABELS.values()],
            rows,
            caption="Probability p of the target under the trained model, and its relative change.",
            n=len(rows),
        ),
    )


def controls(seed: SeedResult) -> Section | None:
    """Controls: the same intervention on every other prototype."""
    ranked = [(one.mode, one.control) for one in seed.modes if one.control is not None]
    if not ranked:
        return None
    own, histograms = report_text.name(seed), []
    for mode, control in ranked:
        others = [
            effect
            for layer, row in enumerate(control.effects)
            for r, effect in enumerate(row)
            if (layer, r) != (seed.layer, seed.prototype)
        ]
        histograms.append(
            report.histogram(
                others,
                caption=f"{report_text.LABELS[mode].capitalize()}: effects of other prototypes.",
                x_label="change of the targets' geometric mean (%)",
                y_label="prototypes (count)",
                bins=24,
                markers=[(control.chosen, own)],
            )
        )
    rows = [
        [
            report_text.LABELS[mode],
            _percent(control.chosen),
            _percent(control.mean),
            " to ".join(map(report_text.signed, (control.low, control.high))),
            ", ".join(
                f"{report_text.name(other)} ({report_text.signed(other.effect)})"
                for other in control.strongest[:3]
            ),
        ]
        for mode, control in ranked
    ]
    return section(
        "Controls: the same on every other prototype",
        _PROSE("controls"),
        table(
            [
                "Intervention",
                report_text.name(seed),
                "Others, mean",
                "Middle 95 % of others",
                "Greatest drops",
            ],
            rows,
            caption="Change of the targets' geometric mean over kept sentences.",
            n=f"{ranked[0][1].n} other prototypes",
        ),
        report.grid(*histograms),
    )


def seeds(result: InterventionReport) -> Section | None:
    """The matched prototypes of other seeds, and the same interventions there."""
    first, *others = result.seeds
    if not others:
        return None
    rows = [_seed_row(first, first.run)]
    matches = []
    for seed in others:
        rows.append(_seed_row(seed, first.run))
        match = cast(Match, seed.match)
        matches.append(
            [
                report_text.model_name(seed, first.run),
                report_text.name(seed),
                _two(match.similarity),
                _two(match.best),
                _two(match.median),
                _two(match.null_95),
                cell(match.percentile, spec=".0f"),
                cell(match.p_value, spec=".3f"),
                cell(seed.place),
            ]
        )
    return section(
        "The same prototype in other seeds",
        report_text.replication(result),
        _PROSE("seeds"),
        table(
            [
                "Model",
                "Match",
                "Correlation",
                "Highest with any",
                "Median of matches",
                "Different ones, 95 %",
                "Percentile",
                "p",
                "Rank by words",
            ],
            matches,
            caption=f"Matches of {report_text.name(first)} in other models.",
        ),
        table(
            [
                "Model",
                "Prototype",
                "Kept",
                *report_text.LABELS.values(),
                "Percentile, write zeroed",
            ],
            rows,
            caption="Change of the targets' geometric mean, with 95 % intervals over the "
            "sentences' texts.",
        ),
    )


def _two(value: float) -> Cell:
    return cell(value, spec=".2f")


def _seed_row(seed: SeedResult, run: str) -> list[object]:
    modes = report_text.by_mode(seed)
    control = modes[ABLATION].control
    return [
        report_text.model_name(seed, run),
        report_text.name(seed),
        f"{seed.kept} of {seed.kept + seed.excluded}",
        *(_change(modes[mode].effect) for mode in report_text.LABELS),
        cell(control and control.percentile, spec=".0f"),
    ]


def paper_comparison(result: InterventionReport) -> Section | None:
    """The paper's numbers for the same concept, and the differences in its setting."""
    printed = paper.tables().get(result.settings.concept or "")
    if printed is None:
        return None
    seed = result.seeds[0]
    modes = report_text.by_mode(seed)
    baselines = [100 * one.baseline for one in seed.sentences if one.kept]
    ours: list[object] = [
        f"ours, {report_text.name(seed)}",
        f"{seed.kept} of {seed.kept + seed.excluded}",
        _span(baselines),
        *(_change(modes[mode].effect) for mode in paper.MODES),
    ]
    theirs: list[list[object]] = [
        [
            f"paper, {column.prototype} ({column.role})",
            f"{len(column.rows)} of {column.sentences}",
            _span([row.baseline for row in column.rows]),
            *(_percent(column.mean(mode), _extremes(column, mode)) for mode in paper.MODES),
        ]
        for column in printed.columns
    ]
    return section(
        "Comparison with the paper",
        _PROSE("paper_comparison", table=printed.number, remark=printed.remark),
        table(
            [
                "Model and prototype",
                "Sentences kept",
                "Baseline, %",
                *(report_text.LABELS[mode] for mode in paper.MODES),
            ],
            [ours, *theirs],
            caption="Ours: change of the geometric mean of the targets' probabilities. The "
            "paper's: mean of relative changes, with the smallest and the largest of a sentence "
            "below.",
        ),
    )


def _percent(value: float | None, note: str = "") -> Cell:
    return Cell("–" if value is None else f"{report_text.signed(value)} %", note, numeric=True)


def _change(interval: Interval | None) -> Cell:
    """A mean with its interval below."""
    if interval is None or interval.mean is None:
        return _percent(None)
    return _percent(interval.mean, report_text.ends(interval))


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.1f} to {max(values):.1f}" if values else "–"


def _extremes(column: paper.Column, mode: str) -> str:
    values = column.changes(mode)
    return f"{report_text.signed(min(values))} to {report_text.signed(max(values))}"
