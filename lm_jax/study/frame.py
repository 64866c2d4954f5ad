"""How every study runs, finishes and is shown: the one way.

The work folder then has, besides what `lm_jax.run.workdir` lists and the study's own tables,

    summary.json    every number, as the study's dataclass; read back strictly
    report.html     the same as one offline page
"""

from collections.abc import Sequence
import logging
from pathlib import Path
from typing import Any, NamedTuple, cast

from lm_jax import report
from lm_jax.console import output
from lm_jax.report import Report
from lm_jax.run import processes
from lm_jax.run.config import as_stored, config_hash, from_plain, to_plain
from lm_jax.run.files import make_folder, to_jsonable, write_json, write_text
from lm_jax.run.finished import (
    NO_INPUTS,
    Inputs,
    OtherInputsError,
    check_resumed,
    finish_time,
    is_finished,
    mark_finished,
)
from lm_jax.run.provenance import collect_provenance, read_provenance, record_provenance
from lm_jax.run.results import load_result
from lm_jax.run.workdir import FINISHED_FILE, Resume, check_workdir
from lm_jax.study.declaration import Study, Training
from lm_jax.study.work import Opened, Work

SUMMARY, REPORT = "summary.json", "report.html"
# What some studies called these files before they had the frame.
EARLIER_SUMMARIES = (
    *("attribution.json", "benchmark.json", "check.json", "comparison.json", "concepts.json"),
    *("diagnosis.json", "hybrid.json", "intervention.json", "scores.json"),
)
EARLIER_REPORTS = ("comparison.html", "concepts.html", "intervention.html", "scores.html")


class Answer(NamedTuple):
    """What a study found.

    Attributes:
      summary: summary, an instance of the dataclass that the study declares.
      exit_code: what its report says that the command returns.
    """

    summary: Any
    exit_code: int


def execute(study: Study, settings: Any, folder: Path, *, resume: Resume = "auto") -> Any:
    """Returns the summary of `answer`."""
    return answer(study, settings, folder, resume=resume).summary


def answer(study: Study, settings: Any, folder: Path, *, resume: Resume = "auto") -> Answer:
    """Runs or resumes a study, or reads what it has finished; prints and returns what it found.

    Args:
      study: the declaration.
      settings: a ConfigDict or mapping of the study's settings, or its dataclass.
      folder: work folder, created if needed.
      resume: rule of resuming, which `lm_jax.run.workdir.open_workdir` explains.

    Raises:
      UserError: the settings, an input or the folder is refused, the run was stopped, or its
        folder is full or damaged; every subclass says what to do.
    """
    config, folder = from_plain(settings, study.config), folder.expanduser()
    settings = as_stored(settings, study.config)
    bound = {"resume": resume, "may_change": study.may_change}
    opened = _open_inputs(study, config)
    # Before what takes long; by the first alone, which may write there while others load.
    processes.on_first(lambda: check_workdir(folder, settings, **bound))
    force = resume == "force"
    if force or not is_finished(folder):
        opened = opened.complete()
    _make_place(config, folder)
    with processes.open_shared_workdir(folder, settings, **bound) as path:
        # A training goes on from its checkpoints, whose rows are bound to its data.
        again = force and issubclass(study.config, Training)
        finished = None if again else _finish_time(path, opened.inputs, force)
        if not finished:
            if not force:
                check_resumed(path, opened.inputs)
            opened = opened.complete()
            rows_of = _fingerprint(study, settings, opened.inputs)
            _run(study, config, Work(path, rows_of, opened.loaded, force), opened.inputs)
        summary = load_summary(study, path)

        def show() -> int:
            built = study.function("report")(config, summary, path)
            said = [f"finished {finished}"] * bool(finished)
            print(output.printable("\n".join([*said, *built.lines])))
            print(f"report: {report_file(path)}")
            return built.exit_code

        # Every process returns what the first has read.
        return Answer(summary, processes.on_first(show))


def _open_inputs(study: Study, config: Any) -> Opened:
    given = study.function("inputs")(config) if study.inputs else NO_INPUTS
    return given if isinstance(given, Opened) else Opened(given)


def _fingerprint(study: Study, settings: Any, inputs: Inputs) -> str:
    bound = {k: v for k, v in to_plain(settings).items() if k not in study.may_change}
    # Rows of a study without inputs are also those of earlier versions.
    return config_hash([bound, sorted(inputs.items())] if inputs else bound)


def run_part(study: Study, config: Any, work: Work, inputs: Inputs, **shared: Any) -> Any:
    """Runs or resumes a study that is a step of another one, and returns its summary.

    Args:
      study: the declaration.
      config: the settings, as the study's dataclass.
      work: the work of the step (`Work.part`).
      inputs: what the numbers of the step depend on besides all settings.
      **shared: what `run` of the study takes besides, from the study that it is a step of.

    Raises:
      OtherInputsError: the step finished with other inputs.
    """
    if work.force or not finish_time(work.path, inputs, work.fingerprint):
        _run(study, config, work, inputs, **shared)
    return load_summary(study, work.path)


def _finish_time(path: Path, inputs: Inputs, force: bool) -> str | None:
    """When a run finished; by force one of other inputs is made again.

    Its rows are then kept only if they are of the same fingerprint (`Work.fingerprint`, or the
    study's own), and refused if not.
    """
    try:
        return finish_time(path, inputs)
    except OtherInputsError as error:
        if not force:
            raise
        logging.getLogger(__name__).warning("made again by force: %s", error)
        return None


def _make_place(config: Any, folder: Path) -> None:
    """Makes the folder that the default work folders of a study share, as `attribution` of a run.

    It is below what `inputs` has read, while `open_workdir` makes no parent of an absolute folder.
    """
    if not folder.is_absolute() or folder != config.default_folder():
        return
    make_folder(folder.parent)


def _run(study: Study, config: Any, work: Work, inputs: Inputs, **shared: Any) -> None:
    path = work.path
    started = collect_provenance(
        seeds=_seeds(config), dtype=getattr(config, "dtype", "float32"), data=inputs
    )

    def begin() -> None:
        # From here on, files of this run and of an earlier one may stand side by side.
        (path / FINISHED_FILE).unlink(missing_ok=True)
        record_provenance(path, started)

    # All have read the marker before it goes.
    processes.wait_for_all()
    processes.on_first(begin)
    summary = study.function("run")(config, work, **shared)

    def finish() -> None:
        write_json(path / SUMMARY, summary)
        # The page is made from the file, not from the numbers in memory.
        written = load_summary(study, path)
        built = study.function("report")(config, written, path)
        write_text(path / REPORT, page(built, path))
        mark_finished(path, inputs, work.fingerprint)

    processes.on_first(finish)


def load_summary(study: Study, folder: Path) -> Any:
    """The summary of a finished study, from its work folder or one of an earlier version.

    Raises:
      CorruptError: it is not a summary of this study.
      StorageError: it cannot be read.
    """
    # It takes a union too, which no annotation of a class says.
    return load_result(summary_file(folder), cast(type, study.summary))


def summary_file(folder: Path) -> Path:
    """The summary of a finished study, also of one of an earlier version."""
    return _first_file(folder, SUMMARY, EARLIER_SUMMARIES)


def report_file(folder: Path) -> Path:
    """The page of a finished study, also of one of an earlier version."""
    return _first_file(folder, REPORT, EARLIER_REPORTS)


def _first_file(folder: Path, name: str, earlier: Sequence[str]) -> Path:
    named = [folder / one for one in (name, *earlier)]
    return next((file for file in named if file.is_file()), named[0])


def page(built: Report, folder: Path) -> str:
    """The page of a report, with the provenance of its run."""
    provenance = report.facts(to_jsonable(read_provenance(folder)))
    return report.page(
        built.title,
        built.sections(),
        provenance=provenance | dict(built.facts),
        lead=built.lead,
        script=built.script,
        style=built.style,
    )


def _seeds(config: Any) -> dict[str, int]:
    """The random seeds of the settings, for the provenance."""
    if hasattr(config, "seeds"):
        return {f"run {i}": seed for i, seed in enumerate(config.seeds)}
    return {"study": config.seed} if hasattr(config, "seed") else {}
