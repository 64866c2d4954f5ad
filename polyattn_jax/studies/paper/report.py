"""The page of the paper's tables on given models, and the same answer for a terminal.

The page opens with one screen: every claim of the paper with what each model says of it.
"""

from collections.abc import Sequence
import io
from pathlib import Path

from markupsafe import Markup
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lm_jax import report
from lm_jax.report import Cell, Column, Report, Section, cell, section, table_of
from lm_jax.report.markup import clean, element
from lm_jax.report.prose import Prose
from polyattn_jax.report import paper
from polyattn_jax.report.beside import ComparedNumber
from polyattn_jax.report.findings import Tone
from polyattn_jax.report.paper_comparison import PAPER, comparison_table
from polyattn_jax.studies.paper import claims
from polyattn_jax.studies.paper.items import ITEMS
from polyattn_jax.studies.paper.results import ClaimResult, ClaimVerdict, PaperSummary, StudiedModel
from polyattn_jax.studies.paper.run import COMPARISON
from polyattn_jax.studies.paper.settings import PaperConfig

_PROSE = Prose("polyattn_jax.studies.paper")
TONES: dict[ClaimVerdict, Tone] = {"holds": "good", "undecided": "warn", "fails": "bad"}
WIDTH = 100


def answer(summary: PaperSummary) -> str:
    """The sentence to quote: how many of the paper's claims hold on these models."""
    names = [model.name for model in summary.models if model.available]
    counts = dict.fromkeys((*TONES, "not measured"), 0)
    for claim in summary.claims:
        counts[claim.verdict] += 1
    every = "all of " * (len(names) > 1)
    text = (
        f"Of {len(summary.claims)} claims of the paper {counts['holds']} hold on {every}"
        f"{' and '.join(names)}, {counts['fails']} fail{' on at least one' * (len(names) > 1)}, "
        f"{counts['undecided']} stay undecided"
    )
    text += f", {counts['not measured']} not measured." if counts["not measured"] else "."
    if absent := [model.name for model in summary.models if not model.available]:
        text += f" Not available here: {', '.join(absent)}."
    return text


def build(config: PaperConfig, summary: PaperSummary, folder: Path) -> Report:
    """The report of a summary, with the rows of comparison.parquet."""
    del config
    worst = claims.overall({claim.verdict for claim in summary.claims})
    tolerance = f"{100 * summary.config.tolerance:g}"
    return Report(
        "Do the paper's findings on polynomial attention hold on other models?",
        lambda: sections(summary, read_rows(folder)),
        lead=[
            report.verdict(
                answer(summary), _PROSE("lead", tolerance), tone=TONES.get(worst, "warn")
            ),
            _claims(summary.claims),
        ],
        lines=lines(summary),
        facts={"rows": summary.rows},
    )


def read_rows(folder: Path) -> list[ComparedNumber]:
    """The rows of comparison.parquet in a work folder."""
    rows = pq.read_table(folder / COMPARISON).to_pylist()
    return [ComparedNumber(**row | {"causes": tuple(row["causes"])}) for row in rows]


def sections(summary: PaperSummary, rows: Sequence[ComparedNumber]) -> list[Section]:
    """The sections of the page.

    Args:
      summary: the content of summary.json.
      rows: those of comparison.parquet.
    """
    parts = [_models(summary.models)]
    for name in summary.items:
        title = next(item.title for item in ITEMS if item.name == name)
        own = [one for one in rows if one.item == name]
        parts.append(section(f"Paper's {name}: {title}", comparison_table(name, own)))
    parts.append(
        section(
            "What has no number here",
            table_of(
                summary.unmeasured,
                [
                    Column("Table or figure", value=lambda one: one.item),
                    Column("What it shows", value=lambda one: one.title),
                    Column("Why there is no number", value=lambda one: one.reason),
                ],
                caption=f"Tables and figures of {PAPER} without a number of ours.",
            ),
        )
    )
    return parts


def _claims(results: Sequence[ClaimResult]) -> Markup:
    def of_model(name: str) -> Column:
        def value(claim: ClaimResult) -> Cell:
            finding = claim.by_model[name]
            return Cell(finding.text, finding.verdict, TONES.get(finding.verdict, "none"))

        return Column(name, value=value)

    def evidence(claim: ClaimResult) -> Cell:
        note = f"the paper, {claim.where}: {claim.paper}; ours from {claim.evidence}"
        return cell(claim.claim, note=note)

    return table_of(
        results,
        [Column("Claim of the paper", value=evidence), *map(of_model, results[0].by_model)],
        caption=f"Claims of {PAPER}, and what each model says of them.",
    )


def _models(models: Sequence[StudiedModel]) -> Section:
    def audit(model: StudiedModel) -> str | Cell:
        link = element("a", {"href": f"{model.folder}/report.html"}, "its own report")
        return cell(Markup(link)) if model.available else "not available"

    def beside(model: StudiedModel) -> str:
        if not model.available:
            return "–"
        known = "the same weights" if model.same else paper.UNVERIFIED if model.named else ""
        return (model.beside or "none of its architecture") + (f" ({known})" if known else "")

    return section(
        "Models",
        table_of(
            models,
            [
                Column("Model", value=lambda model: model.name),
                Column("Audit", value=audit),
                Column("Family", value=lambda model: model.family or "–"),
                Column("Stands beside the paper's", value=beside),
                Column("Why not", value=lambda model: model.reason),
            ],
            caption="Models that were asked for. A model that the paper has not tested stands "
            "beside its model of the same architecture.",
        ),
    )


def lines(summary: PaperSummary) -> list[str]:
    """The answer, and the claims with what each model says, as lines of text."""
    file = io.StringIO()
    console = Console(file=file, width=WIDTH, color_system=None)

    def text(value: str) -> Text:
        return Text(clean(value).replace("−", "-").replace("–", "-"))

    shown = Table(box=None, pad_edge=False, show_edge=False, collapse_padding=True)
    shown.add_column("claim", ratio=2)
    for name in summary.claims[0].by_model:
        shown.add_column(clean(name), ratio=2)
    for claim in summary.claims:
        findings = (f"{one.verdict}: {one.text}" for one in claim.by_model.values())
        shown.add_row(text(claim.claim), *map(text, findings))
    console.print(text(answer(summary)), "", shown, "", sep="\n", highlight=False)
    for model in summary.models:
        if not model.available:
            console.print(text(f"{model.name} is not available: {model.reason}"), highlight=False)
    counts = (
        f"{summary.rows:,} numbers of {len(summary.items)} tables and figures, {summary.compared:,}"
        f" beside one of the paper; {len(summary.unmeasured)} tables and figures without a number."
    )
    console.print(text(counts), highlight=False)
    return file.getvalue().splitlines()
