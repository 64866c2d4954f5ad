"""The report of an audit: one offline HTML page that reads like a paper's supplement.

    html = build(summary, rows, by_head)
    lm_jax.run.files.write_text(folder / "report.html", html)

Every number comes from the summary, and the figures from the rows and heads behind it; nothing is
measured here. The controls stand first, because without them nothing else means anything.
"""

from collections.abc import Iterable
import dataclasses

import pyarrow as pa

from lm_jax import report
from lm_jax.report import Cell, Section, section, table
from lm_jax.report.markup import number
from lm_jax.run.files import to_jsonable
from lm_jax.statistics import Interval
from polyattn_jax import paper
from polyattn_jax.calibrate import AtLength
from polyattn_jax.columns import Columns
from polyattn_jax.report import (
    comparability,
    figures,
    findings,
    paper_comparison,
    recipes,
    score_rows,
)
from polyattn_jax.report.findings import suite_label
from polyattn_jax.results import AuditSummary

TERMS = {
    "row": "The attention scores of one query in one head: one score per key it may read.",
    "target": "The key of highest score in a row.",
    "recipe": "A map from scores to weights that replaces softmax: relu_p4_bauto is "
    "max(score + b_auto, 0)⁴ divided by its sum over the row; sigmoid is divided by its sum too; "
    "…_over_L and …_over_sqrtL are divided by the row's length or its root.",
    "Sₚ": "The weight that all other keys get together, in units of the target's, under degree p. "
    "The target receives 1 / (1 + Sₚ) of the row.",
    "safe, unsafe": "Sₚ < 1, so that the target outweighs all others together; Sₚ ≥ 1. The same is "
    "asked of softmax, whose S is the sum of e^(score − target's score) over the other keys.",
    "lost, sharpened": "A row that only softmax makes safe; a row that only the recipe makes safe.",
    "tie": "A row with Sₚ = 1 exactly; counted as unsafe.",
    "active row": "A row whose target scores above −b. All others are dead: every weight is zero, "
    "and the head writes zeros.",
    "b_auto": "The calibrated bias: the smallest b under which the average softmax row has at most "
    "5 % of its mass (or the budget of the settings) on keys that the recipe sets to zero.",
    "relative margin ρ": "The lead of the target over the next key, divided by the target's score "
    "above the threshold −b.",
    "active distractors A": "How many other keys of a row get weight.",
    "p*": "The degree that surely suffices for a row, log A / log(1 / (1 − ρ)). Every p ≥ p* has "
    "Sₚ ≤ 1; a smaller p may still be safe.",
    "needle probe": "A secret word, then filler text, then the question for it. Right means that "
    "the most likely next token is the word.",
    "induction, MQAR": "Random tokens in which a pair (or many pairs, for MQAR: multi-query "
    "associative recall) occurs again, so that the right continuation must be looked up.",
    "sink, induction, local, diffuse": "Head types, by averages over all rows of induction "
    "prompts: weight on the first key over 0.3, else weight on the key that followed the query's "
    "token before over 0.5, else local (the strongest key nearer than 8 tokens, and under 0.1 on "
    "that key), else diffuse.",
}


def build(summary: AuditSummary, rows: pa.Table, by_head: Columns) -> str:
    """The whole page.

    Args:
      summary: the content of `summary.json`.
      rows: the table of `rows.parquet`.
      by_head: the columns of `heads.parquet`.
    """
    model = paper.match(summary.model)
    held, said = findings.controls(summary), findings.overall(summary)
    texts = (
        findings.in_part(summary),
        findings.resolution(summary),
        findings.next_step(summary),
    )
    beside = [text for text in texts if text]
    parts = (
        controls(summary),
        calibration(summary),
        # the paper's bars stand beside ours only where the two may be compared
        recipes.substitution(
            summary, model if model and not comparability.needle_obstacles(summary, model) else None
        ),
        recipes.own_prompts(summary),
        recipes.ablation(summary),
        score_rows.unsafe_rows(summary, by_head),
        score_rows.against_softmax(summary, by_head),
        score_rows.degrees(summary, rows),
        score_rows.head_types(summary, by_head),
        paper_comparison.paper_comparison(summary, model),
        paper_comparison.differences(summary),
        terms(),
    )
    return report.page(
        f"Can polynomial attention replace softmax in {findings.model_name(summary)}?",
        [part for part in parts if part is not None],
        provenance=report.facts(to_jsonable(summary.provenance))
        | {"rows": summary.rows, "answers": summary.answers},
        lead=[
            report.verdict(held.text, _intervals(summary), tone=held.tone),
            report.verdict(said.text, *beside, tone=said.tone),
        ],
    )


def controls(summary: AuditSummary) -> Section:
    """Softmax with and without the needle, and the loss on the second copy of random tokens."""
    result, config = summary.controls, summary.config
    probes = [
        [
            suite_label(suite, config),
            findings.counted(accuracy),
            recipes.percent(accuracy),
        ]
        for suite, accuracy in sorted(result.accuracy.items(), key=_control_place)
    ]
    copies = [
        [
            name,
            Cell(report.rate(own.loss, spec=".2f", scale=1.0).text, numeric=True),
            recipes.percent(own.top_1),
            own.tokens,
        ]
        for name, own in (("first", result.first_copy), ("second", result.second_copy))
    ]
    return section(
        "Controls: does the model do the task at all?",
        "Whether a substitute preserves retrieval can be asked only of a model that retrieves. So "
        "the needle must be found where it is and not where it was left out, and the second copy "
        "of a random sequence must be much easier than the first: that is induction, the model "
        "looking up what it has read.",
        report.grid(
            table(
                ["Probe", "Right", "Accuracy, % [95 % interval]"],
                probes,
                caption="Needle probe with softmax; Wilson intervals.",
                n=_each(entry.n for entry in result.accuracy.values()),
            ),
            table(
                [
                    "Copy",
                    "Loss, nats per token",
                    "Top-1 accuracy, %",
                    "Tokens (n)",
                ],
                copies,
                caption="Random tokens written twice; 95 % bootstrap over prompts.",
                n=_each([result.first_copy.loss.n]).removesuffix(" per row"),
            ),
        ),
    )


def _intervals(summary: AuditSummary) -> str:
    accuracy = summary.controls.accuracy
    needle, without = accuracy[f"niah_{summary.config.sweep_length}"], accuracy.get("control")
    text = f"95 % Wilson intervals: {findings.ends(needle)} with the needle"
    if without is not None:
        text += f", {findings.ends(without)} without"
    return f"{text}. Nothing below means anything unless this holds."


def _control_place(item: tuple[str, Interval]) -> tuple[bool, int]:
    suite = item[0]
    return suite == "control", int(suite[5:]) if suite.startswith("niah_") else 0


def calibration(summary: AuditSummary) -> Section:
    """b_auto, the mass that lies below its threshold, and its dependence on length and text."""
    result, config = summary.calibration, summary.config
    lost = f"{result.mass:.4%}".replace("%", " %")
    texts = f"{number(result.texts)} texts"
    return section(
        "Calibration: which scores count as zero?",
        "A polynomial map sets all scores below −b to zero. The calibrated bias b_auto is the "
        "smallest one that leaves little softmax mass there: one number for the whole model, which "
        "depends on the length of what is read and on the text. At other lengths it would be "
        f"{findings.b_auto_by_length(result).replace('-', '−')}.",
        table(
            ["b_auto", "Length", "Mass below −b_auto", "Allowed", "Rows", "Passes"],
            [
                [
                    Cell(findings.b_auto(result).replace("-", "−"), numeric=True),
                    result.length,
                    Cell(lost, numeric=True),
                    Cell(f"{config.budget:.0%}".replace("%", " %"), numeric=True),
                    result.rows,
                    result.passes,
                ]
            ],
            caption="b_auto is solved exactly on all texts together; summary.json holds every "
            f"digit. Brackets: 95 % bootstrap over {texts}, too narrow for so few. Length: tokens "
            "of each text. Rows: of all layers, heads and texts.",
            n=texts,
        ),
        figures.calibration_curve(result, n=texts),
        report.details(
            "The same as a table",
            table(
                ["Tokens", "b_auto [95 % over texts]", "Smallest and largest of one text"],
                [
                    [
                        one.length,
                        Cell(findings.b_auto(one).replace("-", "−"), numeric=True),
                        Cell(_single_texts(one).replace("-", "−"), numeric=True),
                    ]
                    for one in result.curve
                ],
                caption="b_auto of the first tokens of the same texts, read off a grid of step "
                f"{number(result.step)}.",
                n=texts,
            ),
        ),
    )


def _single_texts(one: AtLength) -> str:
    least, most = (
        findings.b_auto(dataclasses.replace(one, bias=bias), ends=False)
        for bias in (one.least, one.most)
    )
    return f"{least} to {most}"


def terms() -> Section:
    """What the words mean."""
    return section("Terms", report.key_values(TERMS))


def _each(counts: Iterable[int]) -> str:
    distinct = sorted(set(counts))
    unit = "prompt" if distinct == [1] else "prompts"
    return f"{' or '.join(number(count) for count in distinct)} {unit} per row"
