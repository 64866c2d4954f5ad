"""The report of a training of replaced heads."""

from pathlib import Path
import textwrap

from lm_jax import report
from lm_jax.console.terminal import format_table
from lm_jax.report import Column, Points, Report, Section, cell, section, table, table_of
from lm_jax.report.markup import Markup, number
from lm_jax.report.tables import interval_text, rate
from lm_jax.statistics import Interval
from polyattn_jax.audit.bias_tables import describe
from polyattn_jax.recipes.row_maps import parse_recipe
from polyattn_jax.studies.distill.results import DistillSummary, LogitStage
from polyattn_jax.studies.distill.settings import DistillConfig

QUESTION = "Does the safe share predict what training repairs?"
# A rank correlation from here on is called more than a little.
CLEAR = 0.3
TERMS = {
    "error": "Sum over tokens of |z' - z|², over that of |z|²: z is the output of a head under "
    "softmax, z' under the recipe, both on the residual stream of the frozen model.",
    "safe share": "Share of rows in which the recipe gives the key that softmax prefers more than "
    "all other keys together, S < 1.",
    "divergence": "KL(softmax || hybrid) of the next token, mean over tokens, in nats: what the "
    "second stage trains.",
    "repaired": "Share of the error before training that training removes.",
    "interval": "95 %, from resampling documents; of a rank correlation, from resampling heads. "
    "Of one training.",
}


def build(config: DistillConfig, summary: DistillSummary, folder: Path) -> Report:
    """The report of a summary, which holds what it needs of the settings."""
    del config, folder
    return Report(
        f"Trained heads: {Path(summary.model).name}, {summary.recipe}",
        lambda: [
            section("Output and loss", _numbers(summary)),
            *([_logits(summary, summary.logits)] if summary.logits else []),
            _prediction(summary),
            _heads(summary),
            section("Terms", report.key_values(TERMS)),
        ],
        lead=[report.verdict(conclusion(summary), answer(summary))],
        lines=[format_summary(summary)],
    )


def conclusion(summary: DistillSummary) -> str:
    """What the training changes, in one sentence."""
    before, after = (number(each.estimate) for each in (summary.before, summary.after))
    option = parse_recipe(summary.recipe).option
    return (
        f"{summary.steps:,} updates of the {summary.trained} of {summary.replaced} of "
        f"{summary.layers * summary.heads} heads under {summary.recipe} ({option} = "
        f"{describe(summary.bias)}) take the error of their output from "
        f"{summary.error_before.estimate:.3g} to {summary.error_after.estimate:.3g}, and the loss "
        f"over softmax from {before} to {after} nats "
        f"per token (one run).{_second(summary.logits)}"
    )


def _second(stage: LogitStage | None) -> str:
    if stage is None:
        return ""
    ends = (stage.divergence_before, stage.divergence_after)
    divergence = " to ".join(number(each.estimate) for each in ends)
    return (
        f" {stage.steps:,} updates on the model's distribution of the next token then take the "
        f"divergence from it from {divergence} nats, and the loss over softmax to "
        f"{number(stage.after.estimate)}."
    )


def answer(summary: DistillSummary) -> str:
    """The answer to `QUESTION`, from the interval of the rank correlation."""
    rank = summary.repair_rank
    if not _has_s(summary):
        return f"{QUESTION} {parse_recipe(summary.recipe).unmeasured}."
    if rank is None:
        return f"{QUESTION} Nothing to rank: the safe share, or what is repaired, is the same."
    where = f"rank correlation {interval_text(rank, '+.2f')} over {rank.n} heads"
    if rank.low <= 0 <= rank.high:
        return f"{QUESTION} Not shown: {where}."
    extent = "Yes" if abs(rank.estimate) >= CLEAR else "Only a little"
    which = "safer" if rank.low > 0 else "less safe"
    return f"{QUESTION} {extent}, {which} heads are repaired more: {where}."


def _numbers(summary: DistillSummary) -> Markup:
    heads = ["", "Softmax", "Before", "After", "After − before"]
    loss, error = {"spec": "+.3f", "scale": 1.0}, {"spec": ".3g", "scale": 1.0}
    lines = [
        [
            "error of the output",
            0.0,
            rate(summary.error_before, **error),
            rate(summary.error_after, **error),
            rate(summary.error_change, spec="+.3g", scale=1.0),
        ],
        [
            "loss over softmax, nats per token",
            cell(0.0, note=f"loss {summary.softmax_loss.estimate:.3f}"),
            rate(summary.before, **loss),
            rate(summary.after, **loss),
            rate(summary.change, **loss),
        ],
    ]
    caption = (
        f"On {summary.tokens:,} held-out tokens of {summary.documents} documents; trained on "
        f"{summary.trained_tokens:,} tokens, {summary.parameters:,} parameters."
    )
    return table(heads, lines, caption=caption)


def _logits(summary: DistillSummary, stage: LogitStage) -> Section:
    loss, divergence = {"spec": "+.3f", "scale": 1.0}, {"spec": ".3g", "scale": 1.0}
    lines = [
        [
            "divergence, nats per token",
            rate(stage.divergence_before, **divergence),
            rate(stage.divergence_after, **divergence),
            rate(stage.divergence_change, spec="+.3g", scale=1.0),
        ],
        [
            "loss over softmax, nats per token",
            rate(summary.after, **loss),
            rate(stage.after, **loss),
            rate(stage.change, **loss),
        ],
    ]
    caption = (
        f"{stage.steps:,} updates of {stage.parameters:,} parameters on {stage.trained_tokens:,} "
        f"tokens; adapters of {', '.join(stage.targets)}."
    )
    heads = ["", "After the heads", "After the logits", "Change"]
    return section("Second stage: logits", table(heads, lines, caption=caption))


def _prediction(summary: DistillSummary) -> Section:
    if not _has_s(summary):
        return section(QUESTION, answer(summary))
    heads = summary.by_head
    titles = [f"{head.layer}.{head.head}" for head in heads]
    safe = [h.safe_before for h in heads if h.safe_before is not None]
    points = Points("replaced heads", safe, [h.repaired for h in heads], titles)
    return section(
        QUESTION,
        answer(summary),
        table(
            ["Safe share before, ranked against", "Spearman"],
            [[name, _rank(rank)] for name, rank in _ranks(summary).items()],
            caption="Rank correlation over the replaced heads; intervals resample heads.",
        ),
        report.scatter(
            [points],
            caption="A point is a head, layer.head.",
            x_label="safe share before training",
            y_label="share of the error that training removes",
            n=len(heads),
        ),
    )


def _has_s(summary: DistillSummary) -> bool:
    """Whether S is defined for the rows of the recipe."""
    signed = getattr(parse_recipe(summary.recipe).map, "signed", False)
    return not signed and any(head.safe_before is not None for head in summary.by_head)


def _ranks(summary: DistillSummary) -> dict[str, Interval | None]:
    """Rank correlations of the safe share before training, by what it is ranked against."""
    return {
        "error before": summary.error_rank,
        "repaired": summary.repair_rank,
        "error after": summary.after_rank,
    }


def _rank(rank: Interval | None) -> report.Cell:
    return cell(None) if rank is None else rate(rank, spec="+.2f", scale=1.0)


def _heads(summary: DistillSummary) -> Section:
    shown = table_of(
        summary.by_head,
        [
            Column("Head", value=lambda h: f"{h.layer}.{h.head}"),
            Column("Safe, softmax", ".2f", lambda h: h.safe_softmax),
            Column("Safe before", ".2f", lambda h: h.safe_before),
            Column("Safe after", ".2f", lambda h: h.safe_after),
            Column("S before", ".3g", lambda h: None if h.safe_before is None else h.s_before),
            Column("S after", ".3g", lambda h: None if h.safe_after is None else h.s_after),
            Column("Error before", ".3g", lambda h: h.error_before),
            Column("Error after", ".3g", lambda h: h.error_after),
            Column("Repaired", ".2f", lambda h: h.repaired),
        ],
        caption="Replaced heads, layer.head; S is the median over rows.",
    )
    return section("Heads", report.details("All heads", shown))


def format_summary(summary: DistillSummary) -> str:
    """The numbers as plain text of at most 80 columns."""

    def ends(interval: Interval, spec: str) -> tuple[str, str]:
        return f"{interval.estimate:{spec}}", f"{interval.low:{spec}} to {interval.high:{spec}}"

    rows: list[tuple[str, str, str]] = [
        ("error of the output, before", *ends(summary.error_before, ".3g")),
        ("  after", *ends(summary.error_after, ".3g")),
        ("  change (paired)", *ends(summary.error_change, "+.3g")),
        ("loss of softmax, nats per token", *ends(summary.softmax_loss, ".3f")),
        ("  of the hybrid over it, before", *ends(summary.before, "+.3f")),
        ("  after", *ends(summary.after, "+.3f")),
        ("  change (paired)", *ends(summary.change, "+.3f")),
    ]
    if stage := summary.logits:
        rows += [
            ("  after the second stage", *ends(stage.after, "+.3f")),
            ("  change (paired)", *ends(stage.change, "+.3f")),
            ("divergence before that stage", *ends(stage.divergence_before, ".3g")),
            ("  after", *ends(stage.divergence_after, ".3g")),
            ("  change (paired)", *ends(stage.divergence_change, "+.3g")),
        ]
    for name, rank in _ranks(summary).items() if _has_s(summary) else ():
        estimate, interval = ends(rank, "+.2f") if rank else ("none", "")
        rows.append((f"safe share and {name}", estimate, interval))
    lines = [*textwrap.wrap(conclusion(summary), 80), ""]
    lines += [format_table(("", "estimate", "95 % interval"), rows), ""]
    return "\n".join([*lines, *textwrap.wrap(answer(summary), 80)])
