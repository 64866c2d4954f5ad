"""The elementary functions of `tile` as single GPU instructions, for the Triton kernels.

jnp's own cost several times as much on a GPU: they serve denormal numbers and the last bit. The
relative errors of ex2 and rcp are 2^-22 and 2^-23 (PTX ISA): about one gate of 10^7 is not that of
an exact exponential, and it is the same in both passes.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.pallas import triton as plt
import jax.numpy as jnp

from kernels.gated_attention import tile
from kernels.gated_attention.config import Config


def functions(config: Config) -> tile.Intrinsics:
    """Those of the target: the interpreter has the plain ones alone."""
    return tile.PLAIN if config.target.interpret else _INSTRUCTIONS


def _instructions(code: str) -> Callable[..., jax.Array]:
    """The function of PTX `code`: `$0` is its result, `$1` .. its operands, `t` a register."""

    def apply(*operands: Any) -> jax.Array:
        values = jnp.broadcast_arrays(*(jnp.asarray(x, jnp.float32) for x in operands))
        (result,) = plt.elementwise_inline_asm(
            f"{{ .reg .f32 t; {code} }}",
            args=values,
            constraints=",".join(["=f", *["f"] * len(values)]),
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(values[0].shape, jnp.float32)],
        )
        return result

    return apply


_exp2 = _instructions("ex2.approx.ftz.f32 $0, $1;")
_reciprocal = _instructions("rcp.approx.ftz.f32 $0, $1;")


def _tanh(x: jax.Array) -> jax.Array:
    # tanh.approx is wrong by 2^-11, which a soft cap of 50 makes 0.02 of a logit; this is by 2^-22.
    return 1.0 - 2.0 * _reciprocal(1.0 + _exp2(x * (2.0 * tile.LOG2_E)))


# Pallas lowers -x to 0 - x, and XLA has Triton fuse no product with a sum, so both are spelt out; a
# negated operand costs nothing.
_INSTRUCTIONS = tile.Intrinsics(
    exp2=_exp2,
    exp2_of_minus=_instructions("neg.f32 t, $1; ex2.approx.ftz.f32 $0, t;"),
    tanh=_tanh,
    reciprocal=_reciprocal,
    add_product=_instructions("fma.rn.f32 $0, $1, $2, $3;"),
    subtract_product=_instructions("neg.f32 t, $1; fma.rn.f32 $0, t, $2, $3;"),
)
