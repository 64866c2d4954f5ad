"""The section of a report on the rows of the needle prompts themselves (Tables 5, 12 and 14)."""

from lm_jax.report import Cell, Section, cell, section, table
from lm_jax.report.markup import number
from lm_jax.report.prose import Prose
from lm_jax.statistics import Interval
from polyattn_jax.audit.results import AuditSummary, MatchedSafety
from polyattn_jax.report.findings import suite_label
from polyattn_jax.report.recipes import stacked

_PROSE = Prose("polyattn_jax.report")


def answered_rows(summary: AuditSummary) -> Section | None:
    """Measured and predicted safety on the rows of the needle prompts, by target and head set."""
    entries, config = summary.matched, summary.config
    if not entries:
        return None
    top = f"top {config.top_heads}"
    n = f"{number(config.niah_n)} prompts"
    where = suite_label(f"niah_{config.sweep_length}", config)
    return section(
        "The rows of the answered prompts: is the answer's key reached?",
        _PROSE("answered_rows", where=where),
        table(
            [
                "Recipe",
                "All, %",
                "pred., %",
                f"{top}, %",
                "pred., %",
                f"own {top}, %",
                "FN",
                "Dead, %",
            ],
            [
                [
                    e.recipe,
                    *map(_cell, (e.all.measured, e.all.predicted, e.top.measured)),
                    *map(_cell, (e.top.predicted, e.own_top.measured)),
                    e.top_false_negative,
                    _dead(e),
                ]
                for e in entries
            ],
            caption=_PROSE("matched_caption", top=number(config.top_heads)),
            n=n,
        ),
        table(
            [
                "Recipe",
                "Best key, %",
                "Dead, %",
                "Safe, %",
                "pred., %",
                "if best, %",
                "pred., %",
                f"if best, {top}, %",
            ],
            [
                [
                    e.recipe,
                    *map(_cell, (e.answer_is_argmax, e.answer_dead)),
                    *map(_cell, (e.answer.measured, e.answer.predicted)),
                    *map(_cell, (e.answer_argmax.measured, e.answer_argmax.predicted)),
                    _cell(e.answer_argmax_top.measured),
                ]
                for e in entries
            ],
            caption=_PROSE("answer_caption"),
            n=n,
        ),
    )


def _dead(e: MatchedSafety) -> Cell:
    """Shares of dead rows over all heads, the top ones and the recipe's own top ones."""
    shares = (part.dead for part in (e.all, e.top, e.own_top))
    return cell(", ".join(f"{100 * dead.estimate:.1f}" if dead else "–" for dead in shares))


def _cell(share: Interval | None) -> Cell:
    return stacked(share) if share else cell(None)
