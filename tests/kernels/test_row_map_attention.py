"""`row_map_attention`: the reference against row maps and float64, the fast paths against it."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iaj_kernels import row_map_attention
from iaj_kernels.core import cases, dispatch
from iaj_kernels.row_map_attention import maps, xla
from iaj_kernels.row_map_attention.cases import SUITE
from polyattn_jax.recipes.substitute import PerHeadRowMap
from tests import rounding
from tests.kernels import comparison

# The maps of the 14 recipes of Table 2, and more degrees.
MAPS = {
    "softmax": maps.softmax(),
    "sigmoid": maps.sigmoid(),
    **{f"relu{p}": maps.relu_power(p) for p in (0.5, 1, 2, 2.5, 3, 4, 8, 16)},
    **{f"ramapuram_{shifted}": maps.ramapuram_sigmoid(shifted) for shifted in (True, False)},
    **{
        f"relu{p}_over_{alpha}": maps.relu_over_length(p, alpha)
        for p in (1, 2, 2.5)
        for alpha in (1.0, 0.5)
    },
}


def running(implementation):
    if implementation == "pallas":
        return dispatch.on(dispatch.INTERPRETER)
    return contextlib.nullcontext()


# Each takes a second. Others have the same maps, lengths, dead rows and dtype, in other pairs.
CROSSED = comparison.crossed(
    SUITE,
    xla=("relu4_t200",),
    pallas=(
        "relu4_t65",
        "sigmoid_t65",
        "relu4_t200",
        "relu4_dead_rows",
        "relu2_over_root_bfloat16",
    ),
)


@pytest.mark.parametrize(("case", "implementation"), CROSSED)
def test_value_and_gradients_equal_the_reference(case, implementation):
    with running(implementation):
        result = comparison.deviations(SUITE, case, implementation)
    assert all(each.ok for each in result), result


def test_no_suite_case_is_without_a_dead_row_where_it_says_so():
    for name in ("relu4_dead_rows", "relu2_over_root_dead_rows"):
        case = SUITE.named(name)
        arrays = SUITE.make(case, jax.random.key(0))
        assert 10 < int(SUITE.call(case, arrays, "reference")["dead_rows"].sum()) < 2 * 4 * 65


@pytest.mark.parametrize("name", MAPS)
def test_reference_is_the_definition_on_the_scores_with_its_gradients(name):
    row_map = MAPS[name]
    keys = jax.random.split(jax.random.key(0), 4)
    T = 16
    q_BTNH, k_BSKH = (jax.random.normal(key, (2, T, 2, T)) for key in keys[:2])
    # Key s has the value e_s, so that the output is the pattern itself.
    v_BSKH = jnp.broadcast_to(jnp.eye(T)[None, :, None], (2, T, 2, T))
    valid_BT = jnp.arange(T)[None] < jnp.array([T, 11])[:, None]
    mask_BTS = jnp.tril(jnp.ones((T, T), bool))[None] & valid_BT[:, None] & valid_BT[:, :, None]

    def by_attention(q_BTNH, bias_N):
        return row_map_attention(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            row_map=row_map,
            bias=bias_N,
            segment_ids=jnp.where(valid_BT, 0, -1),
            implementation="reference",
        ).out_BTNH.swapaxes(1, 2)

    def by_definition(q_BTNH, bias_N):
        k_BSNH = k_BSKH.astype(q_BTNH.dtype)
        scores = 0.25 * jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH, precision="highest")
        bias_1N11, mask_BNTS = (
            bias_N[None, :, None, None],
            jnp.broadcast_to(mask_BTS[:, None], scores.shape),
        )
        return definition(jnp, row_map, scores, bias_1N11, mask_BNTS)

    bias_N = jnp.array([0.3, -0.4])
    cotangent = jax.random.normal(keys[2], (2, 2, T, T))

    def values_and_gradients(attend, *inputs):
        out, pull = jax.vjp(attend, *inputs)
        return out, pull(cotangent.astype(out.dtype))

    inputs = q_BTNH, bias_N
    run = functools.partial(values_and_gradients, by_attention)
    with jax.enable_x64(True):
        exact = values_and_gradients(by_definition, *(np.asarray(x, np.float64) for x in inputs))
        exact = jax.tree.map(np.asarray, exact)
    assert all(each.dtype == np.float64 for each in jax.tree.leaves(exact))
    wanted = rounding.expected(run, *inputs)._replace(values=exact)
    rounding.assert_within(jax.jit(run)(*inputs), wanted)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("size", [1.0, 100.0])
def test_weights_equal_float64(name, size):
    row_map = MAPS[name]
    rng = np.random.default_rng(0)
    scores = (size * rng.standard_normal((40, 23))).astype(np.float32)
    mask = rng.random((40, 23)) < 0.7
    mask[7] = False
    inputs = jnp.where(mask, scores, -jnp.inf), jnp.asarray([[0.5]])
    got = row_map(*inputs)
    want = definition(np, row_map, scores.astype(np.float64), 0.5, mask)
    assert np.all(np.asarray(got)[7] == 0)
    rounding.assert_within(got, rounding.expected(row_map, *inputs)._replace(values=want))


def definition(xp, row_map, scores, bias, mask):
    """The weights of float64 scores by numpy or jax.numpy, as the maps are written."""
    u = scores + bias
    active = mask & (u > 0)
    r_power = xp.where(active, xp.where(active, u, 1) ** row_map.p, 0)
    n = xp.maximum(mask.sum(-1, keepdims=True), 1)
    with np.errstate(over="ignore"):
        sigma = {b: xp.exp(-xp.logaddexp(0, -(u - b * xp.log(n)))) for b in (0, 1)}
    match row_map.kind:
        case "softmax":
            w = xp.exp(scores - scores.max(-1, keepdims=True))
        case "relu_power":
            w = r_power
        case "sigmoid":
            w = sigma[0]
        case "ramapuram_sigmoid":
            w = sigma[int(row_map.minus_log_n)]
        case _:
            w = r_power / n**row_map.alpha
    w = xp.where(mask, w, 0)
    total = w.sum(-1, keepdims=True)
    return w / xp.where(total > 0, total, 1) if row_map.normalised else w


@pytest.mark.parametrize("implementation", ["reference", "xla", "pallas"])
def test_heads_and_dead_rows_are_those_of_the_substitution(implementation):
    keys = jax.random.split(jax.random.key(3), 3)
    B, T, N = 2, 33, 4
    q_BTNH, k_BSKH, v_BSKH = (jax.random.normal(key, (B, T, N, 16)) for key in keys)
    heads_N = jnp.array([True, False, True, False])
    valid_BT = jnp.arange(T)[None] < jnp.array([T, 20])[:, None]
    mask_BTS = jnp.tril(jnp.ones((T, T), bool))[None] & valid_BT[:, None]
    data = {"index": jnp.int32(0), "bias": -1.5, "heads_N": heads_N, "valid_BT": valid_BT}

    def substituted(q_BTNH, k_BSKH, v_BSKH):
        scores = 0.25 * jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSKH, precision="highest")
        scores = jnp.where(mask_BTS[:, None], scores, -jnp.inf)
        pattern, aux = PerHeadRowMap((maps.relu_power(4),))(scores, data)
        out = jnp.einsum("BNTS,BSNH->BTNH", pattern, v_BSKH, precision="highest")
        return jnp.where(valid_BT[:, :, None, None], out, 0.0), aux["dead_rows_B"]

    @jax.jit
    def attend(q_BTNH, k_BSKH, v_BSKH):
        return row_map_attention(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            row_map=maps.relu_power(4),
            bias=-1.5,
            heads=heads_N,
            segment_ids=jnp.where(valid_BT, 0, -1),
            implementation=implementation,
        )

    with running(implementation):
        out_BTNH, dead_BN = attend(q_BTNH, k_BSKH, v_BSKH)
    wanted = rounding.expected(substituted, q_BTNH, k_BSKH, v_BSKH)
    rounding.assert_within((out_BTNH, dead_BN.sum(1)), wanted)
    np.testing.assert_array_equal(dead_BN.sum(1), wanted.values[1])
    assert dead_BN[:, 0].min() > 0 and np.all(np.asarray(dead_BN)[:, [1, 3]] == 0)


def test_xla_spans_and_blocks_change_nothing(monkeypatch):
    case = SUITE.named("relu4_t65")
    arrays, cotangents, wanted = comparison.expected(SUITE.op, case.name)
    monkeypatch.setattr(xla, "SMALLEST_BLOCK", 8)
    monkeypatch.setattr(xla, "BLOCK_ELEMENTS", 8 * 2 * 4 * 65)
    run = cases.outputs_and_gradients(SUITE, case, "xla")
    result = cases.judged(jax.jit(run)(arrays, cotangents), wanted)
    assert all(each.ok for each in result), result
