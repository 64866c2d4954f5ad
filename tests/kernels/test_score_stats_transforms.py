"""`score_stats` in tiles of other sizes, by vmap, on meshes and exported; and its errors."""

import functools
import math
import re

import jax
from jax import export
import jax.numpy as jnp
import numpy as np
import pytest

from iaj_kernels.core import dispatch
from iaj_kernels.score_stats import config
from iaj_kernels.score_stats.api import score_stats
from polyattn_jax.recipes.diagnostic import relative_error_bound

ALL = ("reference", "xla", "pallas")


@pytest.fixture(autouse=True)
def _interpreter():
    with dispatch.on(dispatch.INTERPRETER):
        yield


def _integers(B=1, T=65, S=65, N=2, K=2, H=16):
    """Queries and keys whose products are exact in any order of summation."""
    keys = jax.random.split(jax.random.key(0))
    q_BTNH = jax.random.randint(keys[0], (B, T, N, H), -3, 4)
    k_BSKH = jax.random.randint(keys[1], (B, S, K, H), -3, 4)
    return q_BTNH.astype(jnp.float32), k_BSKH.astype(jnp.float32)


def _between(degree, k_BSKH):
    """Two sums of powers, each within the proved bound of the sum of the same exact scores."""
    return 2 * relative_error_bound(degree, k_BSKH.shape[1])


def _assert_equal(got, want, rtol=0.0):
    for name in config.RowStats._fields:
        value, wanted = getattr(got, name), getattr(want, name)
        # Of scores that are equal, whole numbers are equal.
        exact = rtol == 0.0 or jnp.issubdtype(wanted.dtype, jnp.integer)
        check = np.testing.assert_array_equal if exact else np.testing.assert_allclose
        check(value, wanted, err_msg=name, **({} if exact else {"rtol": rtol}))


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_the_size_of_a_tile_changes_nothing_but_the_order_of_a_sum(implementation):
    q, k = _integers(T=65, S=130, N=4, K=2)
    target = jnp.arange(65, dtype=jnp.int32)[None] % 50
    run = jax.jit(score_stats, static_argnames=("implementation", "blocks"))
    options = {"target": target, "window": 70, "implementation": implementation}
    sizes = ((16, 64), (64, 16)) if implementation == "pallas" else ((7, 13), (64, 50))
    got, want = (run(q, k, **options, blocks=blocks) for blocks in sizes)
    _assert_equal(got, want, rtol=_between(16, k))


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_several_biases_are_one_pass_of_each(implementation):
    q, k = _integers()
    run = jax.jit(lambda bias: score_stats(q, k, bias=bias, implementation=implementation))
    # One more than a kernel of Pallas takes.
    biases = jnp.array([0.0, 0.37, -1.9, 2.2, 5.0])
    several = run(biases)
    for i in (0, 2, 4):
        one = run(biases[i])
        _assert_equal(jax.tree.map(lambda x, i=i: x[i], several), one, rtol=_between(16, k))


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_queries_anywhere_at_any_bias_by_vmap_equal_the_rows_of_a_full_call(implementation):
    q, k = _integers(B=2, T=65, S=65)
    positions = jnp.array([[3, 64, 20], [0, 63, 40]])
    biases = jnp.array([0.37, -1.9, 2.2])

    def at(q_BNH, start_B, bias):
        call = functools.partial(score_stats, implementation=implementation)
        return call(q_BNH[:, None], k, start=start_B, bias=bias)

    rows = q[jnp.arange(2)[:, None], positions]
    got = jax.jit(jax.vmap(at, in_axes=(1, 1, 0)))(rows, positions, biases)
    full = jax.jit(lambda: score_stats(q, k, bias=biases, implementation="reference"))()
    # For each of the three calls its bias, and of each batch row its own query.
    places = (jnp.arange(3)[:, None], jnp.arange(2)[None], positions.T)
    want = jax.tree.map(lambda x: x[places], full)
    _assert_equal(jax.tree.map(lambda x: x[:, :, 0], got), want, rtol=_between(16, k))


@pytest.mark.parametrize("implementation", ALL)
def test_ties_hold_where_the_compiler_knows_the_bias(implementation):
    # XLA on a CPU then rounds scale q.k + b once for a distractor, and twice for the target.
    q, k = _integers(T=16, S=8)
    k = jnp.concatenate([k, k], axis=1)
    run = functools.partial(score_stats, bias=1.37, scale=0.1, causal=False, degrees=(20_000,))
    stats = jax.jit(lambda q, k: run(q, k, implementation=implementation))(q, k)
    live = stats.status == config.Status.ACTIVE
    # At this degree the keys that tie with the target are all that is left: every key has a copy.
    assert live.any() and (stats.s_p[..., 0][live] % 2 == 1).all()
    np.testing.assert_array_equal(stats.margin, 0.0)


@functools.cache
def _on_one_device(implementation):
    """Queries, keys, targets, and the expected result."""
    q, k = _integers(B=2, T=33, S=33, N=4, K=2)
    target = np.full((2, 33), 3)
    run = functools.partial(score_stats, implementation=implementation)
    return q, k, target, jax.jit(lambda q, k, target: run(q, k, target=target))(q, k, target)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_sharding_over_batch_and_heads_equals_one_device(implementation):
    q, k, target, want = _on_one_device(implementation)
    mesh = jax.make_mesh((2, 2), ("b", "n"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec, rows = jax.sharding.PartitionSpec("b", None, "n"), jax.sharding.PartitionSpec("b")

    def run(q, k, target):
        return score_stats(q, k, target=target, implementation=implementation)

    sharded = jax.shard_map(
        run, mesh=mesh, in_specs=(spec, spec, rows), out_specs=spec, check_vma=False
    )
    _assert_equal(jax.jit(sharded)(q, k, target), want, rtol=_between(16, k))


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_64_bit_types_change_nothing(implementation):
    q, k, target, want = _on_one_device(implementation)
    with jax.enable_x64(True):
        # The target is of int64 here.
        got = jax.jit(lambda: score_stats(q, k, target=target, implementation=implementation))()
    assert [x.dtype for x in got] == [x.dtype for x in want]
    _assert_equal(got, want, rtol=_between(16, k))


def test_no_array_of_all_scores_is_formed():
    T = 4096
    q, k = (jax.ShapeDtypeStruct((1, T, 1, 16), jnp.float32),) * 2
    run = functools.partial(score_stats, implementation="xla", target=np.zeros((1, T), np.int32))
    shapes = re.findall(r"\[(\d+(?:,\d+)*)\]", str(jax.make_jaxpr(run)(q, k)))
    largest = max(math.prod(map(int, shape.split(","))) for shape in shapes)
    # 64 queries of scores, and as many numbers computed from them.
    assert largest == 64 * T


def test_the_xla_path_is_exported():
    q, k = _integers(T=9, S=9)
    run = jax.jit(lambda q, k: score_stats(q, k, implementation="xla"))
    _assert_equal(export.export(run)(q, k).call(q, k), run(q, k))


@pytest.mark.parametrize("implementation", ALL)
def test_a_derivative_is_refused_and_stop_gradient_allowed(implementation):
    q, k = _integers(T=2, S=2)

    def loss(q, k, bias, stop):
        held = jax.lax.stop_gradient((q, k, bias)) if stop else (q, k, bias)
        stats = score_stats(held[0], held[1], bias=held[2], implementation=implementation)
        return stats.margin.sum() + (q**2).sum()

    gradient = jax.jit(jax.grad(loss), static_argnums=3)
    for argument in (0, 1, 2):
        with pytest.raises(NotImplementedError, match=r"score_stats: .*stop_gradient"):
            jax.grad(loss, argument)(q, k, 0.5, False)
    np.testing.assert_array_equal(gradient(q, k, 0.5, True), 2 * q)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"degrees": ()}, ValueError, "degrees is"),
        ({"degrees": (2, 0)}, ValueError, "degrees is"),
        ({"cap": 0.0}, ValueError, "cap is 0.0"),
        ({"bias": np.zeros((2, 2))}, ValueError, "bias has shape"),
        ({"target": np.zeros((1, 3), np.int32)}, ValueError, "target has shape"),
        ({"target": np.zeros((1, 2))}, TypeError, "target is float"),
        ({"implementation": "cuda"}, ValueError, "none of"),
        ({"implementation": "pallas", "blocks": (48, 64)}, dispatch.UnavailableError, "powers of"),
    ],
)
def test_what_does_not_fit_is_refused(options, error, text):
    q, k = _integers(T=2, S=2)
    with pytest.raises(error, match=f"score_stats: .*{text}"):
        score_stats(q, k, **options)


@pytest.mark.parametrize(
    ("q", "k", "error", "text"),
    [
        ((1, 2, 3, 16), (1, 2, 2, 16), ValueError, "N = 3"),
        ((1, 2, 2, 16), (1, 0, 2, 16), ValueError, "S = 0"),
        ((1, 2, 2, 16), (1, 2, 2, 8), ValueError, "H = 8"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(q, k, error, text):
    with pytest.raises(error, match=f"score_stats: .*{text}"):
        score_stats(jnp.zeros(q), jnp.zeros(k))


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match="q is float16"):
        score_stats(jnp.zeros((1, 2, 2, 16), jnp.float16), jnp.zeros((1, 2, 2, 16)))
    with pytest.raises(TypeError, match="k is bfloat16"):
        score_stats(jnp.zeros((1, 2, 2, 16)), jnp.zeros((1, 2, 2, 16), jnp.bfloat16))


def test_a_head_width_that_no_tile_has_falls_back():
    q, k = _integers(T=5, S=5, H=24)
    by_default, by_xla = (
        jax.make_jaxpr(functools.partial(score_stats, implementation=implementation))(q, k)
        for implementation in (None, "xla")
    )
    assert str(by_default) == str(by_xla)
    with pytest.raises(dispatch.UnavailableError, match="H = 24"):
        score_stats(q, k, implementation="pallas")
