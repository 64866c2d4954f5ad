"""The elementary functions of `tile` as single GPU instructions, for the Triton kernels.

The relative errors of ex2 and rcp are 2^-22 and 2^-23 (PTX ISA): about one gate of 10^7 is not that
of an exact exponential, and it is the same in both passes.
"""

import jax

from iaj_kernels.core.ptx import elementwise
from iaj_kernels.gated_attention import tile
from iaj_kernels.gated_attention.config import Config


def functions(config: Config) -> tile.Intrinsics:
    """The functions of the target; the interpreter has those of jnp alone."""
    return tile.PLAIN if config.target.interpret else _INSTRUCTIONS


_exp2 = elementwise("ex2.approx.ftz.f32 $0, $1;")
_reciprocal = elementwise("rcp.approx.ftz.f32 $0, $1;")


def _tanh(x: jax.Array) -> jax.Array:
    # tanh.approx is wrong by 2^-11, which a soft cap of 50 makes 0.02 of a logit; this is by 2^-22.
    return 1.0 - 2.0 * _reciprocal(1.0 + _exp2(x * (2.0 * tile.LOG2_E)))


# Pallas lowers -x to 0 - x, and XLA has Triton fuse no product with a sum, so both are spelt out; a
# negated operand costs nothing.
_INSTRUCTIONS = tile.Intrinsics(
    exp2=_exp2,
    exp2_of_minus=elementwise("neg.f32 t, $1; ex2.approx.ftz.f32 $0, t;"),
    tanh=_tanh,
    reciprocal=_reciprocal,
    add_product=elementwise("fma.rn.f32 $0, $1, $2, $3;"),
    subtract_product=elementwise("neg.f32 t, $1; fma.rn.f32 $0, t, $2, $3;"),
)
