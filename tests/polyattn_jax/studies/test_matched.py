"""The matched diagnostic against counts over the rows of a whole audit."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from lm_jax.run.results import load_result
from polyattn_jax.audit.results import AuditSummary
from polyattn_jax.recipes.diagnostic import Status
from polyattn_jax.studies.audit.matched import head_ranking


def mean(values):
    values = list(values)
    return pytest.approx(np.mean(values)) if values else None


def assert_share(interval, values):
    assert (interval.estimate if interval else None) == mean(values)


def test_shares_are_counts_of_the_rows_of_the_sweep(audited):
    summary = load_result(audited / "summary.json", AuditSummary)
    table = pq.read_table(audited / "rows.parquet").to_pylist()
    heads = sorted(pq.read_table(audited / "heads.parquet").to_pylist(), key=lambda h: h["rank"])
    top = {(h["layer"], h["head"]) for h in heads[:4]}
    assert [e.recipe for e in summary.matched] == ["relu_p4_bauto", "relu_p4_b0", "relu_p2_b0"]
    for entry in summary.matched:
        own = [r for r in table if (r["suite"], r["bias_kind"]) == ("niah_64", entry.bias_kind)]
        best = [r for r in own if (r["target"], r["status"]) == ("argmax", Status.ACTIVE)]
        s = f"s_{entry.p}"
        in_top = [r for r in best if (r["layer"], r["head"]) in top]
        for shares, rows in ((entry.all, best), (entry.top, in_top)):
            assert shares.rows == len(rows)
            assert_share(shares.measured, [r[s] < 1 for r in rows])
            assert_share(shares.predicted, [r["p_star"] <= entry.p for r in rows])
        answer = [r for r in own if r["target"] == "answer"]
        assert_share(entry.answer_is_argmax, [r["argmax"] == r["answer"] for r in answer])
        assert_share(entry.answer_dead, [r["status"] == Status.DEAD for r in answer])
        active = [r for r in answer if r["status"] == Status.ACTIVE]
        hit = [r for r in active if r["argmax"] == r["answer"]]
        hit_top = [r for r in hit if (r["layer"], r["head"]) in top]
        pairs = zip((active, hit, hit_top), shares_of(entry), strict=True)
        for rows, shares in pairs:
            assert shares.rows == len(rows)
            assert_share(shares.measured, [r[s] < 1 for r in rows])
        # Where the answer is the best key, both targets are one.
        both = {(r["prompt"], r["layer"], r["head"]): r[s] for r in best}
        assert all(both[r["prompt"], r["layer"], r["head"]] == r[s] for r in hit)
    assert entry.answer_argmax.rows > 0
    page = (audited / "report.html").read_text("utf-8")
    assert "is the answer’s key reached?" in page or "is the answer&#39;s key reached?" in page


def shares_of(entry):
    return entry.answer, entry.answer_argmax, entry.answer_argmax_top


def test_heads_are_ranked_at_the_recipe_and_dead_ones_come_first():
    columns = {
        "layer": np.array([0, 0, 0, 1, 1, 1]),
        "head": np.array([0, 1, 1, 0, 1, 1]),
        "status": np.array([1, 1, 0, 0, 1, 1]),
        "s_4": np.array([0.5, 3.0, np.inf, np.inf, 1.0, 0.2]),
    }
    assert head_ranking(columns, 4, 2).tolist() == [2, 1, 3, 0]
