"""Diagnosis of score rows on texts of a user, without any substitution: `check --diagnose`.

    iaj polyattn check --model=smollm2 --text=FILE --diagnose --workdir=runs/diagnosis

One forward pass with softmax gives S_p of the rows of 16 positions of each text in every layer and
head, S of softmax on the same rows, and by how much the map would change the head's output. Rows
are read at b = 0 and at the recipe's bias; b_auto is calibrated first, on the shipped texts. Where
each head has a bias of its own they are read at b = 0 alone. The screen warns and promises nothing:
only `check` without `--diagnose` substitutes.

A work folder then holds `diagnosis.json` (`DiagnosisResult`) and the rows.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
from pathlib import Path
import tempfile
import textwrap

import numpy as np

from lm_jax.errors import UsageError
from lm_jax.run.files import write_json
from lm_jax.run.finished import finish_time, mark_finished
from lm_jax.run.provenance import collect_provenance, record_provenance
from lm_jax.run.results import Count, Real, load_result
from lm_jax.run.terminal import format_table
from lm_jax.run.workdir import Resume, open_workdir
from lm_jax.statistics import Interval
from lm_jax.weights import hub
from polyattn_jax.audit import (
    audit_suites,
    concentration,
    model_calibration,
    opening,
    stages,
    units,
)
from polyattn_jax.audit.audit_suites import TEXTS
from polyattn_jax.audit.audited_model import AuditedModel, load
from polyattn_jax.audit.columns import Columns, columns, degrees, where
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.audit.provenance import Provenance, read_provenance
from polyattn_jax.audit.results import Prevalence, SoftmaxComparison
from polyattn_jax.recipes.calibrate import Calibration
from polyattn_jax.recipes.row_maps import parse_recipe
from polyattn_jax.report import findings

RESULT = "diagnosis.json"
SHOWN_HEADS = 10


@dataclasses.dataclass(frozen=True)
class HeadRows:
    """The rows of one head under one bias.

    Attributes:
      rows: number of rows that have a target.
      concentrated: number of these that softmax concentrates, S < 1.
      s_softmax: median over rows of S of softmax.
      s: median over rows of S_p by degree; infinite where half of the rows are dead.
      lost: number of rows that softmax concentrates and r^p does not, by degree.
    """

    layer: Count
    head: Count
    bias_kind: str
    rows: Count
    concentrated: Count
    s_softmax: Real
    s: dict[str, Real]
    lost: dict[str, Count]


@dataclasses.dataclass(frozen=True)
class DiagnosisResult:
    """Diagnosis of the score rows of texts.

    Attributes:
      texts: how many were read, or windows of a plain text.
      documents: how many they are of; intervals are over these.
      tokens: of all texts.
      degrees: of S_p.
      degree: of the recipe; null where S_p is not defined for it.
      calibration: of b_auto; null where the recipe does not ask for it.
      prevalence: unsafe rates by bias.
      against_softmax: rows lost and sharpened, by bias and degree.
      heads: by bias, layer and head.
    """

    model: str
    provenance: Provenance
    recipe: str
    degree: float | None
    calibration: Calibration | None
    texts: Count
    documents: Count
    tokens: Count
    degrees: tuple[int | float, ...]
    prevalence: tuple[Prevalence, ...]
    against_softmax: tuple[SoftmaxComparison, ...]
    heads: tuple[HeadRows, ...]


def run(audited: AuditedModel, folder: Path) -> DiagnosisResult:
    """Diagnoses the texts of the settings in an open work folder, or resumes."""
    config = audited.config
    suite = audit_suites.texts(audited)
    recipe = parse_recipe(config.recipes[0])
    record_provenance(
        folder,
        collect_provenance(
            seeds={"diagnosis": config.seed},
            dtype=config.dtype,
            data=hub.identity("model", audited.model.identity.text, audited.model.revision)
            | {TEXTS: suite.sha256},
            tokenizer=audited.tokenizer.sha256,
        ),
    )
    biases, calibration = {"zero": 0.0}, None
    if recipe.bias == "auto":
        calibration = model_calibration.calibrated(audited, folder)
        biases["auto"] = calibration.bias
    elif not isinstance(recipe.bias, str):
        biases[recipe.bias_kind] = recipe.bias
    fingerprint = opening.fingerprint(audited, {TEXTS: suite})
    with units.open_stores(folder, fingerprint, config.degrees) as stores:
        stages.diagnose(audited, stores, {TEXTS: suite}, biases)
        rows = columns(stores.rows.read())
    return DiagnosisResult(
        model=config.model,
        provenance=read_provenance(folder, config),
        recipe=recipe.spec,
        degree=recipe.degree,
        calibration=calibration,
        texts=len(suite.prompts),
        documents=1 if config.one_document else len(suite.prompts),
        tokens=sum(len(prompt.tokens) for prompt in suite.prompts),
        degrees=degrees(rows),
        prevalence=concentration.prevalence(rows, config),
        against_softmax=concentration.against_softmax(rows, config),
        heads=by_head(rows),
    )


def by_head(rows: Columns) -> tuple[HeadRows, ...]:
    """The argmax rows of every head, by bias, layer and head."""
    results = []
    for suite, kind in concentration.cells(rows):
        c = concentration.with_target(where(rows, suite=suite, bias_kind=kind, target="argmax"))
        concentrated = ~concentration.softmax_unsafe(c).computed
        lost = {str(p): concentrated & concentration.unsafe(c, p).computed for p in degrees(c)}
        layer, head = c["layer"].astype(int), c["head"].astype(int)
        for place in sorted(set(zip(layer.tolist(), head.tolist(), strict=True))):
            own = (layer == place[0]) & (head == place[1])
            results.append(
                HeadRows(
                    layer=place[0],
                    head=place[1],
                    bias_kind=kind,
                    rows=int(own.sum()),
                    concentrated=int(concentrated[own].sum()),
                    s_softmax=float(np.median(c["s_softmax"][own])),
                    s={str(p): float(np.median(c[f"s_{p}"][own])) for p in degrees(c)},
                    lost={name: int(member[own].sum()) for name, member in lost.items()},
                )
            )
    return tuple(results)


def format_diagnosis(result: DiagnosisResult) -> str:
    """The result as plain text of at most 80 columns."""
    texts = f"{result.texts:,} text{'s' * (result.texts != 1)}"
    if one := result.documents == 1:
        texts = f"one text, read in {result.texts:,} windows"
    head = f"{result.model}: score rows of {texts}, {result.tokens:,} tokens"
    lines = [*textwrap.wrap(head, 80)]
    for entry in result.prevalence:
        lost = {str(e.p): e for e in result.against_softmax if e.bias_kind == entry.bias_kind}
        dead = f"{_percent(entry.dead)} % of them dead"
        lines += ["", f"{_bias(entry, result)}, {entry.rows:,} rows, {dead}"]
        rows = [("softmax", _percent(entry.softmax), "", "", "", "")]
        for p in map(str, result.degrees):
            own = lost.get(p)
            rows.append(
                (
                    f"p = {p}",
                    _percent(entry.unsafe.get(p)),
                    _percent(entry.unsafe_active.get(p)),
                    _percent(own.lost if own else None),
                    _percent(own.sharpened if own else None),
                    f"{100 * own.change.estimate:.0f}" if own else "-",
                )
            )
        heads = ("% of rows", "unsafe", "of active", "lost", "sharpened", "change")
        lines.append(format_table(heads, rows))
    lines += ["", *_head_lines(result)]
    text = (
        "Unsafe: the other keys together outweigh the best one, or the row is dead: every weight "
        "is 0. Lost: only softmax concentrates the row; sharpened: only r^p does. Change: of the "
        "head's output, median. "
    )
    text += "One text, no interval." if one else "Brackets: 95 % over texts."
    lines += textwrap.wrap(text, 80)
    if parse_recipe(result.recipe).tabled:
        text = (
            f"{result.recipe} has a bias of each head, at which no S_p is measured: rows are read "
            "at b = 0 alone. Give one bias, --recipe=relu:p=4,b=auto."
        )
        lines += textwrap.wrap(text, 80)
    return "\n".join(lines)


def _bias(entry: Prevalence, result: DiagnosisResult) -> str:
    """At which bias the rows are read, and at which length it was calibrated."""
    label, calibration = findings.bias_label(entry.bias_kind), result.calibration
    if entry.bias_kind != "auto" or calibration is None:
        return label
    return f"{label} = {entry.bias:.3g} of {calibration.length:,} tokens"


def _head_lines(result: DiagnosisResult) -> list[str]:
    """The heads that lose most rows at the recipe's degree, else at the lowest one."""
    p = str(min(result.degrees))
    if result.degree is not None:
        p = next(str(each) for each in result.degrees if each == result.degree)
    kind = result.prevalence[-1].bias_kind
    own = [head for head in result.heads if head.bias_kind == kind]
    most = sorted(own, key=lambda head: (-head.lost[p], head.layer, head.head))[:SHOWN_HEADS]
    free = sum(head.lost[p] == 0 for head in own)
    label = findings.bias_label(kind)
    rows = [
        (
            f"{h.layer}.{h.head}",
            f"{h.s_softmax:.3g}",
            f"{h.s[p]:.3g}",
            f"{h.lost[p]} of {h.concentrated}",
            f"{h.rows}",
        )
        for h in most
    ]
    heads = ("layer.head", "S softmax", f"S_{p}", "lost of concentrated", "rows")
    return [
        f"heads that lose most rows at p = {p}, {label}; medians over rows",
        format_table(heads, rows),
        f"{free} of {len(own)} heads lose no row there",
        "",
    ]


def _percent(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    if findings.unknown_ends(interval):
        return f"{100 * interval.estimate:.1f}"
    return f"{100 * interval.estimate:.1f} [{100 * interval.low:.0f}, {100 * interval.high:.0f}]"


@contextlib.contextmanager
def folder_or_temporary(workdir: Path | None) -> Iterator[Path]:
    """The folder of `--workdir`, or a temporary one."""
    if workdir is not None:
        yield workdir
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def diagnose(config: AuditConfig, workdir: Path | None, *, resume: Resume) -> DiagnosisResult:
    """Runs or resumes `check --diagnose` in its work folder, or in a temporary one.

    Raises:
      UsageError: without a text.
    """
    if not config.text:
        raise UsageError("--diagnose reads the rows of texts; name a file, --text=FILE")
    settings = dataclasses.asdict(config) | {"diagnose": True}
    with (
        folder_or_temporary(workdir) as folder,
        open_workdir(folder, settings, resume=resume) as work,
    ):
        given = opening.inputs(config)
        if not finish_time(work.path, given):
            write_json(work.path / RESULT, run(load(config), work.path))
            mark_finished(work.path, given)
        return load_result(work.path / RESULT, DiagnosisResult)
