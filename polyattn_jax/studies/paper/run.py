"""Audits each model, and compares its numbers with those of the paper.

Besides what every study has, the work folder holds

    <model>/            the audit of one model, with a report of its own
    comparison.parquet  one row per number of ours that stands in a table or figure of the paper
"""

import dataclasses
from pathlib import Path

import pyarrow as pa

from lm_jax.errors import BadInputError
from lm_jax.report import slug
from lm_jax.run.finished import Inputs, OtherInputsError
from lm_jax.run.provenance import read_provenance
from lm_jax.run.tables import write_table
from lm_jax.run.workdir import Resume
from lm_jax.study import Work, frame
from polyattn_jax.audit import opening
from polyattn_jax.report.beside import Audit, read_audit
from polyattn_jax.studies import audit
from polyattn_jax.studies.paper import claims, items
from polyattn_jax.studies.paper.numbers import compare
from polyattn_jax.studies.paper.results import PaperSummary, StudiedModel
from polyattn_jax.studies.paper.settings import PaperConfig

COMPARISON = "comparison.parquet"
NOT_HERE = "not here"
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


def inputs(config: PaperConfig) -> Inputs:
    """The models by their names, and the files of each audit.

    A model that is not here is an input too: once it is, what was finished without it is refused.
    """
    given: dict[str, str] = {}
    for model, name in zip(config.asked, config.names, strict=True):
        try:
            own = dict(opening.inputs(config.audit(model)))
        except BadInputError:
            own = {}
        given |= {name: own.pop("model", NOT_HERE), **own}
    return given


def measure(config: PaperConfig, work: Work) -> PaperSummary:
    """Runs or resumes the audit of each model, and compares them all.

    Raises:
      BadInputError: none of the models is available.
    """
    studied: list[StudiedModel] = []
    audits: list[Audit] = []
    for model, name in zip(config.asked, config.names, strict=True):
        print(f"{name}:")
        folder = work.path / slug(name)
        try:
            resume: Resume = "force" if work.force else "auto"
            summary = frame.execute(audit.STUDY, config.audit(model), folder, resume=resume)
        except OtherInputsError:
            # Its model is there, and the finished audit is of another one.
            raise
        except BadInputError as error:
            # A result is passed on; the name of somebody's home is not part of it.
            reason = str(error).replace(str(Path.home()), "~")
            studied.append(StudiedModel(model, name, False, reason, "", "", None, False))
            continue
        audits.append(read_audit(summary, folder))
        studied.append(_studied(audits[-1], slug(name)))
    if not audits:
        raise BadInputError("; ".join(f"{one.name}: {one.reason}" for one in studied))
    rows = [number for one in audits for number in compare(one)]
    measured = {number.item for number in rows}
    provenance = read_provenance(work.path)
    table = pa.Table.from_pylist(list(map(dataclasses.asdict, rows)), SCHEMA)
    write_table(work.path / COMPARISON, table, provenance)
    return PaperSummary(
        models=tuple(studied),
        config=config.audit(),
        claims=claims.judge(audits),
        rows=len(rows),
        compared=sum(number.paper is not None or number.paper_low is not None for number in rows),
        items=items.in_order(measured),
        unmeasured=items.unmeasured(measured),
        provenance=provenance,
    )


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
