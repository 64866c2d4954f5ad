"""Reads concept reports and compares their scores; the work folder has no files of its own."""

from collections.abc import Sequence
from pathlib import Path

from lm_jax.errors import BadInputError, UsageError
from lm_jax.run.files import file_digest, read_json
from lm_jax.run.results import load_result
from lm_jax.study import Opened, Work, frame
from protot_jax.studies.concepts import scores
from protot_jax.studies.concepts.results import NAME, ConceptReport
from protot_jax.studies.concepts.settings import FOLDER
from protot_jax.studies.scores import numbers
from protot_jax.studies.scores.results import ScoreComparison
from protot_jax.studies.scores.settings import ScoresConfig


def inputs(config: ScoresConfig) -> Opened:
    """The digest of each report by its name.

    Raises:
      UsageError, BadInputError, CorruptError: as `read_reports`.
    """
    reports = read_reports(config.report)
    files = [split_name(text)[1] for text in config.report]
    digests = [file_digest(file)["sha256"] for file in files]
    return Opened(dict(zip(reports, digests, strict=True)), reports)


def measure(config: ScoresConfig, work: Work) -> ScoreComparison:
    """Compares the groups of all reports with the first."""
    return numbers.summarise(work.loaded, seed=config.seed, permutations=config.permutations)


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
        for file in (frame.summary_file(path / FOLDER), frame.summary_file(path)):
            if file.is_file() and _is_report(file):
                return title, file
        if path.is_file():
            return title, path
    raise BadInputError(f"{place} has no concept report; name a run after iaj protot concepts")


def _is_report(file: Path) -> bool:
    """Whether it is a concept report, and not the summary of a run's training."""
    content = read_json(file)
    return isinstance(content, dict) and content.get("schema") == NAME


def _run_of(path: Path) -> str:
    folder = path.absolute().parent
    return folder.parent.name if folder.name == FOLDER else folder.name
