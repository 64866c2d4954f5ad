"""The report of an intervention: the conclusion, every sentence, the controls and the paper.

Every number is from `summary.json` (the paper's from `published/protot.toml`), the prose from
`report.html.j2`.
"""

from collections.abc import Sequence
from pathlib import Path
import textwrap

from lm_jax import report
from lm_jax.console import terminal
from lm_jax.report import Cell, Column, Report, Section, cell, section, table, table_of
from lm_jax.report.markup import number
from lm_jax.report.prose import Prose
from protot_jax.studies.interventions import comparison, paper, report_text
from protot_jax.studies.interventions.numbers import ABLATION
from protot_jax.studies.interventions.results import (
    Comparison,
    Control,
    Interval,
    InterventionReport,
    SeedResult,
    SentenceResult,
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
        heads = ["", "targets [95 %]", "p", "validation perplexity"]
        rows = [
            [
                report_text.LABELS[one.mode],
                report_text.percent(one.effect),
                number(one.control and one.control.p, ".2g"),
                report_text.percent(one.text_perplexity),
            ]
            for one in seed.modes
        ]
        lines += ["", head, terminal.format_table(heads, rows)]
    if skipped := result.skipped:
        lines += ["", f"{report_text.count(len(skipped), 'sentence')} skipped:"]
        lines += [f"  {one.where}: {one.reason}" for one in skipped[:5]]
    return lines


def prototype(result: InterventionReport) -> Section:
    """How the prototype was chosen, and the runners-up."""
    seed, settings = result.seeds[0], result.settings
    own, words = report_text.name(seed), ", ".join(settings.words)
    if not seed.ranking:
        return section("The prototype", _PROSE("named_prototype", name=own, place=seed))
    occurrences = ", ".join(
        f"{word} {report_text.count(n, 'time')}" for word, n in settings.occurrences.items()
    )
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
        table_of(
            seed.ranking,
            [
                Column("Prototype", value=report_text.name),
                Column("d", ".2f", lambda one: one.score),
                Column("On the words, %", ".1f", lambda one: 100 * one.on_words),
                Column("Elsewhere, %", ".1f", lambda one: 100 * one.elsewhere),
            ],
            caption="Prototypes by how specifically they write the words, and their mean write "
            "gates.",
        ),
    )


def effects(result: InterventionReport) -> Section:
    """Effect on targets, rank among controls, and change of perplexities, by intervention."""
    seed, settings = result.seeds[0], result.settings
    return section(
        "Effect on the targets, and on other text",
        _PROSE("effects", text=seed.text),
        table_of(
            seed.modes,
            [
                Column("Intervention", value=lambda one: report_text.LABELS[one.mode]),
                Column("Targets", value=lambda one: _change(one.effect)),
                Column("Percentile", ".0f", lambda one: one.control and one.control.percentile),
                Column("p, two-sided", ".3f", lambda one: one.control and one.control.p),
                Column(
                    "Perplexity of the sentences",
                    value=lambda one: _change(one.sentence_perplexity),
                ),
                Column(
                    "Perplexity of validation text", value=lambda one: _change(one.text_perplexity)
                ),
            ],
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

    def changes(mode: str) -> Column:
        def change(row: tuple[int, SentenceResult]) -> Cell:
            i, sentence = row
            return _change(modes[mode].sentences[i] if sentence.kept else None)

        return Column(report_text.LABELS[mode], value=change)

    def baseline(row: tuple[int, SentenceResult]) -> Cell:
        note = "" if row[1].kept else "excluded"
        return cell(100 * row[1].baseline, spec=".2f", note=note)

    return section(
        "Sentence by sentence",
        "The target is in brackets. The interval of a new vector is over draws.",
        table_of(
            enumerate(seed.sentences),
            [
                Column(
                    "Sentence", value=lambda row: report_text.bracketed(row[1].text, row[1].target)
                ),
                Column("p, %", value=baseline),
                *map(changes, report_text.LABELS),
            ],
            caption="Probability p of the target under the trained model, and its relative change.",
            n=len(seed.sentences),
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
    return section(
        "Controls: the same on every other prototype",
        _PROSE("controls"),
        table_of(
            ranked,
            [
                Column("Intervention", value=lambda row: report_text.LABELS[row[0]]),
                Column(own, value=lambda row: _percent(row[1].chosen)),
                Column("Others, mean", value=lambda row: _percent(row[1].mean)),
                Column("Middle 95 % of others", value=lambda row: _ends(row[1].low, row[1].high)),
                Column("Greatest drops", value=lambda row: _greatest(row[1])),
            ],
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
    model = Column("Model", value=lambda seed: report_text.model_name(seed, first.run))

    def of_mode(mode: str) -> Column:
        label = report_text.LABELS[mode]
        return Column(label, value=lambda seed: _change(report_text.by_mode(seed)[mode].effect))

    return section(
        "The same prototype in other seeds",
        report_text.replication(result),
        _PROSE("seeds"),
        table_of(
            others,
            [
                model,
                Column("Match", value=report_text.name),
                Column("Correlation", ".2f", lambda seed: seed.match.similarity),
                Column("Highest with any", ".2f", lambda seed: seed.match.best),
                Column("Median of matches", ".2f", lambda seed: seed.match.median),
                Column("Different ones, 95 %", ".2f", lambda seed: seed.match.null_95),
                Column("Percentile", ".0f", lambda seed: seed.match.percentile),
                Column("p", ".3f", lambda seed: seed.match.p_value),
                Column("Rank by words", value=lambda seed: seed.place),
            ],
            caption=f"Matches of {report_text.name(first)} in other models.",
        ),
        table_of(
            result.seeds,
            [
                model,
                Column("Prototype", value=report_text.name),
                Column("Kept", value=lambda seed: f"{seed.kept} of {seed.kept + seed.excluded}"),
                *map(of_mode, report_text.LABELS),
                Column("Percentile, write zeroed", ".0f", _ablation_percentile),
            ],
            caption="Change of the targets' geometric mean, with 95 % intervals over the "
            "sentences' texts.",
        ),
    )


def _ablation_percentile(seed: SeedResult) -> float | None:
    control = report_text.by_mode(seed)[ABLATION].control
    return None if control is None else control.percentile


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


def _ends(low: float, high: float) -> str:
    return f"{report_text.signed(low)} to {report_text.signed(high)}"


def _greatest(control: Control) -> str:
    return ", ".join(
        f"{report_text.name(other)} ({report_text.signed(other.effect)})"
        for other in control.strongest[:3]
    )


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.1f} to {max(values):.1f}" if values else "–"


def _extremes(column: paper.Column, mode: str) -> str:
    values = column.changes(mode)
    return _ends(min(values), max(values))
