"""Models with gates under substitution: what `sparse_jax` computes, whatever is reported."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import BadInputError, UsageError
from lm_jax.model.attention import fused
from lm_jax.weights.gates import StoredGates
from polyattn_jax.audit import measure, recipe_rows
from polyattn_jax.audit.audited_model import load, model_identity
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.recipes.gates import GATES, forward, gated
from polyattn_jax.recipes.row_maps import SOFTMAX, parse_recipe
from polyattn_jax.recipes.substitute import recipe, substitute
from sparse_jax.circuits.source_model import open_identity
from sparse_jax.gates import model as sparse_model
from tests import tiny

RECIPES = ("softmax", "relu:p=2,b=0.5", "hedgehog")
MAPS = tuple(parse_recipe(text).map for text in RECIPES)
TOKENS = np.random.default_rng(0).integers(0, 40, (2, 12))


def models(raw_gate=False, renormalise=False):
    """Parameters with gates of which about half are open, without any, and the sparse model."""
    cfg = tiny.DECODER
    params = jax.tree.map(lambda x: 3.0 * x, lm_jax.init_params(jax.random.key(1), cfg))
    bias_LN = np.random.default_rng(4).normal(size=(cfg.num_layers, cfg.num_heads))
    stored = StoredGates(bias_LN.astype(np.float32), raw_gate, renormalise)
    base = lm_jax.Pretrained(cfg, params, None, ())
    gates = sparse_model.Gates(stored.bias_LN, raw_gate, renormalise)
    return params | {GATES: stored}, params, sparse_model.SparseModel(base, gates, {})


def logits(params, index, heads=True, maps=MAPS):
    cfg = tiny.DECODER
    return measure.logits(
        params,
        jnp.asarray(TOKENS),
        jnp.int32(index),
        jnp.float32(0.5),
        jnp.full((cfg.num_layers, cfg.num_heads), heads),
        cfg=cfg,
        maps=maps,
    )


def apart(got, wanted):
    """Whether two are closer than rounding of float32 explains: 64 roundings of the largest."""
    return np.abs(got - wanted).max() <= 64 * 2.0**-24 * np.abs(wanted).max()


@pytest.mark.parametrize("maps", [MAPS, MAPS[:2]], ids=["by queries and keys", "by scores"])
@pytest.mark.parametrize("kind", [(False, False), (True, False), (False, True)])
def test_under_softmax_the_model_is_the_sparse_one(kind, maps):
    params, _, model = models(*kind)
    wanted = model.forward(jnp.asarray(TOKENS)).logits
    for index, heads in ((0, True), (1, False)):
        assert apart(np.asarray(logits(params, index, heads, maps)), np.asarray(wanted))


@pytest.mark.parametrize("index", range(len(RECIPES)))
def test_gates_that_are_all_open_change_nothing_and_closed_ones_leave_nothing(index):
    params, plain, _ = models()
    bias_LN = params[GATES].bias_LN
    opened = plain | {GATES: StoredGates(np.full_like(bias_LN, 1e6))}
    np.testing.assert_array_equal(logits(opened, index), logits(plain, index))
    closed = plain | {GATES: StoredGates(np.full_like(bias_LN, -1e6))}
    blocks = plain["blocks"]
    mixer = blocks["mixer"] | {"o": jnp.zeros_like(blocks["mixer"]["o"])}
    silent = plain | {"blocks": blocks | {"mixer": mixer}}
    assert apart(np.asarray(logits(closed, index)), np.asarray(logits(silent, index)))


@pytest.mark.parametrize(
    "text", ["gdn:distance=0.5", "poly:p=3,b=0.1", "ramapuram", "relu:p=2,b=1"]
)
def test_open_gates_change_nothing_where_they_divide_by_the_open_share(text):
    """Also of maps whose rows do not sum to 1, or have both signs and sums near 0."""
    params, plain, _ = models(renormalise=True)
    stored = params[GATES]
    opened = plain | {GATES: stored.replace(bias_LN=np.full_like(stored.bias_LN, 1e6))}
    attend = recipe(text)
    got, wanted = (
        np.asarray(forward(each, jnp.asarray(TOKENS), tiny.DECODER, attend=attend).logits)
        for each in (opened, plain)
    )
    assert apart(got, wanted)


@pytest.mark.parametrize("text", ["relu:p=2,b=0.5", "elu1", "hedgehog", "gdn:distance=0.5"])
def test_a_recipe_everywhere_is_that_recipe_in_all_heads(text):
    params, _, _ = models()
    cfg, maps = tiny.DECODER, (parse_recipe(text).map,)
    got = forward(params, jnp.asarray(TOKENS), cfg, attend=recipe(text)).logits
    wanted = logits(params, 0, maps=maps)
    assert apart(np.asarray(got), np.asarray(wanted))


def test_a_map_has_no_weight_on_closed_edges():
    params, _, _ = models()
    cfg = tiny.DECODER
    heads_LN = jnp.ones((cfg.num_layers, cfg.num_heads), bool)
    attend = gated(substitute(MAPS[:2], 1, 0.5, heads_LN), params, cfg)
    record = {"attn.scores": lm_jax.keep, "attn.pattern": lm_jax.keep}
    plain = {name: each for name, each in params.items() if name != GATES}
    records = lm_jax.forward(plain, jnp.asarray(TOKENS), cfg, attend=attend, record=record).records
    scores, pattern = (np.asarray(records[name]) for name in record)
    bias = params[GATES].bias_LN[:, None, :, None, None]
    opened = np.isfinite(scores) & (scores + bias > 0)
    wanted = np.where(opened, np.asarray(MAPS[1](jnp.asarray(scores), 0.5)), 0.0)
    assert apart(pattern, wanted)
    assert 0.2 < opened.sum() / np.isfinite(scores).sum() < 0.8


def test_rows_are_those_of_the_gated_forward_pass():
    """Scores of later layers depend on the gates of those before."""
    params, plain, model = models()
    cfg, tokens_BT = tiny.DECODER, jnp.asarray(TOKENS)
    queries_BQ = jnp.asarray([[5, 11], [3, 11]])
    attend = model.gates.attend(cfg)
    record = {"attn.scores": lm_jax.keep}
    scores = lm_jax.forward(plain, tokens_BT, cfg, attend=attend, record=record)
    scores = np.asarray(scores.records["attn.scores"])
    rows = np.stack([scores[:, b][:, :, np.asarray(queries_BQ[b])] for b in range(2)], 1)
    # S of softmax is the weight of the others over that of the best. Scores of two programs differ
    # by some roundings of the largest, and S by as much, relatively, for each of its two sides.
    wanted = np.exp(rows.astype(np.float64) - rows.max(-1, keepdims=True)).sum(-1) - 1
    error = 4 * 64 * 2.0**-24 * max(1.0, np.abs(rows[np.isfinite(rows)]).max())
    got = recipe_rows.measure(
        params,
        tokens_BT,
        queries_BQ,
        np.zeros((1, *params[GATES].bias_LN.shape)),
        cfg=cfg,
        maps=(parse_recipe("hedgehog").map,),
    )
    assert (np.abs(np.asarray(got["s_softmax"])[:, 0] - wanted) <= error * (1 + wanted)).all()
    answers = jnp.full(queries_BQ.shape, -1)
    diagnosed = measure.diagnose(params, tokens_BT, queries_BQ, answers, jnp.zeros(1), cfg=cfg)
    assert (np.abs(np.asarray(diagnosed.softmax["argmax"]) - wanted) <= error * (1 + wanted)).all()


def test_raw_gates_of_capped_scores_are_refused():
    cfg = dataclasses.replace(tiny.DECODER, score_softcap=20.0)
    params, _, _ = models(raw_gate=True)
    with pytest.raises(UsageError, match=r"raw gates, which read q\.k, and capped scores"):
        gated(fused(substitute(MAPS, 0, 0.0, jnp.ones((2, 2), bool)).attend, "dense"), params, cfg)


def test_a_sparse_model_is_audited_with_its_gates_and_known_by_them():
    config = AuditConfig(model="pair_small_sparse")
    audited = load(config)
    assert audited.model.identity.text == open_identity("pair_small_sparse").text
    assert model_identity("pair_small_sparse") == audited.model.identity
    assert model_identity("pair_small_control") != audited.model.identity
    assert not audited.fused
    kernels = load(dataclasses.replace(config, attention="kernels"))
    with pytest.raises(BadInputError, match="has gates, which no kernel of row maps computes"):
        assert kernels.fused
    assert SOFTMAX.map in audited.maps
