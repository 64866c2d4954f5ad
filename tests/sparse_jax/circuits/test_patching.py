"""Effects of patches against runs edited one by one, attributions against their definitions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import UsageError
from sparse_jax.circuits import discover, patching
from sparse_jax.circuits.runs import Batch, CircuitModel, measure
from sparse_jax.circuits.tasks import make_task
from sparse_jax.gates.model import constant_gates
from tests import rounding, tiny
from tests.sparse_jax.circuits import oracle
from tests.sparse_jax.circuits.small_models import both_ways, circuit_model
from tests.sparse_jax.circuits.word_tokenizer import word_tokenizer

DIRECTIONS = ("noising", "denoising")
EDGES = np.array([(0, 0, 5, 2), (0, 3, 7, 7), (1, 1, 12, 4), (1, 2, 3, 0)])
# A bias that opens all gates, and one near which many gates are.
OPEN, NEAR = 1e6, 0.3
# Heads, and steps along z' - z, of the central differences: so small that none crosses a threshold.
SLOPES, STEP = ((0, 0), (0, 3), (1, 2)), 2.0**-16


@functools.cache
def prompts():
    return Batch.of(make_task("ioi", word_tokenizer(), count=4, seed=0))


@functools.cache
def small_model(bias=None):
    """Random weights, large enough that attention is not uniform; two query heads a key head."""
    cfg = tiny.decoder(
        vocab_size=word_tokenizer().vocab_size, num_heads=4, num_kv_heads=2, family="llama"
    )
    params = lm_jax.init_params(jax.random.key(1), cfg)
    model = CircuitModel(jax.tree.map(lambda x: 3.0 * x, params), cfg)
    return model if bias is None else with_gates(model, bias)


@pytest.fixture(scope="module")
def batch():
    return prompts()


@pytest.fixture(scope="module")
def dense(batch):
    del batch
    return small_model()


@functools.cache
def exact_heads():
    """Of heads, with all gates open and with some: in float64 with the bounds of float32."""
    opened = small_model(OPEN)
    bias_GLN = np.stack([small_model(bias).gates.bias_LN for bias in (OPEN, NEAR)])

    def run(model, bias_GLN):
        def with_bias(bias_LN):
            own = dataclasses.replace(
                model, gates=dataclasses.replace(opened.gates, bias_LN=bias_LN)
            )

            def one(batch):
                return {
                    "effects": patching.head_effects(own, batch, at_once=3),
                    "attributions": patching.head_attributions(own, batch),
                }

            return both_ways(one, prompts())

        return jax.lax.map(with_bias, bias_GLN)

    return oracle.expected(run, opened, bias_GLN)


def exact_of_heads(name, bias):
    """`exact_heads` by noising and by denoising; without a bias, of the dense model."""
    return oracle.part(exact_heads(), name, (OPEN, NEAR).index(bias or OPEN))


@functools.cache
def exact():
    """What else is compared with float64: of the dense model, as one with all gates open."""

    def run(model):
        def one(batch):
            return {
                "metric": measure(model, batch, batch.clean_BT)[0],
                "edges": patching.edge_effects(model, batch, EDGES),
            }

        return both_ways(one, prompts()) | {"all": patching.edge_attributions(model, prompts())}

    return oracle.expected(run, small_model(OPEN))


def with_gates(model, bias):
    return dataclasses.replace(model, gates=constant_gates(model.cfg, bias))


def sides(batch, direction):
    pair = (batch.clean_BT, batch.corrupt_BT)
    return pair if direction == "noising" else pair[::-1]


@functools.partial(jax.jit, static_argnames="names")
def forward(model, batch, tokens_BT, edits, names):
    record = dict.fromkeys(names, lm_jax.keep)
    output = model.forward(tokens_BT, batch.valid_BT, edits=edits, record=record)
    return output.logits, output.records


def run(model, batch, tokens_BT, *, edits=None, record=()):
    """Metric of each prompt in float64, and records, by a call of its own."""
    logits, records = forward(model, batch, tokens_BT, edits, tuple(record))
    logits = np.asarray(logits, np.float64)
    rows = np.arange(len(tokens_BT))
    ids = [
        np.asarray(side)[:, 0]
        for side in (batch.continuations.right_BA, batch.continuations.wrong_BA)
    ]
    at = np.asarray(batch.at_B2)[:, 0]
    right, wrong = (logits[rows, at, each] for each in ids)
    return right - wrong, records


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("bias", [None, NEAR])
def test_head_effects_are_those_of_patching_one_by_one(batch, bias, direction):
    model = small_model(bias)
    wanted = oracle.part(exact_of_heads("effects", bias), DIRECTIONS.index(direction))
    here, there = sides(batch, direction)
    before, _ = run(model, batch, here)
    _, other = run(model, batch, there, record=["attn.z"])
    L, N = model.cfg.num_layers, model.cfg.num_heads
    result = np.asarray(patching.head_effects(model, batch, direction=direction, at_once=3))
    one_by_one = np.empty(result.shape)
    for layer in range(L):
        for head in range(N):
            mask = jnp.zeros((1, 1, N, 1), bool).at[..., head, :].set(True)
            patch = lm_jax.Replace(other["attn.z"][layer], mask)
            after, _ = run(
                model, batch, here, edits={"attn.z": lm_jax.OneLayer(jnp.asarray(layer), patch)}
            )
            one_by_one[layer, head] = after - before
    rounding.assert_within(result, wanted)
    rounding.assert_within(one_by_one, wanted, "one by one")
    assert np.ptp(result) > 0.1 and (np.abs(result) > 10 * wanted.bounds).mean() > 0.5


def layered_model():
    """With windows and gates that differ by layer, so that a run must take those of its layers."""
    model = circuit_model("gemma", num_layers=4, windows=(4, None, 2, None))
    bias_LN = np.linspace(-0.5, 2.0, 16, dtype=np.float32).reshape(4, 4)
    gates = dataclasses.replace(constant_gates(model.cfg, 0.0), bias_LN=bias_LN)
    return dataclasses.replace(model, gates=gates)


def whole_passes(model, batch, direction, site, patch_of):
    """The metric of runs through all layers, with `patch_of(values of the other run, index)`."""
    here, there = sides(batch, direction)
    other = measure(model, batch, there, record={site: lm_jax.keep})[1][site]

    def patched(index):
        return measure(model, batch, here, edits={site: patch_of(other, index)})[0]

    return patched, measure(model, batch, here)[0]


def all_heads_by_whole_passes(model, batch, direction):
    """The definition of `head_effects`, every run from the first layer on."""
    L, N = model.cfg.num_layers, model.cfg.num_heads

    def patch(other, index):
        mask_LN = jnp.arange(L * N).reshape(L, N) == index
        return lm_jax.Replace(other, mask_LN[:, None, None, :, None])

    patched, before = whole_passes(model, batch, direction, "attn.z", patch)
    return (jax.lax.map(patched, jnp.arange(L * N)) - before[None]).reshape(L, N, -1)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_runs_from_the_patched_layer_give_what_whole_passes_give(batch, direction):
    model = layered_model()
    wanted = oracle.expected(lambda m: all_heads_by_whole_passes(m, batch, direction), model)
    # Calls within a layer, across layers, of all heads at once, and of one head each.
    for at_once in (3, 16, 1):
        effects = patching.head_effects(model, batch, direction=direction, at_once=at_once)
        result = np.asarray(effects)
        rounding.assert_within(result, wanted, f"{at_once} at once")
    # In every layer.
    assert (np.abs(result) > 10 * wanted.bounds).any((1, 2)).all()


def test_a_patch_of_equal_prompts_changes_exactly_nothing(dense, batch):
    """Though a run that takes up at its layer is rounded unlike the one from the first layer on."""
    same = dataclasses.replace(batch, corrupt_BT=batch.clean_BT.at[1:].set(batch.corrupt_BT[1:]))
    for effects in (
        patching.head_effects(dense, same),
        patching.edge_effects(dense, same, EDGES).reshape(2, 2, -1),
    ):
        effects = np.asarray(effects)
        assert (effects[..., 0] == 0).all() and (effects[..., 1:] != 0).any()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_edge_effects_are_those_of_adding_the_change_by_hand(dense, batch, direction):
    here, there = sides(batch, direction)
    record = ("attn.z", "attn.pattern", "attn.v")
    before, own = run(dense, batch, here, record=record)
    _, other = run(dense, batch, there, record=record)
    wanted = oracle.part(exact(), "edges", DIRECTIONS.index(direction))
    result = np.asarray(patching.edge_effects(dense, batch, EDGES, direction=direction))
    by_hand = np.empty(result.shape)
    for i, (layer, head, query, key) in enumerate(EDGES):
        z = np.array(own["attn.z"], np.float64)
        for side, sign in ((other, 1.0), (own, -1.0)):
            weight = np.asarray(side["attn.pattern"])[layer, :, head, query, key]
            value = np.asarray(side["attn.v"])[layer, :, key, head // 2]
            z[layer, :, query, head] += sign * weight[:, None] * value
        mask = jnp.zeros(z.shape, bool).at[layer, :, query, head].set(True)
        patch = lm_jax.Replace(jnp.asarray(z, jnp.float32), mask)
        after, _ = run(dense, batch, here, edits={"attn.z": patch})
        by_hand[i] = after - before
    rounding.assert_within(result, wanted)
    rounding.assert_within(by_hand, wanted, "by hand")
    assert (np.abs(result) > 10 * wanted.bounds).any(1).sum() > 1


@functools.cache
def exact_weights():
    """Effects and attributions of patched weights, in float64, by noising and by denoising."""

    def run(model):
        def one(batch):
            return {
                "effects": patching.edge_effects(model, batch, EDGES, part="weight"),
                "attributions": patching.edge_attributions(model, batch, part="weight"),
            }

        return both_ways(one, prompts())

    return oracle.expected(run, small_model(NEAR))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_patched_weights_are_edits_of_the_pattern(batch, direction):
    """Nothing is normalised again; of a model with gates, which a patch may open."""
    model, (here, there) = small_model(NEAR), sides(batch, direction)
    before, own = run(model, batch, here, record=["attn.pattern"])
    _, other = run(model, batch, there, record=["attn.pattern"])
    own, other = own["attn.pattern"], other["attn.pattern"]
    wanted = {
        name: oracle.part(exact_weights(), name, DIRECTIONS.index(direction))
        for name in ("effects", "attributions")
    }
    by_hand = []
    for layer, head, query, key in EDGES:
        mask = jnp.zeros((1, *own.shape[2:]), bool).at[:, head, query, key].set(True)
        patch = lm_jax.OneLayer(jnp.asarray(layer), lm_jax.Replace(other[layer], mask))
        by_hand.append(run(model, batch, here, edits={"attn.pattern": patch})[0] - before)
    rounding.assert_within(np.stack(by_hand), wanted["effects"], "by hand")
    effects = patching.edge_effects(model, batch, EDGES, direction=direction, part="weight")
    rounding.assert_within(effects, wanted["effects"])
    assert (np.abs(effects) > 10 * wanted["effects"].bounds).any(1).sum() > 1

    def metric(added):
        edits = {"attn.pattern": lm_jax.Add(added)}
        return measure(model, batch, here, edits=edits, rules=patching.EXACT)[0].sum()

    slopes = (other - own) * jax.grad(metric)(jnp.zeros_like(own))
    rounding.assert_within(slopes, wanted["attributions"], "by hand")
    result = patching.edge_attributions(model, batch, direction=direction, part="weight")
    rounding.assert_within(result, wanted["attributions"])
    of_values = np.asarray(patching.edge_attributions(model, batch, direction=direction))
    assert (np.abs(result - of_values) > 10 * wanted["attributions"].bounds).any()


@pytest.mark.parametrize("bias", [None, 0.3])
def test_the_contributions_of_the_edges_of_a_head_sum_to_z(batch, bias):
    """Of the weights and values of the run, with two query heads a key head."""
    own = patching.activations(small_model(bias), batch, batch.clean_BT)

    def total(own):
        return own.contributions_LBTNH(jnp.ones_like(own.pattern_LBNTS))

    wanted = rounding.expected(total, own)
    rounding.assert_within(total(own), wanted)
    rounding.assert_within(own.z_LBTNH, wanted, "z")


def test_the_attributions_of_the_edges_of_a_head_sum_to_its_own(dense, batch):
    heads = oracle.part(exact_of_heads("attributions", None), 0)
    edges = oracle.part(exact(), "all")
    summed = rounding.Expected(*(each.sum((3, 4)).swapaxes(1, 2) for each in edges))
    rounding.assert_within(heads.values, summed)
    rounding.assert_within(patching.head_attributions(dense, batch), heads)
    rounding.assert_within(patching.edge_attributions(dense, batch), edges)
    assert np.ptp(heads.values) > 0.1


@pytest.mark.parametrize("bias", [OPEN, NEAR])
def test_attributions_are_slopes_towards_the_other_value(batch, bias):
    """Central differences of the metric along z' - z of one head, in float64.

    A gate near its threshold is a constant: no step opens or closes one, so the metric has no slope
    along its probability, which training differentiates.
    """

    def at_steps(model):
        def both(batch):
            keep_z = {"attn.z": lm_jax.keep}
            here, there = (
                measure(model, batch, each, record=keep_z)[1]["attn.z"]
                for each in sides(batch, "noising")
            )

            def at(step_and_head):
                step, layer, head = step_and_head
                index = layer.astype(int), head.astype(int)
                mask_LN = jnp.zeros((2, 4)).at[index].set(step)
                edit = lm_jax.Add(mask_LN[:, None, None, :, None] * (there - here))
                metric_B, records = measure(
                    model,
                    batch,
                    batch.clean_BT,
                    edits={"attn.z": edit},
                    record={"attn.pattern": lm_jax.keep},
                )
                return metric_B, records["attn.pattern"]

            places = [(k * STEP, *each) for each in SLOPES for k in (-2.0, -1.0, 1.0, 2.0)]
            return jax.lax.map(at, jnp.asarray(places))

        return both_ways(both, prompts())

    model = small_model(bias)
    (values, patterns), (bounds, _) = oracle.expected(at_steps, model)
    opened = patterns.reshape(2, len(SLOPES), 4, *patterns.shape[2:]) > 0
    assert (opened == opened[:, :, :1]).all()
    visible = discover.visible_edges(model, batch)
    share = opened[..., visible].mean()
    assert 0.1 < share < 0.9 if bias == NEAR else share == 1
    attributions = exact_of_heads("attributions", bias)
    for way, direction in enumerate(DIRECTIONS):
        result = np.asarray(patching.head_attributions(model, batch, direction=direction))
        rounding.assert_within(result, oracle.part(attributions, way))
        at = values[way].reshape(len(SLOPES), 4, -1)
        slope, wide = (at[:, 2] - at[:, 1]) / (2 * STEP), (at[:, 3] - at[:, 0]) / (4 * STEP)
        # The wide difference is off by four times as much, so this is three times the error.
        off = np.abs(slope - wide) + oracle.in_float64(bounds[way].max()) / STEP
        found, rounded = (
            np.stack([each[place] for place in SLOPES])
            for each in (result, attributions.bounds[way])
        )
        assert (np.abs(found - slope) <= off + rounded).all()
        assert (np.abs(slope) > 10 * (off + rounded)).any(1).all()


def test_open_gates_are_the_dense_model(batch):
    opened = small_model(OPEN)
    for function, wanted in (
        (patching.head_effects, oracle.part(exact_of_heads("effects", OPEN), 0)),
        (patching.head_attributions, oracle.part(exact_of_heads("attributions", OPEN), 0)),
        (patching.edge_attributions, oracle.part(exact(), "all")),
    ):
        rounding.assert_within(function(opened, batch), wanted, function.__name__)


def test_a_closed_edge_has_no_attribution(dense, batch):
    model = with_gates(dense, 0.0)
    patterns = [
        np.asarray(patching.activations(model, batch, tokens).pattern_LBNTS)
        for tokens in (batch.clean_BT, batch.corrupt_BT)
    ]
    closed = (patterns[0] == 0) & (patterns[1] == 0)
    T = closed.shape[-1]
    visible = np.tril(np.ones((T, T), bool))
    assert 0.1 < closed[..., visible].mean() < 0.9
    result = np.asarray(patching.edge_attributions(model, batch))
    assert (result[closed] == 0).all() and (result[~closed] != 0).any()


def test_an_unknown_direction_or_part_is_refused(dense, batch):
    with pytest.raises(UsageError, match=r"no part 'weights' to patch.*'weight'"):
        patching.edge_attributions(dense, batch, part="weights")
    with pytest.raises(UsageError, match=r"no direction 'noise'.*'noising'"):
        patching.head_effects(dense, batch, direction="noise")


def test_measure_is_the_metric_of_the_logits(dense, batch):
    for i, tokens_BT in enumerate((batch.clean_BT, batch.corrupt_BT)):
        wanted = oracle.part(exact(), "metric", i)
        rounding.assert_within(measure(dense, batch, tokens_BT)[0], wanted)
        rounding.assert_within(run(dense, batch, tokens_BT)[0], wanted, "of the logits")
