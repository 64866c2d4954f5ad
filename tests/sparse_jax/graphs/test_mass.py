"""Mass of heads and pairs, by hand; the comparison of two models, on tables made by hand."""

import dataclasses
import math

import numpy as np
import pyarrow as pa
import pytest

from sparse_jax.graphs import comparison, mass
from sparse_jax.graphs.config import COMPARED, GraphConfig
from sparse_jax.graphs.study import SCHEMA

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
    sums.add(score_XLNTS[:1])
    sums.add(score_XLNTS[1:])
    found = {(each.component, each.sign): each for each in sums.means()}
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
    empty = mass.MassSums(0.9)
    empty.add(score_XLNTS[2:])
    (each, *_) = empty.means()
    assert each.edges == 0 and math.isnan(each.needed) and not each.mass_C.size


def rows(role, slug, curve, needed):
    return {
        "role": role,
        "slug": slug,
        "component": "pairs",
        "sign": "absolute",
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
            rows("sparse", "two", sparse, 1.0),
            # A model without a mediated edge: the prompt counts for neither.
            rows("dense", "three", [1.0], 1.0),
            rows("sparse", "three", [], math.nan),
        ],
        schema=SCHEMA,
    )
    mass_PRC, needed_PR = comparison.curves(table, COMPARED, "pairs", "absolute")
    np.testing.assert_array_equal(needed_PR, [[4.0, 2.0], [6.0, 1.0]])
    np.testing.assert_array_equal(mass_PRC[0, 1], [*sparse, 1.0, 1.0, 1.0])
    (ratio,) = (r for r in comparison.ratios(CONFIG, table, COMPARED) if r.of_mean)
    assert (ratio.component, ratio.sign, ratio.paper) == ("pairs", "absolute", 16.1)
    assert ratio.of_mean.estimate == pytest.approx(2.0) and ratio.of_mean.n == 2
    # 5 : 1.5 over both, 2 and 6 over either alone.
    assert ratio.per_edge.estimate == pytest.approx(10 / 3)
    assert (ratio.per_edge.low, ratio.per_edge.high) == (2.0, 6.0)
    assert comparison.ratios(CONFIG, table, ["model"]) == []
    other = dataclasses.replace(CONFIG, fraction=0.8)
    assert all(each.paper is None for each in comparison.ratios(other, table, COMPARED))
