"""The Pallas kernels of `gated_attention`, interpreted: the reference, however they are cut.

The interpreter fills memory past the end of an array with NaN, so every odd length here also
shows that nothing is read from there.
"""

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from iaj_kernels import gated_attention
from iaj_kernels.attention.visibility import visibility
from iaj_kernels.core import dispatch, tuning
from iaj_kernels.gated_attention import pallas, pallas_plan
from iaj_kernels.gated_attention.config import Call, Config
from tests import rounding

SEED = 5


def _inputs(B=2, T=20, S=None, N=2, K=1, H=16):
    """q, k, v and a bias. q and k are multiples of 1/4: no order of summation rounds a score."""
    draw = np.random.default_rng(1)
    S = S or T
    arrays = (
        draw.integers(-3, 4, (B, T, N, H)) / 4.0,
        draw.integers(-3, 4, (B, S, K, H)) / 4.0,
        draw.normal(size=(B, S, K, H)),
        draw.normal(size=N),
    )
    return tuple(jnp.asarray(x, jnp.float32) for x in arrays)


def _call(q, k, v, bias, *, implementation="pallas", mode="sample", seed=SEED, **options):
    seed = seed if mode == "sample" else None
    with dispatch.on(dispatch.INTERPRETER):
        result = gated_attention(
            q,
            k,
            v,
            gate_bias=bias,
            mode=mode,
            seed=seed,
            implementation=implementation,
            **options,
        )
    return result.out_BTNH, result.expected_edges_BN, result.open_edges_BN


def _outputs_and_gradients(*arrays, call=_call, **options):
    """Every output, and the gradients of a number that each of them enters."""

    def loss(*arrays):
        out, expected, opened = call(*arrays, **options)
        waves = [jnp.cos(jnp.arange(x.size)).reshape(x.shape) for x in (out, expected)]
        return (out * waves[0]).sum() + (expected * waves[1]).sum(), (out, expected, opened)

    gradients, outputs = jax.grad(loss, tuple(range(len(arrays))), has_aux=True)(*arrays)
    return outputs, gradients


def _jitted(**options) -> Callable:
    return jax.jit(functools.partial(_outputs_and_gradients, **options))


def _wanted(*arrays, **options) -> rounding.Expected:
    """Outputs and gradients by the reference."""
    run = functools.partial(_outputs_and_gradients, implementation="reference", **options)
    return rounding.expected(run, *arrays)


@functools.cache
def _small():
    """The arguments of a transformation, and the program that it must equal."""
    return _inputs(B=4, N=4, K=2), _jitted()


@functools.cache
def _reference_map() -> tuple[rounding.Expected, np.ndarray]:
    """A P by the reference, on the arrays of `_maps`, and the open edges."""
    q, k, _, bias = _inputs(T=40, K=2, H=40)
    identity = jnp.broadcast_to(jnp.eye(40)[None, :, None], k.shape)
    run = functools.partial(_call, implementation="reference")
    values, bounds = rounding.expected(run, q, k, identity, bias)
    return rounding.Expected(values[0], bounds[0]), values[2]


def _maps(blocks: tuple[int, int] | None) -> tuple[np.ndarray, ...]:
    """A P as the forward kernel has it, as the backward has it, and the open edges.

    v is the identity, so the output is A P; so is the cotangent, which makes (A P)^T of d_v.
    """
    q, k, _, bias = _inputs(T=40, K=2, H=40)
    identity = jnp.broadcast_to(jnp.eye(40)[None, :, None], k.shape)
    config = Config("sample", 40**-0.5, dispatch.INTERPRETER, blocks=blocks)
    visible = visibility("test", 2, 40, 40, causal=True, window=None, segment_ids=None, start=None)

    @jax.jit
    def run(q, k, bias):
        def outputs(v):
            call = Call(q, k, v, bias, jnp.uint32(SEED), jnp.zeros(2, int), visible)
            result = pallas.run(config, call)
            return result[0], result

        _, pull, result = jax.vjp(outputs, identity, has_aux=True)
        return result[0], pull(identity)[0], result[2]

    out_BTNS, d_v_BSNT, opened_BN = run(q, k, bias)
    return np.asarray(out_BTNS), np.asarray(d_v_BSNT).swapaxes(1, 3), np.asarray(opened_BN)


@pytest.mark.parametrize("blocks", [None, (16, 32), (64, 16)])
def test_every_tiling_draws_the_same_gates_in_both_passes(blocks):
    wanted, want_opened = _reference_map()
    want = wanted.values
    out, d_v, opened = _maps(blocks)
    assert 0.2 < (want > 0).sum() / (4 * 40 * 41 / 2) < 0.8
    np.testing.assert_array_equal(out > 0, want > 0)
    np.testing.assert_array_equal(d_v > 0, want > 0)
    np.testing.assert_array_equal(opened, want_opened)
    rounding.assert_within(out, wanted)
    rounding.assert_within(d_v, wanted)


def test_other_tiles_in_every_kernel_change_values_and_gradients_by_rounding_alone():
    arrays = _inputs(T=70, S=90)
    wanted = _wanted(*arrays)
    sides = {"forward": (64, 16), "queries": (16, 64), "keys": (64, 16)}
    tiles = {
        f"{kernel}_{what}": size
        for kernel, pair in sides.items()
        for what, size in zip(("queries", "keys"), pair, strict=True)
    }
    with tuning.trying(pallas_plan.OP, tiles):
        got = _jitted()(*arrays)
    rounding.assert_within(got, wanted)
    np.testing.assert_array_equal(got[0][2], wanted.values[0][2])


def test_rows_that_see_no_key_are_zero_and_give_no_gradient():
    # The width of the paper's Figure 10: no power of two.
    q, k, v, bias = _inputs(T=37, S=45, H=10)
    # Row 0 of the batch starts before the first key; the window of row 1 ends after the last.
    hidden = {"start": jnp.asarray([-18, 30]), "window": 9}
    got = _jitted(**hidden)(q, k, v, bias)
    for x_BTNH in (got[0][0], got[1][0]):
        assert (x_BTNH[0, :18] == 0).all() and (x_BTNH[1, 23:] == 0).all()
    rounding.assert_within(got, _wanted(q, k, v, bias, **hidden))


def test_one_program_runs_every_window_and_the_largest_hides_nothing():
    arrays = _inputs(B=1, T=70, N=1)

    def run(window, *arrays, implementation="pallas"):
        return _outputs_and_gradients(*arrays, window=window, implementation=implementation)

    fast, slow = jax.jit(run), functools.partial(run, implementation="reference")
    for window in (1, 33, 2**31 - 1):
        inputs = jnp.int32(window), *arrays
        result = fast(*inputs)
        rounding.assert_within(result, rounding.expected(slow, *inputs))
    rounding.assert_within(result, _wanted(*arrays))


def test_a_tile_without_an_open_gate_reads_no_values():
    q, k, v, _ = _inputs(B=1, T=96, N=1)
    blocks = (32, 32)
    # No key of the second tile opens a gate: were its values multiplied, by zero, they would show.
    q, k = jnp.abs(q) + 0.25, (jnp.abs(k) + 0.25).at[:, 32:64].multiply(-1.0)
    poisoned = v.at[:, 32:64].set(jnp.nan)
    config = Config("threshold", 0.25, dispatch.INTERPRETER, blocks=blocks)
    visible = visibility("test", 1, 96, 96, causal=True, window=None, segment_ids=None, start=None)
    none = (jnp.zeros(1), jnp.uint32(0), jnp.zeros(2, int))
    run = jax.jit(lambda q, k, v: pallas.run(config, Call(q, k, v, *none, visible)))
    got, want = run(q, k, poisoned), run(q, k, v)
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert int(want[2].sum()) == 96 * 97 // 2 - 32 * 33 // 2 - 32 * 32
    options = {"mode": "threshold", "scale": 0.25, "implementation": "reference"}
    reference = functools.partial(_call, bias=jnp.zeros(1), **options)
    rounding.assert_within(want, rounding.expected(reference, q, k, v))


def test_vmap_and_checkpoint_change_nothing_and_a_repeat_is_equal_to_the_bit():
    arrays, one = _small()
    seeds = jnp.arange(2, dtype=jnp.uint32)
    two = [jnp.stack([x, x[::-1]]) for x in arrays]

    def rematerialised(implementation, seed, *arrays):
        call = functools.partial(_call, implementation=implementation, seed=seed)
        return _outputs_and_gradients(*arrays, call=jax.checkpoint(call))

    got, wanted = (
        run(jax.vmap(functools.partial(rematerialised, implementation)), seeds, *two)
        for run, implementation in (
            (lambda function, *inputs: jax.jit(function)(*inputs), "pallas"),
            (rounding.expected, "reference"),
        )
    )
    rounding.assert_within(got, wanted)
    once, again = (one(*(x[0] for x in two), seed=seeds[0]) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, once, again)


def test_a_mesh_of_batch_rows_and_heads_is_one_device():
    arrays, _ = _small()
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=auto)

    def shard(q, k, v, bias, seed):
        rows, heads = q.shape[0], q.shape[2]
        origin = (jax.lax.axis_index("data") * rows, jax.lax.axis_index("model") * heads)
        return _call(q, k, v, bias, seed=seed, origin=origin)

    of_arrays, of_edges = PartitionSpec("data", None, "model"), PartitionSpec("data", "model")
    sharded = jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(*(of_arrays,) * 3, PartitionSpec("model"), PartitionSpec()),
        out_specs=(of_arrays, of_edges, of_edges),
        check_vma=False,
    )

    def call(*arrays, seed):
        return sharded(*arrays, seed)

    seed = jnp.uint32(SEED)
    got = _jitted(call=call)(*arrays, seed=seed)
    wanted = _wanted(*arrays)
    np.testing.assert_array_equal(got[0][2], wanted.values[0][2])
    rounding.assert_within(got, wanted)


def test_second_derivatives_are_refused():
    q, *others = _inputs(T=3)

    def loss(q):
        return (_call(q, *others)[0] ** 2).sum()

    with pytest.raises(NotImplementedError, match=r"gated_attention: .*'reference'"):
        jax.eval_shape(jax.grad(lambda q: (jax.grad(loss)(q) ** 2).sum()), q)


def test_a_head_wider_than_the_tiles_is_refused():
    with pytest.raises(dispatch.UnavailableError, match=r"at most 256, and H = 320.*'xla'"):
        jax.eval_shape(_call, *_inputs(T=3, H=320))


def test_a_short_call_takes_small_tiles_and_no_more_warps_than_they_feed():
    config = Config("sample", 1.0, dispatch.Target("gpu", "none"))

    def plan(kernel, T, S, dtype=jnp.bfloat16, H=64):
        q, k = (jax.ShapeDtypeStruct((1, length, 1, H), dtype) for length in (T, S))
        visible = visibility(
            "test", 1, T, S, causal=True, window=None, segment_ids=None, start=None
        )
        none = (jnp.zeros(1), jnp.uint32(0), jnp.zeros(2, int))
        result = pallas_plan.plan(config, Call(q, k, k, *none, visible), kernel)
        return result.X, result.Y, result.warps

    assert plan("forward", 2048, 2048) == (64, 64, 4)
    assert plan("forward", 1, 2048) == (16, 64, 1)
    assert plan("keys", 1, 2048) == (16, 64, 4)
    assert plan("keys", 5, 20) == (16, 32, 2)
    assert plan("forward", 2048, 2048, H=96) == plan("forward", 2048, 2048, H=128) == (128, 64, 8)
    assert plan("forward", 2048, 2048, jnp.float32, H=10) == (64, 64, 4)
