"""What the page of a benchmark and its terminal say; prose is in `report.html.j2`."""

from pathlib import Path

from lm_jax import report
from lm_jax.console import terminal
from lm_jax.report import Cell, Column, Report, Section, cell, section, table
from lm_jax.report.markup import number
from lm_jax.report.page import Part
from lm_jax.report.prose import Prose
from protot_jax.studies.perturbations.results import (
    MEANING_FILE,
    MEASURED,
    NOISE_FILE,
    Benchmark,
    Slice,
)
from protot_jax.studies.perturbations.screening import REASONS
from protot_jax.studies.perturbations.settings import PerturbationsConfig
from protot_jax.studies.robustness import meaning

_PROSE = Prose("protot_jax.studies.perturbations")


def build(config: PerturbationsConfig, summary: Benchmark, folder: Path) -> Report:
    """The report of a record, which holds its settings itself."""
    del config
    return Report(
        "Benchmark of perturbed sentences",
        lambda: [_slices(summary), _sources(summary), _files(summary)],
        lead=[_verdict(summary)],
        lines=[
            _answer(summary),
            format_benchmark(summary),
            str(folder / NOISE_FILE),
            str(folder / MEANING_FILE),
        ],
    )


def format_benchmark(record: Benchmark) -> str:
    """Counts by slice for a terminal."""
    heads = [
        *("slice", "pairs", "unique", "built", "frames", "rejected", "similarity"),
        "edit distance",
    ]
    rows = [
        [
            one.name,
            *map(str, (one.pairs, one.unique_pairs, one.built, one.frames)),
            str(sum(one.rejected.values())),
            number(one.similarity, ".3f"),
            number(one.distance, ".2f"),
        ]
        for one in record.slices
    ]
    lines = [terminal.format_table(heads, rows, left=(0,)), ""]
    lines += [f"{one.name}: {one.missing}" for one in record.slices if one.missing]
    if record.similarity != MEASURED:
        lines.append(f"similarity is not measured: {record.similarity}")
    lines += [
        f"{one.source}: {one.sentences} sentences of {', '.join(record.splits)}, {one.trained} "
        f"left out that stand in training text; {one.licence}"
        for one in record.sources
    ]
    return "\n".join(lines)


def _answer(record: Benchmark) -> str:
    kept, flipped = (
        sum(one.pairs for one in record.slices if (one.name in meaning.SLICES) == flips)
        for flips in (False, True)
    )
    return f"{number(kept)} pairs keep the meaning, and {number(flipped)} flip it."


def _verdict(record: Benchmark) -> Part:
    reasons = [f"{one.name}: {one.missing}" for one in record.slices if one.missing]
    if record.similarity != MEASURED:
        reasons.append(f"The similarity is not measured: {record.similarity}")
    return report.verdict(_answer(record), *reasons, tone="warn" if reasons else "good")


def _slices(record: Benchmark) -> Section:
    heads = ["slice", "meaning", "pairs", "unique", "built", "frames"]
    heads += [f"rejected: {reason}" for reason in REASONS]
    return section(
        "Slices",
        _PROSE("slices", record),
        table(
            [*heads, Column("similarity", ".3f"), Column("edit distance", ".2f"), "missing"],
            [
                [
                    one.name,
                    "flipped" if one.name in meaning.SLICES else "kept",
                    *(one.pairs, one.unique_pairs, one.built, one.frames),
                    *(one.rejected.get(reason, 0) for reason in REASONS),
                    *(one.similarity, one.distance, _missing(one)),
                ]
                for one in record.slices
            ],
            caption="Pairs by slice, and the candidates that were left out by reason; similarity "
            "and edit distance are means over the pairs.",
            n=f"up to {number(record.wanted)} pairs a slice",
        ),
    )


def _missing(one: Slice) -> Cell:
    return cell(one.missing, tone="warn") if one.missing else cell("nothing", tone="good")


def _sources(record: Benchmark) -> Section:
    return section(
        "Sources and licences",
        _PROSE("sources", record),
        table(
            ["source", "kind", "sentences", "fragments", "in training text", "version", "licence"],
            [
                [
                    *(one.source, one.kind, one.sentences, one.fragments, one.trained),
                    *(one.version, one.licence),
                ]
                for one in record.sources
            ],
            caption="Sentences of each corpus, and those that were left out.",
        ),
    )


def _files(record: Benchmark) -> Section:
    return section(
        "Files",
        table(
            ["file", "bytes", "sha256"],
            [[name, entry["size"], entry["sha256"]] for name, entry in record.files.items()],
            caption="What `--sentences` of iaj protot robustness takes.",
        ),
    )
