"""AtP* against recomputed softmaxes, derivatives along the patch and exact patching."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import UsageError
from sparse_jax.circuits import atp_star, patching
from sparse_jax.circuits.atp_star import Node, bound_missed, node_attributions, without_layers
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


def test_a_shifted_key_changes_a_row_as_the_softmax_of_its_scores_does():
    """Rows with weights near 0 and 1 too, in float64 and in float32."""
    random = np.random.default_rng(0)
    score = random.normal(size=(40, 9)) * random.choice([1.0, 20.0, 60.0], size=(40, 1))
    shift = random.normal(size=(40, 9)) * random.choice([0.1, 10.0, 40.0], size=(40, 9))
    by_weight = random.normal(size=(40, 9))
    weight = softmax(score)
    wanted, terms = np.zeros((2, 40, 9))
    for key in range(9):
        moved = score.copy()
        moved[:, key] += shift[:, key]
        change = softmax(moved) - weight
        wanted[:, key] = (change * by_weight).sum(1)
        terms[:, key] = (np.abs(change) * np.abs(by_weight)).sum(1)
    with jax.enable_x64():
        got = np.asarray(atp_star.key_effects(*map(jnp.asarray, (weight, shift, by_weight))))
    # The softmaxes of the oracle are rounded to 1 part in 2^53, whatever is left of a difference.
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-15 * np.abs(by_weight).sum(1).max())
    single = atp_star.key_effects(
        *(jnp.asarray(x, jnp.float32) for x in (weight, shift, by_weight))
    )
    # Relative to the terms themselves, small as they may be: no difference of large ones.
    some = terms > 1e-12
    assert (np.abs(single - got)[some] <= 1e-4 * terms[some]).all() and some.sum() > 200
    # Where a key has all but a millionth of the weight, its true effect is far from 0.
    saturated = (weight > 1 - 1e-6) & (np.abs(wanted) > 0.1)
    assert saturated.any()


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
    weight = softmax(np.where(np.isfinite(score), score, -1e30))
    D = D * np.divide(pattern, weight, out=np.zeros_like(weight), where=weight > 0)
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
        moved = np.where(changed & np.isfinite(score), moved, score)
        moved = softmax(np.where(np.isfinite(moved), moved, -1e30))
        effects[:, head, position] = ((moved - weight) * D).sum((2, 3, 4))
    return np.where(np.asarray(batch.valid_BT).T, effects, 0.0)


@pytest.mark.parametrize(
    ("place", "blocks", "bias", "direction"),
    [
        ("query", "gemma", None, "noising"),
        ("key", "llama", None, "denoising"),
        pytest.param("query", "llama", 0.3, "noising", marks=pytest.mark.slow),
        pytest.param("key", "gpt2", 0.3, "noising", marks=pytest.mark.long),
        pytest.param("key", "gemma", None, "noising", marks=pytest.mark.slow),
    ],
)
def test_queries_and_keys_have_the_true_change_of_the_weights(
    batch, place, blocks, bias, direction
):
    model = circuit_model(blocks, bias=bias)
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
    got = atp_star.runs_of(model, batch, nodes, masks, direction="noising", at_once=3)
    exact = {place: place_effects(model, batch, place) for place in ("mlp_out", "query", "key")}
    for node, metric in zip(nodes, got[:-1], strict=True):
        effects = exact[node.place]
        own = effects[node.layer, node.head] if effects.ndim == 4 else effects[node.layer]
        np.testing.assert_allclose(metric - before, own[node.position].mean(), atol=1e-4)
    np.testing.assert_allclose(got[-1], before, atol=1e-6)


def test_bounds_cover_effects_that_add_up():
    """In 300 repeats all bounds together fail in no more than 5 % and what chance allows."""
    random, failed = np.random.default_rng(0), 0
    effects = np.array([0.0, 0.1, -0.3, 1.0, 0.02])
    nodes = tuple(Node("mlp_out", i, 0, 0) for i in range(len(effects)))
    for _ in range(300):
        patched = random.random((200, len(effects))) < 0.5
        metric = patched @ effects + 0.2 * random.normal(size=200)
        found = atp_star.bound_of(nodes, patched, metric, 0.95)
        failed += (found.bound_X < np.abs(effects)).any()
        assert (found.bound_X < np.abs(effects) + 1.0).all()
    assert failed / 300 <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 300)


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
    with pytest.raises(UsageError, match="take more"):
        bound_missed(model, batch, [node], subsets=2)
