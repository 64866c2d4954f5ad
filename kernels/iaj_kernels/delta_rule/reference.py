"""The delta rule by its recurrence, one step at a time: the definition, and the oracle.

The step is written as a correction: what the memory holds under the key is moved towards the value
by the fraction beta, after the memory has decayed. Differentiating it stores a state of size H E
for every step.
"""

import jax
from jax import lax
import jax.numpy as jnp

from iaj_kernels.delta_rule.config import Call, Config


def run(config: Config, call: Call) -> tuple[jax.Array, jax.Array]:
    """`out_BTNE` before its scale, and the memory after the last step, in float32."""
    del config  # There are no chunks.

    def step(S_BNHE, inputs):
        q_BNH, k_BNH, v_BNE, beta_BN, log_decay_BN = inputs
        if log_decay_BN is not None:
            S_BNHE *= jnp.exp(log_decay_BN)[..., None, None]
        held_BNE = _read(k_BNH, S_BNHE)
        change_BNE = beta_BN[..., None] * (v_BNE - held_BNE)
        S_BNHE += k_BNH[..., :, None] * change_BNE[..., None, :]
        return S_BNHE, _read(q_BNH, S_BNHE)

    steps = jax.tree.map(
        lambda x: x.astype(jnp.float32).swapaxes(0, 1), (*call[:4], call.log_decay_BTN)
    )
    state_BNHE, out_TBNE = lax.scan(step, call.state_BNHE, steps)
    return out_TBNE.swapaxes(0, 1), state_BNHE


def _read(key_BNH: jax.Array, S_BNHE: jax.Array) -> jax.Array:
    return jnp.einsum("BNH,BNHE->BNE", key_BNH, S_BNHE, precision="highest")
