"""The objective of post-training, against closed forms where gates are deterministic."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from iaj_kernels.rounding import error_bound
import lm_jax
from lm_jax.errors import UsageError
from lm_jax.model import lora
from lm_jax.model import params as params_lib
from lm_jax.parallel import sharding
from lm_jax.train import losses, optim, step
from lm_jax.train.config import TrainConfig
from lm_jax.train.objective import ignore_index_batch, nll
from lm_jax.train.state import StateLayout
from lm_jax.weights.load import Pretrained
from sparse_jax.gates.attend import gated
from sparse_jax.gates.geco import GecoConfig
from sparse_jax.gates.objective import Sparsifying
from sparse_jax.studies.posttrain import export
from tests import rounding, tiny

U = 2.0**-24
CFG = tiny.decoder(vocab_size=32, max_length=16, windows=(5, None))
LORA = lora.LoraConfig(rank=2, alpha=4.0, targets=("q", "k", "v", "o"))
FIXED = GecoConfig.fixed(0.7)
KEY = jax.random.key(3)


@functools.cache
def dense():
    """Larger than initial ones, so that scores differ from 0."""
    drawn = lm_jax.init_params(jax.random.key(0), CFG)
    return jax.tree.map(lambda x: 3.0 * x, drawn)


@functools.cache
def rows():
    """Eight rows, some with padding at the end; id 0 is an ordinary token."""
    rng = np.random.default_rng(1)
    tokens_BS = rng.integers(0, 32, (8, 13))
    tokens_BS[np.arange(13) >= rng.integers(3, 14, (8, 1))] = -1
    return jnp.asarray(tokens_BS.astype(np.int32))


def forward(attend=lm_jax.softmax, **options):
    input_BT = ignore_index_batch(rows()).input_BT
    run = functools.partial(lm_jax.forward, cfg=CFG, attend=attend, **options)
    return jax.jit(run)(dense(), input_BT)


@functools.cache
def dense_loss():
    """Nats per token of the dense model, and a bound on the float32 error."""
    batch = ignore_index_batch(rows())

    def loss(params):
        output = lm_jax.forward(params, batch.input_BT, CFG)
        return nll(output, params, CFG, batch).sum() / batch.loss_mask_BT.sum()

    return rounding.expected(loss, dense())


def loss_terms(objective, params, *, strength=0.7):
    dual = dataclasses.replace(objective.init_state(), log_strength=jnp.log(jnp.float32(strength)))
    normalizers = objective.normalizers(rows())
    return jax.jit(objective.loss_terms)(params, dense(), dual, rows(), normalizers, KEY)


def drawn(objective):
    return params_lib.init(jax.random.key(7), objective.spec)


@pytest.mark.parametrize("adapters", [LORA, None], ids=["adapters", "weights"])
def test_with_all_gates_open_it_is_the_dense_loss_and_the_whole_penalty(adapters):
    objective = Sparsifying(CFG, FIXED, adapters=adapters, bias=1e4)
    params = {"weights": dense()} if adapters is None else drawn(objective)
    minimised, parts = loss_terms(objective, params)
    loss = dense_loss()
    rounding.assert_within(parts["loss"], loss)
    # Probabilities of one and whole counts.
    assert float(parts["edges"]) == 1.0
    # A mean of differences of two log-probabilities, each with the error of a loss.
    assert abs(float(parts["divergence"])) <= 2 * loss.bounds
    # The sum over two layers, as in Eq. 4; three float32 operations after the loss.
    whole = loss.values + 0.7 * 2
    assert abs(float(minimised) - whole) <= loss.bounds + 4 * U * whole


def test_late_updates_open_gates_by_rule_as_the_evaluation_does():
    """And earlier ones sample them, as without the rule."""
    params = {"weights": dense()}
    sampling = Sparsifying(CFG, FIXED, distill=0.0, bias=-0.5)
    late = dataclasses.replace(sampling, rule_from=0)
    sums = jax.jit(late.evaluate)(params, dense(), rows())
    _, parts = loss_terms(late, params)
    _, sampled = loss_terms(sampling, params)
    # The same losses of at most 96 tokens, summed in chunks and by rows.
    slack = error_bound.DEVIATIONS * math.sqrt(2 * 96) * U
    by_rule = float(sums["loss"] / sums["tokens"])
    assert float(parts["loss"]) == pytest.approx(by_rule, rel=slack)
    assert abs(float(sampled["loss"]) - by_rule) > 1e-3
    early = dataclasses.replace(sampling, rule_from=1)
    _, before = loss_terms(early, params)
    assert float(before["loss"]) == pytest.approx(float(sampled["loss"]), rel=slack)
    gradient = jax.grad(lambda p: loss_terms(late, p)[0])(params)
    # The gate's gradient is straight through: queries of the closed edges have one too.
    assert all(np.any(np.asarray(g)) for g in jax.tree.leaves(gradient))


def test_the_bound_is_above_the_reference_of_the_same_update():
    settings = GecoConfig(target=0.25, dual_rate=0.1, decay=0.0)
    objective = Sparsifying(CFG, settings, distill=0.0, bias=-0.5, reference=(3.5, 3.0))
    _, parts = loss_terms(objective, {"weights": dense()})
    dual = objective.init_state()
    before = 0.0
    for reference in objective.reference:
        dual, columns = objective.update(dual, parts)
        excess = float(parts["loss"]) - reference
        # A difference and a sum, of numbers below 4, and two products.
        after = before + 0.1 * (0.25 - excess)
        assert float(dual.log_strength) == pytest.approx(after, abs=16 * U)
        assert float(columns["strength"]) == pytest.approx(math.exp(before), rel=16 * U)
        before = after
    other = dataclasses.replace(objective, reference=(3.5, 3.25))
    assert other.metadata() != objective.metadata()


def test_edges_are_the_mean_over_layers_of_the_share_of_visible_pairs():
    objective = Sparsifying(CFG, FIXED, adapters=LORA, bias=-0.5)
    _, parts = loss_terms(objective, drawn(objective))
    batch = ignore_index_batch(rows())
    attend = gated(CFG, mode="sample", key=KEY, bias=-0.5, valid_BT=batch.input_mask_BT)
    aux = forward(attend).aux
    share_L = aux["expected_edges_BN"].sum((1, 2)) / (CFG.num_heads * aux["pairs_B"].sum(1))
    # Sums of 1,248 positive terms at most (8 rows, 2 heads, 78 pairs), in two orders.
    slack = error_bound.DEVIATIONS * math.sqrt(2 * 1_248) * U
    assert float(parts["edges"]) == pytest.approx(float(share_L.mean()), rel=slack)
    np.testing.assert_array_equal(objective.normalizers(rows())["pairs"], aux["pairs_B"].sum(1))
    # Query t of the first layer sees at most five keys.
    length_B = np.asarray(batch.input_mask_BT.sum(1))
    visible = sum(min(t + 1, 5) for n in length_B for t in range(n))
    assert int(objective.normalizers(rows())["pairs"][0]) == visible


def test_pairs_of_more_than_int32_holds_are_counted():
    """64 rows of 2,048 tokens and 32 heads: the share of open edges was 2,049 times too large."""
    objective = Sparsifying(dataclasses.replace(CFG, windows=()), FIXED)
    pairs_L = objective._pairs_L(jnp.ones((64, 2048), bool)) * 32
    wanted = 64 * 32 * 2048 * 2049 // 2
    np.testing.assert_allclose(pairs_L, wanted, rtol=4 * U)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_divergence_from_the_dense_model_against_float64(temperature):
    options = {"adapters": LORA, "bias": -0.5, "distill": 1.5, "temperature": temperature}
    objective = Sparsifying(CFG, FIXED, **options)
    minimised, parts = loss_terms(objective, drawn(objective))
    batch = ignore_index_batch(rows())
    attend = gated(CFG, mode="sample", key=KEY, bias=-0.5, valid_BT=batch.input_mask_BT)
    log_p, log_q = (
        special.log_softmax(np.asarray(logits, np.float64) / temperature, axis=-1)
        for logits in (forward().logits, forward(attend).logits)
    )
    kl_BT = (np.exp(log_p) * (log_p - log_q)).sum(-1)[np.asarray(batch.loss_mask_BT)]
    assert float(parts["divergence"]) == pytest.approx(temperature**2 * kl_BT.mean(), rel=1e-4)
    terms = (parts["loss"], 0.7 * 2 * parts["edges"], 1.5 * parts["divergence"])
    # Sums of positive terms: at most eight roundings on either way.
    assert float(minimised) == pytest.approx(float(sum(map(float, terms))), rel=16 * U)


ON_DIVERGENCE = Sparsifying(
    CFG,
    GecoConfig(target=0.25, dual_rate=0.1, decay=0.0),
    adapters=LORA,
    bias=-0.5,
    constraint="divergence",
)


def test_on_the_divergence_it_is_minimised_and_bounded_and_the_loss_is_neither():
    params = drawn(ON_DIVERGENCE)
    minimised, parts = loss_terms(ON_DIVERGENCE, params)
    on_loss = dataclasses.replace(ON_DIVERGENCE, constraint="loss")
    _, others = loss_terms(on_loss, params)
    for name in ("loss", "edges", "divergence"):
        assert float(parts[name]) == pytest.approx(float(others[name]), rel=16 * U), name
    terms = float(parts["divergence"]) + 0.7 * 2 * float(parts["edges"])
    assert float(minimised) == pytest.approx(terms, rel=16 * U)
    dual, _ = ON_DIVERGENCE.update(ON_DIVERGENCE.init_state(), parts)
    wanted = 0.1 * (0.25 - float(parts["divergence"]))
    # A difference of numbers below 1, and a product.
    assert float(dual.log_strength) == pytest.approx(wanted, abs=4 * U)
    assert abs(wanted - 0.1 * (0.25 - float(parts["loss"]))) > 0.01
    assert "constraint" not in on_loss.metadata()["sparsifying"]
    assert ON_DIVERGENCE.metadata()["sparsifying"]["constraint"] == "divergence"


def test_a_share_of_the_positions_stands_for_all_of_them():
    """Their sum over the share, by the number of all tokens; all pairs stay in the penalty."""
    batch = ignore_index_batch(rows())
    T = batch.target_BT.shape[1]
    objective = Sparsifying(CFG, FIXED, adapters=LORA, bias=1e4, loss_share=5 / T)
    at_C = np.asarray(jax.random.permutation(jax.random.fold_in(KEY, 1), T)[:5])
    assert len(set(at_C)) == 5

    def loss(params):
        output = lm_jax.forward(params, batch.input_BT, CFG)
        model = losses.Predictor(output.hidden, params)
        nll_BT = jnp.where(batch.loss_mask_BT, losses.token_nll(model, batch.target_BT, CFG), 0.0)
        return T / 5 * nll_BT[:, at_C].sum() / batch.loss_mask_BT.sum()

    minimised, parts = loss_terms(objective, drawn(objective))
    wanted = rounding.expected(loss, dense())
    rounding.assert_within(parts["loss"], wanted)
    assert abs(float(wanted.values) - float(dense_loss().values)) > 1e-3
    whole = wanted.values + 0.7 * 2
    assert abs(float(minimised) - whole) <= wanted.bounds + 4 * U * whole
    # Of a difference of two log-probabilities of the same model.
    assert abs(float(parts["divergence"])) <= 2 * wanted.bounds
    assert "loss_share" in objective.metadata()["sparsifying"]


def test_at_the_dense_model_the_divergence_and_its_gradient_are_zero():
    """All weights, every gate open: nothing pulls where cross entropy would learn the text."""
    start = {"weights": dense()}
    still = dataclasses.replace(
        ON_DIVERGENCE, adapters=None, bias=1e4, dual=GecoConfig.fixed(1e-30)
    )
    learns = dataclasses.replace(still, constraint="loss", distill=0.0)

    def norm(objective):
        gradient = jax.grad(lambda p: loss_terms(objective, p, strength=1e-30)[0])(start)
        return max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradient))

    # Differences of probabilities of both models, which round alike up to the order of sums.
    assert norm(still) < 1e-4 * norm(learns)


def test_the_dense_model_gets_no_gradient_where_it_is_also_what_is_trained():
    """KL(p || q) with p of the same weights: only q moves, and by descent the divergence falls."""
    params = {"weights": dense(), "gate_bias": jnp.full((2, 2), -0.5, jnp.float32)}
    objective = dataclasses.replace(ON_DIVERGENCE, adapters=None, learn_bias=True, bias=0.0)
    dual = dataclasses.replace(objective.init_state(), log_strength=jnp.float32(-30.0))
    normalizers = objective.normalizers(rows())

    def minimised(frozen):
        return objective.loss_terms(params, frozen, dual, rows(), normalizers, KEY)[0]

    gradient = jax.jit(jax.grad(minimised))(dense())
    assert not any(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(gradient))


def test_the_teacher_is_the_dense_model_and_not_the_one_in_training():
    """All weights, gates open: no divergence from the weights of now, but from those of before."""
    moved = {"weights": jax.tree.map(lambda x: 1.25 * x, dense())}
    objective = dataclasses.replace(ON_DIVERGENCE, adapters=None, bias=1e4)
    _, parts = loss_terms(objective, moved)
    _, still = loss_terms(objective, {"weights": dense()})
    assert float(parts["divergence"]) > 0.01 > 100 * abs(float(still["divergence"]))


def test_an_evaluation_on_the_divergence_has_its_sum():
    params = drawn(ON_DIVERGENCE)
    result = jax.jit(ON_DIVERGENCE.evaluate)(params, dense(), rows())
    batch = ignore_index_batch(rows())
    attend = gated(CFG, mode="threshold", bias=-0.5, valid_BT=batch.input_mask_BT)
    log_p, log_q = (
        special.log_softmax(np.asarray(logits, np.float64), axis=-1)
        for logits in (forward().logits, forward(attend).logits)
    )
    kl_BT = (np.exp(log_p) * (log_p - log_q)).sum(-1)[np.asarray(batch.loss_mask_BT)]
    assert float(result["divergence"]) == pytest.approx(kl_BT.sum(), rel=1e-4)
    on_loss = dataclasses.replace(ON_DIVERGENCE, constraint="loss")
    assert "divergence" not in jax.eval_shape(on_loss.evaluate, params, dense(), rows())


def test_the_teacher_is_left_out_where_it_has_no_weight():
    objective = Sparsifying(CFG, FIXED, distill=0.0)
    normalizers = objective.normalizers(rows())
    args = ({"weights": dense()}, (), objective.init_state(), rows(), normalizers, KEY)
    assert float(jax.jit(objective.loss_terms)(*args)[1]["divergence"]) == 0.0


def test_an_evaluation_counts_the_open_edges_of_the_patterns():
    objective = Sparsifying(CFG, FIXED, adapters=LORA, bias=-0.3)
    result = jax.jit(objective.evaluate)(drawn(objective), dense(), rows())
    batch = ignore_index_batch(rows())
    attend = gated(CFG, mode="threshold", bias=-0.3, valid_BT=batch.input_mask_BT)
    output = forward(attend, record={"attn.pattern": lm_jax.keep})
    pattern_LBNTS = np.asarray(output.records["attn.pattern"])
    open_LN = (pattern_LBNTS > 0).sum((1, 3, 4))
    np.testing.assert_array_equal(result["open_edges"], open_LN)
    assert 0 < open_LN.sum() < 2 * int(result["pairs"].sum())


def updated(objective, mesh, accumulate=1):
    config = TrainConfig(steps=3, learning_rate=1e-2, warmup=0.0, accumulate=accumulate)
    layout = dataclasses.replace(StateLayout.of(objective, mesh, config), aux_state=FIXED_START)
    initial = layout.init(jax.random.key(7))
    update = step.make_train_step(objective, mesh, config)
    frozen = jax.device_put(dense(), sharding.param_shardings(mesh, lm_jax.param_spec(CFG)))
    return update(initial, frozen, sharding.shard_batch(mesh, np.asarray(rows())), KEY)


FIXED_START = Sparsifying(CFG, FIXED).init_state()


def one_device():
    return sharding.make_mesh(devices=jax.devices()[:1])


def test_micro_batches_add_up_to_the_batch():
    # Every micro-batch has its own gate noise; these gates are open whatever the noise.
    objective = Sparsifying(CFG, FIXED, adapters=LORA, bias=1e4)
    (one, metrics), (two, others) = (updated(objective, one_device(), n) for n in (1, 2))
    for name in ("loss", "edges", "divergence", "strength", "tokens"):
        assert float(metrics[name]) == pytest.approx(float(others[name]), rel=1e-5, abs=1e-6), name
    pairs = zip(jax.tree.leaves(one.params), jax.tree.leaves(two.params), strict=True)
    assert max(float(jnp.abs(a - b).max()) for a, b in pairs) < 1e-5


def test_four_devices_sample_the_gates_of_one_and_take_its_step():
    """Of adapters, and of a bias per head, which has no weight decay."""
    objective = Sparsifying(CFG, FIXED, adapters=LORA, bias=0.5, learn_bias=True)
    one, metrics = updated(objective, one_device())
    four, others = updated(objective, sharding.make_mesh(data=1, fsdp=2, tensor=2))
    for name in ("loss", "edges", "divergence", "grad_norm"):
        assert float(metrics[name]) == pytest.approx(float(others[name]), rel=1e-5), name
    pairs = zip(jax.tree.leaves(one.params), jax.tree.leaves(four.params), strict=True)
    assert max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs) < 1e-4
    assert optim.choose(optim.is_weight, objective.spec)["gate_bias"] is False
    # Adam's first step has the size of the learning rate wherever there is a gradient.
    moved_LN = np.abs(np.asarray(one.params["gate_bias"]) - 0.5)
    np.testing.assert_allclose(moved_LN, 1e-2, rtol=1e-3)


def test_what_was_trained_is_in_the_exported_model():
    """The learned biases, the kind of gate, and adapters times their strength."""
    objective = Sparsifying(
        CFG, FIXED, adapters=LORA, bias=0.5, learn_bias=True, raw_gate=True, renormalise=True
    )
    params = drawn(objective)
    bias_LN = np.linspace(-1, 1, CFG.num_layers * CFG.num_heads, dtype=np.float32)
    params["gate_bias"] = jnp.asarray(bias_LN.reshape(CFG.num_layers, CFG.num_heads))
    params["weights"] = jax.tree.map(lambda x: x + 0.1, params["weights"])
    merged = export.merge(Pretrained(CFG, dense(), None, ()), objective, params)
    np.testing.assert_array_equal(merged.gates.bias_LN, params["gate_bias"])
    assert merged.gates.raw_gate and merged.gates.renormalise
    leaves = params_lib.by_path(params["weights"])
    down, up = (np.asarray(leaves[f"blocks/mixer/k/{name}"], np.float64) for name in ("down", "up"))
    # alpha / rank, of a sum of two products of three numbers below 1.
    wanted = 2.0 * np.einsum("LDr,LrNH->LDNH", down, up)
    change = np.float64(merged.params["blocks"]["mixer"]["k"]) - dense()["blocks"]["mixer"]["k"]
    size = np.abs(np.asarray(merged.params["blocks"]["mixer"]["k"])).max()
    np.testing.assert_allclose(change, wanted, rtol=0, atol=8 * U * size)
    fixed = dataclasses.replace(objective, learn_bias=False)
    constant = export.merge(
        Pretrained(CFG, dense(), None, ()), fixed, {"weights": params["weights"]}
    )
    np.testing.assert_array_equal(constant.gates.bias_LN, np.full(bias_LN.size, 0.5).reshape(2, -1))


def test_a_fixed_strength_stays_and_a_bound_moves_it():
    metrics = {"loss": jnp.float32(9.0)}
    objective = Sparsifying(CFG, FIXED)
    dual, columns = objective.update(objective.init_state(), metrics)
    assert float(columns["strength"]) == float(dual.strength) == pytest.approx(0.7)
    objective = Sparsifying(CFG, GecoConfig(target=3.0, dual_rate=0.01, decay=0.0))
    dual, columns = objective.update(objective.init_state(), metrics)
    assert float(columns["strength"]) == 1.0
    assert float(dual.log_strength) == pytest.approx(-0.06)


def test_invalid_settings_are_refused():
    with pytest.raises(UsageError, match=r"distill = -1.*temperature = 0.*dtype = 'half'"):
        Sparsifying(CFG, FIXED, distill=-1, temperature=0, dtype="half")
    with pytest.raises(UsageError, match=r"constraint = 'kl' must be 'loss' or 'divergence'"):
        Sparsifying(CFG, FIXED, constraint="kl")
    with pytest.raises(UsageError, match=r"loss_share = 0 must be above 0 and at most 1"):
        Sparsifying(CFG, FIXED, loss_share=0)
    for changes in ({"distill": 0.0}, {"temperature": 2.0}):
        with pytest.raises(UsageError, match="needs distill = 1 and temperature = 1"):
            Sparsifying(CFG, FIXED, constraint="divergence", **changes)
    with pytest.raises(UsageError, match="no weight matches 'qq'"):
        _ = Sparsifying(CFG, FIXED, adapters=lora.LoraConfig(targets=("qq",))).spec
