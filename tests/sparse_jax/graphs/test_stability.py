"""Overlap of graphs over heads: the definition, its bounds, and which graphs are compared."""

import itertools
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from sparse_jax.studies.graphs import stability
from sparse_jax.studies.graphs.results import ComparedPrompt
from sparse_jax.studies.graphs.settings import COMPARED, GraphConfig

CONFIG = GraphConfig(resamples=200)
ALICE, WAR = ("ioi", "Alice gives"), ("greater-than", "the war")


def graph(role, about, shares, slug=""):
    kind, meaning = about
    shares = tuple(shares)
    return SimpleNamespace(role=role, kind=kind, meaning=meaning, head_shares=shares, slug=slug)


def test_shares_of_heads_are_those_of_the_absolute_mass():
    size_LNTS = np.zeros((2, 2, 3, 3))
    size_LNTS[0, 1, 2, 0], size_LNTS[0, 1, 2, 1], size_LNTS[1, 0, 1, 1] = 1.0, 2.0, 1.0
    assert stability.head_shares(size_LNTS) == (0.0, 0.75, 0.25, 0.0)
    # Nothing that a head carries has no distribution, and no share is 0 / 0.
    assert stability.head_shares(np.zeros((2, 2, 3, 3))) == ()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8))
def test_the_overlap_is_one_minus_the_total_variation(counts):
    p, q = (np.array(column, float) + 1e-9 for column in zip(*counts, strict=True))
    p, q = p / p.sum(), q / q.sum()
    found = stability.overlap(p, q)
    assert found == pytest.approx(1 - np.abs(p - q).sum() / 2, abs=1e-12)
    assert found == stability.overlap(q, p) and -1e-12 <= found <= 1 + 1e-12
    assert stability.overlap(p, p) == pytest.approx(1.0)


def test_means_are_over_pairs_then_over_meanings():
    bob = ("ioi", "Bob gives")
    given_shares = {
        ALICE: [(1, 0, 0), (0.5, 0.5, 0), (0, 1, 0)],
        bob: [(0.2, 0.8, 0), (0.2, 0.8, 0)],
        WAR: [(0, 0, 1), (0.5, 0, 0.5)],
    }
    graphs = [graph("model", about, s) for about, many in given_shares.items() for s in many]
    # Graphs of prompts without a meaning are of another kind, if anything.
    graphs.append(graph("model", ("completion", ""), (0.1, 0.2, 0.7)))
    result, of_gifts, of_wars = stability.measure(CONFIG, graphs, ["model"], ())

    def mean(pairs):
        return np.mean([np.minimum(a.head_shares, b.head_shares).sum() for a, b in pairs])

    within, across = [], []
    for kind, meaning in given_shares:
        same = [each for each in graphs if each.meaning == meaning]
        within.append(mean(itertools.combinations(same, 2)))
        across.append(mean((a, b) for a in same for b in graphs if b.kind != kind))
    # (0.5 + 0 + 0.5) / 3, 1 and 0.5.
    np.testing.assert_allclose(within, [1 / 3, 1, 0.5])
    assert (result.within.estimate, result.within.n) == (pytest.approx(np.mean(within)), 3)
    assert result.across.estimate == pytest.approx(np.mean(across))
    # Three meanings have a mean and no interval.
    assert not result.within.bounded
    assert [each.kind for each in (result, of_gifts, of_wars)] == ["", "ioi", "greater-than"]
    assert (of_gifts.within.estimate, of_gifts.within.n) == (pytest.approx(2 / 3), 2)
    assert of_gifts.across.estimate == pytest.approx(np.mean(across[:2])) and of_wars.within is None


def test_two_models_are_compared_by_meaning():
    graphs = []
    for role, first in (("dense", 0.5), ("sparse", 0.9)):
        for about, moved in ((ALICE, 0.1), (WAR, 0.3)):
            graphs += [graph(role, about, (first, 1 - first))]
            graphs += [graph(role, about, (first - moved, 1 - first + moved))]
    # A meaning of which one model has no mass in any head is left out of both.
    lost = ("ioi", "Carol gives")
    graphs += [graph(role, lost, (1.0, 0.0)) for role in ("dense", "dense", "sparse")]
    graphs += [graph("sparse", lost, ())]
    dense, sparse, change, *by_kind = stability.measure(CONFIG, graphs, ["dense", "sparse"], ())
    assert [each.role for each in (dense, sparse)] == ["dense", "sparse"]
    for each in (dense, sparse):
        assert each.within.estimate == pytest.approx(0.8) and each.within.n == 2
    assert change.role == "sparse minus dense" and len(by_kind) == 2 * 3
    assert change.within.estimate == pytest.approx(0.0)


def test_without_rephrasings_there_is_nothing_to_compare():
    graphs = [graph("model", ("ioi", ""), (1.0, 0.0)), graph("model", WAR, (1.0, 0.0))]
    assert stability.measure(CONFIG, graphs, ["model"], ()) == ()
    one = [*graphs, graph("model", WAR, (0.0, 1.0))]
    (result,) = stability.measure(CONFIG, one, ["model"], ())
    assert result.within is None
    # Meanings without a kind are in the mean of all, and have none of their own.
    plain = [graph("model", ("", "a gift"), (1.0, 0.0)) for _ in range(2)]
    assert [each.kind for each in stability.measure(CONFIG, [*one, *plain], ["model"], ())] == [
        "",
        "greater-than",
    ]


def test_prompts_that_are_not_compared_count_in_no_overlap():
    """Their graphs explain other tokens than one right one, by other heads."""
    shares = {"one": (1.0, 0.0, 0.0), "two": (1.0, 0.0, 0.0), "wrong": (0.0, 1.0, 0.0)}
    graphs = [
        graph(role, about, shares[slug], f"{slug} {about[0]}")
        for role in COMPARED
        for about in (ALICE, WAR)
        for slug in shares
    ]
    compared = [
        ComparedPrompt(f"{slug} {kind}", {}, "", "an answer is wrong" if slug == "wrong" else "")
        for kind, _ in (ALICE, WAR)
        for slug in shares
    ]
    dense, sparse, change, *_ = stability.measure(CONFIG, graphs, COMPARED, compared)
    assert [each.within.estimate for each in (dense, sparse, change)] == [1.0, 1.0, 0.0]
    assert dense.across.estimate == 1.0
    # One pair of three is of one target.
    dense, *_ = stability.measure(CONFIG, graphs, COMPARED, ())
    assert dense.within.estimate == pytest.approx(1 / 3)
