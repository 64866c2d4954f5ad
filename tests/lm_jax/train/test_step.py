"""An update is that of the whole batch, on any number of devices and micro-batches."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import BadInputError, UsageError
from lm_jax.model.mixers import ATTENTION
from lm_jax.parallel import sharding
from lm_jax.train import optim, step
from lm_jax.train.evaluate import evaluate
from lm_jax.train.objective import LanguageModelling, cast_params, token_loss
from tests import rounding
from tests.lm_jax.train import tiny_training as tiny

CONFIG = dataclasses.replace(tiny.CONFIG, warmup=0.0)
OBJECTIVE = LanguageModelling(tiny.CFG)
BATCH = tiny.BATCHES.at(0)["tokens"]


def updated(config, ways=1, batch=BATCH, objective=OBJECTIVE, **options):
    """State and metrics after one update."""
    mesh = tiny.mesh(ways)
    update = step.make_train_step(objective, mesh, config, **options)
    before = tiny.fresh_state(mesh, config)
    return update(before, (), sharding.shard_batch(mesh, batch), jax.random.key(7))


@pytest.fixture(scope="module")
def whole():
    return updated(CONFIG)


@pytest.fixture(scope="module")
def reference():
    """Sum of losses of any batch, each -log p written out, in float64."""

    def total(params, tokens_BS):
        logits_BTV = lm_jax.forward(params, tokens_BS[:, :-1], tiny.CFG).logits
        log_p_BTV = jax.nn.log_softmax(logits_BTV)
        target_BT1 = tokens_BS[:, 1:, None]
        log_p_BT1 = jnp.take_along_axis(log_p_BTV, target_BT1, axis=-1)
        return -jnp.sum(jnp.where(target_BT1 == 0, 0.0, log_p_BT1))

    return total


@pytest.fixture(scope="module")
def mean(reference):
    """The mean over the tokens of `BATCH` that are no padding, and its gradient."""

    def of_tokens(params):
        return reference(params, jnp.asarray(BATCH)) / count(BATCH)

    return rounding.expected(jax.value_and_grad(of_tokens), tiny.initial_params())


def assert_is_the_update_of(after, metrics, mean):
    tiny.assert_is_the_update_of(after, metrics, mean, tiny.initial_params(), tiny.SPEC, CONFIG)


def count(batch):
    return int((batch[:, 1:] != 0).sum())


def largest_difference(left, right):
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs)


def test_the_update_is_that_of_the_mean_over_tokens_that_are_no_padding(whole, mean):
    after, metrics = whole
    n = count(BATCH)
    assert n < BATCH[:, 1:].size
    assert int(metrics["tokens"]) == n
    assert int(after.step) == 1
    assert bool(metrics["finite"])
    assert_is_the_update_of(after, metrics, mean)


def test_accumulation_equals_the_whole_batch(mean):
    counts = [count(BATCH[a::4]) for a in range(4)]
    assert len(set(counts)) > 1, "micro-batches of unequal length are what this test is about"
    after, metrics = updated(dataclasses.replace(CONFIG, accumulate=4))
    assert_is_the_update_of(after, metrics, mean)


def test_four_devices_equal_one(mean):
    after, metrics = updated(dataclasses.replace(CONFIG, accumulate=2), ways=4)
    assert_is_the_update_of(after, metrics, mean)
    spread = after.opt_state[0].mu["blocks"]["mlp"]["up"].sharding
    assert spread == after.params["blocks"]["mlp"]["up"].sharding
    assert not spread.is_fully_replicated


def test_the_norms_of_groups_are_those_of_their_gradients(mean):
    _, metrics = updated(CONFIG, group=optim.group)
    got = {name: float(norm) for name, norm in metrics["grad_norms"].items()}
    mixer = {f"mixer/{name}" for name in "qkvo"}
    assert got.keys() == {"embed", "unembed", "norms", "mlp"} | mixer
    gradient, bound = (lm_jax.params.by_path(each[1]) for each in (mean.values, mean.bounds))
    for name, norm in got.items():
        paths = [path for path in gradient if optim.group(path) == name]
        want, off = (
            math.sqrt(sum(float(np.sum(np.square(tree[path]))) for path in paths))
            for tree in (gradient, bound)
        )
        # By the triangle inequality; and a sum of squares is right to its number of terms.
        terms = sum(gradient[path].size for path in paths)
        assert abs(norm - want) <= off + terms * tiny.U * want
    total = math.sqrt(sum(norm**2 for norm in got.values()))
    assert total == pytest.approx(float(metrics["grad_norm"]), rel=1e-6)


def test_bfloat16_computes_near_float32_and_keeps_float32_state(whole):
    after, metrics = updated(CONFIG, objective=LanguageModelling(tiny.CFG, dtype="bfloat16"))
    assert float(metrics["loss"]) == pytest.approx(float(whole[1]["loss"]), rel=1e-2)
    assert float(metrics["loss"]) != float(whole[1]["loss"])
    floats = {leaf.dtype for leaf in jax.tree.leaves(after) if leaf.dtype != jnp.int32}
    assert floats == {jnp.dtype("float32")}


def test_only_matrices_and_the_biases_added_to_them_are_cast():
    cfg = dataclasses.replace(tiny.CFG, norm="layer", qkv_bias=True, mlp_bias=True, out_bias=True)
    spec = lm_jax.param_spec(cfg)

    def low(params):
        params = cast_params(params, spec, jnp.bfloat16)
        return params, token_loss(params, jnp.asarray(BATCH), cfg, ATTENTION)[0]

    params, total = jax.eval_shape(low, lm_jax.params.abstract(spec))
    leaves = lm_jax.params.by_path(params)
    kept = {name for name, leaf in leaves.items() if leaf.dtype == jnp.float32}
    norms = ("final", "blocks/ln1", "blocks/ln2")
    assert kept == {f"{norm}/{part}" for norm in norms for part in ("scale", "bias")}
    assert total.dtype == jnp.float32


def test_a_batch_of_padding_alone_moves_nothing_but_by_decay(whole):
    after, metrics = updated(CONFIG, batch=np.zeros_like(BATCH))
    assert float(metrics["loss"]) == 0.0
    assert float(metrics["grad_norm"]) == 0.0
    scale = after.params["final"]["scale"]
    np.testing.assert_array_equal(scale, np.ones_like(scale))
    shrunk = 1.0 - float(optim.schedule(CONFIG)(0)) * CONFIG.weight_decay
    # Two products and a sum.
    want = shrunk * np.float64(tiny.initial_params()["unembed"])
    np.testing.assert_allclose(after.params["unembed"], want, rtol=4 * tiny.U)


@pytest.mark.parametrize(("rows", "accumulate", "ways"), [(6, 1, 4), (8, 4, 4), (8, 3, 1)])
def test_a_batch_that_does_not_divide_is_refused_with_the_numbers(rows, accumulate, ways):
    with pytest.raises(UsageError, match=rf"batch of {rows} .* multiple of {accumulate * ways}$"):
        step.check_batch(rows, accumulate, tiny.mesh(ways))


def test_a_spike_is_skipped_once_the_window_is_full_and_a_lasting_rise_is_not():
    config = dataclasses.replace(CONFIG, skip_sigma=4.0)
    mesh = tiny.mesh()
    update = step.make_train_step(OBJECTIVE, mesh, config)
    everywhere = sharding.replicated(mesh)
    usual = np.linspace(1.0, 1.1, step.LOSS_WINDOW, dtype=np.float32)

    def updated_after(losses_W):
        before = tiny.fresh_state(mesh, config).replace(
            step=jax.device_put(np.int32(130), everywhere),
            losses_W=jax.device_put(losses_W, everywhere),
        )
        tokens_BS = sharding.shard_batch(mesh, BATCH)
        return update(before, (), tokens_BS, jax.random.key(7))

    after, metrics = updated_after(usual)
    assert bool(metrics["skipped"])
    assert int(after.step) == 131
    tiny.assert_bitwise(after.params, tiny.initial_params())
    assert max(float(np.abs(m).max()) for m in jax.tree.leaves(after.opt_state[0].mu)) == 0.0
    want = usual.copy()
    want[130 % 128] = metrics["loss"]
    np.testing.assert_array_equal(after.losses_W, want)
    for losses_W in (np.where(np.arange(128) == 5, np.nan, usual), usual + 2.5):
        after, metrics = updated_after(losses_W.astype(np.float32))
        assert not bool(metrics["skipped"])
        assert largest_difference(after.params, tiny.initial_params()) > 1e-4


def test_perplexity_weights_tokens_and_says_what_batches_would_give(reference):
    mesh = tiny.mesh()
    look = step.make_eval_step(OBJECTIVE, mesh)
    params = tiny.fresh_state(mesh).params
    batches = [tiny.VALIDATION.at(k)["tokens"] for k in range(tiny.VALIDATION.per_epoch)]
    exact = [rounding.expected(reference, params, jnp.asarray(batch)) for batch in batches]
    (a, b), (n, m) = (float(each.values) for each in exact), map(count, batches)
    assert n != m
    result = evaluate(look, params, tiny.VALIDATION, mesh)
    assert result.tokens == n + m
    # The relative error of an exponential is the absolute error of its argument.
    off = sum(float(each.bounds) for each in exact) / min(n, m) + 8 * tiny.U * math.log(32)
    assert result.perplexity == pytest.approx(math.exp((a + b) / (n + m)), rel=off)
    assert result.batch_mean_perplexity == pytest.approx(math.exp((a / n + b / m) / 2), rel=off)

    class Empty(tiny.FakeBatches):
        def at(self, k):
            return {"tokens": np.zeros((8, 12), np.int32), "document": np.zeros(8, np.int64)}

    with pytest.raises(BadInputError, match="no token to predict"):
        evaluate(look, params, Empty(), mesh)
