"""Row maps against float64 oracles: values, gradients, masks, dead rows; recipes by name."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, special

import lm_jax
from lm_jax.errors import UsageError
from polyattn_jax import row_stats
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.recipes import linear_state, row_maps
from polyattn_jax.recipes.field_maps import FieldMap
from polyattn_jax.recipes.fused import by_kernels
from polyattn_jax.recipes.substitute import recipe as attend_of
from tests import rounding, tiny

INF = np.inf


def power_oracle(p):
    def oracle(z, b):
        r = np.maximum(z + b, 0)
        x = (r / max(r.max(), 1e-300)) ** p
        return x / x.sum() if x.sum() else x

    return oracle


def over_length_oracle(p, alpha):
    return lambda z, b: np.maximum(z + b, 0) ** p / len(z) ** alpha


def softpick_oracle(z, b):
    # e^u - 1 over e^m, by expm1 on either side of 0
    u = z + b
    size = np.exp(np.maximum(u, 0) - max(u.max(), 0)) * -np.expm1(-np.abs(u))
    return np.where(u > 0, size, 0) / size.sum()


def entmax_oracle(z, b):
    """By the root of the sum, not by sorting."""
    x = (z - z.max()) / 2
    root = optimize.brentq(lambda t: (np.maximum(x - t, 0) ** 2).sum() - 1, -1, 0, xtol=1e-15)
    return np.maximum(x - root, 0) ** 2


def poly_oracle(p):
    def oracle(z, b):
        power = ((z + b) / np.abs(z + b).max()) ** p
        return power / np.abs(power).sum()

    return oracle


def taylor_oracle(z, b):
    weight = 1 + (z + b) + (z + b) ** 2 / 2
    return weight / weight.sum()


def window_oracle(z, b):
    """The last four keys and the first two of a row that ends with its query."""
    place = np.arange(len(z))
    return special.softmax(np.where((place < 2) | (place >= len(z) - 4), z, -np.inf))


# Name: row map, float64 oracle on a row without masked keys.
MAPS = {
    "softmax": (row_maps.softmax, lambda z, b: special.softmax(z)),
    "sigmoid": (row_maps.sigmoid, lambda z, b: special.softmax(special.log_expit(z + b))),
    "relu_p0.5": (row_maps.relu_power(0.5), power_oracle(0.5)),
    "relu_p1": (row_maps.relu_power(1), power_oracle(1)),
    "relu_p2": (row_maps.relu_power(2), power_oracle(2)),
    "relu_p2.5": (row_maps.relu_power(2.5), power_oracle(2.5)),
    "relu_p16": (row_maps.relu_power(16), power_oracle(16)),
    "relu_p2/L": (row_maps.relu_over_length(2, 1.0), over_length_oracle(2, 1.0)),
    "relu/sqrt L": (row_maps.relu_over_length(1, 0.5), over_length_oracle(1, 0.5)),
    "ramapuram": (
        row_maps.ramapuram_sigmoid(),
        lambda z, b: special.expit(z + b - np.log(len(z))),
    ),
    "ramapuram plain": (row_maps.ramapuram_sigmoid(False), lambda z, b: special.expit(z + b)),
    "softpick": (FieldMap("softpick"), softpick_oracle),
    "entmax15": (FieldMap("entmax15"), entmax_oracle),
    "softmax_logn": (
        FieldMap("softmax_logn", n0=64.0),
        lambda z, b: special.softmax(z * np.log(len(z)) / np.log(64)),
    ),
    "poly_p3": (FieldMap("poly", p=3), poly_oracle(3)),
    "poly_p4": (FieldMap("poly", p=4), poly_oracle(4)),
    "poly_p3/sqrt L": (
        FieldMap("poly_over_length", p=3, alpha=0.5),
        lambda z, b: (z + b) ** 3 / np.sqrt(len(z)),
    ),
    "taylor2": (FieldMap("taylor2"), taylor_oracle),
    "window": (FieldMap("window", w=4, sinks=2), window_oracle),
}
everywhere = pytest.mark.parametrize("name", MAPS)
# Sorting has no rounding rule: entmax has a bound of its own below.
rounded = pytest.mark.parametrize("name", [name for name in MAPS if name != "entmax15"])


def rows(scale, dtype=np.float32, shape=(6, 40)):
    return (np.random.default_rng(0).standard_normal(shape) * scale).astype(dtype)


@rounded
@pytest.mark.parametrize(
    ("scale", "dtype"),
    [(1e-3, np.float32), (1.0, jnp.bfloat16), (30.0, np.float32), (1e4, np.float32)],
)
def test_values_match_a_float64_oracle(name, scale, dtype):
    row_map, oracle = MAPS[name]
    z, bias = rows(scale, dtype), np.float32(0.25 * scale)
    got = row_map(jnp.asarray(z), bias)
    assert got.dtype == jnp.float32
    want = np.stack([oracle(row, np.float64(bias)) for row in z.astype(np.float64)])
    rounding.assert_within(got, rounding.expected(row_map, z, bias)._replace(values=want))


def test_sigmoid_is_right_where_every_weight_underflows():
    z = np.float32([-200, -201, -203])
    want = special.softmax(z.astype(np.float64))
    wanted = rounding.expected(row_maps.sigmoid, z)._replace(values=want)
    rounding.assert_within(row_maps.sigmoid(z), wanted)


def test_power_map_is_scale_free_at_sixteen():
    z = rows(1.0)
    want = row_maps.relu_power(16)(z)
    for scale in (2.0**-60, 2.0**60):
        np.testing.assert_array_equal(row_maps.relu_power(16)(z * np.float32(scale)), want)


@rounded
def test_gradients_match_central_differences_of_the_oracle(name):
    row_map, oracle = MAPS[name]
    z, bias, step = rows(2.0, shape=(7,)), float(np.float32(0.3)), 1e-6
    direction = np.random.default_rng(1).standard_normal(7)
    direction = np.float32(direction)
    gradients = jax.grad(lambda z, b: (row_map(z, b) * direction).sum(), argnums=(0, 1))
    wanted = rounding.expected(gradients, z, bias)
    rounding.assert_within(gradients(jnp.asarray(z), bias), wanted)

    def difference(dz, db):
        above, below = (oracle(np.float64(z) + s * dz, bias + s * db) for s in (step, -step))
        return ((above - below) * direction).sum() / (2 * step)

    # In float64 differences over h are good to h^2 and to 2^-53 / h: 1e-12 and 1e-10.
    want = [difference(e, 0.0) for e in np.eye(7)]
    np.testing.assert_allclose(wanted.values[0], want, atol=1e-8)
    np.testing.assert_allclose(wanted.values[1], difference(0.0, 1.0), atol=1e-8)


@rounded
def test_masked_keys_change_nothing_and_get_no_weight_and_no_gradient(name):
    row_map, _ = MAPS[name]
    z = rows(3.0, shape=(4, 12))
    # A window reads places, so that only later keys may be masked.
    kept = np.arange(5) if name == "window" else np.array([0, 1, 4, 5, 9])
    masked = jnp.where(np.isin(np.arange(12), kept), z, -INF)
    full = row_map(masked, 0.5)
    wanted = rounding.expected(row_map, z[:, kept], 0.5)
    for result in (full[:, kept], row_map(z[:, kept], 0.5)):
        rounding.assert_within(result, wanted)
    others = np.delete(np.arange(12), kept)
    assert not np.any(full[:, others])
    grad = jax.grad(lambda z: (row_map(z, 0.5) ** 2).sum())(masked)
    assert np.isfinite(grad).all() and not np.any(grad[:, others])


@everywhere
def test_dead_and_empty_rows_give_zeros_with_finite_gradients(name):
    row_map, _ = MAPS[name]
    empty = jnp.full((1, 4), -INF)
    dead = jnp.float32([[-1, -2, -0.5, -INF], [0, 0, 0, 0]])
    scores = jnp.concatenate([empty, dead])
    weights, gradient = jax.value_and_grad(lambda z: (row_map(z) ** 2).sum())(scores)
    assert np.isfinite(weights) and np.isfinite(gradient).all()
    assert not np.any(row_map(empty)) and not np.any(gradient[0])
    if row_map.degree is not None:
        assert not np.any(row_map(dead)) and not np.any(gradient)


@everywhere
def test_a_nan_score_is_not_hidden(name):
    assert np.isnan(MAPS[name][0](np.float32([1, np.nan, 2]))).any()


@everywhere
def test_normalised_rows_sum_to_one_and_the_others_are_flagged(name):
    row_map, _ = MAPS[name]
    total = row_map(rows(2.0), 3.0).sum(-1)
    # Forty weights over the sum of forty, a dozen operations for each.
    assert np.allclose(total, 1, rtol=2 * (40 + 12) * 2**-24, atol=0) == row_map.normalised


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e4])
def test_entmax_is_the_root_of_its_sum(scale):
    """Within what follows from |x| <= 1 in a row of n keys, k of them in the support.

    Sums of n terms put the mean M off by (n + 1) u and 1 / k - V by (3 n + 8) u. The difference
    M - t is at least 1 / k, for the sum of x - t is at least that of its squares, 1; so its root is
    off by half of (3 n + 8) k u. A key within that of t may count or not, which moves t by as much
    again. A weight (x - t)^2 moves by twice as much, and their sum by sqrt k times that.
    """
    z = rows(scale)
    got = FieldMap("entmax15")(jnp.asarray(z))
    want = np.stack([entmax_oracle(row, 0) for row in z.astype(np.float64)])
    n, k, u = z.shape[-1], (want > 0).sum(-1, keepdims=True), 2.0**-24
    threshold = 2 * ((n + 3) + (3 * n + 8) * k / 2) * u
    assert (np.abs(got - want) <= 2 * threshold * (1 + np.sqrt(k))).all()
    np.testing.assert_allclose(got.sum(-1), 1, rtol=(n + 2) * u)


def test_entmax_has_the_gradient_of_its_definition_and_reads_no_masked_key():
    with jax.enable_x64(True):
        z, step = rows(2.0, np.float64, (7,)), 1e-6
        direction = np.random.default_rng(1).standard_normal(7)
        row_map = FieldMap("entmax15")
        got = jax.grad(lambda z: (row_map(z) * direction).sum())(jnp.asarray(z))

        def difference(dz):
            above, below = (entmax_oracle(z + s * dz, 0) for s in (step, -step))
            return ((above - below) * direction).sum() / (2 * step)

        np.testing.assert_allclose(got, [difference(e) for e in np.eye(7)], atol=1e-8)
        masked = jnp.concatenate([jnp.full(3, -INF), jnp.asarray(z)])
        weights, gradient = row_map(masked), jax.grad(lambda z: row_map(z)[5])(masked)
        np.testing.assert_allclose(weights[3:], row_map(z), rtol=1e-14)
        assert not np.any(weights[:3]) and not np.any(gradient[:3]) and np.any(gradient[3:])


def test_scaled_softmax_is_softmax_at_its_own_number_of_keys():
    z = rows(3.0)
    own = FieldMap("softmax_logn", n0=float(z.shape[-1]))
    wanted = rounding.expected(own, z)._replace(values=special.softmax(z.astype(float), -1))
    rounding.assert_within(own(z), wanted)


@pytest.mark.parametrize("name", ["softpick", "entmax15", "softmax_logn", "poly_p4", "taylor2"])
def test_s_of_a_row_is_that_of_its_weights(name):
    row_map, oracle = MAPS[name]
    z = rows(2.0, np.float64)
    weight = np.stack([oracle(row, 0.5) for row in z])
    target = z.argmax(-1)
    with jax.enable_x64(True):
        got = row_stats(z, bias=0.5, row_map=row_map, target=target).s_p[..., 0]
    mass = np.take_along_axis(weight, target[:, None], -1)[:, 0]
    want = (weight.sum(-1) - mass) / mass
    np.testing.assert_allclose(got, want, rtol=1e-9)


@pytest.mark.parametrize(("w", "sinks"), [(3, 0), (1, 0), (3, 2), (50, 0)])
def test_a_window_is_sliding_window_attention_and_its_sinks(w, sinks):
    """Against the model that has the window itself, and a masked softmax with sinks."""
    cfg, tokens_BT = tiny.DECODER, jnp.asarray(np.random.default_rng(0).integers(0, 40, (2, 12)))
    params = jax.tree.map(lambda x: 3.0 * x, lm_jax.init_params(jax.random.key(1), cfg))
    place = np.arange(12)
    distance = place[:, None] - place
    seen_TS = (distance < w) | (place < sinks)

    def masked(scores_BNTS):
        return lm_jax.softmax(jnp.where(seen_TS[None, None], scores_BNTS, -jnp.inf))

    recipe = attend_of(f"window:w={w},sinks={sinks}")
    got = lm_jax.forward(params, tokens_BT, cfg, attend=recipe).logits
    wanted = [lm_jax.forward(params, tokens_BT, cfg, attend=masked).logits]
    if not sinks:
        windows = dataclasses.replace(cfg, windows=(w,) * cfg.num_layers)
        wanted.append(lm_jax.forward(params, tokens_BT, windows).logits)
    for each in wanted:
        # The same numbers but for the order of sums over masked keys, which are zero.
        apart = 64 * 2.0**-24 * np.abs(np.asarray(each)).max()
        assert np.abs(np.asarray(got) - np.asarray(each)).max() <= apart


def test_the_state_of_a_window_is_its_cache():
    recipe = row_maps.parse_recipe("window:w=64,sinks=4")
    assert (recipe.name, recipe.spec) == ("window_w64_sinks4", "window:w=64,sinks=4")
    entry = linear_state.linear_state(recipe, 0.0, tiny.DECODER)
    width = tiny.DECODER.head_dim
    assert (entry.cache_tokens, entry.state) == (68, 68 * 2 * width)
    assert linear_state.sentence(entry) == "none, but a KV cache of 68 tokens at any length"


def test_s_of_signed_weights_is_refused():
    with pytest.raises(UsageError, match="S of a row is not defined for FieldMap"):
        row_stats(rows(1.0), row_map=FieldMap("poly", p=3))
    assert "may be negative" in row_maps.parse_recipe("poly:p=3").unmeasured
    assert row_maps.parse_recipe("poly:p=4").unmeasured == "S_p is not measured for this map"


def test_maps_that_no_kernel_computes_are_refused_by_name():
    with pytest.raises(UsageError, match="no kernel computes softpick; pass the attend unfused"):
        by_kernels(attend_of("softpick"))
    with pytest.raises(UsageError, match="no kernel computes 'taylor2'; set it to 'dense'"):
        AuditConfig("a", attention="kernels", recipes=("relu_p4_b0", "taylor2"))


def test_a_bias_per_head_broadcasts():
    z = rows(1.0, shape=(2, 3, 5, 8))
    bias = np.float32([0.0, 1.0, -0.5]).reshape(3, 1, 1)
    got = row_maps.relu_power(4)(z, bias)
    for n in range(3):
        wanted = rounding.expected(row_maps.relu_power(4), z[:, n], bias[n, 0, 0])
        rounding.assert_within(got[:, n], wanted)


def test_a_wider_dtype_is_kept():
    with jax.enable_x64(True):
        z = rows(100.0, np.float64)
        got = row_maps.relu_power(16)(z, 0.5)
        want = np.stack([power_oracle(16)(row, 0.5) for row in z])
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, want, rtol=1e-13)


def test_row_maps_are_static_arguments_and_biases_are_traced():
    traces = []

    @jax.jit
    def keep_one_trace(z, b):
        traces.append(None)
        return row_maps.relu_power(4)(z, b)

    apply = jax.jit(lambda z, b, m: m(z, b), static_argnums=2)
    z = jnp.ones((2, 3))
    for b in (0.0, 1.0, 2.0):
        keep_one_trace(z, b)
        apply(z, b, row_maps.relu_power(4))
    assert len(traces) == 1 and apply._cache_size() == 1
    assert row_maps.relu_power(4) == row_maps.relu_power(4.0) != row_maps.relu_power(2)


def test_the_fourteen_recipes_of_table_2_in_order():
    want = [f"relu_p{p}_b{b}" for p in (2, 4, 8, 16) for b in ("0", "auto")]
    want += ["sigmoid_b0", "sigmoid_bauto"]
    want += ["relu_p1_over_L", "relu_p2_over_L", "relu_p1_over_sqrtL", "relu_p2_over_sqrtL"]
    assert list(row_maps.RECIPES) == want
    assert [r.map.normalised for r in row_maps.RECIPES.values()] == [True] * 10 + [False] * 4


@pytest.mark.parametrize(
    "spec",
    [
        *(r.spec for r in row_maps.RECIPES.values()),
        *("softmax", "ramapuram", "relu:p=3,b=-1.5", "softpick:b=auto", "entmax15"),
        *("softmax_logn:n0=512", "poly:p=3,b=-1", "poly_over_length:p=3,b=auto", "taylor2:b=2"),
        *("elu1", "hedgehog", "performer", "performer:m=32,seed=2"),
        *("gdn", "gdn:distance=20", "gdn:distance=0", "gdn:distance=x/mine.json"),
        *("window:w=64", "window:w=64,sinks=4", "taylor2:w=64,sinks=4,gamma=0.5", "elu1:w=8"),
        *(
            "hedgehog:w=64,gamma=1",
            "performer:m=32,w=64,seed=2",
            "hedgehog:w=0",
            "taylor2:b=auto,w=2",
        ),
    ],
)
def test_specs_and_names_round_trip(spec):
    recipe = row_maps.parse_recipe(spec)
    assert row_maps.parse_recipe(recipe.spec) == recipe
    if recipe.name in row_maps.RECIPES:
        assert row_maps.parse_recipe(recipe.name) is row_maps.RECIPES[recipe.name]


def test_a_window_around_a_map_is_named_by_what_is_not_its_default():
    """The factor is 0.1 where features do not estimate e^z, and 1 where they do."""
    for text, name, gamma in (
        ("hedgehog:w=64,sinks=4,gamma=0.1", "hedgehog_w64_sinks4", 0.1),
        ("elu1:w=64", "elu1_w64", 0.1),
        ("hedgehog:w=64,gamma=1", "hedgehog_w64_gamma1", 1),
        ("taylor2:w=64", "taylor2_b0_w64", 1),
        ("performer:m=256,w=64", "performer_m256_w64", 1),
        ("performer:seed=2,w=64,gamma=0.5", "performer_m256_seed2_w64_gamma0.5", 0.5),
    ):
        recipe = row_maps.parse_recipe(text)
        assert (recipe.name, recipe.map.gamma, recipe.map.w) == (name, gamma, 64)
    for text in ("hedgehog", "elu1", "taylor2:b=0", "performer:m=256"):
        assert row_maps.parse_recipe(text).spec == text
        none = f"{text}{',' if ':' in text else ':'}w=0"
        assert row_maps.parse_recipe(none) == row_maps.parse_recipe(text)


def test_recipes_with_distances_are_named_by_them():
    specs = ("gdn", "gdn:distance=20", "gdn:distance=0.5", "gdn:distance=x/mine.json")
    names = [row_maps.parse_recipe(spec).name for spec in specs]
    assert names == ["gdn", "gdn_distance20", "gdn_distance0.5", "gdn_mine"]


def test_recipes_with_numbers():
    recipe = row_maps.parse_recipe("relu: p=2.5, b=1.25")
    assert (recipe.name, recipe.bias, recipe.map.degree) == ("relu_p2.5_b1.25", 1.25, 2.5)
    assert row_maps.parse_recipe("relu:p=4,b=0") == row_maps.RECIPES["relu_p4_b0"]
    recipe = row_maps.parse_recipe("ramapuram:b=2")
    assert recipe.bias == 2.0 and recipe.map == row_maps.ramapuram_sigmoid(False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rleu:p=4", "did you mean 'relu'"),
        ("relu:p=4,bias=0", "no option 'bias'; did you mean 'b'|no option 'bias'; known: b, p"),
        ("relu:b=auto", "relu needs p"),
        ("relu:p=-2", "p=-2 must be a positive number"),
        ("relu:p=4,b=nan", "b=nan must be a number or auto"),
        ("relu:p=4,b=mine/auto.json", "reads as the bias auto; rename the file"),
        ("relu:p=4,p=2", "write p=<value> once"),
        ("poly:p=2.5", "p=2.5 must be a whole number"),
        ("performer:m=2.5", "m=2.5 must be a whole number"),
        ("window:w=0", "w=0 must be a positive number"),
        ("window:w=2,sinks=1.5", "sinks=1.5 must be a whole number$"),
        ("window:sinks=4", "window needs w"),
        ("hedgehog:b=1", "hedgehog has no option 'b'; .*gamma, sinks, w"),
        ("entmax15:b=1", "entmax15 has no option 'b'; it has none"),
        (
            "hedgehog:gamma=0.5",
            "gamma belongs to a window .* write hedgehog:w=64,gamma=0.5, or leave",
        ),
        (
            "taylor2:w=0,sinks=4",
            "sinks belongs to a window .* write taylor2:w=64,sinks=4, or leave",
        ),
        ("performer:w=2.5", "performer: w=2.5 must be a whole number$"),
        ("elu1:w=-1", "w=-1 must be a positive number"),
        ("elu1:w=4,gamma=0", "gamma=0 must be a positive number"),
        ("gdn:distnce=3", "gdn has no option 'distnce'; did you mean 'distance'"),
        ("gdn:distance=-1", "distance=-1 must be 0, a positive number or a FILE.json$"),
        ("gdn:distance=mine/distance20.json", "reads as the bias distance20; rename the file"),
        ("gdn:distance=distance.json", "reads as the bias distance; rename the file"),
        ("gnd", "did you mean 'gdn'"),
    ],
)
def test_recipes_that_cannot_be_read_name_the_remedy(text, message):
    with pytest.raises(UsageError, match=message):
        row_maps.parse_recipe(text)


def test_auto_bias_needs_a_calibration():
    recipe = row_maps.RECIPES["relu_p4_bauto"]
    assert row_maps.resolve_bias(recipe, 3.5) == 3.5
    assert row_maps.resolve_bias(row_maps.RECIPES["relu_p4_b0"], 3.5) == 0.0
    with pytest.raises(UsageError, match="b=auto needs a calibrated bias"):
        row_maps.resolve_bias(recipe, None)
