"""Custom gradients of the implementations that stream over the keys.

Each has a forward pass, which keeps two numbers of every row (`tile.closed`), and a backward pass,
which recomputes the weights from them.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp

from iaj_kernels.core import dispatch
from iaj_kernels.row_map_attention.config import Call, Config, Rows
from iaj_kernels.row_map_attention.maps import OP


def differentiable(
    forward: Callable[[Config, Call, jax.Array], tuple[jax.Array, Rows]],
    backward: Callable[[Config, Call, Rows, jax.Array, jax.Array], tuple[jax.Array, ...]],
) -> Callable[[Config, Call], Any]:
    """A function `run(config, call)` like `reference.run`, from its two passes.

    Args:
      forward: `(config, call, visible_BT) -> (out_BTNH, rows)`; `visible_BT` counts a query's keys.
      backward: `(config, call, rows, out_BTNH, d_out_BTNH)` -> gradients of q, k, v and bias.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def run(config: Config, call: Call) -> Any:
        return run_forward(config, call)[0]

    def run_forward(config: Config, call: Call) -> Any:
        # A second derivative differentiates this function too.
        call = Call._make((*dispatch.first_order(OP, call[:4]), *call[4:]))
        visible_BT = call.visibility.counts_BT(call.q_BTNH.shape[1], call.k_BSKH.shape[1])
        out_BTNH, rows = forward(config, call, visible_BT)
        dead_BNT = (rows.factor_BNT == 0) & (visible_BT > 0)[:, None]
        if call.heads_N is not None:
            dead_BNT &= call.heads_N[None, :, None]
        return (out_BTNH, dead_BNT.sum(-1, dtype=jnp.int32)), (call, out_BTNH, rows)

    def run_backward(config: Config, residuals: Any, cotangents: Any) -> tuple[Call]:
        (call, out_BTNH, rows), d_out_BTNH = dispatch.first_order(OP, (residuals, cotangents[0]))
        gradients = backward(config, call, rows, out_BTNH, d_out_BTNH)
        # None: no gradient.
        return (Call._make((*gradients, *(None for _ in call[4:]))),)

    run.defvjp(run_forward, run_backward)
    return run
