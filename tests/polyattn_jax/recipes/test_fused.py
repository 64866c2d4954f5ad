"""The audit's attends give on `kernels` what they give on dense scores."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iaj_kernels.attention.visibility import Visibility
import lm_jax
from lm_jax.errors import UsageError
from lm_jax.model import attention
import polyattn_jax
from polyattn_jax.audit import measure
from polyattn_jax.recipes import row_maps
from polyattn_jax.recipes.fused import by_kernels
from polyattn_jax.recipes.probe import DENSE, Probe
from polyattn_jax.recipes.row_maps import RECIPES
from polyattn_jax.recipes.substitute import GlobalRowMap, recipe, substitute
from tests import rounding, tiny, traced

L, N, B, T = 2, 4, 2, 37
CFG = lm_jax.DecoderConfig(
    num_layers=L,
    num_heads=N,
    num_kv_heads=2,
    head_dim=6,
    hidden_size=20,
    mlp_size=28,
    vocab_size=40,
    max_length=64,
    windows=(None, 9),
    score_softcap=4.0,
)
MAPS = tuple(dict.fromkeys(r.map for r in (row_maps.SOFTMAX, *RECIPES.values())))


@pytest.fixture(scope="module")
def params():
    params = tiny.params(CFG)
    # Larger weights than at initialisation, so that attention is far from uniform.
    blocks = jax.tree.map(lambda a: a * 6 if a.ndim > 2 else a, params["blocks"])
    return params | {"blocks": blocks}


@pytest.fixture(scope="module")
def tokens_BT():
    return jax.random.randint(jax.random.key(1), (B, T), 0, CFG.vocab_size)


def test_diagnosed_rows_are_the_same(params, tokens_BT):
    queries_BQ = jnp.array([[3, 20, 36], [0, 11, 30]])
    answers_BQ = jnp.array([[1, 19, -1], [0, 30, 2]])
    run = functools.partial(
        measure.diagnose, params, tokens_BT, queries_BQ, answers_BQ, jnp.array([0.0, 0.7]), cfg=CFG
    )
    wanted = rounding.expected(run)
    for fused in (False, True):
        rounding.assert_within(run(fused=fused), wanted, f"fused={fused}")
    assert {int(s) for s in np.unique(wanted.values.rows["answer"].status)} >= {0, 1, 3}


def test_answers_under_every_map_of_the_paper_are_the_same(params, tokens_BT):
    lengths_B = jnp.array([T, 23])
    heads_LN = jnp.array([[True, False, True, True], [False, True, True, False]])
    run = functools.partial(
        measure.evaluate, params, tokens_BT, lengths_B, jnp.array([3, 5]), cfg=CFG, maps=MAPS
    )
    assert len(MAPS) == 10
    every = functools.partial(jax.vmap(run, (0, None, None)), jnp.arange(len(MAPS)))
    values, bounds = rounding.expected(every, jnp.float32(-0.4), heads_LN)
    for index, row_map in enumerate(MAPS):
        wanted = rounding.Expected(*jax.tree.map(lambda x, i=index: x[i], (values, bounds)))
        for fused in (False, True):
            got = run(jnp.int32(index), jnp.float32(-0.4), heads_LN, fused=fused)
            rounding.assert_within(got, wanted, str(row_map))
    assert values["dead_rows"].sum() > 0


def test_one_recipe_everywhere_also_while_decoding(params, tokens_BT):
    attend = recipe("relu:p=4", bias=None)
    forward = jax.jit(lm_jax.forward, static_argnames="cfg")
    wanted = rounding.expected(lambda: forward(params, tokens_BT, cfg=CFG, attend=attend).logits)
    result = forward(params, tokens_BT, cfg=CFG, attend=by_kernels(attend)).logits
    rounding.assert_within(result, wanted)
    cache = lm_jax.model.decoder.init_cache(CFG, B, T + 5)
    steps = []
    for t in range(0, T, 12):
        out = forward(
            params, tokens_BT[:, t : t + 12], cfg=CFG, attend=by_kernels(attend), cache=cache
        )
        cache = out.cache
        steps.append(out.logits)
    rounding.assert_within(jnp.concatenate(steps, 1), wanted)


def test_documents_stay_apart_where_there_is_padding_too(params, tokens_BT):
    """Queries that are no padding once lost their documents in the kernel."""
    document_BT = jnp.broadcast_to(jnp.repeat(jnp.arange(3), np.array([9, 14, T - 23])), (B, T))
    valid_BT = jnp.arange(T)[None] < jnp.array([[T], [30]])
    heads_LN = jnp.array([[True, False, True, True], [False, True, True, False]])
    attend = substitute([RECIPES["relu_p2_b0"].map], 0, 0.5, heads_LN, valid_BT)

    def outputs(attend):
        out = lm_jax.forward(params, tokens_BT, CFG, attend=attend, document_BT=document_BT)
        return {"logits": jnp.where(valid_BT[..., None], out.logits, 0.0), **out.aux}

    wanted = rounding.expected(lambda: outputs(attend))
    for computed in (attend, by_kernels(attend)):
        rounding.assert_within(jax.jit(outputs)(computed), wanted)
    queries_BQ = jnp.array([[8, 22], [12, 36]])
    probe = Probe(queries_BQ, jnp.maximum(queries_BQ - 3, 0), jnp.zeros(1))
    wanted = rounding.expected(lambda: outputs(attention.fused(probe, DENSE)))
    rounding.assert_within(jax.jit(outputs)(by_kernels(probe)), wanted)


def test_all_reports_of_the_probe_read_the_same_scores(monkeypatch):
    """S_p is compared with softmax's S row by row: neither is of scores of its own."""
    q, k, v = (
        jax.random.normal(key, (1, 4, 2, 8)) for key in jax.random.split(jax.random.key(3), 3)
    )
    scores_BNQS = jnp.array([[[[1.0, 3.0, 2.0, -jnp.inf]], [[2.0, 0.5, 0.0, -jnp.inf]]]])
    monkeypatch.setattr(polyattn_jax.recipes.fused, "_scores", lambda *args: scores_BNQS)
    probe = Probe(jnp.array([[2]]), jnp.array([[-1]]), jnp.zeros(1), degrees=(2,))
    visibility = Visibility(True, jnp.zeros(1, jnp.int32), None, None, None)
    run = functools.partial(
        polyattn_jax.recipes.fused._probe, visibility=visibility, scale=1.0, cap=None
    )
    _, aux = jax.jit(run)(probe, q, k, v)
    s_p = aux["rows"]["argmax"].s_p
    np.testing.assert_allclose(s_p.ravel(), [5 / 9, 1 / 16], rtol=1e-6)
    z = np.float64([[1, 2, -np.inf], [0.5, 0, -np.inf]]) - [[3], [2]]
    np.testing.assert_allclose(aux["softmax"]["argmax"].ravel(), np.exp(z).sum(1), rtol=1e-6)


def test_no_score_matrix_is_formed(params, tokens_BT):
    # Blocks of queries are formed, T x S of all heads at once is not: B N T T elements.
    long_BT = jnp.zeros((B, 8 * T), jnp.int32)
    last_B1 = jnp.full((B, 1), 8 * T - 1)
    jaxpr = jax.make_jaxpr(functools.partial(measure.diagnose, cfg=CFG, fused=True))(
        params, long_BT, last_B1, last_B1, jnp.zeros(2)
    )
    assert traced.largest(jaxpr.jaxpr) < B * N * (8 * T) ** 2


def test_what_no_kernel_knows_is_refused(params, tokens_BT):
    def own(z, b):
        return jax.nn.softmax(z + b, axis=-1)

    with pytest.raises(TypeError, match="row_map is a function; make one with a function of"):
        lm_jax.forward(params, tokens_BT, CFG, attend=by_kernels(GlobalRowMap(own, 0.0)))
    with pytest.raises(UsageError, match="no kernel 'kernels' for"):
        by_kernels(jax.nn.softmax)
    with pytest.raises(UsageError, match="forms no scores"):
        lm_jax.forward(
            params,
            tokens_BT,
            CFG,
            attend=by_kernels(recipe("sigmoid")),
            record={"attn.pattern": lm_jax.keep},
        )
