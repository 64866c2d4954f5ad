"""Softmax attention with a Bernoulli gate on every edge, computed from the same queries and keys.

Sparse Attention Post-Training, Eq. 1-3. For query i and key j of one head,

    s_ij = scale q_i . k_j        e_ij = s_ij + gate_bias        A_ij ~ Bernoulli(sigma(e_ij))
    out_i = sum_j A_ij softmax_j(s_i)_j v_j                      expected = sum_ij sigma(e_ij)

The gate multiplies the softmax weight, and nothing is normalised again: with every gate open the
result is dense attention. The straight-through gradient is that of sigma(e + noise), where noise is
the logistic draw that opened or closed the gate.
"""

from collections.abc import Callable, Mapping
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from iaj_kernels.attention.visibility import visibility
from iaj_kernels.core import dispatch, shapes
from iaj_kernels.gated_attention import pallas, pallas_plan, reference, xla
from iaj_kernels.gated_attention.config import MODES, Call, Config
from iaj_kernels.gated_attention.edges import EdgeList, edge_list

OP = "gated_attention"


_mosaic = dispatch.lazy_module("iaj_kernels.gated_attention.mosaic")

# In order of preference; "mosaic" runs only where a call names it.
IMPLEMENTATIONS: Mapping[str, Callable[[Config, Call], Any]] = {
    "pallas": pallas.run,
    "xla": xla.run,
    "reference": reference.run,
    "mosaic": lambda config, call: _mosaic().run(config, call),
}


class GatedAttention(NamedTuple):
    """The result of one call.

    Attributes:
      out_BTNH: the output, in the dtype of the values.
      expected_edges_BN: float32, the sum of sigma(e) over visible pairs; differentiable. Divide by
        the number of visible pairs for the mean, on which a penalty is usually set.
      open_edges_BN: int32, the count of open gates over visible pairs, exact up to 2^31 - 1 and at
        most that; in mode "expected" that of e > 0.
      edges: the list of open edges; None without `edge_capacity`.
    """

    out_BTNH: jax.Array
    expected_edges_BN: jax.Array
    open_edges_BN: jax.Array
    edges: EdgeList | None


def gated_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    gate_bias: jax.Array | float = 0.0,
    seed: jax.Array | int | None = None,
    mode: str = "sample",
    scale: float | None = None,
    gate_scale: float | None = None,
    soft_cap: float | None = None,
    causal: bool = True,
    window: jax.Array | int | None = None,
    segment_ids: Any = None,
    start: jax.Array | int | None = None,
    origin: tuple[jax.Array | int, jax.Array | int] = (0, 0),
    renormalise: bool = False,
    edge_capacity: int | None = None,
    implementation: str | None = None,
) -> GatedAttention:
    """Softmax attention with gated edges; query head n reads key head n // (N / K).

    Noise is a function of (seed, batch row, head, position of the query, position of the key)
    alone, so every implementation, tile size and sharding draws the same gates; two differ only
    where the rounding of a score crosses the threshold. sigma(e) is resolved to 2^-23 when it is
    drawn: a gate with sigma(e) < 2^-24 never opens.

    "xla" and "pallas" have first derivatives in reverse mode; "reference" has all.

    A row that sees no key gives zeros. Positions hidden as padding must hold finite numbers: a NaN
    there is multiplied by zero.

    Args:
      q_BTNH: `[B, T, N, H]` queries, after any rotary embedding; float32 or bfloat16.
      k_BSKH: `[B, S, K, H]` keys of that dtype, K dividing N.
      v_BSKH: `[B, S, K, H]` values of that dtype.
      gate_bias: the bias of the gate logit: one number, or `[N]`. Differentiable.
      seed: an integer in [0, 2^32), or an integer scalar array. Required in mode "sample", None in
        the others. From a PRNG key: `jax.random.bits(key, (), jnp.uint32)`. One for each layer.
      mode: "sample" draws the gates; "threshold" opens those with e > 0; "expected" multiplies by
        sigma(e); "open" opens all.
      scale: the factor of q.k, positive; 1 / sqrt(H) by default.
      gate_scale: the factor of q.k in the gate logit gate_scale * q.k + gate_bias, without the soft
        cap. Eq. 1 as printed is `gate_scale=1.0`; by default the gate reads s.
      soft_cap: the cap of scores: s becomes soft_cap * tanh(s / soft_cap).
      causal: whether keys after a query are hidden.
      window: the width of the window: keys at least this many positions before a query are hidden.
      segment_ids: `[B, T]` where T = S, or a pair (`[B, T]`, `[B, S]`); a key is visible in its own
        segment, and a negative segment is padding.
      start: position of the first query, a scalar or `[B]`; S - T by default. For decoding, and for
        queries that are sharded.
      origin: the global index of the first batch row and of the first query head, for the shards of
        `jax.shard_map`, which is to be called with `check_vma=False`.
      renormalise: whether to divide by the sum of A P, so that open weights sum to one: an
        ablation, in "reference" and "xla" alone.
      edge_capacity: the most open edges to list in the result; None for no list. The list has no
        gradient.
      implementation: "reference", "xla", "pallas", or None for the best of these that runs here;
        or "mosaic", a forward pass for Hopper that no GPU has timed yet.

    Returns:
      a `GatedAttention`. Scores, sums and gates are float32 whatever the inputs.

    Raises:
      ValueError: shapes that do not fit, an unknown mode, a seed missing or out of place.
      TypeError: a dtype other than float32 and bfloat16, or dtypes that differ.
      dispatch.UnavailableError: a named implementation that does not run here.
    """
    size = shapes.sizes(OP, q_BTNH=q_BTNH) | shapes.sizes(OP, k_BSKH=k_BSKH)
    shapes.sizes(OP, q_BTNH=q_BTNH, k_BSKH=k_BSKH, v_BSKH=v_BSKH)
    B, T, N, H, S = (size[letter] for letter in "BTNHS")
    _check(q_BTNH, k_BSKH, v_BSKH, size, mode, scale, soft_cap, edge_capacity)
    config = Config(
        mode=mode,
        scale=1.0 / math.sqrt(H) if scale is None else float(scale),
        target=dispatch.target(),
        gate_scale=None if gate_scale is None else float(gate_scale),
        soft_cap=None if soft_cap is None else float(soft_cap),
        renormalise=renormalise,
    )
    if jnp.shape(gate_bias) not in ((), (N,)):
        raise ValueError(f"{OP}: gate_bias has shape {jnp.shape(gate_bias)}; pass a number or [N]")
    call = Call(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        bias_N=jnp.broadcast_to(jnp.asarray(gate_bias, jnp.float32), (N,)),
        seed=_seed(mode, seed),
        origin_2=jnp.stack([jnp.asarray(each, jnp.int32) for each in origin]),
        visibility=visibility(
            OP, B, T, S, causal=causal, window=window, segment_ids=segment_ids, start=start
        ),
    )
    reasons = {
        "pallas": pallas_plan.unsupported_reason(config, call),
        "xla": "",
        "reference": "",
    }
    if implementation == "mosaic":
        reasons["mosaic"] = _mosaic().unsupported_reason(config, call)
    run = IMPLEMENTATIONS[dispatch.choose(OP, implementation, reasons)]
    out_BTNH, expected_BN, opened_BN = run(config, call)
    edges = None if edge_capacity is None else edge_list(config, call, edge_capacity)
    return GatedAttention(out_BTNH, expected_BN, opened_BN, edges)


def _check(q_BTNH, k_BSKH, v_BSKH, size, mode, scale, soft_cap, edge_capacity) -> None:
    shapes.one_dtype(OP, q=q_BTNH, k=k_BSKH, v=v_BSKH)
    shapes.grouped_heads(OP, size)
    if mode not in MODES:
        raise ValueError(f"{OP}: mode={mode!r} is none of {', '.join(MODES)}")
    for name, number in (("scale", scale), ("soft_cap", soft_cap)):
        if number is not None and number <= 0:
            raise ValueError(f"{OP}: {name} is {number}; pass a positive number, or None")
    if edge_capacity is not None and edge_capacity < 1:
        raise ValueError(f"{OP}: edge_capacity is {edge_capacity}; pass at least 1, or None")


def _seed(mode: str, seed: jax.Array | int | None) -> jax.Array:
    """The seed as a uint32 scalar; 0 where none is used."""
    if (seed is not None) != (mode == "sample"):
        text = "needs a seed" if seed is None else "draws nothing; pass seed=None"
        raise ValueError(f"{OP}: mode={mode!r} {text}")
    if seed is None:
        return jnp.uint32(0)
    if isinstance(seed, int):
        if not 0 <= seed < 2**32:
            raise ValueError(f"{OP}: seed is {seed}; pass an integer in [0, 2^32)")
        return jnp.uint32(seed)
    if jnp.shape(seed) != () or not jnp.issubdtype(seed.dtype, jnp.integer):
        raise ValueError(
            f"{OP}: seed is {seed.dtype}{list(jnp.shape(seed))}; pass an integer scalar, "
            "jax.random.bits(key, (), jnp.uint32) for a key"
        )
    return seed.astype(jnp.uint32)
