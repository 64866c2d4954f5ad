"""Attention whose softmax is replaced by a pointwise row map, in all heads or in chosen ones.

"When Does Polynomial Attention Concentrate?", Eq. 2 and Algorithm 1 (the maps are in `maps.py`):

    1. s = cap(scale q.k) in float32, cap(x) = soft_cap tanh(x / soft_cap)
    2. u = s + bias of the head
    3. pattern = row_map(u) over the keys that the query sees; 0 for the others
    4. out = pattern v

The fast implementations stream over the keys and form no matrix of scores, forward or backward.
"""

from collections.abc import Callable, Mapping
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from iaj_kernels.attention.visibility import visibility
from iaj_kernels.core import dispatch, shapes
from iaj_kernels.row_map_attention import pallas, pallas_plan, reference, xla
from iaj_kernels.row_map_attention.config import Call, Config
from iaj_kernels.row_map_attention.maps import OP, RowMap

_mosaic = dispatch.lazy_module("iaj_kernels.row_map_attention.mosaic")

# In order of preference; "mosaic" runs only where a call names it.
IMPLEMENTATIONS: Mapping[str, Callable[[Config, Call], Any]] = {
    "pallas": pallas.run,
    "xla": xla.run,
    "reference": reference.run,
    "mosaic": lambda config, call: _mosaic().run(config, call),
}


class RowMapAttention(NamedTuple):
    """The output `out_BTNH`, and the number of dead rows, int32 `[B, N]`.

    A dead row sees keys and has no weight, which normalisation would turn into 0 / 0; its output is
    zero. Rows that see no key, padding, and heads that keep softmax have none.
    """

    out_BTNH: jax.Array
    dead_rows_BN: jax.Array


def row_map_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    row_map: RowMap,
    bias: jax.Array | float = 0.0,
    heads: jax.Array | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    causal: bool = True,
    window: jax.Array | int | None = None,
    segment_ids: Any = None,
    start: jax.Array | int | None = None,
    implementation: str | None = None,
) -> RowMapAttention:
    """Grouped-query attention with `row_map` in place of softmax.

    Query head n reads key/value head n // (N / K). Scores, weights and sums are float32 whatever
    the inputs; in bfloat16 the fast implementations round the weights before the product with v, as
    flash attention does. They have first derivatives in reverse mode, by q, k, v and bias; the
    reference has all. A hidden key has weight 0; the gradient of a relu map is 0 at the threshold
    and below. Under `jax.shard_map`, over batch or heads, pass `check_vma=False`.

    Args:
      q_BTNH: `[B, T, N, H]` float32 or bfloat16. Pallas serves H = 16, 32, 64, 128 and 256.
      k_BSKH: `[B, S, K, H]`, N a multiple of K, of q's dtype.
      v_BSKH: `[B, S, K, H]`, of q's dtype.
      row_map: the map of scores to weights, by a function of `iaj_kernels.row_map_attention.maps`.
      bias: the bias of the scores, a scalar or `[N]`; may be traced. Without effect on softmax. A
        Python number is a constant, and the backward pass then does not sum its gradient.
      heads: bool `[N]`, may be traced: true where `row_map` is used, softmax elsewhere. None uses
        it everywhere. XLA then computes both maps of every score; a Pallas kernel holds both
        programs, and a head runs one of them.
      scale: the factor of q.k, a positive number; None for H^-0.5.
      soft_cap: a positive number, or None for none.
      causal: whether keys after the query are hidden.
      window: the width of the window: keys at least this many positions before the query are
        hidden.
      segment_ids: int `[B, T]`, or a pair for queries and keys; negative is padding.
      start: position of the first query, a scalar or `[B]`; None aligns the last query with the
        last key. The XLA path reads fewer keys where it is a Python number or None.
      implementation: "reference", "xla", "pallas", or None for the best of these that runs here;
        or "mosaic", a forward pass for Hopper that no GPU has timed yet.

    Returns:
      `RowMapAttention(out_BTNH, dead_rows_BN)`, the output in the dtype of v.

    Raises:
      ValueError: shapes or options that do not fit.
      TypeError: a dtype other than float32 and bfloat16, unequal dtypes, or no `RowMap`.
      dispatch.UnavailableError: a named implementation that does not run here.
    """
    size = shapes.sizes(OP, q_BTNH=q_BTNH, k_BSKH=k_BSKH, v_BSKH=v_BSKH, heads_N=heads)
    _check(size, q_BTNH, k_BSKH, v_BSKH, row_map, bias, heads, scale, soft_cap)
    B, T, S, N, H = (size[letter] for letter in "BTSNH")
    bias_N = jnp.broadcast_to(jnp.asarray(bias, jnp.float32), (N,))
    call = Call(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        bias_N,
        heads,
        visibility(OP, B, T, S, causal=causal, window=window, segment_ids=segment_ids, start=start),
    )
    config = Config(
        row_map=row_map,
        scale=H**-0.5 if scale is None else float(scale),
        soft_cap=None if soft_cap is None else float(soft_cap),
        first=S - T if start is None else start if isinstance(start, int) else None,
        bias_moves=isinstance(bias, jax.Array),
        target=dispatch.target(),
    )
    reasons = {
        "pallas": pallas_plan.unsupported_reason(config, call),
        "xla": "",
        "reference": "",
    }
    if implementation == "mosaic":
        reasons["mosaic"] = _mosaic().unsupported_reason(config, call)
    run = IMPLEMENTATIONS[dispatch.choose(OP, implementation, reasons)]
    return RowMapAttention(*run(config, call))


def _check(size, q, k, v, row_map, bias, heads, scale, soft_cap) -> None:
    if not isinstance(row_map, RowMap):
        raise TypeError(
            f"{OP}: row_map is a {type(row_map).__name__}; make one with a function of "
            "iaj_kernels.row_map_attention.maps, such as relu_power(4)"
        )
    shapes.one_dtype(OP, q=q, k=k, v=v)
    shapes.grouped_heads(OP, size, "TSK")
    if jnp.shape(bias) not in ((), (size["N"],)):
        raise ValueError(f"{OP}: bias has shape {jnp.shape(bias)}; pass a scalar or [N]")
    if heads is not None and heads.dtype != jnp.bool_:
        raise TypeError(f"{OP}: heads is {heads.dtype}; pass bool [N], true where row_map is used")
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"{OP}: scale is {scale}; pass a positive number, or None for H^-0.5")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise ValueError(f"{OP}: soft_cap is {soft_cap}; pass a positive number, or None for none")
