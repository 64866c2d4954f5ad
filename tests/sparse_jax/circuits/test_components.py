"""Component edges: exact patches against runs edited at other sites, attributions by definition."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.model import layers
from lm_jax.model.sites import Scope
from sparse_jax.circuits import components
from sparse_jax.circuits.component_graph import ComponentGraph
from sparse_jax.circuits.patching import sides
from sparse_jax.circuits.runs import measure
from tests.sparse_jax.circuits.small_models import circuit_model, ioi_batch

RECORDED = ("embed", "resid_pre", "resid_post", "attn.z", "attn.out", "mlp.out")


@pytest.fixture(scope="module")
def batch():
    return ioi_batch()


@functools.cache
def model_of(blocks, bias=None):
    return circuit_model(blocks, bias=bias)


MODELS = [("llama", 0.3), ("gpt2", None), ("gemma", None), ("pythia", None)]


@jax.jit
def records_of(model, batch, tokens_BT):
    names = [*RECORDED, "attn.q", "attn.k", "attn.v"]
    names += [] if model.cfg.parallel_residual else ["resid_mid"]
    names += ["ln1_post.scale"] if model.cfg.post_norms else []
    return measure(model, batch, tokens_BT, record=dict.fromkeys(names, lm_jax.keep))[1]


def written(model, records, writer):
    """Value of a writer, computed from records of other sites in float64."""
    cfg, N = model.cfg, model.cfg.num_heads
    if writer == 0:
        return np.asarray(records["embed"], np.float64)
    layer, head = divmod(writer - 1, N + 1)
    if head == N:
        return np.asarray(records["mlp.out"][layer], np.float64)
    z = np.asarray(records["attn.z"][layer, :, :, head], np.float64)
    block = jax.tree.map(lambda x: np.asarray(x[layer], np.float64), model.params["blocks"])
    value = z @ block["mixer"]["o"][head]
    if cfg.post_norms:
        divisor = np.asarray(records["ln1_post.scale"][layer], np.float64)
        value = value / divisor * (block["ln1_post"]["scale"] + cfg.norm_offset)
    return value


def read(model, records, reader, change):
    """What a reader computes of its changed input, by layer functions: site, layer, head, value."""
    cfg, params = model.cfg, model.params
    graph = ComponentGraph.of(cfg)
    scope = Scope({}, {})
    if reader == graph.num_readers - 1:
        x = records["resid_post"][-1] + change
        x = layers.norm(params.get("final", {}), x, cfg, scope, "final")
        return "logits", 0, None, layers.unembed(params, x, cfg)
    layer, index = divmod(reader, graph.layer_readers)
    block = jax.tree.map(lambda x: x[layer], params["blocks"])
    if index == graph.layer_readers - 1:
        mid = records["resid_pre" if cfg.parallel_residual else "resid_mid"][layer]
        h = layers.norm(block["ln2"], mid + change, cfg, scope, "ln2")
        out = layers.mlp(block["mlp"], h, cfg, scope)
        if cfg.post_norms:
            out = layers.norm(block["ln2_post"], out, cfg, scope, "ln2_post")
        return "mlp.out", layer, None, out
    heads = [("q", n) for n in range(cfg.num_heads)]
    heads += [(name, k) for name in "kv" for k in range(cfg.num_kv_heads)]
    name, head = heads[index]
    h = layers.norm(block["ln1"], records["resid_pre"][layer] + change, cfg, scope, "ln1")
    projected = jnp.einsum("BTD,DH->BTH", h, block["mixer"][name][:, head])
    if name + "_bias" in block["mixer"]:
        projected = projected + block["mixer"][name + "_bias"][head][None, None]
    return "attn." + name, layer, head, projected


@jax.jit
def metric_with(model, batch, tokens_BT, records, masks):
    """The metric with recorded values written where a mask is true: one program for all sites."""
    edits = {site: lm_jax.Replace(records[site], mask) for site, mask in masks.items()}
    return measure(model, batch, tokens_BT, edits=edits)[0]


def effect_by_hand(model, batch, tokens_BT, records, reader, change):
    before = metric_with(model, batch, tokens_BT, records, no_masks(records))
    site, layer, head, value = read(model, records, reader, change)
    if site == "logits":
        rows = np.arange(len(before))
        logits = np.asarray(value)[rows, np.asarray(batch.at_B2)[:, 0]]
        sides = batch.continuations.right_BA, batch.continuations.wrong_BA
        right, wrong = (logits[rows, np.asarray(ids)[:, 0]] for ids in sides)
        return right - wrong - np.asarray(before)
    written = np.array(records[site])
    place = (layer,) if head is None else (layer, slice(None), slice(None), head)
    written[place] = value
    masks = no_masks(records)
    masks[site][layer] = True
    return metric_with(model, batch, tokens_BT, records | {site: written}, masks) - before


def no_masks(records):
    sites = ("attn.q", "attn.k", "attn.v", "mlp.out")
    return {site: np.zeros((2,) + (1,) * (records[site].ndim - 1), bool) for site in sites}


def some_edges(graph):
    """Into every kind of reader, from every kind of writer before it."""
    names, readers = graph.writer_names, graph.reader_names
    first = graph.layer_readers
    edges = [(0, 0), (0, graph.num_heads), (0, first - 1), (names.index("m0"), len(readers) - 1)]
    edges += [(names.index("a0.h1"), first + i) for i in range(graph.layer_readers)]
    edges += [(names.index("m0"), first + i) for i in range(0, graph.layer_readers, 2)]
    edges += [(names.index("a1.h0"), len(readers) - 1), (0, len(readers) - 1)]
    return np.array(edges)


@pytest.mark.parametrize(("blocks", "bias"), MODELS)
def test_effects_are_those_of_editing_what_the_reader_computes(batch, blocks, bias):
    model = model_of(blocks, bias)
    runs = [(tokens, records_of(model, batch, tokens)) for tokens in sides(batch, "noising")]
    graph = ComponentGraph.of(model.cfg)
    edges = some_edges(graph)
    for direction, order in (("noising", runs), ("denoising", runs[::-1])):
        (here, own), (_, other) = order
        result = np.asarray(
            components.component_effects(model, batch, edges, direction=direction, at_once=5)
        )
        for effect, (writer, reader) in zip(result, edges, strict=True):
            change = written(model, other, writer) - written(model, own, writer)
            change = jnp.asarray(change, jnp.float32)
            wanted = effect_by_hand(model, batch, here, own, reader, change)
            np.testing.assert_allclose(effect, wanted, atol=3e-4)
        assert np.abs(result).max() > 0.1 and (np.abs(result).max(1) > 1e-3).mean() > 0.4


def test_a_patch_of_equal_values_has_effect_zero_exactly(batch):
    same = dataclasses.replace(batch, corrupt_BT=batch.clean_BT)
    model = model_of("llama")
    edges = some_edges(ComponentGraph.of(model.cfg))
    assert (np.asarray(components.component_effects(model, same, edges)) == 0).all()


@pytest.mark.parametrize(("blocks", "bias"), MODELS)
def test_writers_sum_to_what_the_logits_read(batch, blocks, bias):
    model = model_of(blocks, bias)
    values = components.writer_values(model, batch, batch.clean_BT)
    records = records_of(model, batch, batch.clean_BT)
    total = np.asarray(values, np.float64).sum(0)
    constant = model.params["blocks"]["mixer"].get("o_bias")
    if constant is not None:
        total += np.asarray(constant, np.float64).sum(0)
    np.testing.assert_allclose(total, records["resid_post"][-1], atol=2e-5)


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


@pytest.mark.parametrize("direction", ["noising", "denoising"])
def test_attribution_is_exact_on_a_linear_model(batch, direction):
    """Scores are neither zero nor all alike, and positions mix through attention."""
    model = linear_model()
    graph = ComponentGraph.of(model.cfg)
    edges = np.argwhere(graph.mask_UR)
    exact = np.asarray(
        components.component_effects(model, batch, edges, direction=direction, at_once=16)
    )
    for method in components.METHODS:
        scores = np.asarray(
            components.component_attributions(
                model, batch, method=method, steps=2, direction=direction
            )
        )
        assert (scores[~np.broadcast_to(graph.mask_UR[:, None], scores.shape)] == 0).all()
        np.testing.assert_allclose(scores[edges[:, 0], :, edges[:, 1]], exact, atol=1e-5)
    # Uniform attention gives queries and keys nothing to do; all other edges have an effect.
    scored = np.array([not name.endswith(("<q>", "<k>")) for name in graph.reader_names])
    scores = exact[scored[edges[:, 1]]]
    assert (np.abs(scores) > 1e-4).mean() > 0.5
    assert np.abs(scores).max() > 0.03 and np.ptp(scores) > 0.03


@pytest.mark.parametrize("blocks", ["llama", "gemma"])
def test_scores_are_slopes_along_each_edge(batch, blocks):
    """Central differences of the metric by the reader's own input, in the clean run."""
    model = model_of(blocks)
    graph = ComponentGraph.of(model.cfg)
    scores = np.asarray(components.component_attributions(model, batch, method="eap"))
    change = components.writer_values(model, batch, batch.corrupt_BT) - components.writer_values(
        model, batch, batch.clean_BT
    )
    step, shape = 2e-2, (graph.num_readers, *change.shape[1:])

    @jax.jit
    def at(writer, reader, size):
        added = jnp.zeros(shape).at[reader].set(size * change[writer])
        kinds = components.split_readers(jnp.moveaxis(added, 0, -1), graph)
        edits = {
            site: lm_jax.Add(jnp.moveaxis(x, -1, 3) if x.ndim == 5 else x)
            for site, x in kinds.by_site().items()
        }
        return measure(model, batch, batch.clean_BT, edits=edits)[0]

    steepest = 0.0
    for writer, reader in some_edges(graph):
        near, far = (
            (at(writer, reader, k * step) - at(writer, reader, -k * step)) / (2 * k * step)
            for k in (1, 2)
        )
        # Curvature, and rounding of the metric divided by the step.
        bound = np.abs(near - far) + 1e-4 / step
        assert (np.abs(scores[writer, :, reader] - near) < bound).all(), (writer, reader)
        steepest = max(steepest, float(np.abs(near / bound).max()))
    assert steepest > 10


@pytest.mark.parametrize("blocks", ["llama", "pythia"])
def test_scores_of_a_reader_sum_to_the_change_of_its_input(batch, blocks):
    model = model_of(blocks)
    scores = np.asarray(components.component_attributions(model, batch, method="eap"))
    clean = components.writer_values(model, batch, batch.clean_BT)
    gradient = components.reader_gradients(model, batch, clean[0], components.EXACT)
    own, other = (records_of(model, batch, tokens) for tokens in sides(batch, "noising"))
    last = ((other["resid_post"] - own["resid_post"])[-1] * gradient.logits).sum((1, 2))
    np.testing.assert_allclose(scores[:, :, -1].sum(0), last, atol=1e-4)
    change = (other["resid_pre"] - own["resid_pre"])[1]
    graph = ComponentGraph.of(model.cfg)
    queries = jnp.einsum("BTD,BTND->BN", change, gradient.q[1])
    result = scores[:, :, graph.layer_readers :][:, :, : graph.num_heads].sum(0)
    np.testing.assert_allclose(result, queries, atol=1e-4)
    assert np.ptp(result) > 1e-3 and np.ptp(np.asarray(last)) > 1e-2


@pytest.mark.parametrize("path_rule", ["left", "right", "midpoint"])
def test_integrated_gradients_of_the_input_are_complete(batch, path_rule):
    """All edges out of the embedding sum to the metric's difference as the steps grow."""
    model = model_of("llama")
    clean_B, _ = measure(model, batch, batch.clean_BT)
    corrupt_B, _ = measure(model, batch, batch.corrupt_BT)
    wanted = np.asarray(corrupt_B - clean_B)
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
    model, steps = model_of("llama"), 4
    run = functools.partial(components.component_attributions, model, batch)
    left, right = (run(steps=steps, path_rule=rule) for rule in ("left", "right"))
    clean, corrupt = run(method="eap"), -run(method="eap", direction="denoising")
    np.testing.assert_allclose(steps * (right - left), clean - corrupt, atol=1e-4)
    np.testing.assert_allclose(run(method="clean_corrupted"), (clean + corrupt) / 2, atol=1e-5)
    np.testing.assert_allclose(run(direction="denoising"), -run(), atol=1e-6)
    assert np.abs(clean - corrupt).max() > 1e-2


@pytest.mark.parametrize("blocks", ["llama", "gemma"])
def test_a_shared_key_reader_is_the_sum_of_its_heads(batch, blocks):
    model = model_of(blocks)
    wide = components.ungrouped(model)
    np.testing.assert_allclose(
        measure(wide, batch, batch.clean_BT)[0], measure(model, batch, batch.clean_BT)[0], atol=1e-4
    )
    scores, single = (
        np.asarray(components.component_attributions(each, batch, method="eap"))
        for each in (model, wide)
    )
    graph = ComponentGraph.of(model.cfg)
    summed = np.zeros_like(scores)
    np.add.at(
        summed, (slice(None), slice(None), graph.expand(np.arange(graph.num_readers))), single
    )
    np.testing.assert_allclose(summed, scores, atol=2e-5 * np.abs(scores).max())
    keys = scores[:, :, graph.layer_readers + graph.num_heads]
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
    short, long = (components.component_attributions(model, each) for each in (batch, padded))
    np.testing.assert_allclose(short, long, atol=2e-5 * np.abs(short).max())


def test_other_prompts_and_weights_compile_nothing_more(batch):
    model = model_of("llama")
    edges = some_edges(ComponentGraph.of(model.cfg))
    other = dataclasses.replace(batch, clean_BT=batch.corrupt_BT, corrupt_BT=batch.clean_BT)
    first = components.component_effects(model, batch, edges)
    size = components._component_effects._cache_size()
    second = components.component_effects(model, other, edges[::-1], direction="denoising")
    assert components._component_effects._cache_size() == size
    # The same runs in the other order.
    np.testing.assert_array_equal(first, second[::-1])


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


@pytest.mark.parametrize(
    ("edge", "message"),
    [((1, 0), r"a0\.h0<q> does not read a0\.h0"), ((99, 0), r"edge \(99, 0\) is outside 11")],
)
def test_pairs_that_are_no_edge_are_refused(batch, edge, message):
    with pytest.raises(UsageError, match=message):
        components.component_effects(model_of("llama"), batch, [edge])
