"""The selective scan by its recurrence, one step at a time: the definition, and the oracle.

Gu & Dao 2023, Eq. 2a and 2b with the step-dependent coefficients of Algorithm 2. Differentiating it
stores a state of size I J for every step.
"""

import jax
from jax import lax
import jax.numpy as jnp

from iaj_kernels.selective_scan.config import Call, Config


def run(config: Config, call: Call) -> tuple[jax.Array, jax.Array]:
    """`y_BTI` without the skip, and the state after the last step, in float32."""
    del config  # There are no chunks.
    arrays = (call.u_BTI, call.delta_BTI, call.B_BTJ, call.C_BTJ)

    def step(h_BIJ, inputs):
        u_BI, delta_BI, B_BJ, C_BJ = inputs
        decay_BIJ = jnp.exp(delta_BI[..., None] * call.A_IJ[None])
        h_BIJ = decay_BIJ * h_BIJ + (delta_BI * u_BI)[..., None] * B_BJ[:, None, :]
        return h_BIJ, jnp.einsum("BIJ,BJ->BI", h_BIJ, C_BJ, precision="highest")

    steps = tuple(x.astype(jnp.float32).swapaxes(0, 1) for x in arrays)
    state_BIJ, y_TBI = lax.scan(step, call.state_BIJ, steps)
    return y_TBI.swapaxes(0, 1), state_BIJ
