"""Mass of heads and pairs, by hand; the comparison of two models, on tables made by hand."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from sparse_jax.graphs.mediation import Mediation
from sparse_jax.studies.graphs import comparison, mass
from sparse_jax.studies.graphs.explanations import carrying_pairs
from sparse_jax.studies.graphs.piece import measure_mediation, mediated_edges
from sparse_jax.studies.graphs.report_text import format_ratio
from sparse_jax.studies.graphs.results import EdgeCounts
from sparse_jax.studies.graphs.run import SCHEMA
from sparse_jax.studies.graphs.settings import COMPARED, GraphConfig
from tests.sparse_jax.graphs.small_graphs import small_graph, small_model

CONFIG = GraphConfig(
    dense="a",
    dense_transcoder="b",
    sparse="c",
    sparse_transcoder="d",
    fraction=0.9,
    resamples=400,
)


def test_absolute_mass_by_hand():
    mass_XC = mass.cumulative(np.array([[2.0, -3.0, 4.0, 1.0], [0.0, 0.0, -5.0, 0.0]]), "absolute")
    np.testing.assert_allclose(mass_XC, [[0.4, 0.7, 0.9, 1.0], [1.0, 1.0, 1.0, 1.0]])
    assert mass.needed(mass_XC, 0.9).tolist() == [3, 1]
    assert mass.needed(mass_XC, 0.91).tolist() == [4, 1]


def test_signed_mass_is_in_the_direction_of_the_sum():
    # Sums 5 and -5: the largest in their direction are 3, 2 and then what takes back.
    shares = np.array([[-2.0, 3.0, 2.0, 2.0], [2.0, -3.0, -2.0, -2.0]])
    mass_XC = mass.cumulative(shares, "signed")
    np.testing.assert_allclose(mass_XC, [[0.6, 1.0, 1.0, 1.0]] * 2)
    assert mass.needed(mass_XC, 0.9).tolist() == [2, 2]


def test_edges_that_no_component_carries_are_left_out_and_counted():
    score_XLNTS = np.zeros((3, 2, 2, 3, 3), np.float32)
    score_XLNTS[0, 1, 0, 2, 1] = 2.0
    score_XLNTS[1, 0, 1, 2, 0], score_XLNTS[1, 0, 1, 1, 1] = 1.0, -1.0
    sums = mass.MassSums(0.9)
    different_X = np.array([True, False, False])
    sums.add(score_XLNTS[:1], different_X[:1])
    sums.add(score_XLNTS[1:], different_X[1:])
    means = {mass.Kind(each.component, each.sign, each.positions): each for each in sums.means()}
    found = {kind[:2]: each for kind, each in means.items() if kind.positions == "any"}
    # Edge 1 has two pairs that cancel: no head, and no signed sum of pairs.
    assert {kind: (each.edges, each.unmediated) for kind, each in found.items()} == {
        ("heads", "absolute"): (1, 2),
        ("heads", "signed"): (1, 2),
        ("pairs", "absolute"): (2, 1),
        ("pairs", "signed"): (1, 2),
    }
    # Six causal pairs of three positions, in each head of each layer.
    assert len(found["pairs", "absolute"].mass_C) == 6 * 2 * 2
    assert len(found["heads", "absolute"].mass_C) == 2 * 2
    np.testing.assert_allclose(found["pairs", "absolute"].mass_C[:2], [0.75, 1.0])
    assert found["pairs", "absolute"].needed == 1.5
    # Between different positions is the first edge alone, and it passes a head.
    others = [each for kind, each in means.items() if kind.positions == "different"]
    assert [(each.edges, each.unmediated, each.needed) for each in others] == [(1, 0, 1.0)] * 4
    empty = mass.MassSums(0.9)
    empty.add(score_XLNTS[2:], different_X[2:])
    (each, *_) = empty.means()
    assert each.edges == 0 and math.isnan(each.needed) and not each.mass_C.size


ANY = mass.Kind("pairs", "absolute", "any")


def test_pairs_are_ranked_by_their_shares_of_all_edges():
    """A pair that is the eleventh of each of 12 edges carries more than those before it."""
    heads, T, X = 4, 6, 12
    head, query, key = np.nonzero(np.broadcast_to(np.tri(T, dtype=bool), (heads, T, T)))
    score_XLNTS = np.zeros((X, 1, heads, T, T), np.float32)
    score_XLNTS[:, 0, 0, 0, 0] = 0.9
    for x in range(X):
        larger = 1 + np.arange(10 * x, 10 * x + 10) % (len(head) - 1)
        score_XLNTS[x, 0, head[larger], query[larger], key[larger]] = 1.0
    zero_XL = np.zeros((X, 1))
    graph = SimpleNamespace(
        replacement=SimpleNamespace(
            error_LTD=np.zeros((1, T, 1)),
            layers=SimpleNamespace(mixer=SimpleNamespace(width=1, pattern_shape=(1, heads, T, T))),
        ),
        nodes=pa.table({"position": [0] * (2 * X)}),
        edge_weights=lambda edges: np.ones(len(edges)),
        mediations=lambda part, batch, by_head: [
            Mediation(score_XLNTS[part[:, 0]], zero_XL, zero_XL, np.ones(X, int))
        ],
    )
    edges = np.stack([np.arange(X), X + np.arange(X)], 1)
    measured = measure_mediation(graph, edges, 0.9, key=None)
    listed = {tuple(pair[:4]) for each in measured.carried.values() for pair in each.pairs}
    assert (0, 0, 0, 0) not in listed
    first, second = carrying_pairs(measured.size_LNTS, 2)
    assert first == (0, 0, 0, 0) != second
    np.testing.assert_allclose(measured.size_LNTS[first], 0.9 * X, rtol=1e-6)


def test_prototypes_are_measured_as_heads_are():
    """Three in a layer, of which the config of the decoder says nothing."""
    graph = small_graph("protot")
    assert graph.replacement.layers.mixer.pattern_LNTS.shape[1] == 3
    assert small_model("protot").cfg.num_heads != 3
    edges = mediated_edges(graph, graph.prune(), 40)
    measured = measure_mediation(graph, edges, 0.9, key=None)
    one_by_one = np.stack([graph.mediation(*edge) for edge in edges.tolist()])
    np.testing.assert_allclose(
        measured.size_LNTS, np.abs(one_by_one).sum(0, dtype=np.float64), rtol=1e-4, atol=1e-6
    )
    assert len(measured.carried) == len(edges) and measured.error_L.max() <= 1e-5


def test_edges_of_a_long_prompt_are_split_by_heads_alone():
    graph = small_graph("gpt2", 0.3, 2)
    edges = mediated_edges(graph, graph.prune(), 40)
    key = (*edges[0].tolist(),)
    both = measure_mediation(graph, edges, 0.9, key=key)
    heads = measure_mediation(graph, edges, 0.9, key=key, components=("heads",))
    assert heads.size_LNTS.shape[2:] == heads.key_LNTS.shape[2:] == (1, 1)
    assert heads.carried.keys() == both.carried.keys()
    for edge, each in heads.carried.items():
        wanted = both.carried[edge].heads
        assert not each.pairs and [share[:2] for share in each.heads] == [x[:2] for x in wanted]
        got, want = (np.array([share[2] for share in x]) for x in (each.heads, wanted))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    assert heads.error_L.max() <= 1e-5
    for got, want in zip(heads.masses, both.masses, strict=True):
        if got.component == "pairs":
            assert got.edges == 0 and not len(got.mass_C)
        else:
            np.testing.assert_allclose(got.mass_C, want.mass_C, rtol=1e-4)


def rows(role, slug, curve, needed, *, kind=ANY, edges=3, unmediated=0):
    return {
        "role": role,
        "slug": slug,
        **kind._asdict(),
        "edges": edges,
        "unmediated": unmediated,
        "needed": needed,
        "mass": curve,
    }


def test_ratios_by_hand():
    """Curves that reach 90 % at exactly 4 and 2 components in both prompts."""
    dense, sparse = [0.3, 0.6, 0.8, 0.9, 1.0], [0.5, 0.9, 1.0]
    table = pa.Table.from_pylist(
        [
            rows("dense", "one", dense, 4.0),
            rows("dense", "two", [*dense, 1.0], 6.0),
            rows("sparse", "one", sparse, 2.0),
            rows("sparse", "two", sparse, 1.0, edges=1, unmediated=2),
            # A model without a mediated edge: the prompt counts for neither.
            rows("dense", "three", [1.0], 1.0),
            rows("sparse", "three", [], math.nan, edges=0, unmediated=3),
        ],
        schema=SCHEMA,
    )
    mass_PRC, needed_PR = comparison.curves(table, COMPARED, ANY)
    np.testing.assert_array_equal(needed_PR, [[4.0, 2.0], [6.0, 1.0]])
    np.testing.assert_array_equal(mass_PRC[0, 1], [*sparse, 1.0, 1.0, 1.0])
    (ratio,) = (r for r in comparison.ratios(CONFIG, table, COMPARED) if r.of_mean)
    assert (ratio.component, ratio.sign, ratio.positions) == ANY and ratio.paper == 16.1
    # Of all prompts, those that count for neither too.
    assert (ratio.dense, ratio.sparse) == (EdgeCounts(9, 0), EdgeCounts(9, 5))
    assert "2 prompts; the paper's is 16.1; left out, as no head carries them: 0 of 9 edges of" in (
        format_ratio(ratio)
    )
    assert ratio.of_mean.estimate == pytest.approx(2.0) and ratio.of_mean.n == 2
    # 5 : 1.5 over both; two prompts are too few for an interval.
    assert ratio.per_edge.estimate == pytest.approx(10 / 3)
    assert not ratio.per_edge.bounded and ratio.per_edge.n == 2
    assert comparison.ratios(CONFIG, table, ["model"]) == []
    other = dataclasses.replace(CONFIG, fraction=0.8)
    assert all(each.paper is None for each in comparison.ratios(other, table, COMPARED))


def test_edges_between_different_positions_have_a_ratio_of_their_own():
    """All edges: 2 components to 1. Those between positions: 4 to 1, on one prompt more."""
    different, curve = ANY._replace(positions="different"), [0.5, 0.6, 0.8, 0.9, 1.0]
    made = []
    for slug in ("one", "two", "three"):
        sparse = [] if slug == "three" else [0.9, 1.0]
        made += [
            rows("dense", slug, [0.5, 0.9, 1.0], 2.0),
            rows("sparse", slug, sparse, 1.0, edges=2 * bool(sparse), unmediated=1),
            rows("dense", slug, curve, 4.0, kind=different, edges=2),
            rows("sparse", slug, [0.9, 1.0], 1.0, kind=different, edges=1),
        ]
    table = pa.Table.from_pylist(made, schema=SCHEMA)
    every, apart = (r for r in comparison.ratios(CONFIG, table, COMPARED) if r.of_mean)
    assert (every.positions, apart.positions) == ("any", "different")
    assert [each.of_mean.estimate for each in (every, apart)] == pytest.approx([2.0, 4.0])
    assert (every.sparse, apart.sparse) == (EdgeCounts(7, 3), EdgeCounts(3, 0))
    assert apart.paper is None
