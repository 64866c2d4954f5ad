"""The page counts rows that the float32 error bound leaves undecided, and names its assumption."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest

from polyattn_jax.recipes.diagnostic import Status
from tests.polyattn_jax.report.test_report import (
    audit,
    build,
    diagnosed_rows,
    lines,
    parsed,
    text_of,
)

OPEN = 5


@pytest.fixture(scope="module")
def finding():
    """An audit with `OPEN` induction rows at b = 0 whose S_2 is 1 but for one rounding."""
    rows = diagnosed_rows()
    columns = {n: rows[n].to_numpy(zero_copy_only=False).copy() for n in rows.column_names}
    own = (columns["suite"] == "induction") & (columns["bias_kind"] == "zero")
    chosen = np.flatnonzero(own & (columns["status"] == Status.ACTIVE))[:OPEN]
    columns["s_2"][chosen] = np.nextafter(np.float32(1), np.float32(2))
    # one that p* calls safe: without the error bound it would be a false negative
    columns["p_star"][chosen] = [1.0, 3.0, 3.0, 3.0, 3.0]
    return audit(rows=pa.table(columns, schema=rows.schema))


def lines_of_all(tree, caption):
    """As `lines`, of every table whose caption begins so."""
    return [
        [text_of(cell) for cell in row]
        for figure in tree.iter("figure")
        if figure.get("class") == "table" and text_of(figure.find("figcaption")).startswith(caption)
        for row in figure.find(".//tbody")
    ]


def test_open_rows_are_listed_with_the_counts_that_exclude_them(finding):
    tree = parsed(build(*finding))
    of_bound = {(row[0], row[1]): row for row in lines_of_all(tree, "Predicted")}
    row = of_bound["induction64 tokens, b = 0", "2"]
    assert (row[3], row[7]) == ("0", str(OPEN))
    assert of_bound["induction64 tokens, b_auto", "2"][7] == "0"
    compared = {row[1]: row[4:] for row in lines(tree, "The paper's Table 8 beside")}
    ours, causes = compared["false negatives, rows"]
    assert ours.startswith("0n = ") and f"{row[8]} rows (paper: about 102,000)" in causes


def test_a_proof_that_takes_the_scores_as_exact_says_so(finding):
    page = text_of(parsed(build(*finding)))
    assert page.count("proved error bound") == page.count("given the float32 scores") > 0
    assert "Sₚ in float32 with a proved error bound" not in page
    result, rows, by_head = finding
    prevalence = tuple(
        dataclasses.replace(entry, undecided=dict.fromkeys(entry.undecided, 0))
        for entry in result.prevalence
    )
    result = dataclasses.replace(result, prevalence=prevalence)
    decided = text_of(parsed(build(result, rows, by_head)))
    assert "Given the float32 scores, the proved error bound decides every S." in decided
