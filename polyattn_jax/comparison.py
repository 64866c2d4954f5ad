"""The paper beside an audit: its numbers next to ours, and what differs between the two.

Where the model is one of the paper's four, each of our numbers is judged against the paper's.
Elsewhere the nearest of the four is shown for orientation, and nothing is judged.
"""

from collections.abc import Iterable, Sequence

from markupsafe import Markup

from lm_jax import assets, report
from lm_jax.report import Cell, Section, cell, compared, section, table
from lm_jax.report.markup import number
from lm_jax.stats import Interval
from polyattn_jax import paper, wording
from polyattn_jax.paper import PaperModel
from polyattn_jax.sections import suite_cell
from polyattn_jax.wording import Summary, finite, interval, suite_label

PAPER = "“When Does Polynomial Attention Concentrate?”"

_HAYSTACKS = {
    "essays": "essays by Paul Graham",
    "speeches": "annual messages of US presidents",
}


def beside_paper(summary: Summary, model: PaperModel | None) -> Section:
    """Our numbers beside those of the same model, or of the nearest one."""
    title = "Paper: how do its numbers compare?"
    if model is not None:
        return section(
            title,
            f"{model.name} is one of the models of {PAPER}. ✓: ours is within the tolerance "
            "printed under it; ≈: within twice that, or the paper's value lies in our interval; ✗: "
            "further off. Prompts, lengths and arithmetic differ, as the next section lists.",
            *_tables(summary, model, judged=True),
        )
    name, near = wording.model_name(summary), paper.nearest(summary.get("family"))
    if near is None:
        intro = (
            f"{name} is not one of the four models of {PAPER}, and none of them is of its "
            "architecture. Its needle sweep is shown for orientation only."
        )
        return section(title, intro, _needle_table())
    return section(
        title,
        f"{name} is not one of the four models of {PAPER}; the nearest in architecture is "
        f"{near.name}. Its numbers stand under ours for orientation only: they are of another "
        "model, other weights and longer prompts, and agreement is not judged.",
        *_tables(summary, near, judged=False),
        report.details("The paper's needle sweep on its four models", _needle_table()),
    )


def _tables(summary: Summary, model: PaperModel, *, judged: bool) -> tuple[Markup, Markup]:
    whose = f"ours, with the paper's {model.name} under it"
    return (
        _prevalence(summary, model, whose, judged),
        report.grid(_needle(summary, model, whose, judged), _bound(summary, model, whose, judged)),
    )


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
        made = compared(ours, theirs, tolerance=tolerance, spec=spec, scale=scale)
        # n is the same in a whole table and stands in its caption
        return made._replace(note=made.note.partition(" · ")[0])
    note = f"paper {number(theirs * scale, spec)}"
    if isinstance(ours, Interval):
        return report.rate(ours, spec=spec, scale=scale)._replace(note=note)
    return cell(None if ours is None else ours * scale, spec=spec, note=note)


def _prevalence(summary: Summary, model: PaperModel, whose: str, judged: bool) -> Markup:
    ours = {(e["suite"], e["bias_kind"]): e for e in summary["prevalence"]}
    lines = []
    for row in model.prevalence:
        entry = ours.get((row.suite, row.bias_kind))
        if entry is None:
            continue
        rates = [
            _beside(
                interval(entry["unsafe"][str(p)]) if str(p) in entry["unsafe"] else None,
                row.unsafe[p] / 100,
                judged=judged,
                tolerance=0.05,
                scale=100.0,
            )
            if p in row.unsafe
            else cell(None)
            for p in (2, 4, 8)
        ]
        middle = entry.get("median", {})
        medians = [
            _beside(
                finite(middle[name]) if middle.get(name) is not None else None,
                value,
                judged=judged,
                tolerance=0.2 * value,
                spec=spec,
            )
            for name, value, spec in (
                ("s_2", row.s_2, ".2f"),
                ("relative_margin", row.relative_margin, ".3f"),
                ("active", row.active, ",.0f"),
            )
        ]
        # never judged: the paper prints one share for both biases
        dead = _beside(finite(entry["dead"]), row.dead / 100, judged=False, scale=100.0)
        lines.append([suite_cell(entry, summary["config"]), *rates, *medians, dead])
    remarks = "; ".join(dict.fromkeys(text for row in model.prevalence for text in row.remarks))
    return table(
        [
            "Suite",
            *(f"p = {p}, %" for p in (2, 4, 8)),
            "Median S₂",
            "Median ρ",
            "Median A",
            "Dead, %",
        ],
        lines,
        caption=f"Unsafe rows, {whose} (4,096 tokens, 200 prompts; Tables 1 and 10 at b = 0, "
        "Table 11 at b_auto)." + (f" On the paper's numbers: {remarks}." if remarks else ""),
        n=_prompts(e["n"] for entry in ours.values() for e in entry["unsafe"].values()),
    )


def _needle(summary: Summary, model: PaperModel, whose: str, judged: bool) -> Markup:
    lines = []
    for entry in wording.by_recipe(summary["sweep"]):
        accuracy = model.needle_accuracy(entry["recipe"])
        found = interval(entry["accuracy"])
        if accuracy is None:
            lines.append([entry["recipe"], cell(None)])
            continue
        ours = _beside(found, accuracy / 100, judged=judged, tolerance=0.07, scale=100.0)
        lines.append([entry["recipe"], ours])
    return table(
        ["Recipe", "Needle accuracy, %"],
        lines,
        caption=f"Needle probe, {whose} (Table 3: about 1,500 tokens, n = 200).",
        n=_prompts(entry["accuracy"]["n"] for entry in summary["sweep"]),
    )


def _bound(summary: Summary, model: PaperModel, whose: str, judged: bool) -> Markup:
    bias = finite(summary["calibration"]["bias"])
    calibrated = _beside(bias, model.b_auto, judged=judged, tolerance=0.1, spec=".4f")
    agreement = [
        [
            f"bound agrees at p = {p}, %",
            _beside(_agreement(summary, p), agree, judged=judged, tolerance=0.05, scale=100.0),
            "Table 8",
        ]
        for p, agree in model.bound.agree.items()
    ]
    return table(
        ["Quantity", "Value", "Where"],
        [["b_auto", calibrated, "Appendix J"], *agreement],
        caption=f"Calibration and bound (induction, b = 0), {whose}.",
    )


def _agreement(summary: Summary, p: int) -> float | None:
    for entry in summary["bound"]:
        if (entry["suite"], entry["bias_kind"], entry["p"]) == ("induction", "zero", p):
            return None if entry["agree"] is None else finite(entry["agree"])
    return None


def _needle_table() -> Markup:
    recipes = list(paper.MODELS[0].needle)
    return table(
        ["Recipe", *(model.name for model in paper.MODELS)],
        [
            [recipe, *(cell(model.needle[recipe], spec="+.1f") for model in paper.MODELS)]
            for recipe in recipes
        ],
        caption="The paper's Table 3: change of needle accuracy in points at about 1,500 tokens; "
        "softmax 200 of 200 on each model.",
        n="200 prompts per cell",
    )


def differences(summary: Summary) -> Section:
    """What differs from the paper, so that nobody compares unlike numbers."""
    c = summary["config"]
    asset = assets.manifest().get(summary["model"])
    weights = ", ".join(summary.get("weights", ())) or "not recorded"
    shape = f"{number(summary['layers'])} layers of {number(summary['heads'])} heads"
    random = (
        f"{number(c['ablation_draws'])} random draw{'s' * (c['ablation_draws'] != 1)}"
        if c["ablation_heads"]
        else ""
    )
    lines: Sequence[tuple[str, str, str]] = (
        (
            "Model",
            f"{asset.description if asset else wording.model_name(summary)} ({shape}; {weights})",
            "Llama-3.2-1B, Qwen3-1.7B, Gemma-4-E2B, Pythia-1.4b",
        ),
        (
            "Arithmetic",
            f"{c['dtype']} weights; scores, maps and Sₚ in float32 with a proved error bound",
            "bfloat16, eager attention; Sₚ in float64 on those scores",
        ),
        (
            "Prompts per suite",
            f"needle {_count(c['niah_n'])}, induction {_count(c['induction_n'])}, MQAR "
            f"{_count(c['mqar_n'])}, ablation {_count(c['ablation_n'])}",
            "200 in every cell",
        ),
        (
            "Prompt length",
            f"needle {_list(c['niah_lengths'])} tokens (sweep at {number(c['sweep_length'])}), "
            f"induction {number(c['induction_length'])}, MQAR {number(c['mqar_length'])}",
            "4,096 tokens; needle with 128 filler sentences, about 1,500 tokens",
        ),
        (
            "Needle filler",
            _HAYSTACKS.get(c["haystack"], "a text file of the user"),
            "“random text”, not given",
        ),
        ("Literary probe", "left out", "included; its openings are known by heart (contaminated)"),
        (
            "Calibration",
            f"{number(c['calibration_length'])} tokens of an 1825 presidential message; solved "
            "exactly",
            "1,024 tokens of a text that is not given",
        ),
        (
            "Ablation",
            f"{c['ablation_recipe']} in K = {_list(c['ablation_heads'])} heads, {random}, needle "
            "probe"
            if c["ablation_heads"]
            else "left out",
            "relu_p2_bauto in K = 5, 10, 20, 40, 80 heads, 5 random draws, literary and needle "
            "probe",
        ),
        (
            "Ranking of heads, head types",
            suite_label(summary["ranking_suite"], c),
            "induction: 4,096 tokens for the ranking, 80 prompts of 1,024 for the types",
        ),
        (
            "Comparison with softmax",
            "paired: exact McNemar test, Tango's score interval",
            "difference of two rates, Wilson intervals",
        ),
        ("Dead rows under substitution", "write zeros and are counted", "not stated"),
    )
    return section(
        "Differences: what is not as in the paper?",
        "Numbers of the two may be compared only as far as these lines allow. Every setting of "
        "this run is in the folded list.",
        table(
            ["What", "This run", "Paper"],
            lines,
            caption=f"This audit and {PAPER}.",
        ),
        report.details("Settings of this run", report.key_values(c)),
    )


def _prompts(counts: Iterable[int]) -> str:
    distinct = sorted(set(counts))
    return " or ".join(number(n) for n in distinct) + " prompts" if distinct else "no prompts"


def _count(n: int) -> str:
    return number(n) if n else "left out"


def _list(values: Sequence[int]) -> str:
    return ", ".join(number(int(value)) for value in values)
