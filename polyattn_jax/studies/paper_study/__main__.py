"""Puts every table and figure of the paper beside the same numbers of given models.

    iaj polyattn paper --models=smollm2,gemma3_270m --workdir=runs/paper
    iaj polyattn paper --models=smollm2 --config=polyattn/paper:quickstart --workdir=runs/quick

Each model is audited in a folder of its own (`polyattn_jax.studies.audit`), with the suites and
recipes of the paper; a model that is not here is said to be unavailable, and the others go on. The
work folder then holds

    <model>/            the audit of one model, with a report of its own
    comparison.parquet  one row per number of ours that stands in a table or figure of the paper
    summary.json        the claims of the paper on these models (`results.PaperSummary`)
    report.html         all of it, one offline file; it opens with the claims

The same command resumes a killed run. Another one in the same folder may name more models: finished
audits are not done again.
"""

from collections.abc import Sequence
import dataclasses
from pathlib import Path

import pyarrow as pa

from lm_jax.errors import BadInputError, UsageError
from lm_jax.report import slug
from lm_jax.run import cli
from lm_jax.run.config import from_plain, to_plain
from lm_jax.run.files import write_json, write_text
from lm_jax.run.finished import OtherInputsError, is_finished
from lm_jax.run.provenance import collect_provenance, read_provenance, record_provenance
from lm_jax.run.settings import CommandOptions
from lm_jax.run.tables import write_table
from lm_jax.run.workdir import Resume, open_workdir
from lm_jax.study import frame
from polyattn_jax.audit import opening
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.report import findings
from polyattn_jax.studies import audit
from polyattn_jax.studies.audit.settings import AuditSettings
from polyattn_jax.studies.paper_study import claims, items, page
from polyattn_jax.studies.paper_study.beside import Audit, read_audit
from polyattn_jax.studies.paper_study.results import PaperSummary, StudiedModel
from polyattn_jax.studies.paper_study.rows import compare

SUMMARY, REPORT, COMPARISON = "summary.json", "report.html", "comparison.parquet"
SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("item", "model", "beside", "suite", "cell")),
        *((name, pa.string()) for name in ("quantity", "unit")),
        *((name, pa.float64()) for name in ("paper", "paper_low", "paper_high")),
        *((name, pa.float64()) for name in ("ours", "low", "high")),
        ("n", pa.int64()),
        ("causes", pa.list_(pa.string())),
    ]
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """The models.

    Attributes:
      models: models, with commas between them: Hugging Face folders, GGUF files, hub ids, or
        assets.
    """

    models: tuple[str, ...]


def run(
    config: AuditConfig, models: Sequence[str], folder: Path, *, resume: Resume = "auto"
) -> PaperSummary:
    """Runs or resumes the audit of each model in an open work folder, and compares them all.

    Args:
      config: of every audit, but for its model.
      models: as `AuditConfig.model` names them.
      folder: the work folder.
      resume: as `open_workdir` takes it, for the folder of each audit.

    Raises:
      UsageError: two models have the same name, and would share a folder.
      BadInputError: none of the models is available.
    """
    names = [findings.own_name(model) for model in models]
    if len(set(map(slug, names))) < len(names):
        raise UsageError(f"--models={','.join(models)} has two of one name; give each its own run")
    studied: list[StudiedModel] = []
    audits: list[Audit] = []
    for model, name in zip(models, names, strict=True):
        print(f"{name}:")
        own = from_plain({**to_plain(config), "model": model}, AuditSettings)
        try:
            # A model that is not here leaves no folder.
            if not is_finished(folder / slug(name)):
                opening.check_readable(own)
            summary = frame.execute(audit.STUDY, own, folder / slug(name), resume=resume)
        except OtherInputsError:
            # Its model is there, and the finished audit is of another one.
            raise
        except BadInputError as error:
            # A result is passed on; the name of somebody's home is not part of it.
            reason = str(error).replace(str(Path.home()), "~")
            studied.append(StudiedModel(model, name, False, reason, "", "", None, False))
            continue
        audits.append(read_audit(summary, folder / slug(name)))
        studied.append(_studied(audits[-1], slug(name)))
    if not audits:
        raise BadInputError("; ".join(f"{one.name}: {one.reason}" for one in studied))
    rows = [number for one in audits for number in compare(one)]
    record_provenance(
        folder,
        collect_provenance(
            seeds={"audit": config.seed},
            dtype=config.dtype,
            data={one.name: one.summary.model_sha256 for one in audits},
        ),
    )
    measured = {number.item for number in rows}
    summary = PaperSummary(
        models=tuple(studied),
        config=config,
        claims=claims.judge(audits),
        rows=len(rows),
        compared=sum(number.paper is not None or number.paper_low is not None for number in rows),
        items=items.in_order(measured),
        unmeasured=items.unmeasured(measured),
        provenance=read_provenance(folder),
    )
    table = pa.Table.from_pylist(list(map(dataclasses.asdict, rows)), SCHEMA)
    write_table(folder / COMPARISON, table, summary.provenance)
    write_json(folder / SUMMARY, summary)
    write_text(folder / REPORT, page.build(summary, rows))
    return summary


def _studied(one: Audit, folder: str) -> StudiedModel:
    return StudiedModel(
        model=one.summary.model,
        name=one.name,
        available=True,
        reason="",
        folder=folder,
        family=one.summary.family,
        beside=one.beside.name if one.beside else None,
        same=one.same,
        named=one.named,
    )


def main(arguments: cli.Arguments) -> None:
    """The command."""
    config = from_plain(arguments.config, AuditConfig)
    if config.model:
        raise UsageError(
            f"config.model = {config.model!r} is not read here; name it by --models={config.model}"
        )
    with open_workdir(arguments.folder, arguments.config, resume=arguments.resume) as work:
        # A folder that is new holds no audits; one that is resumed may get further models.
        how = "force" if arguments.resume == "force" else "auto"
        summary = run(config, arguments.options.models, work.path, resume=how)
        page.print_summary(summary, report=work.path / REPORT)


if __name__ == "__main__":
    cli.app(main, config="polyattn/paper", config_class=AuditConfig, options=Options)
