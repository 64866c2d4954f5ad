"""Concentration statistics of q.k score rows: S_p and the mass of a polynomial map's target.

"When Does Polynomial Attention Concentrate?", section 3, Eq. 1 and 3. For a row of scores z, with a
bias b and a cap tau (infinite unless given),

    r_j = min(max(z_j + b, 0), tau)        S_p = sum_{j != *} (r_j / r_*)^p

where * is the argmax of z or a key that the caller names. Attention by r^p puts 1 / (1 + S_p) of
its mass on the target, and S_p < 1 is the recall criterion (Remark 4.5). The definitions are those
of `polyattn_jax.row_stats`, which takes the scores themselves; here they are never all stored.
"""

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any

import jax
import jax.numpy as jnp

from iaj_kernels.attention.visibility import visibility
from iaj_kernels.core import dispatch, shapes
from iaj_kernels.score_stats import pallas, reference, xla
from iaj_kernels.score_stats.config import Call, Config, RowStats

OP = "score_stats"

# In order of preference.
IMPLEMENTATIONS: Mapping[str, Callable[[Config, Call], RowStats]] = {
    "pallas": pallas.run,
    "xla": xla.run,
    "reference": reference.run,
}


def score_stats(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    *,
    degrees: Sequence[float] = (2, 4, 8, 16),
    bias: jax.Array | float = 0.0,
    target: jax.Array | None = None,
    cap: float = math.inf,
    scale: float | None = None,
    soft_cap: float | None = None,
    causal: bool = True,
    window: jax.Array | int | None = None,
    segment_ids: Any = None,
    start: jax.Array | int | None = None,
    blocks: tuple[int, int] | None = None,
    implementation: str | None = None,
) -> RowStats:
    """The concentration statistics of the score row of every query and head.

    Scores are `scale * q.k` in float32 whatever the inputs, and so is all arithmetic on them. The
    first key wins a tie for the argmax. Works under `jit`, `vmap` and `shard_map` (with
    `check_vma=False`; over batch rows and heads, for a row needs all of its keys).

    The statistics have no derivative: differentiating by q, k or the bias raises.

    Args:
      q_BTNH: `[B, T, N, H]` queries, float32 or bfloat16.
      k_BSKH: `[B, S, K, H]` keys of the same dtype; query head n reads key head n // (N / K).
      degrees: the powers p > 0, static; the last axis of `s_p` and `target_mass`.
      bias: b, possibly traced: a scalar, or `[X]` for several in one pass over the scores, which
        gives every field a leading axis X.
      target: int32 `[B, T]` or `[B, T, N]`, key indices; None takes the argmax. A row whose target
        is hidden from it is DEAD, one whose target is no key of the array INVALID.
      cap: tau > 0, the largest weight, static.
      scale: the factor of q.k, static; None is 1 / sqrt(H).
      soft_cap: the cap of scores, static; they become `soft_cap * tanh(score / soft_cap)` before
        the bias.
      causal: whether keys after the query are hidden. This and the next three say which keys a
        query sees, as in `iaj_kernels.attention.visibility`.
      window: the width of a sliding window, or None.
      segment_ids: the segment of each position, or None.
      start: the position of the first query, or None.
      blocks: (queries, keys) of a tile, powers of two; None chooses. No result depends on it but
        for the rounding of a sum.
      implementation: "reference", "xla", "pallas", or None for the best that runs here.

    Returns:
      `RowStats` of arrays `[B, T, N]`, or `[X, B, T, N]` for several biases.

    Raises:
      ValueError: shapes that do not fit, an axis of size 0, or an option outside its range.
      TypeError: a dtype other than float32 and bfloat16, or a target that is not of integers.
      dispatch.UnavailableError: a named implementation that does not run here.
      NotImplementedError: when it is differentiated.
    """
    sizes = shapes.sizes(OP, q_BTNH=q_BTNH, k_BSKH=k_BSKH)
    B, T, N, S, H = (sizes[letter] for letter in "BTNSH")
    shapes.floating(OP, q=q_BTNH)
    shapes.floating(OP, (q_BTNH.dtype,), k=k_BSKH)
    shapes.grouped_heads(OP, sizes)
    if not degrees or not all(0 < p < math.inf for p in degrees):
        raise ValueError(f"{OP}: degrees is {tuple(degrees)}; pass one or more positive numbers")
    if not cap > 0:
        raise ValueError(f"{OP}: cap is {cap}; pass a positive number")
    if jnp.ndim(bias) > 1:
        raise ValueError(f"{OP}: bias has shape {jnp.shape(bias)}; expected a scalar or [X]")

    config = Config(
        degrees=tuple(int(p) if p == int(p) else float(p) for p in degrees),
        cap=float(cap),
        scale=H**-0.5 if scale is None else float(scale),
        soft_cap=None if soft_cap is None else float(soft_cap),
        target=dispatch.target(),
        blocks=blocks,
    )
    bias_X = jnp.atleast_1d(jnp.asarray(bias, jnp.float32))
    call = Call(
        *_underived((q_BTNH, k_BSKH, bias_X)),
        target_BTN=None if target is None else _targets(target, B, T, N),
        visibility=visibility(
            OP, B, T, S, causal=causal, window=window, segment_ids=segment_ids, start=start
        ),
    )
    reasons = {"pallas": pallas.unsupported_reason(config, call), "xla": "", "reference": ""}
    run = IMPLEMENTATIONS[dispatch.choose(OP, implementation, reasons)]
    stats = run(config, call)
    return stats if jnp.ndim(bias) else RowStats(*(x[0] for x in stats))


def _targets(target: jax.Array, B: int, T: int, N: int) -> jax.Array:
    """`[B, T, N]` int32."""
    target = jnp.asarray(target)
    if not jnp.issubdtype(target.dtype, jnp.integer):
        raise TypeError(f"{OP}: target is {target.dtype}; pass key indices as int32")
    if target.shape not in ((B, T), (B, T, N)):
        raise ValueError(f"{OP}: target has shape {target.shape}; expected {(B, T)} or {(B, T, N)}")
    target = target.astype(jnp.int32)
    return target if target.ndim == 3 else jnp.broadcast_to(target[..., None], (B, T, N))


@jax.custom_jvp
def _underived(arrays: Any) -> Any:
    return arrays


@_underived.defjvp
def _refuse(primals, tangents):
    raise NotImplementedError(
        f"{OP}: its statistics have no derivative; pass jax.lax.stop_gradient of q, k and bias"
    )
