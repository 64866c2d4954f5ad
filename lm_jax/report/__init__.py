"""Reports: one offline HTML file per run, of escaped parts and charts.

sections = [section("Accuracy", "What was measured.", table(...), curves(...))]
write(folder / "report.html", page("Audit", sections, provenance={...}, lead=[verdict(...)]))
"""

from lm_jax.report.charts import Bar, Points, Series, bars, curves, histogram, scatter
from lm_jax.report.heat import heat_map
from lm_jax.report.markup import slug
from lm_jax.report.page import (
    Report,
    Section,
    coverage,
    details,
    facts,
    grid,
    key_values,
    page,
    script,
    section,
    verdict,
)
from lm_jax.report.prose import Prose
from lm_jax.report.tables import Cell, Column, cell, compared, rate, table, table_of
from lm_jax.report.words import words

__all__ = [
    "Bar",
    "Cell",
    "Column",
    "Points",
    "Prose",
    "Report",
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
    "script",
    "section",
    "slug",
    "table",
    "table_of",
    "verdict",
    "words",
]
