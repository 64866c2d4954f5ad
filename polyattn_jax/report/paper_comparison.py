"""Comparison of an audit with the paper: its numbers beside ours, and what differs.

The rows are those of `iaj polyattn paper` (`beside`). Where the model has the name of one of the
paper's, a number of ours is judged against the paper's if nothing else differs. For other models
the nearest of the four is shown for orientation, and nothing is judged.
"""

from collections.abc import Sequence

from markupsafe import Markup

from lm_jax import assets, report
from lm_jax.report import Cell, Column, Section, cell, compared, section, table, table_of
from lm_jax.report.markup import number
from lm_jax.report.prose import Prose
from lm_jax.run.config import to_plain
from lm_jax.statistics import Interval, minimum_detectable_effect
from polyattn_jax.audit import decision, head_types
from polyattn_jax.audit.columns import Columns
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.audit.results import AuditSummary
from polyattn_jax.report import answer_rows, beside, diagnostic_rows, findings, paper
from polyattn_jax.report.beside import ComparedNumber
from polyattn_jax.report.findings import suite_label
from polyattn_jax.suites import named, openings

_PROSE = Prose("polyattn_jax.report")

PAPER = "“When Does Polynomial Attention Concentrate?”"
# The tables of the page of one audit.
COMPARISONS = (
    diagnostic_rows.prevalence,
    answer_rows.needle,
    diagnostic_rows.bound,
    diagnostic_rows.calibration,
)

_HAYSTACKS = {
    "essays": "essays by Paul Graham",
    "speeches": "annual messages of US presidents",
}


def paper_comparison(summary: AuditSummary, by_head: Columns) -> Section:
    """Our numbers beside those of the same model, or of the nearest one."""
    audit, tables = beside.audit_of(summary, by_head), []
    name, sweeps = audit.name, _sweep_tables(summary.config)
    if audit.beside is None:
        text = _PROSE("no_model", model=name, paper=PAPER)
    else:
        near = audit.beside.name
        if audit.named:
            text = _PROSE("same_model", model=near, paper=PAPER, verified=audit.same)
        else:
            text = _PROSE("near_model", model=name, near=near, paper=PAPER)
        rows = [row for compare in COMPARISONS for row in compare(audit)]
        items = dict.fromkeys(row.item for row in rows)
        tables = [
            comparison_table(item, [row for row in rows if row.item == item]) for item in items
        ]
        sweeps = [report.details("The paper's sweeps on its four models", *sweeps)]
    return section("Paper: how do its numbers compare?", text, *tables, *sweeps)


def comparison_table(item: str, rows: Sequence[ComparedNumber]) -> Markup:
    """The numbers of one table or figure of the paper beside ours, of one model or of several."""
    place = {key: i for i, key in enumerate(dict.fromkeys(map(_key, rows)))}
    return table_of(
        sorted(rows, key=lambda one: place[_key(one)]),
        [
            Column("Cell, suite", value=lambda one: cell(one.cell, note=one.suite)),
            Column(
                "Quantity",
                value=lambda one: ", ".join([one.quantity, *[one.unit] * (one.unit != "1")]),
            ),
            Column(
                "Model",
                value=lambda one: cell(
                    one.model, note=f"beside {one.beside}" if one.beside else ""
                ),
            ),
            Column("Paper", value=_theirs),
            Column("Ours [95 %]", value=_ours),
            Column("What differs", value=lambda one: "; ".join(one.causes)),
        ],
        caption=f"The paper's {item} beside ours; n counts prompts.",
    )


def _key(one: ComparedNumber) -> tuple[str, str, str]:
    """What a line is of, whatever the model: lines of several models stand together."""
    return one.suite, one.cell, one.quantity


def _spec(one: ComparedNumber) -> str:
    if one.unit in ("rows", "heads", "sets", "keys"):
        return ",.0f"
    return ".3f" if one.unit == "1" else "+.1f" if one.unit == "points" else ".1f"


def _ours(one: ComparedNumber) -> Cell:
    spec, note, tolerance = _spec(one), f"n = {number(one.n)}", beside.tolerance(one)
    text, ours = number(one.ours, spec), one.ours
    if one.low is not None and one.high is not None:
        text += f" [{number(one.low, spec)}, {number(one.high, spec)}]"
        ours = Interval(one.ours, one.low, one.high, one.n)
    if tolerance is None:
        return Cell(text, note, numeric=True)
    return Cell(text, note, compared(ours, one.paper, tolerance=tolerance).tone, numeric=True)


def _theirs(one: ComparedNumber) -> Cell:
    spec, tolerance = _spec(one), beside.tolerance(one)
    ends = f"{number(one.paper_low, spec)} to {number(one.paper_high, spec)}"
    if one.paper is None:
        return Cell(number(None) if one.paper_low is None else ends, numeric=True)
    text = number(one.paper, spec)
    # A fraction of a whole number of keys would be written as 0.
    fine = "" if ".0f" in spec else spec.lstrip("+")
    note = "" if tolerance is None else f"± {number(tolerance, fine)}"
    return Cell(text if one.paper_low is None else f"{text} [{ends}]", note, numeric=True)


def _sweep_tables(config: AuditConfig) -> tuple[Markup, Markup]:
    def sweep(name: str, caption: str) -> Markup:
        """The changes of accuracy that a field of the paper's models holds, by recipe."""
        columns = [Column(m.name, "+.1f", getattr(m, name).get) for m in paper.MODELS]
        return table_of(
            paper.MODELS[0].needle,
            [Column("Recipe", value=str), *columns],
            caption=caption,
            n="200 prompts per cell",
        )

    own = "has its own above." if _copying_lengths(config) else "has no such probe."
    return (
        sweep(
            "needle",
            "The paper's Table 3: change of needle accuracy in points at about 1,500 tokens; "
            "softmax 200 of 200 on each model.",
        ),
        sweep(
            "literary",
            "The paper's Table 2: change of accuracy in points on openings of literature, 500 "
            f"tokens of padding; softmax 74 to 79 %. This audit {own}",
        ),
    )


def differences(summary: AuditSummary) -> Section:
    """Differences between this audit and the paper's."""
    c = summary.config
    asset = assets.entries().get(summary.model)
    weights = ", ".join(summary.weights) or "not recorded"
    shape = f"{number(summary.layers)} layers of {number(summary.heads)} heads"
    random = (
        f"{number(c.ablation_draws)} random draw{'s' * (c.ablation_draws != 1)}"
        if c.ablation_heads
        else ""
    )
    lines: Sequence[tuple[str, str, str]] = (
        (
            "Model",
            f"{asset.description if asset else findings.model_name(summary)} ({shape}; {weights})",
            "Llama-3.2-1B, Qwen3-1.7B, Gemma-4-E2B, Pythia-1.4b",
        ),
        (
            "Arithmetic",
            f"{c.dtype} weights; scores, maps and Sₚ in float32; given the float32 scores, Sₚ "
            "has a proved error bound",
            "bfloat16, eager attention; Sₚ in float64 on those scores",
        ),
        (
            "Prompts per suite",
            f"needle {_count(c.niah_n)}, induction {_count(c.induction_n)}, MQAR "
            f"{_count(c.mqar_n)}, ablation {_count(c.ablation_n)}",
            "200 in every cell",
        ),
        (
            "Prompt length",
            f"needle {_list(c.niah_lengths)} tokens (sweep at {number(c.sweep_length)}), "
            f"induction {number(c.induction_length)}, MQAR {number(c.mqar_length)}",
            "4,096 tokens; needle with 128 filler sentences, about 1,500 tokens",
        ),
        (
            "Needle filler",
            _HAYSTACKS.get(c.haystack, "a text file of the user"),
            "“random text”, not given",
        ),
        ("Literary probe", _literary(c), "200 openings, known by heart (contaminated)"),
        (
            "Calibration",
            f"{number(summary.calibration.length)} tokens of each of "
            f"{number(summary.calibration.texts)} presidential messages; solved exactly",
            "1,024 tokens of a text that is not given",
        ),
        (
            "Ablation",
            f"{c.ablation_recipe} in K = {_list(c.ablation_heads)} heads, {random}, "
            + " and ".join(["needle", *(findings.suite_name(name) for name, _ in c.ablated_suites)])
            + " probe"
            if c.ablation_heads
            else "left out",
            "relu_p2_bauto in K = 5, 10, 20, 40, 80 heads, 5 random draws (20 in Appendices V and "
            "AF), literary and needle probe",
        ),
        (
            "Ranking of heads, head types",
            f"{suite_label(summary.ranking_suite, c)}; types "
            + (
                f"from whole induction prompts, at most {number(head_types.PROMPTS)}"
                if summary.head_types
                else "left out"
            ),
            "induction: 4,096 tokens for the ranking, 80 prompts of 1,024 for the types",
        ),
        (
            "Comparison with softmax",
            "paired: exact McNemar test, Tango's score interval",
            "difference of two rates, Wilson intervals",
        ),
        (
            "Least loss that is found (80 % power)",
            _power(summary),
            "“about 10 points” of the literary probe; by the unpaired formula for 200 prompts of "
            f"78 % a gain of {100 * minimum_detectable_effect(0.78, 200, direction='gain'):.1f}, "
            f"and a loss of {100 * minimum_detectable_effect(0.78, 200):.1f}",
        ),
        ("Dead rows under substitution", "write zeros and are counted", "not stated"),
    )
    return section(
        "Differences: what is not as in the paper?",
        _PROSE("differences"),
        table(
            ["What", "This run", "Paper"],
            lines,
            caption=f"This audit and {PAPER}.",
        ),
        report.details("Settings of this run", report.key_values(to_plain(c))),
    )


def _literary(config: AuditConfig) -> str:
    lengths = _copying_lengths(config)
    if not lengths:
        return "left out"
    n = named.available("copying", config.suite_n)
    return f"{number(n)} of {openings.COUNT} openings, one prompt each, at {_list(lengths)} tokens"


def _copying_lengths(config: AuditConfig) -> list[int]:
    return [length for name, length in config.asked_suites if name == "copying"]


def _power(summary: AuditSummary) -> str:
    n = findings.softmax_of(summary.sweep).accuracy.n
    loss = decision.detectable_loss(n, summary.config.tolerance)
    if loss is None:
        return f"none: {number(n)} prompts are too few for “no-go”"
    return f"{100 * loss:.1f} points end in “no-go” (exact; {number(n)} prompts, all right before)"


def _count(n: int) -> str:
    return number(n) if n else "left out"


def _list(values: Sequence[int]) -> str:
    return ", ".join(number(int(value)) for value in values)
