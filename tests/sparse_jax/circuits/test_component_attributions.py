"""Attributions of component edges: slopes, linear models, sums over paths, heads and padding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.model.edits import Add
from sparse_jax.circuits import components
from sparse_jax.circuits.component_graph import ComponentGraph
from sparse_jax.circuits.runs import measure, metric
from tests import rounding
from tests.sparse_jax.circuits import oracle
from tests.sparse_jax.circuits.small_models import (
    both_ways,
    circuit_model,
    ioi_batch,
    some_edges,
)

# The expected scores of a family take half a minute.
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def batch():
    return ioi_batch()


model_of = functools.cache(circuit_model)


def linear_model():
    """Norms whose divisor is constant, an MLP whose units stay above zero, uniform attention."""
    model = circuit_model(
        "gpt2",
        scale=6.0,
        norm="rms",
        norm_eps=1e8,
        activation="relu",
        num_heads=4,
        num_kv_heads=2,
        family="",
    )
    blocks = dict(model.params["blocks"])
    for name in ("ln1", "ln2"):
        blocks[name] = {"scale": 1e4 * jnp.ones_like(blocks[name]["scale"])}
    mixer = dict(blocks["mixer"])
    for name in ("q", "q_bias"):
        mixer[name] = jnp.zeros_like(mixer[name])
    mlp = blocks["mlp"] | {"up_bias": jnp.full_like(blocks["mlp"]["up_bias"], 4.0)}
    final = {"scale": 1e4 * jnp.ones_like(model.params["final"]["scale"])}
    blocks |= {"mixer": mixer, "mlp": mlp}
    unembed = 4.0 * model.params["unembed"]
    params = model.params | {"blocks": blocks, "final": final, "unembed": unembed}
    return dataclasses.replace(model, params=params)


@functools.cache
def linear_effects():
    """All effects in float64, by noising and by denoising."""
    model, batch = linear_model(), ioi_batch()
    edges = np.argwhere(ComponentGraph.of(model.cfg).mask_UR)

    def run(model):
        return both_ways(lambda b: components.component_effects(model, b, edges, at_once=16), batch)

    return edges, oracle.expected(run, model)


@pytest.mark.parametrize("direction", ["noising", "denoising"])
def test_attribution_is_exact_on_a_linear_model(batch, direction):
    """Scores are neither zero nor all alike, and positions mix through attention."""
    model = linear_model()
    graph = ComponentGraph.of(model.cfg)
    edges, both = linear_effects()
    wanted = oracle.part(both, ("noising", "denoising").index(direction))
    for method in components.METHODS:
        scores = np.asarray(
            components.component_attributions(
                model, batch, method=method, steps=2, direction=direction
            )
        )
        assert (scores[~np.broadcast_to(graph.mask_UR[:, None], scores.shape)] == 0).all()
        # A product rounds less than the difference of two metrics, of which the bounds are; and
        # the norms' divisors, of sqrt(1e8 + x^2), are constant to far less.
        rounding.assert_within(scores[edges[:, 0], :, edges[:, 1]], wanted, method)
    exact = wanted.values
    # Uniform attention gives queries and keys nothing to do; all other edges have an effect.
    scored = np.array([not name.endswith(("<q>", "<k>")) for name in graph.reader_names])
    scores = exact[scored[edges[:, 1]]]
    assert (np.abs(scores) > 1e-4).mean() > 0.5
    assert np.abs(scores).max() > 0.03 and np.ptp(scores) > 0.03


# Shares of the clean prompt, whose gradients are averaged.
SHARES = {
    "clean": (1.0, 1.0),
    "corrupt": (0.0, 0.0),
    "both": (0.0, 1.0),
    "left": (0.0, 0.5),
    "midpoint": (0.25, 0.75),
    "right": (0.5, 1.0),
}


@functools.cache
def exact_scores(blocks):
    """Scores in float64, by shares of the clean prompt; and the metric of the clean prompt."""
    model, batch = model_of(blocks), ioi_batch()
    shares = jnp.asarray(list(SHARES.values()))

    def run(model):
        def scores(shares):
            return components._component_attributions(model, batch, shares, components.EXACT)

        return jax.lax.map(scores, shares), measure(model, batch, batch.clean_BT)[0]

    values, bounds = oracle.expected(run, model)
    exact = {name: rounding.Expected(values[0][i], bounds[0][i]) for i, name in enumerate(SHARES)}
    return exact | {"metric": rounding.Expected(values[1], bounds[1])}


def slopes(model, batch, edges):
    """Of the metric by what a reader reads, along each edge's change, and their error: `[E, B]`.

    Central differences in the clean run, in float64. A writer of U + l is the whole stream that
    enters layer l, and the last one that of the logits.
    """
    graph, step = ComponentGraph.of(model.cfg), 1e-3
    writers, readers = (each.repeat(4) for each in edges.T)
    sizes = np.tile(np.float32([-2, -1, 1, 2]) * np.float32(step), len(edges))

    def run(model):
        record = dict.fromkeys(("resid_pre", "resid_post"), lm_jax.keep)
        values = []
        for tokens_BT in (batch.clean_BT, batch.corrupt_BT):
            _, records = measure(model, batch, tokens_BT, record=record)
            streams = records["resid_pre"], records["resid_post"][-1:]
            writes = components.writer_values(model, batch, tokens_BT)
            values.append(jnp.concatenate([writes, *streams]))
        change = values[1] - values[0]

        def at(place):
            writer, reader, size = place
            added = jnp.zeros((graph.num_readers, *change.shape[1:]))
            added = added.at[reader].set(size * change[writer])
            kinds = components.split_readers(jnp.moveaxis(added, 0, -1), graph)
            edits = {
                site: lm_jax.Add(jnp.moveaxis(x, -1, 3) if x.ndim == 5 else x)
                for site, x in kinds.by_site().items()
            }
            return measure(model, batch, batch.clean_BT, edits=edits)[0]

        return jax.lax.map(at, tuple(map(jnp.asarray, (writers, readers, sizes))))

    metrics = oracle.expected(run, model)
    left2, left, right, right2 = metrics.values.reshape(len(edges), 4, -1).swapaxes(0, 1)
    step = np.float64(sizes[2])
    near, far = (right - left) / (2 * step), (right2 - left2) / (4 * step)
    # Curvature, of which Richardson's extrapolation takes off most, and rounding of the metric
    # divided by the step.
    error = np.abs(near - far) + oracle.in_float64(metrics.bounds).max() / step
    return near + (near - far) / 3, error


@pytest.mark.parametrize("blocks", ["llama", slow("gemma"), slow("pythia")])
def test_scores_are_slopes_along_each_edge(batch, blocks):
    """And those of a reader sum to the slope along the change of its whole input."""
    model = model_of(blocks)
    graph, edges = ComponentGraph.of(model.cfg), some_edges(ComponentGraph.of(model.cfg))
    first, U = graph.layer_readers, graph.num_writers
    sums = [(U + 1, first + n) for n in range(graph.num_heads)]
    sums += [(U + 2, graph.num_readers - 1)]
    wanted, error = slopes(model, batch, np.concatenate([edges, sums]))
    exact = exact_scores(blocks)["clean"]
    scores = exact.values[edges[:, 0], :, edges[:, 1]]
    summed = exact.values.sum(0)[:, [reader for _, reader in sums]].T
    # Derivatives have constants of their own, which are those of float32.
    of_scores = exact.bounds[edges[:, 0], :, edges[:, 1]]
    of_sums = np.sqrt((exact.bounds**2).sum(0))[:, [reader for _, reader in sums]].T
    error += np.concatenate([of_scores, of_sums])
    assert (np.abs(np.concatenate([scores, summed]) - wanted) < error).all()
    groups = [wanted[: len(edges)] / error[: len(edges)], wanted[-1] / error[-1]]
    # A window hides the change from the last query of gemma's first layer.
    groups += [] if blocks == "gemma" else [wanted[len(edges) : -1] / error[len(edges) : -1]]
    for each in groups:
        assert np.abs(each).max() > 100 and np.ptp(each) > 1
    result = components.component_attributions(model, batch, method="eap")
    rounding.assert_within(result, exact)


@pytest.mark.parametrize("path_rule", ["left", "right", "midpoint"])
def test_integrated_gradients_of_the_input_are_complete(batch, path_rule):
    """All edges out of the embedding sum to the metric's difference as the steps grow."""
    model = model_of("llama")
    wanted = np.asarray(
        metric(model, batch, batch.corrupt_BT) - metric(model, batch, batch.clean_BT)
    )
    errors = []
    for steps in (2, 64):
        scores = components.component_attributions(
            model, batch, method="eap_ig", steps=steps, path_rule=path_rule
        )
        errors.append(np.abs(np.asarray(scores)[0].sum(1) - wanted).max())
    # An end-point rule is of first order in 1 / S, the midpoint of second.
    order = 2 if path_rule == "midpoint" else 1
    assert errors[1] < np.abs(wanted).max() * (0.05 if order == 1 else 0.005)
    assert errors[1] < errors[0] / 4**order


def test_path_rules_are_sums_over_the_same_gradients(batch):
    """Left and right differ by the two ends alone; denoising along a path is minus noising."""
    exact = exact_scores("llama")
    run = functools.partial(components.component_attributions, model_of("llama"), batch, steps=2)
    for rule in ("left", "midpoint", "right"):
        rounding.assert_within(run(path_rule=rule), exact[rule], rule)
        rounding.assert_within(-run(path_rule=rule, direction="denoising"), exact[rule], rule)
    rounding.assert_within(run(method="clean_corrupted"), exact["both"])
    rounding.assert_within(run(method="eap"), exact["clean"])
    rounding.assert_within(-run(method="eap", direction="denoising"), exact["corrupt"])
    left, right, clean, corrupt, both = (
        exact[name].values for name in ("left", "right", "clean", "corrupt", "both")
    )
    bounds = 2 * sum(exact[name].bounds for name in ("left", "right", "clean", "corrupt"))
    oracle.assert_equal(2 * (right - left), rounding.Expected(clean - corrupt, bounds))
    oracle.assert_equal((clean + corrupt) / 2, rounding.Expected(both, bounds))
    assert np.abs(clean - corrupt).max() > 1e-2


@pytest.mark.parametrize("blocks", ["llama", slow("gemma")])
def test_a_shared_key_reader_is_the_sum_of_its_heads(batch, blocks):
    model, exact = model_of(blocks), exact_scores(blocks)
    wide = components.ungrouped(model)
    rounding.assert_within(metric(wide, batch, batch.clean_BT), exact["metric"])
    single = np.asarray(components.component_attributions(wide, batch, method="eap"))
    graph = ComponentGraph.of(model.cfg)
    summed = np.zeros_like(exact["clean"].values)
    heads = graph.expand(np.arange(graph.num_readers))
    np.add.at(summed, (slice(None), slice(None), heads), single)
    # The shared gradient is the same sum of those of the heads, within its product.
    rounding.assert_within(summed, exact["clean"])
    keys = exact["clean"].values[:, :, graph.layer_readers + graph.num_heads]
    assert np.abs(keys).max() > 1e-3


def test_padding_changes_nothing(batch):
    model = model_of("llama")
    extra = [(0, 0), (0, 3)]
    padded = dataclasses.replace(
        batch,
        clean_BT=jnp.pad(batch.clean_BT, extra),
        corrupt_BT=jnp.pad(batch.corrupt_BT, extra),
        valid_BT=jnp.pad(batch.valid_BT, extra),
    )
    for each in (batch, padded):
        scores = components.component_attributions(model, each, steps=2)
        rounding.assert_within(scores, exact_scores("llama")["midpoint"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "eap-ig"}, r"no method 'eap-ig'.*'eap_ig'"),
        ({"path_rule": "middle"}, r"no path rule 'middle'"),
        ({"steps": 0}, "steps = 0 must be at least 1"),
        ({"direction": "noise"}, r"no direction 'noise'"),
    ],
)
def test_unknown_options_are_refused(batch, options, message):
    with pytest.raises(UsageError, match=message):
        components.component_attributions(model_of("llama"), batch, **options)


@pytest.mark.parametrize("blocks", ["llama", "pythia"])
def test_edges_by_token_are_derivatives_along_what_their_writer_adds_there(blocks):
    """Of a reader's input at one token, by forward differentiation; and they sum to the edges."""
    model, batch = circuit_model(blocks), ioi_batch()
    graph = ComponentGraph.of(model.cfg)
    whole_UBR = components.component_attributions(model, batch, method="eap")
    split_UBRT = components.component_attributions(model, batch, method="eap", by_position=True)
    B, T = batch.clean_BT.shape
    # Additions of T numbers, whose order is another one.
    size_UBR = np.abs(split_UBRT).sum(-1).max()
    np.testing.assert_allclose(split_UBRT.sum(-1), whole_UBR, rtol=0, atol=T * 2e-7 * size_UBR)

    change_UBTD = components.writer_values(model, batch, batch.corrupt_BT)
    change_UBTD -= components.writer_values(model, batch, batch.clean_BT)

    def metric(added):
        edits = {site: Add(value) for site, value in added.by_site().items()}
        return measure(model, batch, batch.clean_BT, edits=edits)[0]

    nothing = components.ReaderArrays.zeros(model.cfg, B, T)
    edges = np.argwhere(graph.mask_UR)
    for u, r in edges[np.random.default_rng(0).permutation(len(edges))[:6]]:
        t = T - 2
        # The reader's own entry, 1 at that token.
        values_BTR = jnp.zeros((B, T, graph.num_readers)).at[:, t, r].set(1.0)
        one = components.split_readers(values_BTR, graph)
        added_BTD = change_UBTD[u]
        shapes = {4: added_BTD[None, :, :, None], 3: added_BTD[None], 2: added_BTD}
        along = components.ReaderArrays(*(x[..., None] * shapes[x.ndim] for x in one))
        _, wanted_B = jax.jvp(metric, (nothing,), (along,))
        np.testing.assert_allclose(split_UBRT[u, :, r, t], wanted_B, rtol=1e-3, atol=1e-6)
    assert np.abs(split_UBRT).max() > 1e-3
