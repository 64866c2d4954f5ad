"""The report of generation and judging, for its page and for the terminal.

It shows a `results.JudgingSummary` and measures nothing; the prose is in `report.html.j2`.
"""

import dataclasses
from pathlib import Path

from lm_jax import report
from lm_jax.assets import papers
from lm_jax.console import terminal
from lm_jax.evaluate.generation import ORDERS
from lm_jax.evaluate.verdicts import DECISIVE, failed
from lm_jax.report import Bar, Cell, Column, Report, Section, cell, rate, section, table, table_of
from lm_jax.report.page import Part
from lm_jax.report.prose import Prose
from lm_jax.statistics import Interval
from protot_jax.studies.judging.numbers import why_not
from protot_jax.studies.judging.results import Judged, JudgeResult, JudgingSummary, Sample
from protot_jax.studies.judging.settings import JudgingConfig

_PROSE = Prose("protot_jax.studies.judging")


def build(config: JudgingConfig, summary: JudgingSummary, folder: Path) -> Report:
    """The report of a summary."""
    del config, folder
    return Report(
        "What trained models write, and which a judge prefers",
        lambda: [
            _models(summary),
            _measures(summary),
            _judges(summary),
            *(_rated(*each) for each in _with_ratings(summary)),
            _paper(summary),
            _samples(summary),
            section("Terms", _PROSE("terms", summary)),
        ],
        lead=[_verdict(summary), _PROSE("lead", summary.settings, len(summary.models))],
        lines=[answer(summary), *findings(summary)],
        facts={
            "settings": dataclasses.asdict(summary.settings),
            "BLEU": [summary.bleu_signature, summary.bleu_unsmoothed_signature],
        },
    )


def findings(summary: JudgingSummary) -> list[str]:
    """Measures of the texts and ratings of the models, for a terminal."""
    heads = ["model", "decoding", "BLEU", "ROUGE-L", "repetition", "distinct-2", "words"]
    rows = [
        [
            one.model,
            one.decoding or "",
            *(
                "" if value is None else f"{value:.3f}"
                for value in (
                    one.bleu and one.bleu.estimate,
                    one.rouge_l and one.rouge_l.estimate,
                    one.repetition and one.repetition.estimate,
                    one.distinct[1],
                )
            ),
            f"{one.words.estimate:.1f}",
        ]
        for one in summary.measured
    ]
    lines = [terminal.format_table(heads, rows, left=(0, 1))]
    for judge in summary.judges:
        # A file from before may hold ratings of a judge that failed.
        failure = why_not(failed(judge.controls))
        for judged in judge.decodings:
            if judged.ratings is None or failure:
                why = judged.no_ratings or failure
                lines.append(f"{judge.name}, {judged.decoding}: no ratings, {why}")
                continue
            lines.append(f"{judge.name}, {judged.decoding}:")
            lines += [
                f"  {one.model}: {one.strength.estimate:.0f} ({one.strength.low:.0f} to "
                f"{one.strength.high:.0f}; online Elo {one.elo.estimate:.0f})"
                for one in judged.ratings
            ]
    return lines


def answer(summary: JudgingSummary) -> str:
    """Which model each judge prefers, for each decoding; or that there are no ratings."""
    if len(summary.models) < 2:
        return "No ratings: one model has no opponent."
    parts = []
    for name, judged in _with_ratings(summary):
        ranked = sorted(judged.ratings or (), key=lambda one: -one.strength.estimate)
        points = ", ".join(f"{one.model} {one.strength.estimate:.0f}" for one in ranked)
        parts.append(f"{name} ({judged.decoding}): {points}")
    return f"Ratings, the best first, by {'; by '.join(parts)}." if parts else "No ratings."


def _verdict(result: JudgingSummary) -> Part:
    rating = [judge.name for judge in result.judges if any(one.ratings for one in judge.decodings)]
    notes = [] if result.settings.same_data else [_PROSE("other_data")]
    if len(result.models) < 2:
        return report.verdict(answer(result), tone="warn")
    if not rating:
        return report.verdict(answer(result), _PROSE("no_ratings"), *notes, tone="warn")
    return report.verdict(answer(result), *notes, tone="warn" if notes else "good")


def _models(result: JudgingSummary) -> Section:
    return section(
        "Models",
        table(
            ["model", "mixer", "parameters", "seed", "step", "run"],
            [
                [one.name, one.kind, one.parameters, str(one.seed), one.step, one.run]
                for one in result.models
            ],
            caption="One seed of each: the intervals below say nothing of other seeds.",
        ),
    )


def _measures(result: JudgingSummary) -> Section:
    distinct = [
        Column(f"distinct-{n}", ".3f", lambda one, i=i: one.distinct[i])
        for i, n in enumerate(ORDERS)
    ]
    return section(
        "What the models write",
        _PROSE("measures"),
        table_of(
            result.measured,
            [
                Column("texts", value=lambda one: one.model),
                Column("decoding", value=lambda one: one.decoding or "–"),
                _mean("BLEU", "bleu"),
                _mean("unsmoothed", "bleu_unsmoothed"),
                Column("corpus", ".3f", lambda one: one.bleu_corpus),
                _mean("ROUGE-L", "rouge_l"),
                _mean("repetition", "repetition"),
                *distinct,
                _mean("words", "words", ".1f"),
                Column("ended, %", value=lambda one: rate(one.ended)),
            ],
            caption="Means over prompts with 95 % intervals over prompts.",
            n=result.settings.prompts,
        ),
    )


def _mean(title: str, field: str, spec: str = ".3f") -> Column:
    return Column(title, value=lambda one: _interval(getattr(one, field), spec))


def _judges(result: JudgingSummary) -> Section:
    duels = [(judge.name, one) for judge in result.judges for one in judge.decodings if one.duels]

    def share(title: str, field: str = "") -> Column:
        return Column(title, value=lambda row: rate(getattr(row[1].consistency, field or title)))

    return section(
        "What the judges can tell",
        _PROSE("controls"),
        table(
            ["judge", "shuffled words", "another text", "a loop", "first of two equal", "rates"],
            [
                [
                    judge.name,
                    *(_control(judge, kind) for kind in DECISIVE),
                    rate(judge.position),
                    cell("yes", tone="good") if judge.rates else _failure(judge),
                ]
                for judge in result.judges
            ],
            caption="How often the real continuation is preferred, in percent.",
            n=result.settings.prompts,
        ),
        table_of(
            duels,
            [
                Column("judge", value=lambda row: row[0]),
                Column("decoding", value=lambda row: row[1].decoding),
                share("flips"),
                Column("kappa", "+.2f", lambda row: row[1].consistency.kappa),
                share("first named", "first"),
                share("ties"),
                share("longer"),
                Column("missing", value=lambda row: row[1].consistency.missing),
            ],
            caption="Verdicts on the models, in both orders; shares in percent.",
        ),
    )


def _failure(judge: JudgeResult) -> Cell:
    return cell("no", tone="warn", note=f"failed: {', '.join(failed(judge.controls))}")


def _control(judge: JudgeResult, kind: str) -> Cell:
    (one,) = (each for each in judge.controls if each.kind == kind)
    if one.share is None:
        return cell("never in both orders", tone="bad")
    shown = rate(one.share)
    return shown._replace(tone="good" if one.passed else "bad")


def _with_ratings(result: JudgingSummary) -> list[tuple[str, Judged]]:
    """Each judge's verdicts that have ratings, with the judge's name."""
    verdicts = [(judge.name, one) for judge in result.judges for one in judge.decodings]
    return [(name, one) for name, one in verdicts if one.ratings is not None]


def _rated(judge: str, judged: Judged) -> Section:
    rows = judged.ratings or ()
    bars = report.bars(
        [
            Bar(
                one.model,
                one.strength.estimate - 1000,
                one.strength.low - 1000,
                one.strength.high - 1000,
            )
            for one in rows
        ],
        caption=f"Bradley-Terry ratings less their mean of 1000, by {judge}.",
        x_label="points",
        spec="+.0f",
        n=rows[0].strength.n,
    )
    ratings = table(
        [
            "model",
            "Bradley-Terry",
            "both orders agree",
            "online Elo",
            Column("equal length", ".0f"),
        ],
        [
            [
                one.model,
                _interval(one.strength, ".0f"),
                _interval(one.agreed, ".0f"),
                _interval(one.elo, ".0f"),
                one.length_controlled,
            ]
            for one in rows
        ],
        caption="Ratings, in points.",
        n=rows[0].strength.n,
    )
    duels = table(
        ["model", "against", "won", "tied", "lost", "won in both orders", "lost in both"],
        [[*dataclasses.astuple(one)] for one in judged.duels],
        caption="Verdicts, two for each prompt.",
    )
    return section(
        f"{judge}, {judged.decoding}",
        *(bars, _PROSE("ratings", judged), ratings, report.details("Pair by pair", duels)),
    )


def _paper(result: JudgingSummary) -> Section:
    judged, printed = _with_ratings(result), papers.tables("protot")
    heads = ["mixer", Column("paper, Table 22", ".2f")]
    heads += [f"{name}, {one.decoding}" for name, one in judged]
    kinds = {one.name: one.kind for one in result.models}
    rows = []
    for kind, elo in printed["table_22"].items():
        ours = []
        for _, one in judged:
            rated = [each for each in one.ratings or () if kinds[each.model] == kind]
            ours.append(_interval(rated[0].strength, ".0f") if len(rated) == 1 else None)
        rows.append([kind, elo, *ours])
    best = [
        [
            one.model,
            one.decoding,
            _best(one, smoothed=True),
            _best(one, smoothed=False),
            cell(printed["appendix_b3"].get(kinds[one.model]), spec=".4f"),
        ]
        for one in result.samples
    ]
    return section(
        "Beside the paper",
        _PROSE("paper"),
        table(heads, rows, caption="Ratings by mixer."),
        table(
            ["model", "decoding", "BLEU", "unsmoothed", "paper"],
            best,
            caption="BLEU at the prompt where the smoothed one is highest.",
        ),
    )


def _best(sample: Sample, *, smoothed: bool) -> Cell:
    (own,) = (one for one in sample.answers if one.model == sample.model)
    return cell(own.bleu if smoothed else own.bleu_unsmoothed, spec=".4f")


def _samples(result: JudgingSummary) -> Section:
    return section(
        "Samples",
        _PROSE("samples"),
        *(
            report.details(
                f"{sample.model}, {sample.decoding}",
                table(
                    ["", "text", Column("BLEU", ".4f"), Column("ROUGE-L", ".4f")],
                    [
                        ["prompt", sample.prompt, "–", "–"],
                        ["reference", sample.reference, "–", "–"],
                        *([one.model, one.text, one.bleu, one.rouge_l] for one in sample.answers),
                    ],
                    caption=f"Prompt {sample.number}.",
                    align=["left", "left", "right", "right"],
                ),
            )
            for sample in result.samples
        ),
    )


def _interval(interval: Interval | None, spec: str) -> Cell:
    return rate(interval, spec=spec, scale=1.0)._replace(note="")
