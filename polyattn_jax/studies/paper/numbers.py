"""The paper's numbers beside those of an audit: all rows of comparison.parquet."""

from collections.abc import Iterator

from polyattn_jax.report import answer_rows, diagnostic_rows
from polyattn_jax.report.beside import Audit, ComparedNumber

OF_ITEMS = (
    diagnostic_rows.prevalence,
    diagnostic_rows.over_length,
    diagnostic_rows.calibration,
    answer_rows.literary,
    answer_rows.needle,
    answer_rows.suites,
    answer_rows.fixed_bias,
    answer_rows.ablation,
    answer_rows.literary_ablation,
    answer_rows.single_heads,
    diagnostic_rows.matched,
    diagnostic_rows.sigmoid,
    diagnostic_rows.bound,
    diagnostic_rows.types_of_heads,
)


def compare(audit: Audit) -> Iterator[ComparedNumber]:
    """Every number of the audit that stands in a table or figure of the paper."""
    for of_item in OF_ITEMS:
        yield from of_item(audit)
