"""The head on padded rows, its loss and sums."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.errors import UsageError
from lm_jax.model import params as params_lib
from lm_jax.model.decoder import forward
from protot_jax.mixers.models import build_model
from protot_jax.studies.glue import metrics
from protot_jax.studies.glue.objective import HEAD, MODEL, TextPrediction, text_batch

LENGTHS = (3, 7, 5)


def objective_of(**options):
    """Of a Prototype Transformer; `test_row_length.py` has padding for each kind of model."""
    cfg, mixer = build_model(
        "protot",
        hidden_size=16,
        num_layers=2,
        vocab_size=20,
        context=16,
        tie_embeddings=True,
        num_prototypes=3,
    )
    return TextPrediction(cfg, mixer, outputs=3, **options)


def rows(lengths, width, *, seed=0):
    rng = np.random.default_rng(seed)
    result = np.zeros((len(lengths), width + 1), np.int32)
    for row, length in zip(result, lengths, strict=True):
        row[:length] = rng.integers(1, 20, length)
        row[-1] = rng.integers(0, 3)
    return result


@pytest.fixture(scope="module")
def trained():
    """An objective, and parameters with a head of some size."""
    objective = objective_of()
    params = params_lib.init(jax.random.key(0), objective.spec)
    params[HEAD]["w"] *= 20.0
    return objective, params


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_row_has_the_same_outputs_alone_and_padded(trained, pooling):
    objective, params = trained
    objective = dataclasses.replace(objective, pooling=pooling)
    predict = jax.jit(objective.predict)
    padded = rows(LENGTHS, 9)
    together = np.asarray(predict(params, padded))
    assert np.ptp(together, axis=0).min() > 1e-2
    for row, wanted, length in zip(padded, together, LENGTHS, strict=True):
        alone = np.append(row[:length], row[-1])[None]
        # Sums over at most nine positions and 16 channels in another order: some 100 roundings of
        # numbers below 10.
        np.testing.assert_allclose(np.asarray(predict(params, alone))[0], wanted, atol=1e-4)


def test_the_released_pooling_depends_on_the_padding(trained):
    objective, params = trained
    objective = dataclasses.replace(objective, pooling="released")
    predict = jax.jit(objective.predict)
    shorter, longer = rows(LENGTHS, 9), rows(LENGTHS, 14)
    np.testing.assert_array_equal(shorter[:, :7], longer[:, :7])
    difference = predict(params, shorter) - predict(params, longer)
    assert np.abs(difference).max() > 1e-2


def test_outputs_are_those_of_the_formula():
    objective = objective_of(pooling="last")
    params = params_lib.init(jax.random.key(1), objective.spec)
    padded = rows(LENGTHS, 9)
    batch = text_batch(jnp.array(padded))
    hidden_BTD = forward(
        params[MODEL],
        batch.input_BT,
        objective.cfg,
        mixer=objective.mixer,
        valid_BT=batch.held_BT,
    ).hidden
    for b, length in enumerate(LENGTHS):
        x_D = np.asarray(hidden_BTD)[b, length - 1]
        wanted = x_D @ np.asarray(params[HEAD]["w"]) + np.asarray(params[HEAD]["bias"])
        result = objective.predict(params, jnp.array(padded))[b]
        np.testing.assert_allclose(result, wanted, atol=1e-5)


@pytest.fixture(scope="module")
def classes():
    objective = objective_of()
    params = params_lib.init(jax.random.key(2), objective.spec)
    # The last two are rows of padding.
    padded = np.concatenate([rows((4, 6, 2, 9), 9, seed=5), np.zeros((2, 10), np.int32)])
    return objective, params, jnp.array(padded)


def test_sums_of_an_evaluation_leave_rows_of_padding_out(classes):
    objective, params, padded = classes
    sums = jax.jit(objective.evaluate)(params, (), padded)
    logits = np.asarray(objective.predict(params, padded), np.float64)[:4]
    target = np.asarray(padded)[:4, -1]
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert int(sums["tokens"]) == 4
    assert float(sums["loss"]) == pytest.approx(-log_p[np.arange(4), target].sum(), abs=1e-5)
    wanted = np.zeros((3, 3), int)
    np.add.at(wanted, (target, logits.argmax(1)), 1)
    np.testing.assert_array_equal(sums[metrics.COUNTS], wanted)


def test_terms_of_micro_batches_sum_to_the_loss_of_the_batch(classes):
    objective, params, padded = classes
    objective = dataclasses.replace(objective, head_dropout=0.0)
    normalizers = objective.normalizers(padded)
    assert int(normalizers["examples"]) == 4 and int(normalizers["tokens"]) == 21
    key = jax.random.key(0)

    def term(part):
        return float(objective.loss_terms(params, (), None, part, normalizers, key)[0])

    whole = term(padded)
    assert whole == pytest.approx(term(padded[:2]) + term(padded[2:]), abs=1e-6)
    evaluated = objective.evaluate(params, (), padded)
    assert whole == pytest.approx(float(evaluated["loss"]) / 4, abs=1e-6)


def test_a_score_has_the_squared_error_of_its_bits():
    objective = dataclasses.replace(objective_of(), outputs=1)
    params = params_lib.init(jax.random.key(3), objective.spec)
    padded = rows((4, 6), 9)
    score = np.array([-1.5, 0.25], np.float32)
    padded[:, -1] = score.view(np.int32)
    sums = objective.evaluate(params, (), jnp.array(padded))
    result = np.asarray(objective.predict(params, jnp.array(padded)))[:, 0]
    assert float(sums["loss"]) == pytest.approx(((result - score) ** 2).sum(), abs=1e-5)
    wanted = [2, result.sum(), score.sum(), (result**2).sum(), (score**2).sum(), result @ score]
    np.testing.assert_allclose(sums[metrics.MOMENTS], wanted, atol=1e-5)


def test_dropout_of_the_head_needs_a_key_and_changes_outputs(classes):
    objective, params, padded = classes
    plain = objective.predict(params, padded)
    dropped = objective.predict(params, padded, jax.random.key(0))
    assert np.abs(np.asarray(plain - dropped)[:4]).max() > 1e-4
    with pytest.raises(UsageError, match=r"head_dropout = 1\.0 must be at least 0 and below 1"):
        dataclasses.replace(objective, head_dropout=1.0)


def test_every_weight_of_the_model_but_the_unused_ones_is_trained(classes):
    objective, params, padded = classes
    key = jax.random.key(0)

    def loss(params):
        normalizers = objective.normalizers(padded)
        return objective.loss_terms(params, (), None, padded, normalizers, key)[0]

    grads = params_lib.by_path(jax.grad(loss)(params))
    still = {name for name, grad in grads.items() if not np.abs(np.asarray(grad)).max()}
    # Parameters that the mixer allocates and does not use, by layer.
    assert all(name.startswith(f"{MODEL}/blocks/mixer/") for name in still)
    assert np.abs(np.asarray(grads[f"{HEAD}/w"])).max() > 0
    assert np.abs(np.asarray(grads[f"{MODEL}/embed/tokens"])).max() > 0
