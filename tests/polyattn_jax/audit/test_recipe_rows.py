"""S of recipes' own weights against float64, all recipes in one forward pass."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import lm_jax
from polyattn_jax.audit import concentration, recipe_rows
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.recipes.diagnostic import Status
from polyattn_jax.recipes.row_maps import parse_recipe
from tests import tiny

L, N, T = 2, 4, 9
CFG = tiny.GROUPED
QUERIES = [3, 8]
# Weights of rows `[..., S]` in float64, up to their sum.
WEIGHTS = {
    "sigmoid:b=0": special.expit,
    "sigmoid:b=2": lambda z: special.expit(z + 2),
    "taylor2:b=1": lambda z: 1 + (z + 1) + (z + 1) ** 2 / 2,
    "poly:p=2,b=0.5": lambda z: (z + 0.5) ** 2,
    "elu1": None,
}


@pytest.fixture(scope="module")
def measured():
    params = tiny.params(CFG)
    tokens_BT = jnp.asarray(np.random.default_rng(0).integers(0, CFG.vocab_size, (2, T)))
    recipes = [parse_recipe(text) for text in WEIGHTS]
    bias_RLN = np.array([np.full((L, N), recipe.bias) for recipe in recipes])
    queries_BQ = jnp.asarray([QUERIES, QUERIES])
    maps = tuple(recipe.map for recipe in recipes)
    got = recipe_rows.measure(params, tokens_BT, queries_BQ, bias_RLN, cfg=CFG, maps=maps)
    record = {"attn.scores": lm_jax.keep}
    out = lm_jax.forward(params, tokens_BT, CFG, record=record)
    scores = np.asarray(out.records["attn.scores"], np.float64)[:, :, :, QUERIES]
    alone = recipe_rows.measure(
        params, tokens_BT, queries_BQ, bias_RLN[1:2], cfg=CFG, maps=maps[1:2]
    )
    return {name: np.asarray(value) for name, value in got.items()}, scores, alone


@pytest.mark.parametrize("place", range(4))
def test_s_is_the_weight_of_other_keys_over_that_of_the_best(measured, place):
    got, scores, _ = measured
    weight_of = list(WEIGHTS.values())[place]
    seen = np.isfinite(scores)
    weights = np.where(seen, weight_of(np.where(seen, scores, 0)), 0)
    best = scores.argmax(-1)
    of_best = np.take_along_axis(weights, best[..., None], -1)[..., 0]
    want = (weights.sum(-1) - of_best) / of_best
    # Scores of a few units, off by some 40 roundings of them; slopes of log weights below 8 / u_*.
    np.testing.assert_allclose(got["s_own"][:, place], want, rtol=1e-4)
    np.testing.assert_array_equal(got["target"][:, place], best)
    assert (got["status"][:, place] == Status.ACTIVE).all()


def test_a_recipe_among_others_is_measured_as_alone(measured):
    got, _, alone = measured
    for name, value in alone.items():
        np.testing.assert_allclose(got[name][:, 1:2], value, rtol=1e-6)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("sigmoid_b0", True),
        ("entmax15", True),
        ("performer:m=8", True),
        ("relu:p=2,b=auto_head", True),
        ("relu_p4_bauto", False),  # by `probe`
        ("softmax", False),
        ("poly:p=3", False),
        ("relu_p1_over_L", False),
        ("ramapuram", False),
    ],
)
def test_a_recipe_is_measured_if_its_weights_are_shares(text, wanted):
    assert recipe_rows.measured(parse_recipe(text)) == wanted


def test_a_map_without_a_proved_bound_is_taken_as_computed():
    c = {
        "s_own": np.float32([0.5, 1 - 1e-6, 1.0, 1.5]),
        "query": np.full(4, 9),
        "window": np.zeros(4, int),
        "active": np.int32([9, 9, 9, 9]),
        "margin": np.float32([1, 1, 0, 0]),
    }
    unsafe = concentration.own_unsafe(c, parse_recipe("sigmoid_b0").map)
    assert unsafe.computed.tolist() == [False, False, True, True]
    assert unsafe.possible.tolist() == [False, False, True, True]


def test_dead_rows_are_lost_and_are_not_safe():
    """Of four rows one is dead, as softmax concentrates it: it counts, and as an unsafe one."""
    c = {
        "suite": np.full(4, "niah_64"),
        "recipe": np.full(4, "relu_p2_bauto_head"),
        "prompt": np.array(["a", "b", "a", "b"]),
        "status": np.int8([Status.ACTIVE, Status.ACTIVE, Status.ACTIVE, Status.DEAD]),
        "layer": np.zeros(4, int),
        "head": np.zeros(4, int),
        "s_own": np.float32([0.1, 0.2, 3.0, np.inf]),
        "s_softmax": np.float32([0.1, 3.0, 3.0, 0.1]),
        "change": np.float32([0.1, 0.2, 0.3, 1.0]),
        "query": np.full(4, 9),
        "window": np.zeros(4, int),
        "active": np.int32([9, 9, 9, 0]),
        "margin": np.ones(4, np.float32),
    }
    config = AuditConfig("x", niah_lengths=(64,), sweep_length=64)
    audited = SimpleNamespace(
        config=config, model=SimpleNamespace(cfg=SimpleNamespace(num_heads=1))
    )
    recipe = parse_recipe("relu:p=2,b=auto_head")
    safe, compared = recipe_rows.shares(c, audited, recipe, "niah_64")
    assert (safe.recipe.estimate, safe.softmax.estimate) == (0.5, 0.5)
    assert safe.dead.estimate == safe.dead_top.estimate == 0.25
    assert safe.recipe_top == safe.recipe and safe.softmax_top == safe.softmax
    assert (compared.rows, compared.lost.estimate, compared.sharpened.estimate) == (4, 0.25, 0.25)
    dead = c | {"status": np.full(4, Status.DEAD, np.int8), "s_own": np.full(4, np.float32(np.inf))}
    safe, compared = recipe_rows.shares(dead, audited, recipe, "niah_64")
    assert (safe.recipe.estimate, safe.dead.estimate, compared.lost.estimate) == (0.0, 1.0, 0.5)
