"""A memory of slots that decay as they are written, and are read by attention.

Zhang et al. 2024, "Gated Slot Attention for Efficient Linear-Time Sequence Modeling", Eq. 6 to 8.
Slot m holds a key and a value, averages of those written to it, with alpha_tm in (0, 1]:

    K_tm = alpha_tm K_{t-1,m} + (1 - alpha_tm) k_t        V_tm alike with v_t
    o_t  = sum_m softmax_m(scale <q_t, K_tm>) V_tm

A slot with alpha = 1 is left as it is, to the bit: so a router that gives most slots a logarithm of
zero writes to the others alone (Raven, `protot_jax.mixers.slots`). Where every alpha is a number
per slot and step, M slots of width H replace a state of H x H.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from iaj_kernels.core import dispatch, shapes
from iaj_kernels.gated_slots import reference, tile, xla
from iaj_kernels.gated_slots.config import Call, Config, Slots

OP = "gated_slots"

# In order of preference.
IMPLEMENTATIONS: Mapping[str, Callable[[Config, Call], tuple[jax.Array, Slots]]] = {
    "xla": xla.run,
    "reference": reference.run,
}


def gated_slots(
    q_BTNH: jax.Array,
    k_BTNH: jax.Array,
    v_BTNE: jax.Array,
    log_decay_BTNM: jax.Array,
    *,
    scale: float = 1.0,
    initial_state: Slots | None = None,
    return_state: bool = False,
    resets_BT: jax.Array | None = None,
    implementation: str | None = None,
) -> Any:
    """Writes and reads the slots of every head over T steps, or over one step of decoding.

    Args:
      q_BTNH: `[B, T, N, H]` queries, float32 or bfloat16.
      k_BTNH: `[B, T, N, H]` keys.
      v_BTNE: `[B, T, N, E]` values.
      log_decay_BTNM: `[B, T, N, M]` logarithms of alpha, at most 0 and finite; 0 writes nothing.
      scale: factor of the scores.
      initial_state: float32 slots before the first step; None is zero. Differentiable.
      return_state: whether the slots after the last step are also returned.
      resets_BT: `[B, T]` bool, true where the slots are emptied before the step, as at the first
        token of a document; None for no reset.
      implementation: "reference", "xla", or None for the best that runs here. There is no "pallas":
        a kernel is added only where it was measured to beat XLA on a GPU, and none was.

    Returns:
      `out_BTNE` in the dtype of `v_BTNE`; with `return_state`, also the float32 `Slots`. Arithmetic
      is float32 whatever the inputs.

    Raises:
      ValueError: shapes that do not fit, or T = 0 or M = 0.
      TypeError: an unsupported dtype, or resets that are not bool.
    """
    keys_BNMH, values_BNME = (None, None) if initial_state is None else initial_state
    size = shapes.sizes(
        OP,
        q_BTNH=q_BTNH,
        k_BTNH=k_BTNH,
        v_BTNE=v_BTNE,
        log_decay_BTNM=log_decay_BTNM,
        initial_keys_BNMH=keys_BNMH,
        initial_values_BNME=values_BNME,
        resets_BT=resets_BT,
    )
    shapes.floating(OP, q=q_BTNH, k=k_BTNH, v=v_BTNE, log_decay=log_decay_BTNM)
    shapes.floating(OP, (jnp.float32,), initial_keys=keys_BNMH, initial_values=values_BNME)
    shapes.floating(OP, (jnp.bool_,), resets=resets_BT)
    for letter, what in (("T", "steps"), ("M", "slots")):
        if size[letter] == 0:
            raise ValueError(f"{OP}: {letter} = 0 {what}; pass at least one")
    state = initial_state
    if state is None:
        B, N, M, H, E = (size[letter] for letter in "BNMHE")
        state = Slots(*(jnp.zeros((B, N, M, width), jnp.float32) for width in (H, E)))
    run = IMPLEMENTATIONS[dispatch.choose(OP, implementation, {"xla": "", "reference": ""})]
    call = Call(q_BTNH, k_BTNH, v_BTNE, log_decay_BTNM, Slots(*state), resets_BT)
    config = Config(scale, tile.default_tiles(size, v_BTNE.dtype)["longest_chunk"])
    out_BTNE, state = run(config, call)
    out_BTNE = out_BTNE.astype(v_BTNE.dtype)
    return (out_BTNE, state) if return_state else out_BTNE
