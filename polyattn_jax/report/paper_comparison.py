"""Comparison of an audit with the paper: its numbers under ours, and what differs.

Where the model is one of the paper's four, a number of ours is judged against the paper's if
`comparability` finds no obstacle; else the table gives the reason. For other models the
nearest of the four is shown for orientation, and nothing is judged.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from markupsafe import Markup

from lm_jax import assets, report
from lm_jax.report import Cell, Section, cell, compared, section, table
from lm_jax.report.markup import number
from lm_jax.report.prose import Prose
from lm_jax.run.config import to_plain
from lm_jax.statistics import Interval, minimum_detectable_effect
from polyattn_jax.audit import decision, head_types
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.audit.results import AuditSummary
from polyattn_jax.report import comparability, findings, paper
from polyattn_jax.report.findings import suite_label, suite_length
from polyattn_jax.report.paper import PaperModel
from polyattn_jax.report.recipes import suite_cell
from polyattn_jax.suites import named, openings

_PROSE = Prose("polyattn_jax.report")

PAPER = "“When Does Polynomial Attention Concentrate?”"

_HAYSTACKS = {
    "essays": "essays by Paul Graham",
    "speeches": "annual messages of US presidents",
}


def _not_comparable(reasons: Sequence[str]) -> str:
    return f"not comparable: {', '.join(reasons)}" if reasons else ""


def paper_comparison(summary: AuditSummary, model: PaperModel | None) -> Section:
    """Our numbers beside those of the same model, or of the nearest one."""
    title = "Paper: how do its numbers compare?"
    if model is not None:
        return section(
            title,
            _PROSE(
                "same_model",
                model=model.name,
                paper=PAPER,
                verified=comparability.is_verified(summary, model),
            ),
            *_tables(summary, model, judged=True),
            report.details("The paper's sweeps on its four models", *_sweep_tables(summary.config)),
        )
    name, near = findings.model_name(summary), paper.nearest(summary.family)
    if near is None:
        return section(
            title, _PROSE("no_model", model=name, paper=PAPER), *_sweep_tables(summary.config)
        )
    return section(
        title,
        _PROSE("near_model", model=name, near=near.name, paper=PAPER),
        *_tables(summary, near, judged=False),
        report.details("The paper's sweeps on its four models", *_sweep_tables(summary.config)),
    )


def _tables(summary: AuditSummary, model: PaperModel, *, judged: bool) -> list[Markup]:
    whose = f"ours, with the paper's {model.name} under it"
    return [
        *_prevalence(summary, model, whose, judged),
        report.grid(_needle(summary, model, whose, judged), _bound(summary, model, whose, judged)),
    ]


def _beside(
    ours: float | Interval | None,
    theirs: float,
    *,
    judged: bool,
    tolerance: float = 0.0,
    spec: str = ".1f",
    scale: float = 1.0,
) -> Cell:
    """Our value with the paper's under it; with a tone only where the two may be compared."""
    if judged and ours is not None:
        judgement = compared(ours, theirs, tolerance=tolerance, spec=spec, scale=scale)
        # n is the same in a whole table, whose caption gives it
        return judgement._replace(note=judgement.note.partition(" · ")[0])
    note = f"paper {number(theirs * scale, spec)}"
    if isinstance(ours, Interval):
        return report.rate(ours, spec=spec, scale=scale)._replace(note=note)
    return cell(None if ours is None else ours * scale, spec=spec, note=note)


def _prevalence(summary: AuditSummary, model: PaperModel, whose: str, judged: bool) -> list[Markup]:
    rates, medians, remarks = [], [], []
    for entry in findings.by_suite(summary.prevalence):
        length = suite_length(entry.suite, summary.config)
        if length is None:
            continue
        row = model.prevalence_at(entry.suite, entry.bias_kind, length)
        if row is None:
            continue
        reasons = comparability.prevalence_obstacles(summary, model, row, length, entry.prompts)
        same, suite = judged and not reasons, suite_cell(entry, summary.config)
        of_degrees = [
            _beside(
                entry.unsafe_active.get(str(p)),
                row.unsafe[p] / 100,
                judged=same,
                tolerance=0.05,
                scale=100.0,
            )
            if p in row.unsafe
            else cell(None)
            for p in (2, 4, 8)
        ]
        unlike = _not_comparable(reasons) if judged else ""
        rates.append([suite, *of_degrees, unlike or f"{number(row.length)} tokens"])
        theirs = row.medians
        if theirs is None:
            continue
        ours = entry.median
        of_rows = [
            _beside(value, reference, judged=same, tolerance=0.2 * reference, spec=spec)
            for value, reference, spec in (
                (ours.s_2 if ours else None, theirs.s_2, ".2f"),
                (ours.relative_margin if ours else None, theirs.relative_margin, ".3f"),
                (ours.active if ours else None, theirs.active, ",.0f"),
            )
        ]
        # never judged: the paper prints one share for both biases
        dead = _beside(entry.dead, theirs.dead / 100, judged=False, scale=100.0)
        medians.append([suite, *of_rows, dead])
        remarks += row.remarks
    remark = "; ".join(dict.fromkeys(remarks))
    n = _prompts(entry.prompts for entry in summary.prevalence)
    return [
        table(
            ["Suite", *(f"p = {p}, %" for p in (2, 4, 8)), "The paper's"],
            rates,
            caption=f"Unsafe rows, {whose} (of active rows; 200 prompts; Tables 1 and 10 at b = 0, "
            "Table 11 at b_auto).",
            n=n,
        ),
        table(
            ["Suite", "Median S₂", "Median ρ", "Median A", "Dead, %"],
            medians,
            caption=f"Medians over active rows, {whose} (Tables 10 and 11)."
            + (" Tolerance: a fifth." if judged else "")
            + (f" On the paper's numbers: {remark}." if remark else ""),
            n=n,
        ),
    ]


def _needle(summary: AuditSummary, model: PaperModel, whose: str, judged: bool) -> Markup:
    reasons = comparability.needle_obstacles(summary, model)
    calibrated = comparability.calibration_obstacles(summary)
    lines = []
    for entry in findings.by_recipe(summary.sweep):
        accuracy = model.needle_accuracy(entry.recipe)
        result = entry.accuracy
        if accuracy is None:
            lines.append([entry.recipe, cell(None)])
            continue
        unlike = reasons or (calibrated if entry.recipe.endswith("bauto") else [])
        same = judged and not unlike
        ours = _beside(result, accuracy / 100, judged=same, tolerance=0.07, scale=100.0)
        lines.append([entry.recipe, ours])
    why = _not_comparable(reasons)
    if not why and calibrated:
        why = f"at b_auto {_not_comparable(calibrated)}"
    return table(
        ["Recipe", "Needle accuracy, %"],
        lines,
        caption=f"Needle probe, {whose} (Table 3: about 1,500 tokens, n = 200)."
        + (f" {why[0].upper()}{why[1:]}." if judged and why else ""),
        n=_prompts(entry.accuracy.n for entry in summary.sweep),
    )


def _bound(summary: AuditSummary, model: PaperModel, whose: str, judged: bool) -> Markup:
    result = summary.calibration
    bias = Interval(result.bias, result.low, result.high, result.texts)
    places = len(findings.b_auto(result, ends=False).partition(".")[2])
    row = next(r for r in model.prevalence if (r.suite, r.bias_kind) == ("induction", "zero"))
    rows = row.medians.rows if row.medians else 0
    config = summary.config
    unlike = comparability.prevalence_obstacles(
        summary, model, row, config.induction_length, config.induction_n
    )
    of_bias = comparability.model_obstacles(summary, model)
    of_bias += comparability.calibration_obstacles(summary)
    calibrated = _beside(
        bias, model.b_auto, judged=judged and not of_bias, tolerance=0.1, spec=f".{places}f"
    )
    ours = {
        entry.p: entry
        for entry in summary.bound
        if (entry.suite, entry.bias_kind) == ("induction", "zero")
    }
    lines: list[list[object]] = [["b_auto", calibrated, "Appendix J"]]
    for p, agree in model.bound.agree.items():
        result = ours[p].agree if p in ours else None
        both = _beside(result, agree, judged=judged and not unlike, tolerance=0.05, scale=100.0)
        lines.append([f"bound agrees at p = {p}, %", both, "Table 8"])
    at_2 = ours.get(2)
    for label, count, theirs in (
        ("false negatives", at_2.false_negative if at_2 else None, model.bound.false_negative),
        ("false positives", at_2.false_positive if at_2 else None, model.bound.false_positive),
    ):
        # counts of unlike numbers of rows are not judged
        of = f"paper {number(theirs)} of {number(rows)}"
        value = f"{number(count)} of {number(at_2.n)}" if at_2 else "–"
        lines.append([f"{label} at p = 2", cell(value, note=of), "Tables 8, 10"])
    if at_2:
        value = f"{number(at_2.undecided)} of {number(at_2.n)}"
        lines.append(["left open by rounding at p = 2", value, "this audit"])
    reasons = [*(_not_comparable(of_bias),), _not_comparable(unlike)] if judged else []
    named = [
        f"{what} {why}" for what, why in zip(("b_auto", "bound"), reasons, strict=False) if why
    ]
    return table(
        ["Quantity", "Value", "Where"],
        lines,
        caption=_PROSE("bound_comparison_caption", whose=whose, reasons=named),
    )


def _sweep_tables(config: AuditConfig) -> tuple[Markup, Markup]:
    recipes = list(paper.MODELS[0].needle)
    names = ["Recipe", *(model.name for model in paper.MODELS)]

    def of(values: Callable[[PaperModel], Mapping[str, float]]) -> list[list[object]]:
        return [
            [recipe, *(cell(values(model)[recipe], spec="+.1f") for model in paper.MODELS)]
            for recipe in recipes
        ]

    return (
        table(
            names,
            of(lambda model: model.needle),
            caption="The paper's Table 3: change of needle accuracy in points at about 1,500 "
            "tokens; softmax 200 of 200 on each model.",
            n="200 prompts per cell",
        ),
        table(
            names,
            of(lambda model: model.literary),
            caption="The paper's Table 2: change of accuracy in points on openings of literature, "
            "500 tokens of padding; softmax 74 to 79 %. This audit "
            + ("has its own above." if "copying" in config.suites else "has no such probe."),
            n="200 prompts per cell",
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
            + " and ".join(["needle", *map(findings.suite_name, c.ablation_suites)])
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
    if "copying" not in config.suites:
        return "left out"
    n = named.available("copying", config.suite_n)
    return (
        f"{number(n)} of {openings.COUNT} openings, one prompt each, at "
        f"{_list(config.suite_lengths)} tokens"
    )


def _power(summary: AuditSummary) -> str:
    n = findings.softmax_of(summary.sweep).accuracy.n
    loss = decision.detectable_loss(n, summary.config.tolerance)
    if loss is None:
        return f"none: {number(n)} prompts are too few for “no-go”"
    return f"{100 * loss:.1f} points end in “no-go” (exact; {number(n)} prompts, all right before)"


def _prompts(counts: Iterable[int]) -> str:
    distinct = sorted(set(counts))
    return " or ".join(number(n) for n in distinct) + " prompts" if distinct else "no prompts"


def _count(n: int) -> str:
    return number(n) if n else "left out"


def _list(values: Sequence[int]) -> str:
    return ", ".join(number(int(value)) for value in values)
