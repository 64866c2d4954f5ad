"""Losses in chunks of tokens against the same from whole logits, in float64."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import lm_jax
from lm_jax.parallel import sharding
from lm_jax.parallel.kernels import under_mesh
from lm_jax.train import losses
from tests import rounding, tiny, traced

B, T, D, V = 4, 9, 12, 40
# Chunks of four tokens do not divide rows of nine.
TOKENS = 4


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_TOKENS", TOKENS)


def config(*, tied=True, cap=None):
    return tiny.decoder(
        vocab_size=V, hidden_size=D, tie_embeddings=tied, logit_softcap=cap, max_length=T
    )


def tree(w_VD, tied):
    return {"embed": {"tokens": w_VD}} if tied else {"unembed": w_VD.T}


@functools.cache
def drawn():
    """Hidden states, unembedding, those of a teacher, targets, and which of them count."""
    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((B, T, D), (V, D), (B, T, D), (V, D))
    ]
    target_BT = rng.integers(0, V, (B, T)).astype(np.int32)
    loss_mask_BT = np.arange(T) < rng.integers(2, T + 1, (B, 1))
    return *map(jnp.asarray, arrays), jnp.asarray(target_BT), jnp.asarray(loss_mask_BT)


def whole(cap, distill, temperature, hidden_BTD, w_VD, teacher_BTD, teacher_VD):
    """The definition: every logit at once."""
    *_, target_BT, loss_mask_BT = drawn()

    def logits(hidden_BTD, w_VD):
        z = jnp.einsum("BTD,VD->BTV", hidden_BTD, w_VD)
        return z if cap is None else cap * jnp.tanh(z / cap)

    z = logits(hidden_BTD, w_VD)
    hot = jax.nn.one_hot(target_BT, V)
    loss_BT = -(hot * jax.nn.log_softmax(z)).sum(-1)
    log_p = jax.nn.log_softmax(logits(teacher_BTD, teacher_VD) / temperature)
    log_q = jax.nn.log_softmax(z / temperature)
    kl_BT = temperature**2 * (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
    loss, divergence = (jnp.where(loss_mask_BT, x, 0.0).sum() for x in (loss_BT, kl_BT))
    return loss + distill * divergence, (loss, divergence)


def chunked(cfg, distill, temperature, hidden_BTD, w_VD, teacher_BTD, teacher_VD):
    *_, target_BT, loss_mask_BT = drawn()
    teacher = losses.Predictor(teacher_BTD, tree(teacher_VD, cfg.tie_embeddings))
    sums = losses.summed(
        losses.Predictor(hidden_BTD, tree(w_VD, cfg.tie_embeddings)),
        target_BT,
        loss_mask_BT,
        cfg,
        teacher=teacher if distill else None,
        distill=distill,
        temperature=temperature,
    )
    return sums.minimised, (sums.loss, sums.divergence)


def with_gradients(function, *options):
    return jax.value_and_grad(functools.partial(function, *options), argnums=(0, 1), has_aux=True)


@pytest.mark.parametrize(
    ("tied", "cap", "distill"),
    [(True, None, 0.0), (False, 3.0, 0.0), (True, 3.0, 0.7), (False, None, 0.7)],
)
def test_value_and_gradients_are_those_of_whole_logits(tied, cap, distill):
    arrays = drawn()[:4]
    wanted = rounding.expected(with_gradients(whole, cap, distill, 2.0), *arrays)
    differentiated = with_gradients(chunked, config(tied=tied, cap=cap), distill, 2.0)
    (minimised, (loss, divergence)), gradients = jax.jit(differentiated)(*arrays)
    if not distill:
        # There is no teacher, and so no divergence from it.
        assert float(divergence) == 0.0
        divergence = wanted.values[0][1][1]
    rounding.assert_within(((minimised, (loss, divergence)), gradients), wanted)


def test_each_product_is_computed_once_and_none_for_a_frozen_unembedding():
    """Logits, d hidden and d W: forward and backward are three products of the sizes of one."""
    arrays, one = drawn()[:4], 2 * B * T * V * D

    def flops(distill, *argnums):
        function = functools.partial(chunked, config(), distill, 2.0)
        if argnums:
            function = jax.value_and_grad(function, argnums, has_aux=True)
        return traced.products(jax.make_jaxpr(function)(*arrays).jaxpr)

    assert flops(0.0) == one
    assert flops(0.0, 0, 1) == 3 * one
    assert flops(0.0, 0) == 2 * one
    # A teacher adds its logits.
    assert flops(0.7, 0, 1) == 4 * one


def test_the_logits_of_a_batch_never_exist(monkeypatch):
    """Of training and of evaluation; the largest array is the gradient by W."""
    monkeypatch.setattr(losses, "CHUNK_TOKENS", D)
    arrays, target_BT = drawn()[:4], drawn()[4]

    def evaluated(hidden_BTD, w_VD):
        return losses.token_nll(losses.Predictor(hidden_BTD, tree(w_VD, True)), target_BT, config())

    trainable = with_gradients(chunked, config(), 0.7, 2.0)
    assert traced.largest(jax.make_jaxpr(trainable)(*arrays).jaxpr) == D * V < B * T * V
    assert traced.largest(jax.make_jaxpr(evaluated)(*arrays[:2]).jaxpr) == D * V
    # It can be differentiated too, and then makes the logits of a chunk twice.
    gradient = jax.grad(lambda *arrays: evaluated(*arrays).sum(), (0, 1))
    assert traced.largest(jax.make_jaxpr(gradient)(*arrays[:2]).jaxpr) == D * V


@pytest.mark.parametrize("cap", [None, 3.0])
def test_the_loss_of_every_token(cap):
    hidden_BTD, w_VD, *_, target_BT, _ = drawn()

    def definition(hidden_BTD, w_VD):
        z = jnp.einsum("BTD,VD->BTV", hidden_BTD, w_VD)
        z = z if cap is None else cap * jnp.tanh(z / cap)
        return -(jax.nn.one_hot(target_BT, V) * jax.nn.log_softmax(z)).sum(-1)

    wanted = rounding.expected(definition, hidden_BTD, w_VD)
    model = losses.Predictor(hidden_BTD, tree(w_VD, True))
    rounding.assert_within(losses.token_nll(model, target_BT, config(cap=cap)), wanted)


# data, fsdp, tensor.
@pytest.mark.parametrize("cap", [None, 3.0])
def test_the_divergence_of_every_token(cap):
    hidden_BTD, w_VD, teacher_BTD, teacher_VD, *_ = drawn()
    cfg = config(cap=cap)

    def kl_BT(hidden_BTD, w_VD, teacher_BTD, teacher_VD):
        z, y = (
            jnp.einsum("BTD,VD->BTV", h, w)
            for h, w in ((hidden_BTD, w_VD), (teacher_BTD, teacher_VD))
        )
        if cap is not None:
            z, y = cap * jnp.tanh(z / cap), cap * jnp.tanh(y / cap)
        log_p, log_q = jax.nn.log_softmax(y), jax.nn.log_softmax(z)
        return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)

    arrays = (hidden_BTD, w_VD, teacher_BTD, teacher_VD)
    models = [losses.Predictor(h, tree(w, True)) for h, w in (arrays[:2], arrays[2:])]
    result = jax.jit(functools.partial(losses.token_divergence, cfg=cfg))(*models)
    rounding.assert_within(result, rounding.expected(kl_BT, *arrays))


def test_the_weight_of_the_cross_entropy_scales_its_value_and_its_gradient():
    """With 0 the divergence alone is minimised; sums of both parts are as before."""
    hidden_BTD, w_VD, teacher_BTD, teacher_VD, target_BT, loss_mask_BT = drawn()
    cfg, teacher = config(), losses.Predictor(teacher_BTD, tree(teacher_VD, True))

    def sums(hidden_BTD, likelihood, distill):
        found = losses.summed(
            losses.Predictor(hidden_BTD, tree(w_VD, True)),
            target_BT,
            loss_mask_BT,
            cfg,
            teacher=teacher,
            distill=distill,
            likelihood=likelihood,
        )
        return found.minimised, (found.loss, found.divergence)

    run = jax.jit(jax.value_and_grad(sums, has_aux=True), static_argnums=(1, 2))
    (none, parts), of_none = run(hidden_BTD, 0.0, 1.0)
    (both, others), of_both = run(hidden_BTD, 1.0, 1.0)
    (loss, _), of_loss = run(hidden_BTD, 1.0, 0.0)
    assert float(none) == float(parts[1]) and parts == others
    U = 2.0**-24
    assert float(both) == pytest.approx(float(none) + float(loss), rel=2 * U)
    size = np.abs(of_none).max() + np.abs(of_loss).max()
    # Two products of 40 terms each against one of their sum.
    np.testing.assert_allclose(of_both, of_none + of_loss, rtol=0, atol=64 * U * float(size))


@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 2, 2), (1, 1, 4)])
def test_on_a_mesh_it_is_what_one_device_computes(sizes):
    """Devices that split the rows add up their gradients by W after the last chunk, once."""
    mesh = sharding.make_mesh(**dict(zip(sharding.AXES, sizes, strict=True)))
    arrays, cfg = drawn()[:4], config()
    wanted = rounding.expected(with_gradients(whole, None, 0.7, 2.0), *arrays)
    rows = sharding.batch_sharding(mesh)
    table = sharding.named(mesh, lm_jax.param_spec(cfg)["embed"]["tokens"])
    jitted = jax.jit(
        under_mesh(with_gradients(chunked, cfg, 0.7, 2.0), mesh),
        in_shardings=(rows, table, rows, table),
        out_shardings=(None, (rows, table)),
    )
    rounding.assert_within(jitted(*arrays), wanted)
    loops, _ = jitted.lower(*arrays).compile().as_text().split("\nENTRY ")
    for sent in re.findall(r"= (.*) (?:all-reduce|all-gather|reduce-scatter)\(", loops):
        sizes = [
            math.prod(map(int, shape.split(","))) for shape in re.findall(r"\[([\d,]+)\]", sent)
        ]
        assert max(sizes) <= TOKENS * D, sent


def test_in_bfloat16_products_round_their_operands_alone():
    """Against float64 on the rounded arguments: d logits are rounded once before each product."""
    arrays = [x.astype(jnp.bfloat16) for x in drawn()[:4]]
    wide = [x.astype(jnp.float32) for x in arrays]
    wanted = rounding.expected(with_gradients(whole, None, 0.0, 1.0), *wide)
    (loss, _), (d_hidden, d_w) = jax.jit(with_gradients(chunked, config(), 0.0, 1.0))(*arrays)
    assert d_hidden.dtype == d_w.dtype == jnp.bfloat16
    rounding.assert_within(loss, rounding.Expected(wanted.values[0][0], wanted.bounds[0][0]))
    unit = 2.0**-8
    hidden_XD, w_VD = (np.asarray(x, np.float64).reshape(-1, D) for x in wide[:2])
    p_XV = special.softmax(hidden_XD @ w_VD.T, axis=-1)
    target_BT, loss_mask_BT = drawn()[4:]
    d_XV = np.where(np.ravel(loss_mask_BT)[:, None], p_XV - np.eye(V)[np.ravel(target_BT)], 0.0)
    absolute = (np.abs(d_XV) @ np.abs(w_VD)).reshape(B, T, D), np.abs(d_XV).T @ np.abs(hidden_XD)
    for gradient, exact, terms in zip((d_hidden, d_w), wanted.values[1], absolute, strict=True):
        # One rounding of each term, one of the sum, and one after it is scaled.
        off = np.abs(np.asarray(gradient, np.float64) - exact)
        assert (off <= unit * terms + 2 * unit * np.abs(exact) + 4 * unit**2 * terms).all()
