"""Gated slots by their recurrence, one step at a time: the definition, and the oracle.

Differentiating it stores the slots of every step.
"""

import jax
from jax import lax
import jax.numpy as jnp

from iaj_kernels.gated_slots.config import Call, Config, Slots


def run(config: Config, call: Call) -> tuple[jax.Array, Slots]:
    """`out_BTNE` in float32, and the slots after the last step."""

    def step(state, inputs):
        q_BNH, k_BNH, v_BNE, log_decay_BNM, reset_B = inputs
        keep_BNM1 = jnp.exp(log_decay_BNM)[..., None]
        if reset_B is not None:
            keep_BNM1 = jnp.where(reset_B[:, None, None, None], 0.0, keep_BNM1)
        write_BNM1 = -jnp.expm1(log_decay_BNM)[..., None]
        state = Slots(
            *(
                keep_BNM1 * held + write_BNM1 * new[..., None, :]
                for held, new in zip(state, (k_BNH, v_BNE), strict=True)
            )
        )
        scores_BNM = jnp.einsum("BNH,BNMH->BNM", q_BNH, state.keys_BNMH, precision="highest")
        weights_BNM = jax.nn.softmax(config.scale * scores_BNM, axis=-1)
        out_BNE = jnp.einsum("BNM,BNME->BNE", weights_BNM, state.values_BNME, precision="highest")
        return state, out_BNE

    steps = tuple(x.astype(jnp.float32).swapaxes(0, 1) for x in call[:4])
    resets_TB = None if call.resets_BT is None else call.resets_BT.T
    state, out_TBNE = lax.scan(step, call.state, (*steps, resets_TB))
    return out_TBNE.swapaxes(0, 1), state
