"""The gated delta rule as weights against its recurrence in float64, token by token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iaj_kernels.core.chunks import LOG_ZERO
from iaj_kernels.delta_rule.api import delta_rule
import lm_jax
from lm_jax.errors import UsageError
from polyattn_jax.audit import ranking, recipe_rows
from polyattn_jax.recipes.delta_maps import GatedDelta
from polyattn_jax.recipes.fused import by_kernels
from polyattn_jax.recipes.linear_state import kept_state, linear_state, sentence
from polyattn_jax.recipes.row_maps import parse_recipe, resolve_bias
from polyattn_jax.recipes.substitute import recipe, substitute
from tests import tiny

B, T, N, K, H, E = 4, 9, 4, 2, 6, 5
# A query that reads its own key alone, and memories of which the last holds all that there is.
DISTANCES = np.array([0.0, 0.4, 3.0, 500.0])
# Two documents; padding after a document; padding before and within one; two that take turns.
SEGMENTS = np.array(
    [
        [0, 0, 0, 0, 0, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 0, -1, -1, -1],
        [-1, -1, 0, 0, 0, -1, 0, 0, 0],
        [0, 0, 0, 1, 1, 0, 1, 1, 0],
    ]
)
U32, U64 = 2.0**-24, 2.0**-53


def inputs(dtype=np.float64, seed=0):
    """Queries, keys and values, of which the keys of three steps in a row are equal."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((B, T, n, e)) for n, e in ((N, H), (K, H), (K, E)))
    k[:, 3:5] = k[:, 2:3]
    return [jnp.asarray(x, dtype) for x in (q, k, v)]


def masked(window=T):
    """Scores that say which keys are seen, `[B, N, T, T]`."""
    away = np.arange(T)[:, None] - np.arange(T)
    same = SEGMENTS[:, :, None] == SEGMENTS[:, None]
    sees = (away >= 0) & (away < window) & same & (SEGMENTS >= 0)[:, None]
    return jnp.broadcast_to(jnp.where(sees, 0.7, -jnp.inf)[:, None], (B, N, T, T))


def recurrence(q_BTNH, k_BTKH, v_BTKE, distances=DISTANCES):
    """Outputs of the recurrence in float64, with a memory of each document that starts empty.

    A memory decays at every step, and only a token of its document erases and writes.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q_BTNH, k_BTKH, v_BTKE))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    out_BTNE = np.zeros((B, T, N, E))
    for b, n in np.ndindex(B, N):
        alpha, beta = distances[n] / (1 + distances[n]), 1 / (1 + distances[n])
        memories = np.zeros((2, H, E))
        for t in range(T):
            memories *= alpha
            if SEGMENTS[b, t] < 0:
                continue
            own_HE, key = memories[SEGMENTS[b, t]], k[b, t, n // (N // K)]
            own_HE -= beta * np.outer(key, key @ own_HE)
            own_HE += beta * np.outer(key, v[b, t, n // (N // K)])
            out_BTNE[b, t, n] = own_HE.T @ q[b, t, n]
    return out_BTNE


def weight_error(size, u):
    """How far a weight may be off for `size` keys, u being half the spacing of numbers at 1.

    No step of a delta rule with unit keys enlarges its memory, so that entries of the system and of
    its inverse are at most 1 in size. An entry of either is a sum of H products of unit vectors
    times a decay e^-x: it is off by less than (2 H + 30) u, x e^-x being at most 1 / e. The corner
    of an inverse of s + r rows is a product of three matrices, an entry a sum of r s terms: it is
    off by the errors of the factors and of two sums.
    """
    of_entry, error, rows = (2 * H + 30) * u, 0.0, 1
    while rows < size:
        terms = rows * min(rows, size - rows)
        error = terms * (2 * error + of_entry + 2 * rows * u)
        rows *= 2
    return size * (error + of_entry + (size + 2) * u)


def apply(weights_BNTS, v_BSKE):
    return np.einsum("BNTS,BSNE->BTNE", weights_BNTS, np.repeat(v_BSKE, N // K, axis=2))


def of_heads(distances=DISTANCES):
    return jnp.asarray(distances)[:, None, None]


def test_the_weights_are_those_of_the_recurrence():
    with jax.enable_x64(True):
        q, k, v = inputs()
        weights = GatedDelta().weights(q, k, masked(), of_heads())
        assert weights.dtype == jnp.float64
        got, want = apply(weights, v), recurrence(q, k, v)
    bound = T * weight_error(T, U64) * np.abs(v).max()
    assert bound < 1e-8
    valid = SEGMENTS >= 0
    assert (np.abs(got - want) <= bound)[valid].all()
    assert not np.asarray(weights)[np.isneginf(masked())].any()
    assert np.isfinite(weights).all()
    # Keys that interfere have weights of both signs, and their heads read unlike each other.
    assert (np.asarray(weights) < 0).any() and np.abs(np.diff(want, axis=2)).max() > 0.1


def test_keys_that_do_not_interfere_have_geometric_weights_with_the_mean_distance():
    keys = jnp.eye(64)[None, :, None]
    seen = jnp.where(np.tril(np.ones((64, 64), bool)), 0.0, -jnp.inf)[None, None]
    ones = jnp.ones((1, 64, 1, 64))
    for m in (0.5, 3.0):
        row = np.asarray(GatedDelta().weights(ones, keys, seen, m), np.float64)[0, 0, -1, ::-1]
        # The cosine of all ones with any key is 1 / 8; of 64 weights alpha^64 is cut off.
        cut = 64 * (m / (1 + m)) ** 64 + 64 * U32 * 100
        assert 8 * row.sum() == pytest.approx(1, abs=cut)
        assert 8 * (row * np.arange(64)).sum() == pytest.approx(m, abs=(64 + m) * cut)


def test_a_distance_of_nothing_reads_the_own_key_alone():
    q, k, _ = inputs(np.float32)
    weights = np.asarray(GatedDelta().weights(q, k, masked(), 0.0))
    off = weights * (1 - np.eye(T))
    assert not off.any() and np.isfinite(weights).all()
    unit = [np.asarray(x) / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k)]
    own = np.einsum("BTNH,BTNH->BNT", unit[0], np.repeat(unit[1], N // K, axis=2))
    valid = np.broadcast_to((SEGMENTS >= 0)[:, None], own.shape)
    got = np.diagonal(weights, axis1=2, axis2=3)
    np.testing.assert_allclose(got[valid], own[valid], rtol=0, atol=(2 * H + 30) * U32)


def test_the_weights_are_those_of_the_kernel_of_the_delta_rule():
    steps = 4
    q, k, v = (x[:, :steps] for x in inputs(np.float32))
    unit_q, unit_k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    m = np.float32(DISTANCES)
    decay = np.where(m > 0, -np.log1p(1 / np.where(m > 0, m, 1)), LOG_ZERO)
    want = delta_rule(
        unit_q,
        jnp.repeat(unit_k, N // K, axis=2),
        jnp.repeat(v, N // K, axis=2),
        jnp.broadcast_to(jnp.asarray(1 / (1 + m)), (B, steps, N)),
        log_decay=jnp.broadcast_to(jnp.asarray(decay, jnp.float32), (B, steps, N)),
        scale=1.0,
    )
    seen = jnp.where(np.tril(np.ones((steps, steps), bool)), 0.0, -jnp.inf)
    scores = jnp.broadcast_to(seen, (B, N, steps, steps))
    got = apply(GatedDelta().weights(q, k, scores, of_heads(m)), v)
    # Both are off by as much from the exact result, the kernel through changes of that size.
    bound = 2 * steps * weight_error(steps, U32) * np.abs(v).max()
    assert bound < 0.01
    np.testing.assert_allclose(got, want, rtol=0, atol=bound)


@pytest.mark.parametrize("window", [T, 4])
def test_some_queries_have_the_rows_of_all_of_them(window):
    """As when one token is decoded, or a few rows are measured, whatever the layer's window."""
    with jax.enable_x64(True):
        q, k, _ = inputs()
        whole = GatedDelta().weights(q, k, masked(window), of_heads())
        for queries in ([8], [4, 5], [2, 5, 7]):
            own = np.array(queries)
            part = GatedDelta().weights(q[:, own], k, masked(window)[:, :, own], of_heads())
            valid = np.broadcast_to((SEGMENTS[:, own] >= 0)[:, None, :, None], part.shape)
            apart = np.abs(np.asarray(part) - np.asarray(whole)[:, :, own])
            assert apart[valid].max() <= 2 * weight_error(T, U64)


def test_gradients_are_those_of_the_recurrence():
    with jax.enable_x64(True):
        q, k, v = inputs()
        direction = np.random.default_rng(1).standard_normal((B, T, N, E))
        direction[SEGMENTS < 0] = 0

        def total(q, k, v):
            weights = GatedDelta().weights(q, k, masked(), of_heads())
            values = jnp.repeat(v, N // K, axis=2)
            return (jnp.einsum("BNTS,BSNE->BTNE", weights, values) * direction).sum()

        grads = jax.grad(total, argnums=(0, 1, 2))(q, k, v)
        step, place = 1e-6, (0, 1, 1, 2)
        for at, got in enumerate(grads):
            assert np.isfinite(got).all()
            moved = [[np.array(x) for x in (q, k, v)] for _ in range(2)]
            moved[0][at][place] += step
            moved[1][at][place] -= step
            above, below = ((recurrence(*each) * direction).sum() for each in moved)
            # Differences over h are good to h^2 and to 2^-53 / h.
            assert got[place] == pytest.approx((above - below) / (2 * step), abs=1e-7)


def test_a_key_without_a_length_writes_nothing_and_has_a_gradient():
    q, k, _ = inputs(np.float32)
    k = k.at[:, 2].set(0)

    def total(k):
        return GatedDelta().weights(q, k, masked(), of_heads()).sum()

    weights = np.asarray(GatedDelta().weights(q, k, masked(), of_heads()))
    assert not weights[..., 2].any() and np.isfinite(jax.grad(total)(k)).all()


CFG = dataclasses.replace(tiny.GROUPED, windows=(None, 4))
# A bound on weights of float32 is worth something for a few keys.
TOKENS = 5
TABLE = np.array([[0.0, 1.0, 5.0, 30.0], [2.0, 0.5, 9.0, 1.0]])


@pytest.fixture(scope="module")
def model():
    params = tiny.params(CFG)
    params |= {"blocks": jax.tree.map(lambda a: a * 6 if a.ndim > 2 else a, params["blocks"])}
    tokens_BT = jax.random.randint(jax.random.key(1), (2, TOKENS), 0, CFG.vocab_size)
    names = ("attn.rot_q", "attn.rot_k", "attn.scores", "attn.v", "attn.z")
    record = dict.fromkeys(names, lm_jax.keep)
    return params, tokens_BT, lm_jax.forward(params, tokens_BT, CFG, record=record).records


def test_chosen_heads_have_the_distance_of_their_head(model):
    params, tokens_BT, base = model
    heads_LN = np.zeros((2, 4), bool)
    heads_LN[0, [1, 2]] = True
    maps = (parse_recipe("relu:p=2").map, GatedDelta())
    attend = substitute(maps, 1, jnp.asarray(TABLE), jnp.asarray(heads_LN))
    record = {"attn.z": lm_jax.keep}
    out = lm_jax.forward(params, tokens_BT, CFG, attend=attend, record=record)
    q, k, scores = (base[name][0] for name in ("attn.rot_q", "attn.rot_k", "attn.scores"))
    weights = GatedDelta().weights(q, k, scores, of_heads(np.float32(TABLE[0])))
    want = apply(weights, base["attn.v"][0])
    got = np.asarray(out.records["attn.z"][0])
    # Each of two programs is off by as much from the exact sums.
    bound = 2 * TOKENS * weight_error(TOKENS, U32) * np.abs(base["attn.v"][0]).max()
    assert bound < 0.05 * np.abs(want).max()
    assert (np.abs(got - want) <= bound)[:, :, [1, 2]].all()
    np.testing.assert_array_equal(got[:, :, [0, 3]], base["attn.z"][0][:, :, [0, 3]])
    assert not np.asarray(out.aux["dead_rows_B"]).any()


def test_a_recipe_everywhere_has_one_distance_or_that_of_every_head(model):
    params, tokens_BT, _ = model

    def logits(attend):
        return lm_jax.forward(params, tokens_BT, CFG, attend=attend).logits

    everywhere = jnp.ones(TABLE.shape, bool)
    one = substitute([GatedDelta()], 0, 20.0, everywhere)
    np.testing.assert_array_equal(logits(recipe("gdn:distance=20")), logits(one))
    each = substitute([GatedDelta()], 0, jnp.asarray(TABLE), everywhere)
    np.testing.assert_array_equal(logits(recipe("gdn", bias=TABLE)), logits(each))
    assert np.abs(logits(one) - logits(each)).max() > 1e-3


def test_later_tokens_change_nothing(model):
    params, _, _ = model
    table = params["embed"]["tokens"]

    def row(table_VD):
        own = params | {"embed": {"tokens": table_VD}}
        attend = recipe("gdn:distance=3")
        return lm_jax.forward(own, jnp.arange(T)[None], CFG, attend=attend).hidden[0, 4].sum()

    gradient = np.abs(jax.grad(row)(table)).sum(-1)
    assert (gradient[:5] > 0).all() and not gradient[5:].any()


def test_rows_of_a_pass_with_softmax_have_the_change_of_the_output_and_no_s(model):
    params, tokens_BT, base = model
    queries_BQ = np.array([[0, 2, 4], [1, 2, 3]])
    got = recipe_rows.measure(
        params,
        tokens_BT,
        jnp.asarray(queries_BQ),
        jnp.asarray(TABLE)[None],
        cfg=CFG,
        maps=(GatedDelta(),),
    )
    assert np.isnan(got["s_own"]).all()
    everywhere = jnp.ones(TABLE.shape, bool)
    attend = substitute([GatedDelta()], 0, jnp.asarray(TABLE), everywhere)
    record = {"attn.z": lm_jax.keep}
    after = lm_jax.forward(params, tokens_BT, CFG, attend=attend, record=record).records["attn.z"]
    # The first layer alone reads the same stream in both.
    for b, q in np.ndindex(2, 3):
        z, z_before = (np.asarray(x[0, b, queries_BQ[b, q]]) for x in (after, base["attn.z"]))
        norms = np.linalg.norm(z_before, axis=-1)
        change = np.linalg.norm(z - z_before, axis=-1) / norms
        # Either program is off by as much in each of H numbers.
        off = TOKENS * weight_error(TOKENS, U32) * np.abs(base["attn.v"][0]).max()
        bound = 2 * np.sqrt(H) * off / norms * (1 + change)
        assert (np.abs(got["change"][0, 0, b, :, q] - change) <= bound).all()
    with pytest.raises(UsageError, match="S is not defined for gdn, whose weights may be negative"):
        ranking.check_statistic("s", parse_recipe("gdn"))


@pytest.mark.parametrize("text", ["gdn", "gdn:distance=20", "gdn:distance=x/y.json"])
def test_rows_of_the_recipe_are_not_measured(text):
    own = parse_recipe(text)
    assert own.degree is None and not recipe_rows.measured(own) and own.option == "distance"
    assert own.unmeasured == "S is not defined for this map, whose weights may be negative"
    assert own.tabled == (text != "gdn:distance=20")
    with pytest.raises(UsageError, match="no kernel computes gdn; pass the attend unfused"):
        by_kernels(substitute([own.map], 0, 1.0, jnp.ones((2, 4), bool)))


def test_distances_that_are_not_known_are_asked_for():
    own = parse_recipe("gdn")
    np.testing.assert_array_equal(resolve_bias(own, {"distance": TABLE}), TABLE)
    words = "the mean distances of the heads are not known; pass them as bias or write distance=<n"
    with pytest.raises(UsageError, match=words):
        resolve_bias(own, 1.5)
    assert resolve_bias(parse_recipe("gdn:distance=0"), None) == 0.0


def test_the_state_is_a_matrix_of_every_key_head():
    cfg = tiny.decoder(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
    for changed in (cfg, dataclasses.replace(cfg, score_softcap=30.0)):
        entry = linear_state(parse_recipe("gdn"), TABLE, changed)
        assert entry.own and not entry.finite and entry.window is None
        assert (entry.features, entry.state, entry.cache_tokens) == (None, 64, 4)
        assert sentence(entry) == (
            "no finite feature map: weights depend on the keys between, but a state of 64 numbers "
            "per KV head, as much memory as 4 tokens of KV cache"
        )
    heads_LN = np.array([[1, 1, 1, 0], [0, 0, 1, 1]], bool)
    cache = 2 * 8 * 100
    kept = kept_state(parse_recipe("gdn"), TABLE, heads_LN, cfg, 100)
    assert (kept.numbers, kept.key_heads, kept.freed) == (2 * cache + 3 * 64, 4, 2)
    # In a layer with a window no memory has the weights, so that its cache stays, and nothing else.
    windowed = dataclasses.replace(cfg, windows=(50, None))
    kept = kept_state(parse_recipe("gdn"), TABLE, heads_LN, windowed, 100)
    assert (kept.numbers, kept.freed) == (cache + cache + 64, 1)
