"""Compares a judge's scores of prototypes between models, such as of 16, 32 and 64 prototypes.

    iaj protot scores --report=runs/a --report=runs/b --workdir=runs/scores
    iaj protot scores --report=R=16=runs/r16 --report=R=32=runs/r32 --report=full=runs/full_rank \
        --workdir=runs/scores

After Prototype Transformer, Figs. 2 and 19 to 24: histograms of disentanglement, coverage and
number of themes, side by side for numbers of prototypes, seeds, a model without low rank, and
LLaMA's heads. A report is a run, its folder `concepts`, or a summary there, with labels of a judge
(`iaj protot concepts --judge=...`), `NAME=` before it names the model in the comparison. The
heads, features and random texts of a report are groups of their own. Into `--workdir` it writes

    scores.json    scores, means and differences of every group
    scores.html    the same as one offline page

Every group is compared with the first: difference of the means with Welch's 95 % interval, and p
of a permutation of labels between both, corrected for the number of groups by Holm's method. Both
take the prototypes of a model for independent and hold for these models alone; other seeds may
differ by more. Labels of different judges are not compared.
"""

from collections.abc import Sequence
import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from scipy import stats

from lm_jax import report as page_parts
from lm_jax.errors import BadInputError, UsageError
from lm_jax.evaluate.judge_prompt import SCORES
from lm_jax.report import cell, rate, section, table
from lm_jax.report.markup import number
from lm_jax.report.prose import Prose
from lm_jax.run import cli, terminal
from lm_jax.run.files import file_digest, to_jsonable, write_json, write_text
from lm_jax.run.finished import finish_time, mark_finished
from lm_jax.run.provenance import collect_provenance, read_provenance, record_provenance
from lm_jax.run.results import Count, load_result
from lm_jax.run.settings import CommandOptions, Flag, at_least
from lm_jax.run.workdir import open_workdir
from lm_jax.statistics import Interval, holm
from lm_jax.study import frame
from protot_jax.studies.concepts import scores
from protot_jax.studies.concepts.results import ConceptReport

RESULT = "scores.json"
PAGE = "scores.html"
NAME: Literal["protot_jax.concepts.scores"] = "protot_jax.concepts.scores"
VERSION: Literal[1] = 1
_PROSE = Prose("protot_jax.studies.concepts")
_FOLDER = "concepts"
_PERMUTATIONS = 9_999


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """The reports, and the seed of the resampling.

    Attributes:
      report: NAME=PATH or PATH, a concept report with labels.
      seed: random seed of bootstrap samples and permutations.
    """

    report: Annotated[tuple[str, ...], Flag(repeated=True)] = ()
    seed: Annotated[int, at_least(0)] = 0


@dataclasses.dataclass(frozen=True)
class Difference:
    """A group's mean score less that of the first group.

    Attributes:
      p: two-sided, of a permutation of labels between both groups.
      p_holm: corrected for the number of groups that are compared in this score.
    """

    mean: Interval
    p: float
    p_holm: float


@dataclasses.dataclass(frozen=True)
class Group:
    """The scores of one kind of unit of one model.

    Attributes:
      units: prototypes, heads, features, or random texts.
      model: kind and size, for a reader.
      asked: number that the judge was asked about.
      scores: of those with a label, by score.
      means: null for fewer than two labels.
      differences: null in the first group, and for fewer than two labels in either.
    """

    name: str
    units: scores.Units
    model: str
    asked: Count
    scores: dict[str, tuple[float, ...]]
    means: dict[str, Interval | None]
    differences: dict[str, Difference | None]


@dataclasses.dataclass(frozen=True)
class ScoreComparison:
    """`scores.json`: groups in the order of the reports, all labelled by one judge."""

    schema: Literal["protot_jax.concepts.scores"]
    version: Literal[1]
    judge: str
    seed: Count
    groups: tuple[Group, ...]


def read_reports(named: Sequence[str]) -> dict[str, ConceptReport]:
    """The concept reports by name.

    Raises:
      UsageError: none is named, or two have one name.
      BadInputError: a report is missing, has no labels, or labels of another judge.
      CorruptError: a file is damaged.
    """
    if not named:
        raise UsageError("--report is missing; name a run whose prototypes a judge has labelled")
    results: dict[str, ConceptReport] = {}
    for text in named:
        name, path = split_name(text)
        result = load_result(path, ConceptReport)
        size = f"{result.model.prototypes} prototypes, seed {result.model.seed}"
        name = name or f"{_run_of(path)}, {size}"
        if name in results:
            raise UsageError(f"--report: {name!r} is given twice; write NAME=PATH")
        if not scores.labels_of(result.prototypes):
            raise BadInputError(
                f"{path} has no labels; run iaj protot concepts with --judge, then compare"
            )
        results[name] = result
    judges = {result.settings.judge for result in results.values()}
    if len(judges) > 1:
        raise BadInputError(
            f"the reports are of different judges, {', '.join(sorted(judges))}; label all of them "
            "with one"
        )
    return results


def split_name(text: str) -> tuple[str, Path]:
    """Name, empty without one, and file of a report.

    Raises:
      BadInputError: there is no such file.
    """
    name, _, place = text.rpartition("=")
    # A path may have the mark too.
    for title, path in (("", Path(text)), (name, Path(place))):
        for file in (path, frame.summary_file(path / _FOLDER), frame.summary_file(path)):
            if file.is_file():
                return title, file
    raise BadInputError(f"{place} has no concept report; name a run after iaj protot concepts")


def _run_of(path: Path) -> str:
    folder = path.absolute().parent
    return folder.parent.name if folder.name == _FOLDER else folder.name


def compare(reports: dict[str, ConceptReport], *, seed: int) -> ScoreComparison:
    """The groups of the reports, each compared with the first."""
    groups: list[Group] = []
    first: dict[str, np.ndarray] = {}
    for name, result in reports.items():
        model = result.model
        size = f"{model.layers} layers of {model.prototypes} prototypes, width {model.hidden_size}"
        members: list[tuple[str, scores.Units, str, scores.Labelled]] = [
            (name, "prototypes", size, result.prototypes)
        ]
        for one in result.comparisons:
            units = scores.UNITS[one.kind]
            members.append((f"{name}: {units} of {one.run}", units, one.model, one.units))
        if result.baseline is not None:
            members.append((f"{name}: random texts", "random texts", size, result.baseline))
        for title, units, about, labelled in members:
            labels = scores.labels_of(labelled)
            values = {score: scores.values(labels, score) for score in SCORES}
            differences = {
                score: _difference(values[score], first[score], seed) if first else None
                for score in SCORES
            }
            groups.append(
                Group(
                    name=title,
                    units=units,
                    model=about,
                    asked=len(labelled),
                    scores={score: tuple(each.tolist()) for score, each in values.items()},
                    means=dict(scores.group(title, labelled, seed).intervals),
                    differences=differences,
                )
            )
            first = first or values
    judge = next(iter(reports.values())).settings.judge
    return ScoreComparison(NAME, VERSION, judge, seed, tuple(_corrected(groups)))


def _difference(ours: np.ndarray, first: np.ndarray, seed: int) -> Difference | None:
    if min(ours.size, first.size) < 2:
        return None
    p = stats.permutation_test(
        (ours, first),
        lambda x, y, axis: x.mean(axis) - y.mean(axis),
        vectorized=True,
        n_resamples=_PERMUTATIONS,
        rng=np.random.default_rng(seed),
    ).pvalue
    return Difference(scores.difference(ours, first), float(p), float(p))


def _corrected(groups: Sequence[Group]) -> list[Group]:
    """The groups with p corrected within each score."""
    found = {name: [group.differences[name] for group in groups] for name in SCORES}
    for differences in found.values():
        tested = [i for i, one in enumerate(differences) if one is not None]
        corrected = holm([one.p for one in differences if one is not None])
        for i, p in zip(tested, corrected, strict=True):
            if one := differences[i]:
                differences[i] = dataclasses.replace(one, p_holm=p)
    return [
        dataclasses.replace(group, differences={name: found[name][i] for name in SCORES})
        for i, group in enumerate(groups)
    ]


def render(result: ScoreComparison, *, provenance: dict[str, object]) -> str:
    """The HTML text of the page."""
    heads = ["Group", "Labelled", *(score.capitalize() for score in SCORES)]
    means = [
        [
            cell(group.name, note=group.model),
            f"{number(len(group.scores[SCORES[0]]))} of {number(group.asked)}",
            *(_mean(group.means[score]) for score in SCORES),
        ]
        for group in result.groups
    ]
    differences = [
        [group.name, *(_tested(group.differences[score]) for score in SCORES)]
        for group in result.groups[1:]
    ]
    tables = [table(heads, means, caption="Mean scores [95 % over prototypes of one model].")]
    if differences:
        caption = (
            f"Mean less that of {result.groups[0].name}, [95 %] of each alone, and p corrected for "
            "the number of rows by Holm's method."
        )
        tables.append(table([heads[0], *heads[2:]], differences, caption=caption))
    sections = [section("Mean scores", _PROSE("score_comparison"), *tables)]
    for score in SCORES:
        charts = [
            page_parts.histogram(
                group.scores[score],
                caption=group.name,
                x_label=score,
                y_label=f"{group.units} (count)",
                bins=[i + 0.5 for i in range(11)],
            )
            for group in result.groups
        ]
        sections.append(section(score.capitalize(), page_parts.grid(*charts)))
    lead = f"{number(len(result.groups))} groups, labelled by {result.judge}."
    return page_parts.page(
        "Scores of prototypes of several models",
        sections,
        provenance=page_parts.facts(provenance),
        lead=[lead],
    )


def _mean(interval: Interval | None) -> page_parts.Cell:
    return cell(None) if interval is None else rate(interval, spec=".2f", scale=1.0)


def _tested(difference: Difference | None) -> page_parts.Cell:
    if difference is None:
        return cell(None)
    mean = difference.mean
    note = f"[{mean.low:.2f}, {mean.high:.2f}], p {difference.p_holm:.2g}"
    return cell(f"{mean.estimate:+.2f}", note=note)


def format_comparison(result: ScoreComparison) -> str:
    """Mean scores and p by group, for a terminal."""
    heads = ["group", "labelled", *(part for score in SCORES for part in (score, "p, Holm"))]
    rows = []
    for group in result.groups:
        cells = [group.name, str(len(group.scores[SCORES[0]]))]
        for score in SCORES:
            mean, difference = group.means[score], group.differences[score]
            cells.append(
                "–" if mean is None else f"{mean.estimate:.2f} [{mean.low:.2f}, {mean.high:.2f}]"
            )
            cells.append("–" if difference is None else f"{difference.p_holm:.2g}")
        rows.append(cells)
    return terminal.format_table(heads, rows, left=(0,))


def main(arguments: cli.Arguments) -> None:
    """The command."""
    options: Options = arguments.options
    reports = read_reports(options.report)
    digests = [file_digest(split_name(text)[1])["sha256"] for text in options.report]
    config = {"reports": list(reports), "sha256": digests, "seed": options.seed}
    with open_workdir(arguments.folder, config, resume=arguments.resume) as work:
        data = dict(zip(reports, digests, strict=True))
        if done := finish_time(work.path, data):
            print(f"finished {done}")
        else:
            start = collect_provenance(seeds={"resampling": options.seed}, data=data)
            record_provenance(work.path, start)
            write_json(work.path / RESULT, compare(reports, seed=options.seed))
            # The page is rendered from the file, not from the numbers in memory.
            written = load_result(work.path / RESULT, ScoreComparison)
            provenance = to_jsonable(read_provenance(work.path))
            write_text(work.path / PAGE, render(written, provenance=provenance))
            mark_finished(work.path, data)
        print(format_comparison(load_result(work.path / RESULT, ScoreComparison)))
        print(work.path / PAGE)


if __name__ == "__main__":
    cli.app(main, options=Options)
