"""The section of a report on linear attention: feature maps, states, and the cache they replace."""

from lm_jax.report import Column, Section, cell, section, table_of
from lm_jax.report.prose import Prose
from polyattn_jax.audit.results import AuditSummary
from polyattn_jax.report.findings import by_recipe

_PROSE = Prose("polyattn_jax.report")


def cost(summary: AuditSummary) -> Section | None:
    """What every recipe costs as linear attention; None without recipes."""
    if not summary.linear:
        return None
    return section(
        "Linear attention: what would a state cost?",
        _PROSE("linear"),
        table_of(
            by_recipe(summary.linear),
            [
                Column("Recipe", value=lambda e: e.recipe),
                Column(
                    "Finite feature map",
                    value=lambda e: "yes" if e.finite else cell("no", note=e.reason),
                ),
                Column("Degree", value=lambda e: e.degree),
                Column("Features", value=lambda e: e.features),
                Column("without symmetry", value=lambda e: e.tensor_features),
                Column("Numbers in the state", value=lambda e: e.state),
                Column("Tokens of KV cache", value=lambda e: e.cache_tokens),
            ],
            caption=_PROSE("linear_caption"),
        ),
    )
