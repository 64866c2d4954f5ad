"""The sections of the concept report below the explorer: figures and tables of all prototypes.

After the paper's Fig. 7 and Table 21 (half-life against repetition), Fig. 3 right (reading before
writing), Figs. 8 and 9 (gates by layer) and Fig. 2 (scores of a judge). Every public function
builds one section from a `ConceptReport`.
"""

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup
import numpy as np

from lm_jax import report
from lm_jax.assets import papers
from lm_jax.evaluate.judge_prompt import SCORES
from lm_jax.report import Bar, Column, Points, Section, Series, cell, rate, section, table
from lm_jax.report.markup import number
from lm_jax.report.prose import Prose
from protot_jax.studies.concepts import scores
from protot_jax.studies.concepts.results import (
    ConceptReport,
    LayerGate,
    Prototype,
    Statistic,
)

_PROSE = Prose("protot_jax.studies.concepts")
# Of scores.
_POINTS: Any = {"spec": ".2f", "scale": 1.0}


def half_lives(result: ConceptReport) -> Section:
    """Half-lives: their distribution, and their relation to the repetition of top tokens."""
    prototypes = result.prototypes
    lives = [p.half_life for p in prototypes if p.half_life is not None]
    both = [p for p in prototypes if p.half_life is not None and p.repetition is not None]
    groups = [
        Points(
            f"layer {one.layer}",
            _floats([p.half_life for p in both if p.layer == one.layer]),
            _floats([p.repetition for p in both if p.layer == one.layer]),
            [_point(p) for p in both if p.layer == one.layer],
        )
        for one in result.layers
    ]
    locality, printed = result.half_life_repetition, papers.tables("protot")["table_21"]
    names = ("shortest quarter", "second", "third", "longest quarter")
    edges = (*locality.edges, *[None] * (4 - len(locality.edges)))
    quartiles = [
        [cell(name, note="" if edge is None else f"up to {number(edge)} tokens"), repetition]
        for name, edge, repetition in zip(names, edges, locality.quartiles, strict=True)
    ]
    return section(
        "Half-lives and repetition",
        _PROSE("half_lives", endless=len(prototypes) - len(lives)),
        report.grid(
            report.histogram(
                lives,
                caption="Half-lives of the prototypes.",
                x_label="half-life (tokens)",
                y_label="prototypes (count)",
                bins=24,
                log_x=True,
            ),
            report.scatter(
                groups,
                caption="Half-life against repetition of the top tokens.",
                x_label="half-life (tokens)",
                y_label="repetition (share)",
                n=len(both),
                log_x=True,
            ),
        ),
        table(
            ["Half-life", Column("Mean repetition", ".3f")],
            quartiles,
            caption=_PROSE("quartiles", *printed["quartiles"], *printed["edges"]),
        ),
        table(
            ["All prototypes", "Ours", "Paper"],
            [
                [
                    "Spearman",
                    locality.overall_spearman,
                    f"{number(printed['spearman'])} (p {printed['p']})",
                ],
                ["Cohen's d", locality.overall_cohens_d, number(printed["cohens_d"])],
            ],
            caption=_PROSE("overall_locality"),
            align=["left", "right", "right"],
        ),
        _tests(
            [
                ("Spearman", locality.spearman),
                ("Cohen's d", locality.cohens_d),
            ],
            _PROSE("locality", resamples=result.settings.resamples),
        ),
    )


def reading_first(result: ConceptReport) -> Section:
    """Cross-correlation of read and write gates, and the test that reading comes first."""
    lag = result.lag
    peaks = [p.lag for p in result.prototypes if p.lag is not None]
    return section(
        "Does reading come before writing?",
        _PROSE(
            "reading_first",
            share=lag.peaks_one_before,
            shared_routing=result.model.shared_routing,
        ),
        report.grid(
            report.curves(
                [Series("mean over prototypes", lag.lags, _floats(lag.mean))],
                caption="Correlation of the read gate with the write gate.",
                x_label="lag of reading behind writing (tokens)",
                y_label="correlation",
                n=len(peaks),
                x_ticks=lag.lags,
            ),
            report.bars(
                [Bar(f"lag {number(at)}", peaks.count(at)) for at in lag.lags],
                caption="Lag at which the correlation of each prototype peaks.",
                x_label="prototypes (count)",
                spec=".0f",
                n=len(peaks),
            ),
        ),
        _tests(
            [
                ("Lead", lag.lead),
                ("Lead over other prototypes", lag.own_lead),
            ],
            _PROSE("lead_tests", resamples=result.settings.resamples),
        ),
    )


def layers(result: ConceptReport) -> Section:
    """Gate statistics by depth, as curves and as numbers."""
    columns = {
        "l1_ratio": "L1 ratio",
        "gini": "Gini",
        "entropy": "Entropy, nats",
        "mutual_information": "MI, nats",
        "mutual_information_by_chance": "by chance",
        "usage_gini": "Gini of usage",
        "max_share": "Top share",
        "top_1": "Largest gate",
        "margin": "Margin",
        "active": "Active",
        "dead": "Dead",
    }
    depth = [one.layer for one in result.layers]
    drawn = {
        "l1_ratio": "L1 ratio",
        "gini": "Gini",
        "entropy": "Entropy (nats)",
        "mutual_information": "Mutual information (nats)",
    }
    return section(
        "Gates by layer",
        _PROSE("layers"),
        report.grid(
            *(
                report.curves(
                    [_by_layer(result, gate, field) for gate in ("write", "read")],
                    caption=f"{name.partition(' (')[0]} by layer.",
                    x_label="layer",
                    y_label=name,
                    x_ticks=depth,
                    n=f"{number(result.settings.tokens)} tokens",
                )
                for field, name in drawn.items()
            )
        ),
        *(
            table(
                ["Layer", *columns.values()],
                [
                    [one.layer, *(_of_layer(getattr(one, gate), field) for field in columns)]
                    for one in result.layers
                ],
                caption=f"{gate.capitalize()} gates.",
                n=f"{number(result.settings.tokens)} tokens",
            )
            for gate in ("write", "read")
        ),
    )


def _by_layer(result: ConceptReport, gate: str, field: str) -> Series:
    """One statistic of one kind of gate over depth, with its band where it has one."""
    results = [getattr(one, gate) for one in result.layers]
    ends = [getattr(one.intervals, field, (None, None)) for one in results]
    low, high = (_floats(end) for end in zip(*ends, strict=True))
    band = (low, high) if np.isfinite(low).all() else ()
    depth = [one.layer for one in result.layers]
    return Series(gate, depth, _floats([getattr(one, field) for one in results]), *band)


def bounded(value: float | None, ends: tuple[float | None, float | None] | None) -> report.Cell:
    """A value with its interval below, if it has one."""
    shown = ends is not None and ends[0] is not None
    return cell(value, note=f"[{number(ends[0])}, {number(ends[1])}]" if ends and shown else "")


def _of_layer(gate: LayerGate, field: str) -> report.Cell:
    return bounded(getattr(gate, field), getattr(gate.intervals, field, None))


def labels(result: ConceptReport) -> Section:
    """Scores of the judge by layer, compared with those of random texts."""
    title = "Themes and scores"
    judge = result.settings.judge
    labelled = [p.label for p in result.prototypes if p.label is not None]
    if not labelled:
        return section(title, _PROSE("no_labels", judge=judge))
    rows = [
        [
            one.group,
            f"{number(one.labelled)} of {number(one.asked)}",
            *(rate(one.intervals[score], **_POINTS) for score in SCORES),
        ]
        for one in scores.by_layer(result)
    ]
    lead = [rate(interval, **_POINTS) for interval in scores.lead(result).values()]
    rows.append(["layers less random", "", *lead])
    return section(
        title,
        _PROSE(
            "labels",
            judge=judge,
            labelled=len(labelled),
            unlabelled=len(result.prototypes) - len(labelled),
            baseline=bool(result.baseline),
        ),
        table(
            ["Group", "Labelled", *(score.capitalize() for score in SCORES)],
            rows,
            caption="Mean scores, 1 to 10. A good theme has high disentanglement and coverage, and "
            "few other themes.",
        ),
        report.grid(
            *(
                report.histogram(
                    [getattr(label, score) for label in labelled],
                    caption=f"{score.capitalize()} of the prototypes.",
                    x_label="score",
                    y_label="prototypes (count)",
                    bins=[i + 0.5 for i in range(11)],
                )
                for score in SCORES
            )
        ),
    )


def _tests(rows: Sequence[tuple[str, Statistic]], caption: str) -> Markup:
    cells = []
    for name, result in rows:
        value = bounded(result.value, (result.low, result.high))
        cells.append([name, value, number(result.p), result.prototypes, result.texts])
    heads = ["Test", "Value [95 %]", "p", "Prototypes", "Texts"]
    return table(heads, cells, caption=caption, align=["left", *["right"] * 4])


def _point(p: Prototype) -> str:
    where = f"layer {p.layer}, prototype {p.prototype}"
    return f"{where}: half-life {number(p.half_life)}, repetition {number(p.repetition)}"


def _floats(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], dtype=float)
