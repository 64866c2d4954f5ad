"""Softmax in a window and a linear map outside it: float64 loops, its limits, its recurrence."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import lm_jax
from polyattn_jax.audit import recipe_rows
from polyattn_jax.recipes.feature_maps import random_vectors
from polyattn_jax.recipes.input_maps import with_inputs
from polyattn_jax.recipes.linear_state import linear_state, sentence
from polyattn_jax.recipes.row_maps import parse_recipe
from polyattn_jax.recipes.substitute import recipe, substitute
from polyattn_jax.studies.distill.matching import HeadMatching
from tests import rounding, tiny
from tests.polyattn_jax.studies.test_check import fields

L, N, K, B, T, H = 2, 4, 2, 2, 9, 6
CFG = dataclasses.replace(tiny.GROUPED, windows=(None, 4))
SCALE = CFG.scale
W, SINKS, GAMMA, TAYLOR_B = 3, 1, 0.3, 0.5
KINDS = ("elu1", "hedgehog", "performer:m=10", "taylor2:b=0.5")
every_kind = pytest.mark.parametrize("kind", KINDS)


def windowed(kind, w=W, sinks=SINKS, gamma=GAMMA):
    return parse_recipe(f"{kind}{',' if ':' in kind else ':'}w={w},sinks={sinks},gamma={gamma}")


def features(kind, x):
    """phi(x) in float64 of one query or key; of the Taylor map without its bias."""
    if kind == "elu1":
        return np.array([each + 1 if each > 0 else np.exp(each) for each in x])
    if kind == "hedgehog":
        return special.softmax(np.concatenate([x, -x]))
    y = np.sqrt(SCALE) * x
    w = random_vectors(10, H, 0)
    return np.exp(w @ y - y @ y / 2) / np.sqrt(10)


def is_inside(place, last, w, sinks):
    return last - place < w or place < sinks


def loop_weights(kind, q, k, scores, w=W, sinks=SINKS, gamma=GAMMA):
    """The weights `[B, N, T, S]` key by key, from their definition, for any mask of the scores."""
    q, k, scores = (np.asarray(x, np.float64) for x in (q, k, scores))
    result = np.zeros_like(scores)
    for b, n, t in np.ndindex(scores.shape[:3]):
        row = scores[b, n, t]
        seen = [s for s in range(len(row)) if row[s] > -np.inf]
        if not seen:
            continue
        inside = [s for s in seen if is_inside(s, max(seen), w, sinks)]
        top = max(row[s] for s in inside)
        for s in seen:
            if kind.startswith("taylor2"):
                u = row[s] + TAYLOR_B
                weight = gamma * np.exp(u) if s in inside else 1 + u + u**2 / 2
            elif s not in inside:
                of_key = features(kind, k[b, s, n // (q.shape[2] // k.shape[2])])
                weight = features(kind, q[b, t, n]) @ of_key
            elif kind.startswith("performer"):
                weight = gamma * np.exp(row[s])
            else:
                weight = gamma * np.exp(row[s] - top)
            result[b, n, t, s] = weight
        result[b, n, t] /= result[b, n, t].sum()
    return result


def weights_of(row_map, bias, q, k, scores):
    """The weights as an attend has them."""
    return with_inputs(row_map, q, k, SCALE)(scores, bias)


def inputs(spread=1.0, dtype=np.float32, seed=0):
    """Queries, keys, and scores of a causal row, of a shorter window in row 1, with padding."""
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((B, T, heads, H)) * spread for heads in (N, K))
    scores = np.einsum("BTNH,BSNH->BNTS", q, k.repeat(N // K, axis=2)) * SCALE
    place = np.arange(T)
    seen = np.tile(place[:, None] >= place, (B, N, 1, 1))
    seen[0, ..., 0] = False  # padding before the text: its first row sees nothing
    seen[1] &= place[:, None] - place < 6
    seen[1, ..., 7:] = False  # padding after the text
    return [np.asarray(x, dtype) for x in (q, k, np.where(seen, scores, -np.inf))]


@every_kind
@pytest.mark.parametrize("spread", [1.0, 2.0])
def test_weights_are_those_of_a_loop_in_float64(kind, spread):
    own = windowed(kind)
    run = functools.partial(weights_of, own.map, own.bias)
    arrays = inputs(spread)
    wanted = rounding.expected(run, *arrays)._replace(values=loop_weights(kind, *arrays))
    rounding.assert_within(jax.jit(run)(*map(jnp.asarray, arrays)), wanted)


@every_kind
def test_with_all_keys_inside_it_is_softmax(kind):
    """Whatever gamma, which all keys have in common; bitwise where nothing is subtracted."""
    q, k, scores = inputs(3.0)
    for w, sinks, gamma in ((T, 0, 1.0), (1, T, 1.0), (T, 2, 0.01)):
        own = windowed(kind, w, sinks, gamma)
        got = weights_of(own.map, own.bias, *map(jnp.asarray, (q, k, scores)))
        seen = np.isfinite(scores)
        wide = np.where(seen, scores, -np.inf).astype(np.float64)
        with np.errstate(invalid="ignore"):
            exact = np.nan_to_num(special.softmax(wide, -1))
        run = functools.partial(weights_of, own.map, own.bias)
        rounding.assert_within(got, rounding.expected(run, q, k, scores)._replace(values=exact))
        if kind.startswith("performer") and gamma == 1:
            np.testing.assert_array_equal(got, lm_jax.softmax(jnp.asarray(scores)))


@every_kind
def test_a_window_of_one_key_is_the_map_on_all_others(kind):
    """At a gamma of next to nothing the window only takes its own key away from the map."""
    with jax.enable_x64(True):
        q, k, scores = inputs(dtype=np.float64)
        own, plain = windowed(kind, 1, 0, 1e-30), parse_recipe(kind)
        got = np.array(weights_of(own.map, own.bias, q, k, jnp.asarray(scores)))
        last = np.array(scores > -np.inf)
        last &= last[..., ::-1].cumsum(-1)[..., ::-1] == 1
        rest = jnp.where(last, -jnp.inf, scores)
        more = np.isfinite(rest).any(-1)
        want = np.asarray(weights_of(plain.map, plain.bias, q, k, rest))
        np.testing.assert_allclose(got[more], want[more], atol=1e-13)
        only = np.isfinite(scores).any(-1) & ~more
        assert only.any() and (got[only][last[only]] == 1).all()


def recurrent(kind, q, k, v):
    """Outputs `[T, H]` of one head token by token: a state, its sums, the window and the sinks."""
    if kind.startswith("taylor2"):
        # (x y + b)^2 has the coordinates of q sqrt(scale) and b, of k sqrt(scale) and 1.
        q, k = (np.sqrt(SCALE) * x for x in (q, k))
        of_query = lambda x: pairs(np.append(x, TAYLOR_B))  # noqa: E731
        of_key = lambda x: pairs(np.append(x, 1.0))  # noqa: E731
        score = lambda x, y: x @ y + TAYLOR_B  # noqa: E731
    else:
        of_query = of_key = functools.partial(features, kind)
        score = lambda x, y: SCALE * (x @ y)  # noqa: E731
    shifted = kind in ("elu1", "hedgehog")
    sinks, cache, outputs = [], [], []
    size = len(of_key(k[0]))
    state, total = np.zeros((size, H)), np.zeros(size)
    for t in range(T):
        cache.append((k[t], v[t]))
        if len(cache) > W:
            key, value = cache.pop(0)
            if len(sinks) < SINKS:
                sinks.append((key, value))
            else:
                state += np.outer(of_key(key), value)
                total += of_key(key)
        phi = of_query(q[t])
        near = sinks + cache
        z = np.array([score(q[t], key) for key, _ in near])
        weight = GAMMA * np.exp(z - z.max() if shifted else z)
        above = phi @ state + weight @ np.array([value for _, value in near])
        outputs.append(above / (phi @ total + weight.sum()))
    return np.array(outputs)


def pairs(x):
    """Features whose product is 1 + x.y + (x.y)^2 / 2."""
    return np.concatenate([[1.0], x, np.outer(x, x).ravel() / np.sqrt(2)])


@every_kind
def test_a_state_and_a_cache_of_the_window_give_the_outputs_token_by_token(kind):
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((T, H)) for _ in range(3))
    scores = np.where(np.tri(T, dtype=bool), SCALE * (q @ k.T), -np.inf)
    own = windowed(kind)
    with jax.enable_x64(True):
        arrays = q[None, :, None], k[None, :, None], jnp.asarray(scores[None, None])
        weights = np.asarray(weights_of(own.map, own.bias, *arrays))[0, 0]
    np.testing.assert_allclose(weights @ v, recurrent(kind, q, k, v), rtol=1e-11, atol=1e-12)


@every_kind
def test_gradients_are_those_of_the_loop(kind):
    own = windowed(kind)
    direction = np.random.default_rng(1).standard_normal((B, N, T, T))
    q, k, scores = inputs(dtype=np.float64)
    with jax.enable_x64(True):
        total = lambda *x: (weights_of(own.map, own.bias, *x) * direction).sum()  # noqa: E731
        grads = jax.grad(total, argnums=(0, 1, 2))(*map(jnp.asarray, (q, k, scores)))
    assert all(np.isfinite(each).all() for each in grads)
    assert not np.any(np.asarray(grads[2])[~np.isfinite(scores)])
    step = 1e-6
    # An old key's features, and scores inside, the largest among them, and outside.
    places = [(0, (1, 5, 1, 2)), (1, (1, 1, 0, 2))]
    row = scores[0, 2, 8]
    inside = [s for s in range(1, T) if is_inside(s, 8, W, SINKS)]
    best = inside[int(np.argmax(row[inside]))]
    places += [(2, (0, 2, 8, s)) for s in (best, 3, next(s for s in inside if s != best))]
    for at, place in places:
        ends = []
        for sign in (1, -1):
            arrays = [q.copy(), k.copy(), scores.copy()]
            arrays[at][place] += sign * step
            ends.append((loop_weights(kind, *arrays) * direction).sum())
        # Differences over h are good to h^2 and to 2^-53 / h.
        assert grads[at][place] == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_far_scores_and_features_neither_overflow_nor_vanish(kind):
    own = windowed(kind, gamma=1)
    q, k, scores = map(jnp.asarray, inputs(25.0))
    assert np.abs(scores[np.isfinite(scores)]).max() > 1000
    weights = np.asarray(weights_of(own.map, own.bias, q, k, scores))
    seen = np.isfinite(scores)
    assert np.isfinite(weights).all() and not np.any(weights[~seen])
    np.testing.assert_allclose(weights.sum(-1)[seen.any(-1)], 1, rtol=(T + 20) * 2.0**-24)
    slope = jax.grad(lambda *x: (weights_of(own.map, own.bias, *x) ** 2).sum(), argnums=(0, 1, 2))
    assert all(np.isfinite(each).all() for each in slope(q, k, scores))


@pytest.fixture(scope="module")
def model():
    params = tiny.params(CFG)
    blocks = jax.tree.map(lambda a: a * 6 if a.ndim > 2 else a, params["blocks"])
    tokens_BT = jax.random.randint(jax.random.key(1), (B, T), 0, CFG.vocab_size)
    names = ("attn.rot_q", "attn.rot_k", "attn.v", "attn.z", "attn.scores")
    params |= {"blocks": blocks}
    record = dict.fromkeys(names, lm_jax.keep)
    document_BT = jnp.where(jnp.arange(T)[None] < jnp.array([[T], [3]]), 0, 1)
    out = lm_jax.forward(params, tokens_BT, CFG, record=record, document_BT=document_BT)
    return params, tokens_BT, document_BT, out.records


@every_kind
def test_chosen_heads_of_the_first_layer_get_the_weights(model, kind):
    params, tokens_BT, document_BT, base = model
    own = windowed(kind)
    heads_LN = np.zeros((L, N), bool)
    heads_LN[0, [1, 2]] = True
    attend = substitute([parse_recipe("relu:p=2").map, own.map], 1, own.bias, jnp.array(heads_LN))
    record = {"attn.z": lm_jax.keep}
    out = lm_jax.forward(
        params, tokens_BT, CFG, attend=attend, record=record, document_BT=document_BT
    )
    q, k, scores, v = (base[f"attn.{name}"][0] for name in ("rot_q", "rot_k", "scores", "v"))
    assert not np.isfinite(scores[1, :, 3:, :3]).any() and np.isfinite(scores[1, :, 3:, 3]).all()
    pattern = loop_weights(kind, q, k, scores)
    exact = rounding.expected(functools.partial(weights_of, own.map, own.bias), q, k, scores)
    assert (np.abs(pattern - exact.values) <= exact.bounds).all()
    v = np.float64(v).repeat(N // K, axis=2)
    want = np.einsum("BNTS,BSNH->BTNH", pattern, v)
    # The weights are off by their bound, those of the pass itself too, and the product has T terms.
    spread = exact.bounds + 2 * T * 2.0**-24 * pattern
    bound = np.einsum("BNTS,BSNH->BTNH", spread, np.abs(v))
    got = np.asarray(out.records["attn.z"][0])
    assert (np.abs(got - want) <= bound)[:, :, [1, 2]].all()
    np.testing.assert_array_equal(got[:, :, [0, 3]], base["attn.z"][0][:, :, [0, 3]])


@every_kind
def test_a_recipe_everywhere_with_a_wide_window_gives_the_logits_of_softmax(model, kind):
    """Sixteen tokens and more than the text: softmax in both layers, to rounding of its logits."""
    params, tokens_BT, _, _ = model
    want = np.asarray(lm_jax.forward(params, tokens_BT, CFG).logits)
    got = lm_jax.forward(params, tokens_BT, CFG, attend=recipe(windowed(kind, 16).spec)).logits
    # A score has half a dozen roundings more and so has a weight; two layers, sums of 60 products.
    assert np.abs(np.asarray(got) - want).max() <= 2e-5 * np.abs(want).max()
    plain = lm_jax.forward(params, tokens_BT, CFG, attend=recipe(kind)).logits
    assert np.abs(np.asarray(plain) - want).max() > 1e-2


@every_kind
def test_s_is_that_of_the_weights_on_the_key_that_softmax_prefers(model, kind):
    params, tokens_BT, _, _ = model
    own = windowed(kind)
    queries_BQ = np.array([[0, 4, 8], [2, 3, 7]])
    bias_RLN = jnp.full((1, L, N), own.bias)
    got = recipe_rows.measure(
        params, tokens_BT, jnp.asarray(queries_BQ), bias_RLN, cfg=CFG, maps=(own.map,)
    )
    names = ("attn.rot_q", "attn.rot_k", "attn.scores")
    record = dict.fromkeys(names, lm_jax.keep)
    base = lm_jax.forward(params, tokens_BT, CFG, record=record).records
    for layer in range(L):
        q, k, scores = (base[name][layer] for name in names)
        run = functools.partial(weights_of, own.map, own.bias)
        wanted = rounding.expected(run, q, k, scores)
        pattern = loop_weights(kind, q, k, scores)
        for b, n, at in np.ndindex(B, N, 3):
            row = pattern[b, n, queries_BQ[b, at]]
            target = int(np.argmax(scores[b, n, queries_BQ[b, at]]))
            place = layer, 0, b, n, at
            assert got["target"][place] == target
            # An error e of the target's weight moves S by (1 + S) e / weight, those of others less.
            error = wanted.bounds[b, n, queries_BQ[b, at]].sum() / row[target] + 60 * 2.0**-24
            want = (row.sum() - row[target]) / row[target]
            assert got["s_own"][place] == pytest.approx(want, abs=2 * error * (1 + want))


def test_the_trained_matrices_act_outside_the_window_alone():
    own = windowed("hedgehog").map
    q, k, scores = map(jnp.asarray, inputs())
    rng = np.random.default_rng(3)
    matrices = {
        name: jnp.asarray(rng.standard_normal((heads, H, H)), jnp.float32)
        for name, heads in (("q", N), ("k", K))
    }
    got = own.log_weights(q, k, SCALE, scores, matrices)
    plain = own.log_weights(q, k, SCALE, scores)
    turned = own.scores(q, k, SCALE, matrices)
    for b, n, t, s in np.ndindex(got.shape):
        seen = np.flatnonzero(np.isfinite(scores[b, n, t]))
        if s not in seen:
            assert got[b, n, t, s] == -np.inf
        else:
            other = plain if is_inside(s, seen[-1], W, SINKS) else turned
            assert got[b, n, t, s] == other[b, n, t, s]


@pytest.mark.parametrize(
    ("kind", "count"),
    [("elu1", H), ("hedgehog", 2 * H), ("performer:m=32", 32), ("taylor2", (H + 1) * (H + 2) // 2)],
)
def test_the_state_is_that_of_the_features_and_the_cache_of_the_window(kind, count):
    plain = linear_state(parse_recipe(kind), 0.0, CFG)
    own = windowed(kind, 5, 2)
    entry = linear_state(own, 0.0, CFG)
    assert entry.finite and (entry.features, entry.window, plain.window) == (count, 7, None)
    assert entry.state == count * (H + 1) + 2 * H * 7
    assert 2 * H * (entry.cache_tokens - 1) < entry.state <= 2 * H * entry.cache_tokens
    assert entry.cache_tokens == plain.cache_tokens + 7
    assert sentence(entry).endswith(
        f"with the cache of a window of 7 tokens as much memory as {entry.cache_tokens} tokens of "
        "KV cache"
    )
    assert "window" not in sentence(plain)


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("hedgehog", {"class": "FeatureMap", "kind": "hedgehog", "m": 0, "seed": 0}),
        ("performer:m=8", {"class": "FeatureMap", "kind": "performer", "m": 8, "seed": 0}),
        (
            "taylor2",
            {
                "class": "FieldMap",
                "kind": "taylor2",
                "p": 1,
                "alpha": 0.0,
                "n0": 1024.0,
                "w": 0,
                "sinks": 0,
            },
        ),
    ],
)
def test_checkpoints_of_maps_without_a_window_keep_their_settings(text, stored):
    """What `metadata` gave before maps had windows, which a stored training is compared with."""

    def of(text):
        own = HeadMatching(CFG, parse_recipe(text).map, 0.0, ((0, 0),))
        return own.metadata()["head_matching"]["row_map"]

    assert of(text) == stored
    assert of(windowed(text).spec) == stored | {"w": W, "sinks": SINKS, "gamma": GAMMA}


def test_a_check_of_a_window_and_a_map_names_both(run_check, tmp_path):
    outcome = run_check("--recipe=hedgehog:w=16", "--top_heads=3", f"--workdir={tmp_path / 'run'}")
    assert outcome.code in (10, 11), outcome.err
    assert "rows with S_phi >= 1, dead or not" in fields(outcome.out)
    words = " ".join(outcome.out.split())
    assert "hedgehog_w16" in words or "hedgehog:w=16" in words
    assert "32 features per KV head, with the cache of a window of 16 tokens" in words
