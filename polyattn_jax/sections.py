"""The sections of a report that hold the findings: tables and figures with a word of guidance.

Each takes the summary (and the rows or heads that its figures draw) and returns a section of the
page; `report.build` puts them together.
"""

from collections.abc import Sequence

from markupsafe import Markup
import numpy as np
import pyarrow as pa

from lm_jax import report
from lm_jax.report import Cell, Column, Section, cell, rate, section, table
from lm_jax.report.markup import number
from lm_jax.stats import Interval, wilson
from polyattn_jax import figures, head_sets, paper, wording
from polyattn_jax.probe import DEGREES
from polyattn_jax.schema import BIASES
from polyattn_jax.summary import TYPES, Columns, as_dict
from polyattn_jax.wording import Summary, finite, interval, suite_label

_ENDS = ("top", "bottom")

# A percentile bootstrap over fewer prompts is too narrow (stats.clustered_bootstrap).
FEW_PROMPTS = 30


def substitution(summary: Summary, model: paper.PaperModel | None) -> Section:
    """The sweep: every recipe in all heads, on the same prompts as softmax."""
    config, sweep = summary["config"], wording.by_recipe(summary["sweep"])
    base = wording.softmax_of(sweep)
    n = f"{number(base['accuracy']['n'])} prompts"
    total = summary["layers"] * summary["heads"] * config["sweep_length"]
    verdicts = {v["recipe"]: v for v in summary["verdicts"]}
    lines = [_sweep_row(entry, verdicts.get(entry["recipe"])) for entry in sweep]
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for entry in sweep:
        if v := verdicts.get(entry["recipe"]):
            reasons.setdefault((v["verdict"], v["reason"], v["next"]), []).append(v["recipe"])
    return section(
        "Substitution: which recipes keep retrieval?",
        "Here softmax is replaced in every head at once, without any training, and the model "
        "answers the same prompts again. This test decides; the share of safe rows beside it is a "
        "screen that can warn but cannot promise. A recipe preserves if the 95 % interval of its "
        f"change lies above −{100 * config['tolerance']:g} points; it is a no-go if that lies "
        "below, or if the paired test finds a loss beyond that; else the prompts leave it "
        "undecided.",
        "A recipe such as relu_p4_bauto weighs each key by max(score + b, 0)⁴, divided by the sum "
        "over the row; all words are explained at the end.",
        table(
            [
                "Recipe",
                "Verdict",
                "Accuracy, %",
                "Change, pts",
                "McNemar p",
                Column("Loss, nats", ".2f"),
                "Rank",
                Column("Dead rows", ",.1f"),
                "Safe, %",
                f"Top {config['top_heads']}, %",
            ],
            lines,
            caption=f"Needle probe at {number(config['sweep_length'])} tokens. Brackets: 95 % "
            "intervals (accuracy: Wilson; change against softmax: paired, Tango; "
            "safe: bootstrap over prompts). Lost and won: prompts that only softmax, or only the "
            f"recipe, got right; p is exact and not corrected for {number(len(lines) - 1)} "
            "comparisons. Loss and median rank are of the needle's token (rank 0: predicted). Dead "
            f"rows: mean per prompt, of {number(total)}. Safe: share of active rows with Sₚ < 1, "
            f"over all heads and in the top {number(config['top_heads'])} by median S₂; a dash "
            "where Sₚ was not measured for the map.",
            n=n,
        ),
        figures.accuracy_bars(sweep, model, n),
        table(
            ["Recipes", "Verdict", "Because, and next step"],
            [
                [
                    ", ".join(names),
                    _verdict(verdict),
                    cell(f"{reason.replace(' -', ' −')}.", note=f"Next: {step}."),
                ]
                for (verdict, reason, step), names in reasons.items()
            ],
            caption="Reasons and next steps.",
        ),
    )


def _sweep_row(entry: wording.Entry, verdict: wording.Entry | None) -> list[object]:
    rank = finite(entry["median_rank"])
    numbers = (
        finite(entry["loss"]),
        int(rank) if rank.is_integer() else cell(rank, spec=",.1f"),
        finite(entry["dead_rows_per_prompt"]),
    )
    accuracy, dash = stacked(interval(entry["accuracy"])), cell(None)
    if verdict is None:
        return [entry["recipe"], "baseline", accuracy, dash, dash, *numbers, dash, dash]
    shares = (verdict["safe"], verdict["top_safe"])
    counts = f"{number(entry['lost'])} lost, {number(entry['won'])} won"
    return [
        cell(entry["recipe"], note=f"b = {finite(entry['bias']):.4g}".replace("-", "−")),
        _verdict(verdict["verdict"]),
        accuracy,
        stacked(interval(entry["delta"]), signed=True),
        cell(finite(entry["p_value"]), spec=".2g", note=counts),
        *numbers,
        *(stacked(interval(share)) if share else dash for share in shares),
    ]


def ablation(summary: Summary) -> Section | None:
    """One recipe in some heads: those of highest, of lowest and of random median S_2."""
    if not summary["ablation"]:
        return None
    config = summary["config"]
    rows = [_ablation_row(wording.softmax_of(summary["ablation"]), "none: softmax everywhere", 0)]
    for kind, cells in head_sets.groups(summary["ablation"]).items():
        for size, entries in cells.items():
            for draw, entry in enumerate(entries):
                which = f"random, seed {draw}" if kind == "random" else f"{kind} of the ranking"
                rows.append(_ablation_row(entry, which, size))
    draws = config["ablation_draws"]
    suite = suite_label(summary["ranking_suite"], config)
    return section(
        "Ablation: which heads need softmax?",
        f"Only K heads get {config['ablation_recipe']}, the others keep softmax. If accuracy falls "
        "with the heads of highest S₂ and stays with those of lowest, then S₂ tells which heads "
        "the task hangs on; random sets of the same size show what K heads cost by themselves. "
        "After the paper the ranking is decisive at K if the highest are worse than every random "
        "set: a flag for each K, no test, and not corrected for their number.",
        wording.in_part(summary),
        table(
            ["K", "Highest S₂", "Lowest S₂", "Random, worst to best", "Worse than", "Decisive"],
            [_decisive_row(entry) for entry in summary["decisiveness"]],
            caption="Prompts answered with the recipe in K heads, with 95 % Wilson intervals. "
            "Worse than: random sets that the highest S₂ leaves fewer right than. Decisive: worse "
            f"than all; not said below {head_sets.FEWEST_DRAWS} draws, where a ranking at random "
            "would be so in more than 1 of 20 cases.",
            n=f"{number(summary['ablation'][0]['accuracy']['n'])} prompts per set",
        ),
        figures.ablation_curves(
            summary["ablation"],
            caption=f"Needle accuracy at {number(config['sweep_length'])} tokens against the "
            f"number of replaced heads. Heads are ranked by their median S₂ at b_auto ({suite}); "
            f"random sets: {number(draws)} draw{'s' * (draws != 1)} per K.",
        ),
        report.details(
            "The same as a table, with intervals",
            table(
                ["Heads", "K", "Accuracy, %", "Change, points", "Lost, won", "Loss, nats"],
                rows,
                caption="Group ablation; 95 % intervals (Wilson, and paired for the change).",
                n=f"{number(summary['ablation'][0]['accuracy']['n'])} prompts per row",
            ),
        ),
    )


def _decisive_row(entry: wording.Entry) -> list[object]:
    n, drawn = entry["n"], sorted(entry["random"])
    flag = {None: "too few draws", True: "yes", False: "no"}[entry["decisive"]]
    ends = [cell(entry[end], note=wording.ends(as_dict(wilson(entry[end], n)))) for end in _ENDS]
    return [
        entry["size"],
        *ends,
        f"{drawn[0]} to {drawn[-1]}",
        f"{entry['beaten']} of {len(drawn)}",
        flag,
    ]


def _ablation_row(entry: wording.Entry, which: str, size: int) -> list[object]:
    return [
        which,
        size,
        percent(interval(entry["accuracy"])),
        percent(interval(entry["delta"]), signed=True),
        f"{entry['lost']}, {entry['won']}",
        cell(finite(entry["loss"]), spec=".2f"),
    ]


def unsafe_rows(summary: Summary, by_head: Columns) -> Section:
    """How many rows are unsafe, by suite and bias, and where the heads lie."""
    config, entries = summary["config"], wording.by_suite(summary["prevalence"])
    lines = []
    for entry in entries:
        middle = entry.get("median", {})
        rates = [entry["unsafe"].get(str(p)) for p in DEGREES]
        lines.append(
            [
                suite_cell(entry, config),
                *(stacked(interval(found)) if found else cell(None) for found in rates),
                *(
                    cell(middle.get(name), spec=spec)
                    for name, spec in (("s_2", ""), ("relative_margin", ".3f"), ("active", ",.0f"))
                ),
                stacked(interval(entry["dead"])),
                cell(entry["active_rows"], note=f"of {number(entry['rows'])}"),
                entry["prompts"],
            ]
        )
    few = any(e["n"] < FEW_PROMPTS for entry in entries for e in entry["unsafe"].values())
    suite = suite_label(summary["ranking_suite"], config)
    answers = sorted((entry["argmax_is_answer"] for entry in entries), key=_estimate)
    return section(
        "Unsafe rows: how often is the target outvoted?",
        "A row is unsafe at degree p when all other keys together outweigh the best one. A high "
        "share warns that the recipe will blur what the model reads; a low share promises "
        "nothing, since a few heads may carry the task. The best key is the one that holds the "
        f"answer in {_with_ends(answers[0])} to {_with_ends(answers[-1])} of the rows, by suite "
        "(paper: 3 to 7 % on its needle prompts).",
        table(
            [
                "Suite",
                *(f"p = {p}, %" for p in DEGREES),
                "Median S₂",
                "Median ρ",
                "Median A",
                "Dead, %",
                "Active",
                "Prompts",
            ],
            lines,
            caption="Unsafe share of the active rows (Sₚ ≥ 1, the target being the best key) at "
            "each degree p. S₂, relative margin ρ and number of active distractors A: medians over "
            f"active rows. b_auto = {finite(summary['calibration']['bias']):.4g}. Brackets: 95 % "
            f"bootstrap over prompts, {number(config['resamples'])} resamples"
            + (f"; too narrow with fewer than {FEW_PROMPTS} prompts." if few else "."),
            n=f"{number(sum(e['rows'] for e in entries))} rows",
        ),
        report.grid(
            figures.phase_plot(
                by_head,
                caption=f"Each head by the medians of its active rows at b_auto ({suite}). Above a "
                "dashed curve A (1 − ρ)ᵖ exceeds 1, so that degree p is not certified to suffice. "
                "A median of no distractor has no place on the log scale.",
            ),
            figures.head_map(
                by_head,
                (summary["layers"], summary["heads"]),
                caption=f"log₁₀ of the median S₂ per head at b_auto ({suite}). Blue: unsafe (S₂ > "
                "1); orange: safe; pale: near the boundary S₂ = 1. Values beyond ±2 are drawn as "
                "±2; a head without an active row has no value and ranks first.",
            ),
        ),
    )


def _estimate(share: wording.Entry) -> float:
    return finite(share["estimate"])


def _with_ends(share: wording.Entry) -> str:
    found = interval(share)
    low, high = 100 * found.low, 100 * found.high
    return f"{100 * found.estimate:.1f} % [{low:.1f}, {high:.1f}]"


def degrees(summary: Summary, rows: pa.Table) -> Section:
    """The sufficient degree p*, and how well it predicts what is measured."""
    config, suite = summary["config"], summary["ranking_suite"]
    by_bias = {kind: figures.argmax_rows(rows, suite, kind) for kind in BIASES}
    edges = figures.degree_edges([columns["p_star"] for columns in by_bias.values()])
    where = suite_label(suite, config)
    return section(
        "Sufficient degree: does the bound predict what is measured?",
        "From its margin and its number of active keys, each row gets a degree p* that surely "
        "suffices. The bound errs on one side only: it may call a safe row unsafe (a false "
        "positive, which is slack), and it may call an unsafe row safe only at an exact tie (a "
        "false negative, which a tolerance of 10⁻⁶ removes).",
        report.grid(
            *(
                figures.degree_histogram(
                    columns["p_star"], edges, where=f"{where}, {wording.bias_label(kind)}"
                )
                for kind, columns in by_bias.items()
            )
        ),
        figures.bound_scatter(
            by_bias["auto"], degree=2, seed=config["seed"], where=f"{where}, b_auto"
        ),
        _bound_table(summary, [e for e in summary["bound"] if e["suite"] == suite]),
        report.details(
            "The same for the other suites",
            _bound_table(summary, [e for e in summary["bound"] if e["suite"] != suite]),
        ),
    )


def _bound_table(summary: Summary, entries: Sequence[wording.Entry]) -> Markup:
    ties = {(e["suite"], e["bias_kind"]): e["ties"] for e in summary["prevalence"]}
    lines = [
        [
            suite_cell(entry, summary["config"]),
            entry["p"],
            stacked(interval(entry["agree"])) if entry["agree"] else cell(None),
            entry["false_negative"],
            entry["false_negative_eps"],
            ties[entry["suite"], entry["bias_kind"]].get(str(entry["p"]), 0),
            entry["false_positive"],
            entry["n"],
        ]
        for entry in wording.by_suite(entries)
    ]
    return table(
        [
            "Suite",
            "p",
            "Agree, %",
            "False negatives",
            "beyond 10⁻⁶",
            "Ties",
            "False positives",
            "Rows (n)",
        ],
        lines,
        caption="Predicted (p ≥ p*) against measured (Sₚ < 1), counts of active rows. False "
        "negatives: predicted safe, measured unsafe; beyond 10⁻⁶: those with Sₚ ≥ 1 + 10⁻⁶. Ties: "
        "Sₚ = 1 exactly. False positives: predicted unsafe, measured safe. Brackets: 95 % "
        "bootstrap over prompts.",
    )


def head_types(summary: Summary, by_head: Columns) -> Section:
    """What kinds of heads there are, in all and at both ends of the ranking."""
    config, total = summary["config"], len(by_head["type"])
    size = min(config["top_heads"], total)
    top, bottom = by_head["rank"] < size, by_head["rank"] >= total - size
    by_end = [
        {kind: int(np.sum(end & (by_head["type"] == kind))) for kind in TYPES}
        for end in (top, bottom)
    ]
    lines = []
    for kind in TYPES:
        own = by_head["s_2"][by_head["type"] == kind]
        median = cell(float(np.median(own)) if own.size else None)
        lines.append([kind, summary["head_types"][kind], *(end[kind] for end in by_end), median])
    return section(
        "Head types: what kind of heads are unsafe?",
        "Diffuse heads spread their attention over many keys, sinks park it on the first token. "
        "The paper finds mostly diffuse heads at the top of the ranking by S₂ and mostly sinks at "
        f"the bottom; here {by_end[0]['diffuse']} of the top {size} are diffuse and "
        f"{by_end[1]['sink']} of the bottom {size} are sinks.",
        table(
            ["Type", "Heads", f"in the top {size}", f"in the bottom {size}", "Median S₂ of heads"],
            lines,
            caption="Heads by type; top and bottom by median S₂ at b_auto "
            f"({suite_label(summary['ranking_suite'], config)}).",
            n=f"{number(total)} heads",
        ),
    )


def percent(found: Interval, *, signed: bool = False) -> Cell:
    """A share with its interval in one line, in percent; the n stands elsewhere."""
    return Cell(rate(found, spec="+.1f" if signed else ".1f").text, numeric=True)


def stacked(found: Interval, *, signed: bool = False) -> Cell:
    """A share in percent with its interval under it, for tables of many columns."""
    spec = "+.1f" if signed else ".1f"
    low, high = (number(100 * end, spec) for end in (found.low, found.high))
    return cell(100 * found.estimate, spec=spec, note=f"[{low}, {high}]")


def suite_cell(entry: wording.Entry, config: wording.Entry) -> Cell:
    """A suite with the length of its prompts and the bias under it."""
    tokens = wording.suite_tokens(entry["suite"], config)
    bias = wording.bias_label(entry["bias_kind"])
    return cell(wording.suite_name(entry["suite"]), note=", ".join(filter(None, (tokens, bias))))


def _verdict(verdict: str) -> Cell:
    return cell(verdict, tone=wording.TONES[verdict])
