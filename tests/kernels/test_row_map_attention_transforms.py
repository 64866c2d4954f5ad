"""`row_map_attention` under JAX's transformations, and its errors."""

import functools

import jax
from jax import export
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from iaj_kernels import row_map_attention
from iaj_kernels.core import dispatch
from iaj_kernels.row_map_attention import maps
from tests import rounding

FAST = pytest.mark.parametrize("implementation", ["xla", "pallas"])
RELU = maps.relu_power(4)


def sample(B=2, T=21, N=4, K=2, H=16):
    keys = jax.random.split(jax.random.key(0), 4)
    return (
        jax.random.normal(keys[0], (B, T, N, H)),
        jax.random.normal(keys[1], (B, T, K, H)),
        jax.random.normal(keys[2], (B, T, K, H)),
        0.5 + 0.3 * jax.random.normal(keys[3], (N,)),
    )


def loss(q, k, v, bias, implementation=None, **options):
    options = {"row_map": RELU} | options
    with dispatch.on(dispatch.INTERPRETER):
        out = row_map_attention(q, k, v, bias=bias, implementation=implementation, **options)
    return (out.out_BTNH**2).sum()


@FAST
def test_vmap_over_everything_that_is_data(implementation):
    q, k, v, bias = sample()
    heads = jnp.array([[True, False, True, True], [False, False, True, False]])
    scales, biases = jnp.array([1.0, 1.5]), jnp.stack([bias, bias - 0.2])

    def one(implementation, scale, bias, heads):
        run = functools.partial(loss, implementation=implementation, heads=heads)
        return jax.value_and_grad(run, argnums=(0, 1, 2, 3))(scale * q, k, v, bias)

    inputs = scales, biases, heads
    wanted = rounding.expected(jax.vmap(functools.partial(one, "reference")), *inputs)
    result = jax.jit(jax.vmap(functools.partial(one, implementation)))(*inputs)
    rounding.assert_within(result, wanted)


@FAST
def test_checkpoint_and_scan_over_layers(implementation):
    q, k, v, bias = sample()

    def layers(q, remat):
        def layer(q, _):
            with dispatch.on(dispatch.INTERPRETER):
                out, dead = row_map_attention(
                    q, k, v, row_map=RELU, bias=bias, implementation=implementation
                )
            return q + out, dead

        layer = jax.checkpoint(layer) if remat else layer
        return (jax.lax.scan(layer, q, None, length=2)[0] ** 2).sum()

    run = jax.jit(jax.value_and_grad(layers), static_argnums=1)
    for x, y in zip(run(q, True), run(q, False), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("axis", "implementation"), [("batch", "xla"), ("heads", "xla"), ("heads", "pallas")]
)
def test_shard_map_over_batch_and_heads(axis, implementation):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    arrays = P("x") if axis == "batch" else P(None, None, "x")
    specs = (arrays, arrays, arrays, P() if axis == "batch" else P("x"))

    def gradients(implementation):
        return jax.grad(functools.partial(loss, implementation=implementation), (0, 1, 2, 3))

    def sharded(*args):
        *d_qkv, d_bias = gradients(implementation)(*args)
        return *d_qkv, jax.lax.psum(d_bias, "x") if axis == "batch" else d_bias

    run = jax.shard_map(sharded, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    wanted = rounding.expected(gradients("reference"), *sample())
    rounding.assert_within(jax.jit(run)(*sample()), wanted)


def test_xla_path_is_exported_for_both_platforms():
    args = sample()
    xla, reference = (
        jax.value_and_grad(functools.partial(loss, implementation=name), argnums=3)
        for name in ("xla", "reference")
    )
    exported = export.export(jax.jit(xla), platforms=("cpu", "cuda"))(*args)
    rounding.assert_within(exported.call(*args), rounding.expected(reference, *args))


@FAST
def test_forward_mode_and_second_derivatives_are_refused(implementation):
    q, k, v, bias = sample()
    run = functools.partial(loss, implementation=implementation)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(run, (q, k, v, bias), (q, k, v, bias))
    with pytest.raises(NotImplementedError, match=r"row_map_attention: .*'reference' for second"):
        jax.grad(lambda q: (jax.grad(run)(q, k, v, bias) ** 2).sum())(q)


def test_reference_has_both():
    q, k, v, bias = sample(T=5)
    run = functools.partial(loss, implementation="reference")
    _, tangent = jax.jvp(run, (q, k, v, bias), (q, k, v, bias))
    assert np.isfinite(tangent)
    hessian = jax.jit(jax.hessian(run, argnums=3))(q, k, v, bias)
    assert np.all(np.isfinite(hessian))


def test_a_constant_bias_and_a_scalar_one_are_a_bias_of_every_head():
    q, k, v, _ = sample()
    xla, reference = (
        jax.value_and_grad(functools.partial(loss, implementation=name), argnums=(0, 1, 2))
        for name in ("xla", "reference")
    )
    of_every_head = jnp.full(4, 0.25)
    wanted = rounding.expected(reference, q, k, v, of_every_head)
    rounding.assert_within(jax.jit(xla, static_argnums=3)(q, k, v, 0.25), wanted)
    rounding.assert_within(jax.jit(xla)(q, k, v, of_every_head), wanted)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"row_map": "relu"}, TypeError, "row_map is a str; make one with"),
        ({"q": jnp.zeros((2, 5, 3, 16))}, ValueError, "N = 3 heads, no multiple of the K = 2"),
        ({"q": jnp.zeros((2, 5, 4, 8))}, ValueError, "k has H = 16 .* q has H = 8"),
        ({"q": jnp.zeros((5, 4, 16))}, ValueError, r"q has shape \(5, 4, 16\)"),
        ({"q": jnp.zeros((2, 0, 4, 16))}, ValueError, "T = 0; pass at least one"),
        (
            {"v": jnp.zeros((2, 5, 2, 16), jnp.bfloat16)},
            TypeError,
            "v is bfloat16; cast them to one",
        ),
        ({"bias": jnp.zeros(3)}, ValueError, r"bias has shape \(3,\)"),
        ({"heads": jnp.ones(3, bool)}, ValueError, "heads has N = 3"),
        ({"window": 0}, ValueError, "window is 0"),
        ({"implementation": "pallas"}, dispatch.UnavailableError, "needs an NVIDIA GPU"),
    ],
)
def test_refusals_name_what_was_found_and_the_remedy(change, error, text):
    q, k, v, bias = sample(T=5)
    arguments = {"q": q, "k": k, "v": v, "bias": bias, "row_map": RELU} | change
    q, k, v = (arguments.pop(name) for name in "qkv")
    with pytest.raises(error, match=f"row_map_attention: .*{text}"):
        row_map_attention(q, k, v, **arguments)


def test_pallas_names_its_head_widths_and_none_falls_back():
    q, k, v, bias = sample(T=5, H=24)
    with pytest.raises(dispatch.UnavailableError, match="64, 128, 256, and H = 24"):
        loss(q, k, v, bias, implementation="pallas")
    assert np.isfinite(loss(q, k, v, bias))
