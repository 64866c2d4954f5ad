"""Compiling for a GPU without one: kernels of known cost, and messages about bad ones.

The marked tests compile a matrix product; the others read handwritten listings and budgets.
"""

import dataclasses
import functools
import importlib.metadata

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import pytest

from iaj_kernels.core import cases, dispatch
from lm_jax.errors import BadInputError
from tools.gpu_code import budgets, machine_code, target

M, N, DEPTH = 256, 256, 512


def product(a, b, *, tile=64, depth=64, name="product"):
    """bfloat16 `a @ b` in square tiles, `depth` of the contraction in a turn of the loop."""

    def kernel(a_ref, b_ref, out_ref):
        def turn(i, total):
            part = pl.ds(i * depth, depth)
            return total + jnp.dot(
                a_ref[:, part], b_ref[part, :], preferred_element_type=jnp.float32
            )

        zero = jnp.zeros((tile, tile), jnp.float32)
        total = jax.lax.fori_loop(0, a.shape[1] // depth, turn, zero)
        out_ref[...] = total.astype(out_ref.dtype)

    return dispatch.triton_call(
        kernel,
        target=dispatch.target(),
        name=name,
        grid=(a.shape[0] // tile, b.shape[1] // tile),
        in_specs=[
            pl.BlockSpec((tile, a.shape[1]), lambda i, j: (i, 0)),
            pl.BlockSpec((b.shape[0], tile), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((tile, tile), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype),
        num_warps=4,
        num_stages=2,
        tile=(tile, tile),
    )(a, b)


def operands(dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((M, DEPTH), dtype), jax.ShapeDtypeStruct((DEPTH, N), dtype)


def toy_suite(**options) -> cases.Suite:
    """The product as an operation of its own, with one case."""
    shape_a, shape_b = operands()
    case = cases.Case("m256", {"M": M, "N": N}, "bfloat16", options, frozenset({"budget"}))

    @jax.custom_vjp
    def differentiable(a, b):
        return product(a, b, **options)

    def backward(saved, out_ct):
        _, b = saved
        return product(out_ct, b.T, name="product_da"), jnp.zeros_like(b)

    differentiable.defvjp(lambda a, b: (differentiable(a, b), (a, b)), backward)

    def call(case, arrays, implementation):
        if implementation == "reference":
            return {"out": arrays["a"] @ arrays["b"]}
        return {"out": differentiable(arrays["a"], arrays["b"])}

    return cases.Suite(
        op="toy",
        cases=(case,),
        make=lambda case, key: {
            "a": jnp.ones(shape_a.shape, shape_a.dtype),
            "b": jnp.ones(shape_b.shape, shape_b.dtype),
        },
        call=call,
        differentiable=("a", "b"),
        implementations=("pallas", "reference"),
    )


def measure(**options) -> budgets.Measured:
    suite = toy_suite(**options)
    return budgets.measure(suite, suite.cases[0])


@functools.cache
def _measured():
    return measure()


# Of a test, not of the module: it comes after the fixture that lets marked tests optimise.
@pytest.fixture
def measured():
    return _measured()


@pytest.mark.compiled
def test_a_product_uses_the_tensor_cores_of_a_warpgroup_and_spills_nothing(measured):
    forward, backward = measured.kernels
    assert (forward.name, backward.name) == ("product", "product_da")
    for kernel in measured.kernels:
        assert kernel.tile == (64, 64) and kernel.warps == 4
        assert kernel.tensor_cores == "HGMMA" and kernel.spill_bytes == 0
        # Two stages of a 64x64 tile of both operands, two bytes each.
        assert kernel.shared_bytes == 2 * 2 * 64 * 64 * 2
        # The accumulator alone holds 64 * 64 / 128 of a thread.
        assert 32 < kernel.registers <= 168
        # 4 wgmma and the copies of the next tile, for 64 * 64 / 128 elements of a thread.
        assert 1 < kernel.instructions_per_element < 4


@pytest.mark.compiled
def test_temporary_memory_is_that_of_the_array_between_two_kernels(tmp_path):
    square = jax.ShapeDtypeStruct((M, M), jnp.bfloat16)

    def twice(a, b):
        return product(product(a, b, name="first"), b, name="second")

    compiled = target.compile_(twice, square, square, dump=tmp_path)
    assert compiled.memory_analysis().temp_size_in_bytes == 2 * M * M
    assert [kernel.name for kernel in machine_code.kernels(tmp_path)] == ["first", "second"]


@pytest.mark.compiled
def test_a_float32_product_does_not_use_tensor_cores(tmp_path):
    target.compile_(exact_product, *operands(jnp.float32), dump=tmp_path)
    (kernel,) = machine_code.kernels(tmp_path)
    assert kernel.tensor_cores == "none"


def exact_product(a, b):
    def kernel(a_ref, b_ref, out_ref):
        precision = dispatch.exact_dot(a_ref.dtype)
        out_ref[...] = jnp.dot(a_ref[...], b_ref[...], precision=precision)

    return dispatch.triton_call(
        kernel,
        target=dispatch.target(),
        name="exact",
        grid=(1,),
        in_specs=[
            pl.BlockSpec((16, 16), lambda i: (0, 0)),
            pl.BlockSpec((16, 16), lambda i: (0, 0)),
        ],
        out_specs=pl.BlockSpec((16, 16), lambda i: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((16, 16), a.dtype),
        num_warps=1,
        num_stages=1,
    )(a[:16, :16], b[:16, :16])


@pytest.mark.compiled
def test_figures_keep_their_own_budget_and_miss_a_lower_one(measured):
    allowed = budgets.budget(measured)
    assert budgets.complaints(measured, allowed) == []

    registers = measured.kernels[0].registers
    allowed["kernels"]["product"]["registers"] = registers - 1
    (result,) = budgets.complaints(measured, allowed)
    assert result == (
        f"toy m256: kernel product: registers is {registers}, over its budget of {registers - 1}; "
        "if intended: python -m tools.compile_kernels --op toy --case m256 --write"
    )


@pytest.mark.compiled
def test_too_much_shared_memory_is_one_sentence_that_names_the_case():
    with pytest.raises(target.NotCompiledError) as caught:
        measure(tile=256, depth=256)
    assert str(caught.value).startswith("toy m256 does not compile for an NVIDIA H200: RESOURCE_")
    assert "Shared memory size limit exceeded" in str(caught.value)


KERNEL = machine_code.Kernel(
    name="forward",
    tile=(64, 32),
    warps=4,
    registers=100,
    spill_bytes=0,
    shared_bytes=1024,
    tensor_cores="HGMMA",
    loop_instructions=320,
)


def of(**changes) -> budgets.Measured:
    return budgets.Measured("toy", "m256", 1000, (dataclasses.replace(KERNEL, **changes),))


def test_a_budget_is_the_figure_and_the_stated_slack():
    assert KERNEL.instructions_per_element == 320 / (64 * 32 / 128)
    assert budgets.budget(of()) == {
        "temporary_bytes": 1050,
        "kernels": {
            "forward": {
                "registers": 104,
                "spill_bytes": 0,
                "shared_bytes": 1024,
                "tensor_cores": "HGMMA",
                "instructions_per_element": 21.0,
            }
        },
    }


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"registers": 105}, "registers is 105, over its budget of 104"),
        ({"spill_bytes": 4}, "spill_bytes is 4, over its budget of 0"),
        ({"tensor_cores": "HMMA"}, "tensor_cores is HMMA, its budget HGMMA"),
        ({"loop_instructions": 340}, "instructions_per_element is 21.2, over its budget of 21.0"),
        ({"shared_bytes": 500}, "shared_bytes is 500, under half its budget of 1024, which is st"),
        ({"tile": None}, "has no budget for loop_instructions"),
    ],
)
def test_a_figure_out_of_its_budget_is_one_sentence(changes, complaint):
    (result,) = budgets.complaints(of(**changes), budgets.budget(of()))
    assert result.startswith("toy m256: kernel forward") and complaint in result
    assert "python -m tools.compile_kernels --op toy --case m256 --write" in result


def test_a_kernel_or_case_without_budget_and_a_removed_one_are_reported():
    (missing,) = budgets.complaints(of(), None)
    assert missing.startswith("toy m256 has no budget")
    gone, new = budgets.complaints(of(name="other"), budgets.budget(of()))
    assert "kernel forward has a budget and is gone" in gone
    assert "kernel other has no budget" in new


LISTING = """
.text.other:
        /*0000*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR12].tnspB, R24 ;
.text.mine:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   IADD3 R1, R1, 0x1, RZ ;
.L_x_1:
.L_x_2:
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR12].tnspB, R24 ;
        /*0030*/              @!P0 BRA `(.L_x_2) ;
        /*0040*/                   FADD R2, R2, R2 ;
        /*0050*/               @P1 BRA `(.L_x_1) ;
        /*0060*/                   MUFU.EX2 R2, R2 ;
        /*0070*/               @P2 BRA `(.L_x_0) ;
.L_x_3:
        /*0080*/                   FADD R2, R2, R2 ;
        /*0090*/                   FADD R2, R2, R2 ;
        /*00a0*/                   FADD R2, R2, R2 ;
        /*00b0*/                   FADD R2, R2, R2 ;
        /*00c0*/                   FADD R2, R2, R2 ;
        /*00d0*/                   FADD R2, R2, R2 ;
        /*00e0*/              @!P3 BRA `(.L_x_3) ;
        /*00f0*/                   EXIT ;
.L_x_4:
        /*0100*/                   BRA `(.L_x_4);
        /*0110*/                   NOP;
"""


def test_the_main_loop_is_the_innermost_with_tensor_cores_up_to_its_last_branch():
    body = machine_code.instructions(LISTING, "mine")
    assert [each.mnemonic for each in body][:3] == ["MOV", "IADD3", "HGMMA"]
    loop = [each.mnemonic for each in machine_code.main_loop(body)]
    assert loop == ["HGMMA", "BRA", "FADD", "BRA"]


def test_without_tensor_cores_the_longest_loop_counts_and_without_loops_everything():
    without = LISTING.replace("HGMMA", "FFMA")
    loop = machine_code.main_loop(machine_code.instructions(without, "mine"))
    assert [each.mnemonic for each in loop] == 6 * ["FADD"] + ["BRA"]
    straight = machine_code.instructions(without.replace("BRA", "MOV"), "mine")
    assert machine_code.main_loop(straight) == straight and len(straight) == 17


def test_a_missing_compiler_is_reported_with_the_command(monkeypatch):
    if jax.__version_info__[:2] != target.READS_PTX_OF:
        assert "needs jax 0.10" in target.unsupported_reason()
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    monkeypatch.setattr(jax, "__version__", "0.10.2")

    def none(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", none)
    with pytest.raises(BadInputError, match=r"needs jax-cuda13-plugin and .*-r requirements/aot"):
        target.require()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.0")
    assert "jax-cuda13-pjrt 0.10.2, the version of jax" in target.unsupported_reason()


def test_a_kernel_lowers_for_the_gpu_without_a_compiler():
    lowered = target.lower(functools.partial(product, name="toy"), *operands())
    assert "__gpu$xla.gpu.triton" in lowered.as_text()
    assert "toy_m64_n64" in lowered.as_text()
