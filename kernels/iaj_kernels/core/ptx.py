"""Elementwise functions as single GPU instructions, inside Pallas kernels of the Triton lowering.

Those of jnp cost several times as much on a GPU, because they handle denormal numbers and round the
last bit. Triton also fuses no product with a sum, and folds no sign into an operand.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.pallas import triton as plt
import jax.numpy as jnp


def elementwise(code: str) -> Callable[..., jax.Array]:
    """A function of float32 arrays and scalars from PTX `code`.

    Args:
      code: `$0` is its result, `$1` .. its operands, `t` a register.
    """

    def apply(*operands: Any) -> jax.Array:
        shape = jnp.broadcast_shapes(*map(jnp.shape, operands))
        (result,) = plt.elementwise_inline_asm(
            f"{{ .reg .f32 t; {code} }}",
            # A kernel cannot capture an array from outside, so a scalar is broadcast here.
            args=[
                jnp.broadcast_to(x, shape) if jnp.ndim(x) else jnp.full(shape, x, jnp.float32)
                for x in operands
            ],
            constraints=",".join(["=f", *["f"] * len(operands)]),
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.float32)],
        )
        return result

    return apply
