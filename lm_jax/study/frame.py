"""How every study runs, finishes and is shown: the one way.

The work folder then has, besides what `lm_jax.run.workdir` lists and the study's own tables,

    summary.json    every number, as the study's dataclass; read back strictly
    report.html     the same as one offline page
"""

from pathlib import Path
from typing import Any

from lm_jax import report
from lm_jax.report import Report
from lm_jax.run import processes
from lm_jax.run.config import config_hash, from_plain, to_plain
from lm_jax.run.files import to_jsonable, write_json, write_text
from lm_jax.run.finished import NO_INPUTS, Inputs, finish_time, mark_finished
from lm_jax.run.provenance import collect_provenance, read_provenance, record_provenance
from lm_jax.run.results import load_result
from lm_jax.run.workdir import Resume
from lm_jax.study.declaration import Study
from lm_jax.study.work import Work

SUMMARY, REPORT = "summary.json", "report.html"


def execute(study: Study, settings: Any, folder: Path, *, resume: Resume = "auto") -> Any:
    """Runs or resumes a study, or reads what it has finished; prints and returns its summary.

    Args:
      study: the declaration.
      settings: a ConfigDict or mapping of the study's settings, or its dataclass.
      folder: work folder, created if needed.
      resume: when to resume, as `lm_jax.run.workdir.open_workdir` takes it.

    Raises:
      UserError: the settings, an input or the folder is refused, the run was stopped, or its
        folder is full or damaged; every subclass says what to do.
    """
    config = from_plain(settings, study.config)
    inputs = study.function("inputs")(config) if study.inputs else NO_INPUTS
    opened = processes.open_shared_workdir(
        folder, settings, resume=resume, may_change=study.may_change
    )
    with opened as path:
        finished = finish_time(path, inputs)
        if not finished:
            _run(study, config, settings, path, inputs)
        summary = load_result(path / SUMMARY, study.summary)
        if processes.is_first():
            built = study.function("report")(config, summary)
            print(*[f"finished {finished}"] * bool(finished), *built.lines, sep="\n")
            print(f"report: {path / REPORT}")
        return summary


def _run(study: Study, config: Any, settings: Any, path: Path, inputs: Inputs) -> None:
    started = collect_provenance(
        seeds=_seeds(config), dtype=getattr(config, "dtype", "float32"), data=inputs
    )
    processes.on_first(lambda: record_provenance(path, started))
    bound = {k: v for k, v in to_plain(settings).items() if k not in study.may_change}
    summary = study.function("run")(config, Work(path, config_hash(bound)))

    def finish() -> None:
        write_json(path / SUMMARY, summary)
        # The page is made from the file, not from the numbers in memory.
        written = load_result(path / SUMMARY, study.summary)
        write_text(path / REPORT, page(study.function("report")(config, written), path))
        mark_finished(path, inputs)

    processes.on_first(finish)


def page(built: Report, folder: Path) -> str:
    """The page of a report, with the provenance of its run."""
    return report.page(
        built.title,
        built.sections,
        provenance=report.facts(to_jsonable(read_provenance(folder))),
        lead=built.lead,
    )


def _seeds(config: Any) -> dict[str, int]:
    """The random seeds of the settings, for the provenance."""
    if hasattr(config, "seeds"):
        return {f"run {i}": seed for i, seed in enumerate(config.seeds)}
    return {"study": config.seed} if hasattr(config, "seed") else {}
