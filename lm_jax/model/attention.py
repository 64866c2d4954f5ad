"""Attention with the row map as an argument.

An *attend* is a function of scores: `attend(scores_BNTS) -> pattern_BNTS`, both float32, where a
masked key has score -inf and must get weight 0, and a row with no key at all must get zeros. It may
return `(pattern_BNTS, aux)` instead, where `aux` is a dict of small arrays (counts, losses) that
the forward pass stacks over layers. It may be a pytree (its leaves are then data under `jit`), and
`PerLayer` gives it data that differ by layer.

`fused(attend, name)` asks for a kernel that never forms scores or pattern. One registers for an
attend with `register_fused`; reading or editing a score site under a fused attend is refused.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from iaj_kernels.attention.rows import softmax
from iaj_kernels.attention.visibility import Visibility
from iaj_kernels.row_map_attention.api import RowMapAttention, row_map_attention
from iaj_kernels.row_map_attention.maps import SOFTMAX, RowMap
from lm_jax.errors import UsageError, nearest
from lm_jax.model import sites
from lm_jax.model.layers import NO_DROPOUT, Dropout, softcap

Attend = Callable[[jax.Array], jax.Array | tuple[jax.Array, dict[str, jax.Array]]]


@struct.dataclass
class PerLayer:
    """`fn(scores_BNTS, data_of_this_layer)`: leaves of `data` carry a leading axis L."""

    fn: Callable[[jax.Array, Any], Any] = struct.field(pytree_node=False)
    data: Any


@struct.dataclass
class Fused:
    """An attend together with the name of the kernel that computes it; `fused` builds one."""

    attend: Any
    implementation: str = struct.field(pytree_node=False)


FusedKernel = Callable[..., Any]
_KERNELS: dict[Any, dict[str, FusedKernel]] = {}


def register_fused(attend: Any, implementation: str, kernel: FusedKernel) -> None:
    """Lets a kernel compute `attend`: a function, or a class of attends (also inside `PerLayer`).

    `kernel(attend, q_BTNH, k_BSKH, v_BSKH, *, visibility, scale, cap)` returns `z_BTNH`, or
    `(z_BTNH, aux)` as an attend may. `visibility` is the `Visibility` of the keys; a `PerLayer`
    attend arrives as the `LayerAttend` of its layer.
    """
    _KERNELS.setdefault(attend, {})[implementation] = kernel


def fused(attend: Any, implementation: str) -> Fused:
    """Names the fused kernel that is to compute `attend`.

    Raises:
      UsageError: if no such kernel is registered for it.
    """
    kernel_of(attend, implementation)
    return Fused(as_pytree(attend), implementation)


def kernel_of(attend: Any, implementation: str) -> FusedKernel:
    """The kernel of that name that computes `attend`.

    Raises:
      UsageError: if no such kernel is registered for it.
    """
    known = _kernels_of(attend)
    if implementation not in known:
        raise UsageError(
            f"fused attention: no kernel {implementation!r} for {attend}"
            f"{nearest(implementation, list(known))}"
        )
    return known[implementation]


def _kernels_of(attend: Any) -> dict[str, FusedKernel]:
    if isinstance(attend, PerLayer | LayerAttend):
        attend = attend.fn
    if isinstance(attend, jax.tree_util.Partial):
        attend = attend.func
    by_class = _KERNELS.get(type(attend), {})
    return by_class or _KERNELS.get(attend, {})


def as_pytree(attend: Any) -> Any:
    """`attend` as an argument for `jax.jit`: a function that is no pytree is wrapped."""
    if jax.tree_util.all_leaves([attend]):
        return jax.tree_util.Partial(attend)
    return attend


@jax.named_scope("attention")
def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    visibility: Visibility,
    *,
    attend: Attend | Fused,
    scale: float,
    cap: float | None,
    scope: sites.Scope,
    dropout: Dropout = NO_DROPOUT,
) -> jax.Array:
    """Grouped-query attention; returns `z_BTNH` in the dtype of `v`.

    Query head n reads key/value head n // G. Scores and pattern are float32.

    Raises:
      UsageError: if a fused kernel was named and a score site is touched, or the pattern dropped.
    """
    if isinstance(attend, Fused):
        if dropout.active:
            raise UsageError(
                f"dropout: the fused kernel {attend.implementation!r} forms no pattern to drop "
                "from; pass the attend unfused, or a mixer without pattern_dropout"
            )
        if scope.touches(sites.SCORE_SITES):
            raise UsageError(
                f"attend: the fused kernel {attend.implementation!r} forms no scores, but "
                "attn.scores or attn.pattern is edited or recorded; pass the attend unfused"
            )
        kernel = kernel_of(attend.attend, attend.implementation)
        result = kernel(
            attend.attend, q_BTNH, k_BSKH, v_BSKH, visibility=visibility, scale=scale, cap=cap
        )
        z_BTNH, aux = result if isinstance(result, tuple) else (result, {})
        scope.aux |= aux
        return scope("attn.z", z_BTNH)

    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    G = N // K
    # The G query heads of a key head are rows of one matrix (X = G T): a plain batched product,
    # without a copy of the keys per head.
    q_BKXH = q_BTNH.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    if T == 1:
        # With the keys first XLA's products for CPUs take them as a cache has them, uncopied.
        scores = product("BSKH,BKXH->BKSX", k_BSKH, q_BKXH).swapaxes(2, 3)
    else:
        scores = product("BKXH,BSKH->BKXS", q_BKXH, k_BSKH)
    scores_BNTS = softcap(scores.reshape(B, N, T, S) * scale, cap)
    # Edits see finite scores; the mask comes after, so that no edit can open a masked key.
    scores_BNTS = scope.edit("attn.scores", scores_BNTS)
    scores_BNTS = jnp.where(visibility.mask_BTS(T, S)[:, None], scores_BNTS, -jnp.inf)
    scope.observe("attn.scores", scores_BNTS)
    result = attend(scores_BNTS)
    pattern_BNTS, aux = result if isinstance(result, tuple) else (result, {})
    scope.aux |= aux
    pattern_BNTS = scope("attn.pattern", pattern_BNTS)
    pattern_BNTS = dropout(pattern_BNTS, "attn.pattern")
    pattern = pattern_BNTS.reshape(B, K, G * T, S).astype(v_BSKH.dtype)
    z_BKXH = jnp.einsum("BKXS,BSKH->BKXH", pattern, v_BSKH)
    z_BTNH = z_BKXH.reshape(B, K, G, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)
    return scope("attn.z", z_BTNH)


def _xla_softmax(attend, q_BTNH, k_BSKH, v_BSKH, *, visibility, scale, cap):
    del attend
    if cap is not None:
        raise UsageError(
            "attend: the fused kernel 'xla' has no score soft cap; pass the attend unfused"
        )
    mask_BTS = visibility.mask_BTS(q_BTNH.shape[1], k_BSKH.shape[1])
    return jax.nn.dot_product_attention(
        q_BTNH, k_BSKH, v_BSKH, mask=mask_BTS[:, None], scale=scale, implementation="xla"
    )


def by_row_map(
    row_map: RowMap, q_BTNH, k_BSKH, v_BSKH, *, visibility: Visibility, scale, cap, **options: Any
) -> RowMapAttention:
    """`iaj_kernels.row_map_attention` of a fused kernel's arguments; `options` are bias, heads."""
    segments = (visibility.query_segments_BT, visibility.key_segments_BS)
    return row_map_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        row_map=row_map,
        scale=scale,
        soft_cap=cap,
        causal=visibility.causal,
        window=visibility.window,
        segment_ids=None if segments[0] is None else segments,
        start=visibility.start,
        **options,
    )


def _kernel_softmax(attend, q_BTNH, k_BSKH, v_BSKH, *, visibility, scale, cap):
    del attend
    return by_row_map(
        SOFTMAX, q_BTNH, k_BSKH, v_BSKH, visibility=visibility, scale=scale, cap=cap
    ).out_BTNH


register_fused(softmax, "xla", _xla_softmax)
register_fused(softmax, "kernels", _kernel_softmax)


@struct.dataclass
class LayerAttend:
    """A `PerLayer` attend with the data of one layer."""

    fn: Any = struct.field(pytree_node=False)
    data: Any

    def __call__(self, scores_BNTS: jax.Array) -> Any:
        return self.fn(scores_BNTS, self.data)


def layer_data(attend: Any) -> Any:
    """The data of `attend` that have a leading axis L, or None."""
    if isinstance(attend, Fused):
        attend = attend.attend
    return attend.data if isinstance(attend, PerLayer) else None


def for_layer(attend: Any, data: Any) -> Any:
    """The attend of one layer, given that layer's slice of `layer_data`."""
    if isinstance(attend, Fused):
        return dataclasses.replace(attend, attend=for_layer(attend.attend, data))
    return LayerAttend(attend.fn, data) if isinstance(attend, PerLayer) else attend
