"""The counted features are those whose inner product is the weight, by exact arithmetic."""

from collections import Counter
import dataclasses
from fractions import Fraction
import itertools
import math

import numpy as np
import pytest

from lm_jax.model.config import LayerShape
from polyattn_jax.recipes.linear_state import kept_state, linear_state, sentence
from polyattn_jax.recipes.row_maps import RECIPES, parse_recipe, resolve_bias
from tests import tiny
from tests.polyattn_jax.conftest import ROOT


def cost(text, d, b_auto=1.0, **changes):
    recipe = parse_recipe(text)
    cfg = tiny.decoder(head_dim=d, rope=None, **changes)
    return linear_state(recipe, resolve_bias(recipe, b_auto), cfg)


def monomials(q, k, p):
    """phi(q).phi(k) with each monomial of degree p once, and the number of these."""
    total, count = Fraction(0), 0
    for chosen in itertools.combinations_with_replacement(range(len(q)), p):
        ways = math.factorial(p)
        for times in Counter(chosen).values():
            ways //= math.factorial(times)
        total += ways * math.prod(q[i] for i in chosen) * math.prod(k[i] for i in chosen)
        count += 1
    return total, count


@pytest.mark.parametrize("d", [1, 2, 3, 5])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("b", [0, 1, -2])
def test_as_many_features_as_the_power_needs(d, p, b):
    q = [Fraction(3 * i - 4, 7) for i in range(d)]
    k = [Fraction(5 - 2 * i, 3) for i in range(d)]
    u = sum(x * y for x, y in zip(q, k, strict=True)) + b
    # The constant is one more coordinate of both, its sign in that of the query.
    extra = ([*q, Fraction(b)], [*k, Fraction(1)]) if b else (q, k)
    value, count = monomials(*extra, p)
    assert value == u**p
    entry = cost(f"poly_over_length:p={p},b={b}", d)
    assert entry.finite and entry.degree == p
    assert entry.features == count
    assert entry.tensor_features == len(list(itertools.product(extra[0], repeat=p)))
    assert entry.state == count * d


@pytest.mark.parametrize("d", [1, 2, 4])
def test_the_taylor_map_has_all_monomials_up_to_degree_two(d):
    entry = cost("taylor2:b=auto", d)
    exponents = [e for e in itertools.product(range(3), repeat=d) if sum(e) <= 2]
    assert entry.finite and entry.features == len(exponents)
    assert entry.tensor_features == 1 + d + d * d
    # One more number per feature: the sum that the map divides by.
    assert entry.state == len(exponents) * (d + 1)


def test_known_sizes_and_the_cache_of_the_same_memory():
    """D = C(d + p - 1, p) at b = 0; D d / 2 d tokens of cache, were there no normaliser."""
    for d, p, features, tokens in (
        (64, 2, 2_080, 1_040),
        (64, 4, 766_480, 383_240),
        (128, 2, 8_256, 4_128),
        (128, 4, 11_716_640, 5_858_320),
        (256, 2, 32_896, 16_448),
    ):
        entry = cost(f"poly_over_length:p={p}", d)
        assert (entry.features, entry.cache_tokens) == (features, tokens)
        normalised = cost(f"poly:p={p}", d)
        assert normalised.state == features * (d + 1)
        # The first number of tokens whose cache is at least as large.
        per_token = 2 * d
        assert per_token * (normalised.cache_tokens - 1) < normalised.state
        assert normalised.state <= per_token * normalised.cache_tokens


@pytest.mark.parametrize(
    ("text", "degree", "words"),
    [
        ("relu:p=4,b=1", 4, "rectified"),
        ("relu_over_length:p=1", 1, "rectified"),
        ("relu:p=2.5", None, "rectified"),
        ("sigmoid", None, "a sigmoid"),
        ("ramapuram", None, "a sigmoid"),
        ("softpick", None, "softpick"),
        ("entmax15", None, "entmax"),
        ("softmax_logn", None, "exponential"),
        ("softmax", None, "exponential"),
        ("poly:p=3", 3, "odd p"),
    ],
)
def test_maps_without_a_finite_feature_map_say_so(text, degree, words):
    entry = cost(text, 8)
    assert not entry.finite and words in entry.reason and entry.degree == degree
    said = sentence(entry)
    assert said.startswith("no finite feature map: ")
    assert ("the plain power of degree" in said) == (degree is not None)
    assert (entry.features is None) == (degree is None)


def test_a_cap_on_the_scores_leaves_no_polynomial():
    entry = cost("poly:p=2", 8, score_softcap=30.0)
    assert not entry.finite and "tanh" in entry.reason and entry.state is None


def test_no_recipe_of_the_paper_has_a_finite_feature_map():
    for recipe in RECIPES.values():
        entry = linear_state(recipe, 1.0, tiny.decoder())
        assert not entry.finite and dataclasses.asdict(entry)["recipe"] == recipe.name


def test_the_documentation_has_the_counts_of_heads_of_width_64():
    words = " ".join((ROOT / "docs" / "polyattn" / "recipes.md").read_text("utf-8").split())
    second, fourth = (cost(f"relu:p={p},b=0", 64) for p in (2, 4))
    assert (
        f"degree 2 has {second.features:,} features and is as large as {second.cache_tokens:,} "
        f"tokens, degree 4 {fourth.features:,} and {fourth.cache_tokens:,}"
    ) in words


def test_a_sequence_keeps_the_cache_of_softmax_heads_and_the_state_of_replaced_ones():
    """Two layers of two key heads with two query heads each, of width 8, in 100 tokens."""
    cfg = tiny.decoder(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
    # A whole key head, half of one; none, all.
    heads_LN = np.array([[1, 1, 1, 0], [0, 0, 1, 1]], bool)
    cache = 2 * 8 * 100
    features = 8 * 9

    def kept(text, length=100, cfg=cfg):
        found = kept_state(parse_recipe(text), 0.0, heads_LN, cfg, length)
        assert found.key_heads == 4
        return found.numbers, found.freed

    assert kept("elu1") == (2 * cache + 3 * features, 2)
    # A window beside a softmax head reads that one's cache.
    assert kept("window:w=30,sinks=2") == (2 * cache + 2 * 2 * 8 * 32, 2)
    assert kept("window:w=300") == (4 * cache, 0)
    assert kept("elu1:w=30,sinks=2") == (2 * cache + 3 * features + 2 * 2 * 8 * 32, 2)
    # No finite feature map: the whole cache stays.
    assert kept("relu:p=2") == (4 * cache, 0)
    # No key has left the window.
    assert kept("window:w=30", 20) == kept("elu1:w=30", 20) == (4 * cache * 20 // 100, 0)
    # The state of a layer with a window of its own needs that cache, to subtract what leaves.
    windowed = dataclasses.replace(cfg, windows=(50, None))
    assert kept("elu1", cfg=windowed) == (cache + cache + 3 * features, 1)
    assert kept("window:w=30,sinks=2", cfg=windowed) == (cache // 2 + cache + 2 * 2 * 8 * 32, 2)


def test_layers_that_read_the_keys_of_another_keep_none_of_their_own():
    """Of three layers the last reads the keys of the second, which is narrower than the first."""
    shapes = (LayerShape(), LayerShape(head_dim=4), LayerShape(head_dim=4, kv=1))
    cfg = tiny.decoder(
        num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, rope=None, layers=shapes
    )
    wide, narrow = 2 * 8 * 100, 2 * 4 * 100

    def kept(*layers):
        heads_LN = np.zeros((3, 4), bool)
        heads_LN[list(layers)] = True
        found = kept_state(parse_recipe("elu1"), 0.0, heads_LN, cfg, 100)
        return found.key_heads, found.numbers, found.freed

    assert kept() == (4, 2 * wide + 2 * narrow, 0)
    # The lender's cache stays for a softmax layer that reads it, whichever of the two it is.
    assert kept(1) == kept(2) == (4, 2 * wide + 2 * narrow + 2 * 4 * 5, 0)
    assert kept(1, 2) == (4, 2 * wide + 2 * 4 * 5, 2)
