"""The section of a report on linear attention: feature maps, states, and the cache they replace."""

from lm_jax.report import Section, cell, section, table
from lm_jax.report.prose import Prose
from polyattn_jax.audit.results import AuditSummary
from polyattn_jax.report.findings import by_recipe

_PROSE = Prose("polyattn_jax.report")


def cost(summary: AuditSummary) -> Section | None:
    """What every recipe costs as linear attention; None without recipes."""
    if not summary.linear:
        return None
    lines = [
        [
            entry.recipe,
            "yes" if entry.finite else cell("no", note=entry.reason),
            *map(
                cell,
                (
                    entry.degree,
                    entry.features,
                    entry.tensor_features,
                    entry.state,
                    entry.cache_tokens,
                ),
            ),
        ]
        for entry in by_recipe(summary.linear)
    ]
    return section(
        "Linear attention: what would a state cost?",
        _PROSE("linear"),
        table(
            [
                "Recipe",
                "Finite feature map",
                "Degree",
                "Features",
                "without symmetry",
                "Numbers in the state",
                "Tokens of KV cache",
            ],
            lines,
            caption=_PROSE("linear_caption"),
        ),
    )
