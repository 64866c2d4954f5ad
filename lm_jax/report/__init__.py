"""Reports: one offline HTML file per run, made of escaped parts.

sections = [section("Accuracy", "What was measured.", table(...), curves(...))]
write(folder / "report.html", page("Audit", sections, provenance={...}, lead=[verdict(...)]))
"""

from lm_jax.report.bars import Bar, bars, histogram
from lm_jax.report.heat import heat_map, words
from lm_jax.report.page import (
    Section,
    coverage,
    details,
    facts,
    grid,
    key_values,
    page,
    section,
    slug,
    verdict,
)
from lm_jax.report.plots import Note, Points, Series, curves, scatter
from lm_jax.report.tables import Cell, Column, cell, compared, rate, table

__all__ = [
    "Bar",
    "Cell",
    "Column",
    "Note",
    "Points",
    "Section",
    "Series",
    "bars",
    "cell",
    "compared",
    "coverage",
    "curves",
    "details",
    "facts",
    "grid",
    "heat_map",
    "histogram",
    "key_values",
    "page",
    "rate",
    "scatter",
    "section",
    "slug",
    "table",
    "verdict",
    "words",
]
