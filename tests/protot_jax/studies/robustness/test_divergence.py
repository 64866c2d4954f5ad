"""Divergences against float64, their bounds and limits, and the agreement of two rankings."""

import math

import hypothesis
from hypothesis import strategies
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from lm_jax.errors import UsageError
from protot_jax.studies.robustness import agreement, arithmetic_geometric, jensen_shannon

EPSILON = float(np.finfo(np.float32).eps)


def exact(a, b):
    """JS and AG in float64 by their definitions, and the sum of absolute terms of JS."""
    p, q = (special.softmax(np.asarray(x, np.float64), axis=-1) for x in (a, b))
    m = (p + q) / 2
    js = (special.rel_entr(p, m) + special.rel_entr(q, m)).sum(-1) / 2
    ag = (special.rel_entr(m, p) + special.rel_entr(m, q)).sum(-1) / 2
    size = (np.abs(special.rel_entr(p, m)) + np.abs(special.rel_entr(q, m))).sum(-1) / 2
    return js, ag, size


@hypothesis.given(
    seed=strategies.integers(0, 2**32 - 1),
    scale=strategies.sampled_from([1e-3, 0.1, 1.0, 10.0, 60.0]),
    step=strategies.sampled_from([1e-4, 1e-2, 1.0, 20.0]),
)
def test_random_rows_against_float64(seed, scale, step):
    rng = np.random.default_rng(seed)
    a = (scale * rng.standard_normal((3, 50))).astype(np.float32)
    b = (a + step * rng.standard_normal((3, 50))).astype(np.float32)
    js = np.asarray(jensen_shannon(a, b), np.float64)
    want_js, want_ag, size = exact(a, b)
    # A log-probability is rounded to eps times its size and that of the largest logit, and dJS is
    # at most half the sum of |p - q| and m times that: with the square root for small JS.
    error = 4 * EPSILON * (1 + np.abs(np.stack([a, b])).max() + math.log(50))
    assert np.all(np.abs(js - want_js) <= error * (np.sqrt(8 * want_js) + error) + EPSILON * size)
    assert np.all(js <= math.log(2)) and np.all(js >= 0)
    assert np.array_equal(js, jensen_shannon(b, a))
    ag = np.asarray(arithmetic_geometric(a, b), np.float64)
    assert np.all(np.abs(ag - want_ag) <= error * (1 + want_ag) * 4)
    assert np.array_equal(ag, arithmetic_geometric(b, a))


def test_equal_rows_give_zero_and_disjoint_ones_ln_2():
    a = 5 * np.random.default_rng(0).standard_normal((4, 30)).astype(np.float32)
    assert np.array_equal(jensen_shannon(a, a), np.zeros(4))
    # A constant added to the logits changes no probability.
    assert np.all(np.asarray(jensen_shannon(a, a + 3)) < 1e-10)
    one, other = np.zeros(6, np.float32), np.zeros(6, np.float32)
    one[3:], other[:3] = -np.inf, -np.inf
    js = float(jensen_shannon(one, other))
    assert math.log(2) * (1 - 2 * EPSILON) <= js <= math.log(2)
    assert float(jensen_shannon(100 * one.clip(-1), 100 * other.clip(-1))) == js
    assert float(arithmetic_geometric(one, other)) == np.inf


def test_a_closed_form_and_a_small_divergence_keeps_its_digits():
    # p = (1/2, 1/2), q = (1, 0): m = (3/4, 1/4).
    js = float(jensen_shannon([0.0, 0.0], [0.0, -np.inf]))
    entropy = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    assert js == pytest.approx(entropy - 0.5 * math.log(2), rel=4 * EPSILON)
    # Over two outcomes of probability 1/2, a step d of the logit difference gives d^2 / 32.
    step = 1e-4
    assert float(jensen_shannon([0.0, 0.0], [step, 0.0])) == pytest.approx(step**2 / 32, rel=1e-3)


def test_the_papers_values_above_ln_2_are_possible_for_ag_alone():
    a, b = np.array([6.0, 0, 0], np.float32), np.array([0, 6.0, 0], np.float32)
    assert float(arithmetic_geometric(a, b)) > math.log(2) > float(jensen_shannon(a, b))


def test_low_precision_is_computed_in_float32_and_shapes_must_agree():
    a, b = jnp.array([1.0, 2.0, 4.0], jnp.bfloat16), jnp.array([1.0, 3.0, 0.5], jnp.bfloat16)
    js = jensen_shannon(a, b)
    assert js.dtype == jnp.float32
    assert float(js) == float(jensen_shannon(a.astype(jnp.float32), b.astype(jnp.float32)))
    with pytest.raises(UsageError, match=r"\(2,\) and logits_b \(3,\)"):
        jensen_shannon(np.zeros(2), np.zeros(3))


def test_agreement_of_rankings():
    a = np.arange(40, 0, -1.0)
    same = agreement(a, a + 1)
    assert same == (1.0, pytest.approx(1.0), True, pytest.approx(special.softmax(a)[:10].sum()))
    b = a.copy()
    b[:10], b[10:20] = a[10:20], a[:10]
    turned = agreement(a, b)
    assert turned.overlap == 0 and not turned.same_top
    assert turned.mass == pytest.approx(special.softmax(b)[:10].sum())
    # Two blocks of ten exchange ranks: sum of squared differences 20 * 10^2 of 20 ranks.
    assert turned.spearman == pytest.approx(1 - 6 * 20 * 100 / (20 * (20**2 - 1)))
    assert turned.spearman == pytest.approx(stats.spearmanr(a[:20], b[:20]).statistic)
    # Ranks 11 to 20 turned round, which the ten most probable know nothing of: the union of the
    # twenty has squared differences of 9^2, 7^2, ... 1, twice.
    c = a.copy()
    c[10:20] = a[10:20][::-1]
    below = agreement(a, c)
    assert below.overlap == 1 and below.same_top
    assert below.spearman == pytest.approx(1 - 6 * 2 * 165 / (20 * (20**2 - 1)))
    assert math.isnan(agreement(a, np.zeros(40)).spearman)
    assert agreement([2.0, 1.0], [1.0, 2.0]).overlap == 1
