"""Feature maps against numpy in float64: products, S_phi, random features, substitution."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy import special

import lm_jax
from lm_jax.errors import UsageError
from polyattn_jax.audit import recipe_rows
from polyattn_jax.recipes.diagnostic import softmax_error_bound
from polyattn_jax.recipes.feature_maps import FeatureMap, random_vectors
from polyattn_jax.recipes.fused import by_kernels
from polyattn_jax.recipes.linear_state import linear_state, sentence
from polyattn_jax.recipes.row_maps import parse_recipe
from polyattn_jax.recipes.substitute import recipe, substitute
from tests import tiny
from tests.polyattn_jax.studies.test_check import fields

L, N, K, B, T, H = 2, 4, 2, 2, 9, 6
CFG = dataclasses.replace(tiny.GROUPED, windows=(None, 4))
MAPS = {name: parse_recipe(name).map for name in ("elu1", "hedgehog", "performer:m=10")}
every_map = pytest.mark.parametrize("name", MAPS)
U = 2.0**-24


def log_features(name, x, scale=CFG.scale):
    """log phi(x) in float64, from the definitions."""
    x = np.asarray(x, np.float64)
    if name == "elu1":
        return np.log(np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))))
    if name == "hedgehog":
        both = np.concatenate([x, -x], -1)
        return both - special.logsumexp(both, axis=-1, keepdims=True)
    m = MAPS[name].m
    y = np.sqrt(scale) * x
    w = random_vectors(m, x.shape[-1], 0)
    return y @ w.T - (y * y).sum(-1, keepdims=True) / 2 - np.log(m) / 2


def log_products(name, q_BTNH, k_BSKH, scale=CFG.scale):
    """log phi(q).phi(k) in float64 `[B, N, T, S]`."""
    a = log_features(name, q_BTNH, scale).transpose(0, 2, 1, 3)[:, :, :, None]
    c = log_features(name, k_BSKH, scale).transpose(0, 2, 1, 3)[:, :, None]
    return special.logsumexp(a + c.repeat(a.shape[1] // c.shape[1], axis=1), axis=-1)


def product_error(name, q_BTNH, k_BSKH, scale=CFG.scale):
    """How far the float32 logarithms may be off.

    A log feature is a few sums of H or 2 H terms of size at most `size`, and library functions of
    16 ulp of their result; the log of their products' sum over F features adds F + 40 roundings of
    positive terms, and a difference to and a sum with the peaks two of twice that size.
    """
    size = 1.0
    for x in (q_BTNH, k_BSKH):
        x = np.abs(np.asarray(x, np.float64))
        if name.startswith("performer"):
            w, y = np.abs(random_vectors(MAPS[name].m, H, 0)), np.sqrt(scale) * x
            size = max(size, (y @ w.T).max() + (y * y).sum(-1).max() + np.log(MAPS[name].m))
        else:
            size = max(size, 2 * x.max() + np.log(2 * H))
    features = MAPS[name].size(H)
    return (2 * (2 * H + 20) * size + features + 40 + 8 * size) * U


def inputs(seed=0, spread=2.0):
    rng = np.random.default_rng(seed)
    shapes = (B, T, N, H), (B, T, K, H)
    return [jnp.asarray(rng.standard_normal(s) * spread, jnp.float32) for s in shapes]


@every_map
def test_products_match_a_float64_oracle(name):
    q, k = inputs()
    got = MAPS[name].scores(q, k, CFG.scale)
    want = log_products(name, q, k)
    assert np.abs(got - want).max() <= product_error(name, q, k)


@every_map
def test_features_far_apart_keep_their_products(name):
    """Inputs of norm 60, for which the features of Performer alone would underflow."""
    q, k = inputs(spread=25.0)
    got = np.asarray(MAPS[name].scores(q, k, 1.0))
    want = log_products(name, q, k, 1.0)
    peak_BNT, peak_BKS = (log_features(name, x, 1.0).max(-1).transpose(0, 2, 1) for x in (q, k))
    peaks = peak_BNT[..., None] + peak_BKS.repeat(N // K, axis=1)[:, :, None]
    # Of F terms those below the smallest normal number are lost, 2^-24 of a sum of this size.
    kept = want - peaks >= np.log(MAPS[name].size(H) * 2.0**-126 / U)
    assert kept.mean() > 0.5
    assert (np.abs(got - want)[kept] <= product_error(name, q, k, 1.0) + U).all()
    assert (got[~kept] <= peaks[~kept]).all()


@every_map
def test_gradients_are_those_of_the_oracle(name):
    with jax.enable_x64(True):
        q, k = (jnp.asarray(x, jnp.float64) for x in inputs())
        direction = np.random.default_rng(1).standard_normal((B, N, T, T))
        total = lambda q, k: (MAPS[name].scores(q, k, CFG.scale) * direction).sum()  # noqa: E731
        grads = jax.grad(total, argnums=(0, 1))(q, k)
        step, place = 1e-6, (1, 3, 1, 2)
        for at, got in enumerate(grads):
            moved = [[np.array(q), np.array(k)] for _ in range(2)]
            moved[0][at][place] += step
            moved[1][at][place] -= step
            above, below = ((log_products(name, *each) * direction).sum() for each in moved)
            # Differences over h are good to h^2 and to 2^-53 / h.
            assert got[place] == pytest.approx((above - below) / (2 * step), abs=1e-7)


def test_performer_estimates_the_exponential_without_bias():
    """The mean over draws is within five standard errors of e^(q.k).

    With s = q + k an estimate of m independent features has the variance
    e^(2 q.k) (e^|s|^2 - 1) / m; orthogonal features have no more (Performer, Theorem 2).
    """
    rng = np.random.default_rng(0)
    m, draws, scale = 12, 400, 0.5
    q, k = (jnp.asarray(rng.standard_normal((1, 5, 1, H)) / 2, jnp.float32) for _ in range(2))
    estimates = [
        np.exp(FeatureMap("performer", m=m, seed=seed).scores(q, k, scale)[0, 0], dtype=np.float64)
        for seed in range(draws)
    ]
    a, b = (np.float64(x[0, :, 0]) * np.sqrt(scale) for x in (q, k))
    true = np.exp(a @ b.T)
    square = ((a[:, None] + b[None]) ** 2).sum(-1)
    error = true * np.sqrt(np.expm1(square) / (m * draws))
    assert (np.abs(np.mean(estimates, 0) - true) <= 5 * error).all()
    # Features of one draw only are another estimate.
    assert np.std(estimates, axis=0).min() > 0


def test_random_vectors_are_orthogonal_in_blocks_with_normal_lengths():
    w = random_vectors(20, H, 3)
    assert w.shape == (20, H)
    for start in range(0, 20, H):
        block = w[start : start + H]
        gram = block @ block.T
        np.testing.assert_allclose(gram, np.diag(np.diag(gram)), atol=1e-12)
    np.testing.assert_array_equal(random_vectors(7, H, 3), w[:7])
    assert not np.allclose(random_vectors(20, H, 4), w)
    many = random_vectors(6000, H, 0)
    # 6,000 squared lengths of H degrees of freedom: mean H, variance 2 H.
    assert abs((many**2).sum(1).mean() - H) <= 5 * np.sqrt(2 * H / 6000)
    # A direction is uniform: a coordinate has variance 1, of at most the error of normal ones.
    assert np.abs((many**2).mean(0) - 1).max() <= 5 * np.sqrt(2 / 6000)


def test_features_are_positive_and_those_of_hedgehog_sum_to_one():
    x = inputs()[0]
    for name, row_map in MAPS.items():
        features = np.exp(row_map.log_features(x, CFG.scale))
        assert features.shape[-1] == row_map.size(H) and (features > 0).all(), name
    total = np.exp(MAPS["hedgehog"].log_features(x, CFG.scale)).sum(-1)
    np.testing.assert_allclose(total, 1, rtol=(2 * 2 * H + 64) * U)


@pytest.fixture(scope="module")
def model():
    params = tiny.params(CFG)
    blocks = jax.tree.map(lambda a: a * 6 if a.ndim > 2 else a, params["blocks"])
    tokens_BT = jax.random.randint(jax.random.key(1), (B, T), 0, CFG.vocab_size)
    names = ("attn.rot_q", "attn.rot_k", "attn.v", "attn.z", "attn.scores", "attn.pattern")
    record = dict.fromkeys(names, lm_jax.keep)
    params |= {"blocks": blocks}
    return params, tokens_BT, lm_jax.forward(params, tokens_BT, CFG, record=record).records


@every_map
def test_chosen_heads_of_the_first_layer_get_the_feature_map(model, name):
    params, tokens_BT, base = model
    heads_LN = np.zeros((L, N), bool)
    heads_LN[0, [1, 2]] = True
    maps = (parse_recipe("relu:p=2").map, MAPS[name])
    attend = substitute(maps, 1, 0.0, jnp.asarray(heads_LN), jnp.ones((B, T), bool))
    out = lm_jax.forward(params, tokens_BT, CFG, attend=attend, record={"attn.z": lm_jax.keep})
    own = log_products(name, base["attn.rot_q"][0], base["attn.rot_k"][0])
    visible = np.isfinite(base["attn.scores"][0])
    pattern = special.softmax(np.where(visible, own, -np.inf), -1)
    v = np.float64(base["attn.v"][0]).repeat(N // K, axis=2)
    want = np.einsum("BNTS,BSNH->BTNH", pattern, v)
    # An error e of the logarithms moves a weight by at most e^(2 e) of itself, and so does each
    # rounding of the softmax; the product with v has T terms.
    error = 2 * product_error(name, base["attn.rot_q"][0], base["attn.rot_k"][0])
    bound = (error + (2 * T + 80) * U) * np.einsum("BNTS,BSNH->BTNH", pattern, np.abs(v))
    got = np.asarray(out.records["attn.z"][0])
    assert (np.abs(got - want) <= bound)[:, :, [1, 2]].all()
    np.testing.assert_array_equal(got[:, :, [0, 3]], base["attn.z"][0][:, :, [0, 3]])
    assert not np.asarray(out.aux["dead_rows_B"]).any()


@every_map
def test_a_recipe_everywhere_is_its_map_in_every_head(model, name):
    params, tokens_BT, _ = model
    everywhere = jnp.ones((L, N), bool)
    one = lm_jax.forward(params, tokens_BT, CFG, attend=recipe(name)).logits
    attend = substitute([MAPS[name]], 0, 0.0, everywhere)
    np.testing.assert_array_equal(one, lm_jax.forward(params, tokens_BT, CFG, attend=attend).logits)


@every_map
def test_no_head_is_bitwise_softmax_and_later_tokens_change_nothing(model, name):
    params, tokens_BT, _ = model
    none = substitute([MAPS[name]], 0, 0.0, jnp.zeros((L, N), bool))
    np.testing.assert_array_equal(
        lm_jax.forward(params, tokens_BT, CFG, attend=none).logits,
        lm_jax.forward(params, tokens_BT, CFG).logits,
    )
    # A causal row has no gradient by the embedding of a later token.
    table = params["embed"]["tokens"]

    def row(table_VD):
        own = params | {"embed": {"tokens": table_VD}}
        return lm_jax.forward(own, jnp.arange(T)[None], CFG, attend=recipe(name)).hidden[0, 4].sum()

    gradient = np.abs(jax.grad(row)(table)).sum(-1)
    assert (gradient[:5] > 0).all() and not gradient[5:].any()


@every_map
def test_s_phi_is_that_of_the_products_on_the_key_that_softmax_prefers(model, name):
    params, tokens_BT, base = model
    queries_BQ = np.array([[0, 4, 8], [2, 3, 7]])
    got = recipe_rows.measure(
        params,
        tokens_BT,
        jnp.asarray(queries_BQ),
        jnp.zeros((1, L, N)),
        cfg=CFG,
        maps=(MAPS[name],),
    )
    error = product_error(name, base["attn.rot_q"], base["attn.rot_k"])
    for layer in range(L):
        own = log_products(name, base["attn.rot_q"][layer], base["attn.rot_k"][layer])
        for b, n, q in np.ndindex(B, N, 3):
            row = base["attn.scores"][layer, b, n, queries_BQ[b, q]]
            seen = np.isfinite(row)
            target = int(np.argmax(row))
            weight = np.exp(own[b, n, queries_BQ[b, q]][seen] - own[b, n, queries_BQ[b, q], target])
            place = layer, 0, b, n, q
            assert got["target"][place] == target
            want = weight.sum() - 1
            bound = np.expm1(2 * error) + softmax_error_bound(T)
            assert got["s_own"][place] == pytest.approx(want, rel=bound, abs=bound)
            assert got["active"][place] == seen.sum() - 1


def test_matrices_of_hedgehog_act_on_queries_and_keys_of_their_heads():
    q, k = inputs()
    rng = np.random.default_rng(2)
    matrices = {
        "q": jnp.asarray(rng.standard_normal((N, H, H)), jnp.float32),
        "k": jnp.asarray(rng.standard_normal((K, H, H)), jnp.float32),
    }
    got = MAPS["hedgehog"].scores(q, k, CFG.scale, matrices)
    turned = [
        np.einsum("BTNH,NHF->BTNF", np.float64(x), np.float64(matrices[name]))
        for name, x in (("q", q), ("k", k))
    ]
    # The products with W have H terms of at most the sum of their absolute values.
    sizes = [
        np.einsum("BTNH,NHF->BTNF", np.abs(np.float64(x)), np.abs(np.float64(matrices[name]))).max()
        for name, x in (("q", q), ("k", k))
    ]
    bound = product_error("hedgehog", *turned) + 4 * (H + 1) * sum(sizes) * U
    assert np.abs(got - log_products("hedgehog", *turned)).max() <= bound
    identity = {"q": jnp.tile(jnp.eye(H), (N, 1, 1)), "k": jnp.tile(jnp.eye(H), (K, 1, 1))}
    np.testing.assert_array_equal(
        MAPS["hedgehog"].scores(q, k, CFG.scale, identity),
        MAPS["hedgehog"].scores(q, k, CFG.scale),
    )


@pytest.mark.parametrize(
    ("text", "features"), [("elu1", H), ("hedgehog", 2 * H), ("performer:m=32", 32)]
)
def test_the_cost_as_linear_attention_is_that_of_the_features(text, features):
    for cfg in (CFG, dataclasses.replace(CFG, score_softcap=30.0)):
        entry = linear_state(parse_recipe(text), 0.0, cfg)
        assert entry.finite and (entry.degree, entry.features) == (None, features)
        # One number per feature for the sum that the weights are divided by.
        assert entry.state == features * (H + 1)
        assert 2 * H * (entry.cache_tokens - 1) < entry.state <= 2 * H * entry.cache_tokens
        assert sentence(entry) == (
            f"a finite feature map of {features} features per KV head, as much memory as "
            f"{entry.cache_tokens} tokens of KV cache"
        )


def test_no_kernel_computes_a_feature_map():
    with pytest.raises(UsageError, match="no kernel computes performer; pass the attend unfused"):
        by_kernels(recipe("performer:m=4"))


def test_a_check_of_a_feature_map_counts_rows_by_s_phi(run_check, tmp_path):
    outcome = run_check("--recipe=hedgehog", "--top_heads=3", f"--workdir={tmp_path / 'run'}")
    assert outcome.code in (10, 11), outcome.err
    printed = fields(outcome.out)
    assert "rows with S_phi >= 1, dead or not" in printed
    rows = pq.read_table(tmp_path / "run" / "recipe_rows").to_pylist()
    needle = [row for row in rows if row["suite"] == "niah_64"]
    assert {row["recipe"] for row in rows} == {"hedgehog"} and len(needle) == 7 * 3 * 4
    unsafe = np.mean([row["s_own"] >= 1 for row in needle])
    assert printed["all heads"][0] == f"{100 * unsafe:.1f}"
    lost = np.mean([row["s_own"] >= 1 > row["s_softmax"] for row in needle])
    assert printed["only softmax concentrates: lost"][0] == f"{100 * lost:.1f}"
    assert "32 features per KV head" in " ".join(outcome.out.split())
