"""AtP* against recomputed softmaxes, derivatives along the patch and exact patching."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import lm_jax
from lm_jax.errors import UsageError
from sparse_jax.circuits import patching
from sparse_jax.circuits.atp_star import (
    Node,
    bound_missed,
    estimates,
    missed,
    node_attributions,
    without_layers,
)
from sparse_jax.circuits.place_patching import PLACES, heads_of, place_effects
from sparse_jax.circuits.rules import EXACT
from sparse_jax.circuits.runs import measure
from tests.sparse_jax.circuits.small_models import circuit_model, ioi_batch


@pytest.fixture(scope="module")
def batch():
    return ioi_batch()


def softmax(score):
    weight = np.exp(score - score.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True)


def test_a_patched_key_changes_a_row_as_the_softmax_of_its_scores_does():
    """Rows with weights that no float has beside 1, too, in float64 and in float32."""
    random = np.random.default_rng(0)
    scale = random.choice([1.0, 20.0, 60.0, 300.0], size=(60, 1))
    score, patched = (np.float32(scale * random.normal(size=(60, 9))) for _ in range(2))
    by_weight = np.float32(random.normal(size=(60, 9)))
    wanted, terms = np.zeros((2, 60, 9), np.longdouble)
    for key in range(9):
        moved = score.astype(np.longdouble)
        moved[:, key] = patched[:, key]
        change = softmax(moved) - softmax(score.astype(np.longdouble))
        wanted[:, key] = (change * by_weight).sum(1)
        terms[:, key] = (np.abs(change) * np.abs(by_weight)).sum(1)
    got = np.asarray(estimates.key_effects(*map(jnp.asarray, (score, patched, by_weight))))
    # Relative to the terms themselves, small as they may be: no difference of large ones. A score
    # near 900 is rounded by 3e-5, and its power by as much; the oracle by 1 part in 2^64 of 1.
    rounding = 1e-18
    assert (np.abs(got - wanted) <= 2e-4 * terms + rounding).all()
    assert (terms > 1e-12).sum() > 250
    # Keys of no weight that get all of it, and of all weight that lose it, in the same rows.
    weight = softmax(score.astype(np.float64))
    for saturated in (weight < 1e-40, weight > 1 - 1e-16):
        assert (np.abs(wanted[saturated]) > 0.1).any()
    with jax.enable_x64():
        rows = (jnp.asarray(x, jnp.float64) for x in (score, patched, by_weight))
        double = np.asarray(estimates.key_effects(*rows))
    assert (np.abs(double - wanted) <= 1e-11 * terms + rounding).all()


def test_rows_of_one_key_and_of_none_change_nothing():
    score = jnp.asarray([[1.0, -jnp.inf, -jnp.inf], [-jnp.inf] * 3])
    patched = jnp.asarray([[50.0, 3.0, 3.0], [1.0] * 3])
    assert not np.asarray(estimates.key_effects(score, patched, jnp.ones((2, 3)))).any()


def recomputed(model, batch, place, direction):
    """Every query or key patched by itself, its rows computed again, times the derivatives."""
    here, there = patching.sides(batch, direction)
    sites = ("attn.rot_q", "attn.rot_k", "attn.scores", "attn.pattern")
    record = dict.fromkeys(sites, lm_jax.keep)
    own = measure(model, batch, here, record=record)[1]
    other = np.asarray(measure(model, batch, there, record=record)[1][PLACES[place]], np.float64)
    q, k, score, pattern = (np.asarray(own[site], np.float64) for site in sites)

    def metric(added):
        edits = {"attn.pattern": lm_jax.Add(added)}
        return measure(model, batch, here, edits=edits, rules=EXACT)[0].sum()

    D = np.asarray(jax.grad(metric)(jnp.zeros(pattern.shape)), np.float64)
    gates = model.gates
    closed = (pattern == 0) if gates is not None else np.zeros(pattern.shape, bool)
    seen = np.isfinite(score) & ~(closed if gates is not None and gates.renormalise else False)

    def weights(scores):
        """The pattern of scores, gates held: of the open keys alone where they are normalised."""
        weight = softmax(np.where(seen, scores, -1e30)) * seen
        return np.where(closed, 0.0, weight)

    np.testing.assert_allclose(weights(np.where(seen, score, 0.0)), pattern, atol=1e-5)
    cfg, (L, B, N, T, _) = model.cfg, pattern.shape
    of = N // cfg.num_kv_heads
    heads = heads_of(cfg, place)
    effects = np.zeros((L, heads, T, B))
    for position, head in np.ndindex(T, heads):
        queries, keys = q.copy(), k.copy()
        patched = queries if place == "query" else keys
        patched[:, :, position, head] = other[:, :, position, head]
        moved = np.einsum("LBTNH,LBSNH->LBNTS", queries, np.repeat(keys, of, 3)) * cfg.scale
        if cfg.score_softcap is not None:
            moved = cfg.score_softcap * np.tanh(moved / cfg.score_softcap)
        changed = np.zeros((N, T, T), bool)
        if place == "query":
            changed[head, position] = True
        else:
            changed[head * of : (head + 1) * of, :, position] = True
        clean = np.where(seen, score, 0.0)
        change = weights(np.where(changed, moved, clean)) - weights(clean)
        effects[:, head, position] = (change * D).sum((2, 3, 4))
    return np.where(np.asarray(batch.valid_BT).T, effects, 0.0)


@pytest.mark.parametrize(
    ("place", "blocks", "bias", "direction"),
    [
        ("query", "gemma", None, "noising"),
        ("key", "llama", None, "denoising"),
        ("key", "llama", "renormalised", "noising"),
        pytest.param("query", "llama", 0.3, "noising", marks=pytest.mark.slow),
        pytest.param("key", "gpt2", 0.3, "noising", marks=pytest.mark.long),
        pytest.param("key", "gemma", None, "noising", marks=pytest.mark.slow),
    ],
)
def test_queries_and_keys_have_the_true_change_of_the_weights(
    batch, place, blocks, bias, direction
):
    model = circuit_model(blocks, bias=0.3 if bias == "renormalised" else bias)
    if bias == "renormalised":
        gates = dataclasses.replace(model.gates, renormalise=True)
        model = dataclasses.replace(model, gates=gates)
    wanted = recomputed(model, batch, place, direction)
    got = node_attributions(model, batch, place, direction=direction)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())
    assert np.abs(wanted).max() > 1e-3


def along_the_patch(model, batch, place, constant=None):
    """Derivative of the metric as a place goes from its value towards the other, forwards."""
    here, there = patching.sides(batch, "noising")
    sites = (PLACES[place], "attn.out", "mlp.out")
    record = dict.fromkeys(sites, lm_jax.keep)
    own = measure(model, batch, here, record=record)[1]
    other = measure(model, batch, there, record=record)[1][PLACES[place]]
    difference = other - own[PLACES[place]]
    L, T = model.cfg.num_layers, here.shape[1]
    heads = heads_of(model.cfg, place)
    held = {}
    if constant is not None:
        on_L111 = (jnp.arange(L) == constant).reshape(-1, 1, 1, 1)
        held = {site: lm_jax.Replace(own[site], on_L111) for site in sites[1:]}

    def one(which):
        layer, head, position = which
        on = jnp.zeros((L, 1, T, heads or 1), bool).at[layer, 0, position, head].set(True)
        on = on[..., None] if heads else on

        def metric(step):
            edits = {PLACES[place]: lm_jax.Add(jnp.where(on, step * difference, 0.0))}
            return measure(model, batch, here, edits=edits | held, rules=EXACT)[0]

        return jax.jvp(metric, (0.0,), (1.0,))[1]

    grid = np.stack(np.meshgrid(*map(np.arange, (L, heads or 1, T)), indexing="ij"), -1)
    effects = jax.jit(lambda which: jax.lax.map(one, which))(jnp.asarray(grid.reshape(-1, 3)))
    effects = np.asarray(effects).reshape(L, heads or 1, T, -1)
    return effects if heads else effects[:, 0]


@pytest.mark.parametrize(
    ("place", "blocks"),
    [("value", "llama"), pytest.param("mlp_out", "pythia", marks=pytest.mark.long)],
)
def test_other_places_have_the_derivative_along_the_patch(batch, place, blocks):
    model = circuit_model(blocks)
    wanted = along_the_patch(model, batch, place)
    got = node_attributions(model, batch, place)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())
    # And queries, where the gradient alone is asked for.
    wanted = along_the_patch(model, batch, "query")
    got = node_attributions(model, batch, "query", recompute=False)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.long
def test_without_layers_is_the_mean_size_with_each_layer_s_branches_held(batch):
    model = circuit_model("llama", num_layers=3)
    wanted = sum(np.abs(along_the_patch(model, batch, "value", layer)) for layer in range(3)) / 2
    got = without_layers(model, batch, "value")
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())
    # It is no sum of signed parts: where the estimate is small, it need not be.
    plain = np.abs(node_attributions(model, batch, "value"))
    assert (got > 5 * plain).any() and (got >= 0).all()
    with pytest.raises(UsageError, match="one layer"):
        without_layers(circuit_model("llama", num_layers=1), batch, "value")


@pytest.mark.parametrize("place", ["query", pytest.param("key", marks=pytest.mark.long)])
def test_recomputed_weights_are_nearer_to_exact_patching_than_the_gradient(batch, place):
    model = circuit_model("llama")
    exact = place_effects(model, batch, place)
    errors = [
        np.abs(node_attributions(model, batch, place, recompute=each) - exact).sum()
        for each in (True, False)
    ]
    assert errors[0] < errors[1] and np.abs(exact).max() > 1e-2


def test_subsets_of_one_place_have_its_exact_effect(batch):
    model = circuit_model("llama")
    nodes = [
        *(Node("mlp_out", layer, 0, 4) for layer in range(2)),
        *(Node(place, 1, head, 6) for place in ("query", "key") for head in range(2)),
    ]
    masks = np.concatenate([np.eye(len(nodes), dtype=bool), np.zeros((1, len(nodes)), bool)])
    before = np.asarray(measure(model, batch, batch.clean_BT)[0]).mean()
    got = missed.runs_of(model, batch, nodes, masks, direction="noising", at_once=3)
    exact = {place: place_effects(model, batch, place) for place in ("mlp_out", "query", "key")}
    for node, metric in zip(nodes, got[:-1], strict=True):
        effects = exact[node.place]
        own = effects[node.layer, node.head] if effects.ndim == 4 else effects[node.layer]
        np.testing.assert_allclose(metric - before, own[node.position].mean(), atol=1e-4)
    np.testing.assert_allclose(got[-1], before, atol=1e-6)


def test_bounds_are_ends_of_welch_s_intervals_and_cover_effects_that_add_up():
    """In 300 repeats all bounds together fail in no more than 5 % and what chance allows."""
    random, failed = np.random.default_rng(0), 0
    effects = np.array([0.0, 0.1, -0.3, 1.0, 0.02])
    nodes = tuple(Node("mlp_out", i, 0, 0) for i in range(len(effects)))
    for _ in range(300):
        patched = random.random((200, len(effects))) < 0.5
        metric = patched @ effects + 0.2 * random.normal(size=200)
        found = missed.bound_of(nodes, patched, metric, 0.95)
        failed += (found.bound_X < np.abs(effects)).any()
    assert failed / 300 <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 300)
    for own, bound in zip(patched.T, found.bound_X, strict=True):
        test = scipy.stats.ttest_ind(metric[own], metric[~own], equal_var=False)
        # Both ends, of five places together.
        interval = test.confidence_interval(1 - 0.05 / len(effects))
        assert bound == pytest.approx(max(-interval.low, interval.high), rel=1e-9)


def test_a_bound_of_places_of_a_model_is_above_what_they_do(batch):
    model = circuit_model("llama")
    T = batch.clean_BT.shape[1]
    nodes = [Node("key", 1, head, position) for head in range(2) for position in range(T)]
    found = bound_missed(model, batch, nodes, subsets=64)
    exact = place_effects(model, batch, "key").mean(-1)
    assert (found.bound_X >= [abs(exact[n.layer, n.head, n.position]) for n in nodes]).all()
    assert found.nodes == tuple(nodes) and found.confidence == 0.95


def test_refusals(batch):
    model = circuit_model("llama")
    node = Node("query", 0, 0, 1)
    with pytest.raises(UsageError, match="no place 'querry'"):
        node_attributions(model, batch, "querry")
    with pytest.raises(UsageError, match="different places"):
        bound_missed(model, batch, [node, node])
    with pytest.raises(UsageError, match=r"share = 1\.5"):
        bound_missed(model, batch, [node], share=1.5)
    with pytest.raises(UsageError, match="there is no Node"):
        bound_missed(model, batch, [node._replace(head=99)])
    for nested in ([node, Node("head_out", 0, 0, 1)], [Node("resid_pre", i, 0, 1) for i in (0, 1)]):
        with pytest.raises(UsageError, match="overwrite one another"):
            bound_missed(model, batch, nested)
    with pytest.raises(UsageError, match="take more"):
        bound_missed(model, batch, [node], subsets=2)
