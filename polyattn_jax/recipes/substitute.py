"""Substitution of softmax by a row map, everywhere or in chosen heads, as data under `jit`.

"When Does Polynomial Attention Concentrate?", Algorithm 1 and section 5.4. Which maps may be used
is static; which of them a layer uses, its bias and its heads are traced, so that a sweep over
recipes, biases, layers and heads compiles once.

A row map is a function of scores. Where one of the maps reads queries and keys (`input_maps`), the
attend is computed by the name `DENSE` (`lm_jax.fused`), and score sites cannot be
touched.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from lm_jax.errors import UsageError
from lm_jax.model.attention import (
    Fused,
    LayerAttend,
    PerLayer,
    attention,
    fused,
    register_fused,
    softmax,
)
from lm_jax.model.sites import Scope
from polyattn_jax.recipes.input_maps import InputMap, with_inputs
from polyattn_jax.recipes.probe import DENSE
from polyattn_jax.recipes.row_maps import Map, parse_recipe, resolve_bias


@struct.dataclass
class GlobalRowMap:
    """An attend that uses one map in every layer and head; `bias` is a traced scalar.

    The map is a function of scores, or an `InputMap`, which becomes one `with_inputs`.
    """

    map: Any = struct.field(pytree_node=False)
    bias: jax.Array | float

    def __call__(self, scores_BNTS: jax.Array) -> jax.Array:
        return self.map(scores_BNTS, self.bias)


def recipe(text: str, *, bias: Any = None) -> GlobalRowMap | PerLayer | Fused:
    """An attend from a recipe such as `relu:p=4,b=auto`, to be passed to `lm_jax.forward`.

    Args:
      text: a recipe, or a name of `row_maps.RECIPES`.
      bias: the calibrated bias, needed where the recipe says `b=auto` (`calibrate.calibrate`), or
        biases `[L, N]` of all heads, where it says `b=auto_head`, `auto_layer` or a file, and the
        mean distances `[L, N]` of `gdn` (`bias_tables.read`).

    Raises:
      UsageError: for a recipe that cannot be read, or `b=auto` without a bias.
    """
    parsed = parse_recipe(text)
    if parsed.tabled:
        table = jnp.asarray(resolve_bias(parsed, {str(parsed.bias): bias}))
        if table.ndim != 2:
            raise UsageError(
                f"bias has shape {table.shape}; recipe {parsed.spec!r} has one of each head, "
                f"[L, N]; or write {parsed.option}=<number>"
            )
        return substitute([parsed.map], 0, table, jnp.ones(table.shape, bool))
    return _runnable(GlobalRowMap(parsed.map, resolve_bias(parsed, bias)), [parsed.map])


@dataclasses.dataclass(frozen=True)
class PerHeadRowMap:
    """Replaces the softmax of chosen heads by one of `maps`; counts dead rows.

    A dead row has keys but no weight; its output is zero. `data` of one layer holds `index` (which
    map), `bias` (a scalar or `[N]`), `heads_N` (bool) and, where there is padding, `valid_BT`
    (queries that are none).
    """

    maps: tuple[Any, ...]

    def __call__(
        self, scores_BNTS: jax.Array, data: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        branches = [lambda s, b, m=m: m(s, b) for m in self.maps]
        bias = data["bias"]
        bias = bias[:, None, None] if jnp.ndim(bias) else bias
        mapped_BNTS = jax.lax.switch(data["index"], branches, scores_BNTS, bias)
        heads = data["heads_N"][None, :, None]
        dead_BNT = (mapped_BNTS == 0.0).all(-1) & heads
        if "valid_BT" in data:
            dead_BNT &= data["valid_BT"][:, None, :]
        pattern_BNTS = jnp.where(heads[..., None], mapped_BNTS, softmax(scores_BNTS))
        return pattern_BNTS, {"dead_rows_B": dead_BNT.sum((1, 2))}


def substitute(
    maps: Sequence[Map],
    index: jax.Array | int,
    bias: jax.Array | float,
    heads_LN: jax.Array,
    valid_BT: jax.Array | None = None,
) -> PerLayer | Fused:
    """The attend that uses `maps[index]` with `bias` in the heads where `heads_LN` is true.

    `bias` is a scalar, or `[L, N]` for one of each head.

    `Output.aux["dead_rows_B"]` is then `[L, B]`, the count of dead rows over replaced heads, of the
    queries where `valid_BT` is true, of all of them without it.

    Raises:
      UsageError: if `heads_LN` has not two axes.
    """
    if jnp.ndim(heads_LN) != 2:
        raise UsageError(f"heads_LN has shape {jnp.shape(heads_LN)}; expected [L, N]")
    L, bias = heads_LN.shape[0], jnp.asarray(bias, jnp.float32)
    if bias.ndim and bias.shape != heads_LN.shape:
        raise UsageError(
            f"bias has shape {bias.shape}; pass a number, or one of each head, {heads_LN.shape}"
        )
    data = {
        "index": jnp.broadcast_to(jnp.asarray(index, jnp.int32), (L,)),
        "bias": bias if bias.ndim else jnp.broadcast_to(bias, (L,)),
        "heads_N": heads_LN,
    }
    if valid_BT is not None:
        data["valid_BT"] = jnp.broadcast_to(valid_BT, (L, *valid_BT.shape))
    return _runnable(PerLayer(PerHeadRowMap(tuple(maps)), data), maps)


def _runnable(attend: Any, maps: Sequence[Map]) -> Any:
    """The attend, set to run by name if one of its maps reads queries and keys."""
    if any(isinstance(row_map, InputMap) for row_map in maps):
        return fused(attend, DENSE)
    return attend


def _global(attend: GlobalRowMap, q_BTNH, k_BSKH, v_BSKH, *, visibility, scale, cap):
    bound = dataclasses.replace(attend, map=with_inputs(attend.map, q_BTNH, k_BSKH, scale))
    return on_scores(bound, q_BTNH, k_BSKH, v_BSKH, visibility, scale, cap)


def _per_head(attend: LayerAttend, q_BTNH, k_BSKH, v_BSKH, *, visibility, scale, cap):
    bound = LayerAttend(bound_to(attend.fn, q_BTNH, k_BSKH, scale), attend.data)
    return on_scores(bound, q_BTNH, k_BSKH, v_BSKH, visibility, scale, cap)


def bound_to(
    attend: PerHeadRowMap, q_BTNH: jax.Array, k_BSKH: jax.Array, scale: float
) -> PerHeadRowMap:
    """The same whose maps have these queries and keys, where they read them."""
    return PerHeadRowMap(tuple(with_inputs(m, q_BTNH, k_BSKH, scale) for m in attend.maps))


def on_scores(
    attend: Any, q_BTNH, k_BSKH, v_BSKH, visibility, scale: float, cap: float | None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`z_BTNH` of an attend on whole score matrices, and what it reports."""
    scope = Scope({}, {})
    z_BTNH = attention(
        q_BTNH, k_BSKH, v_BSKH, visibility, attend=attend, scale=scale, cap=cap, scope=scope
    )
    return z_BTNH, scope.aux


register_fused(GlobalRowMap, DENSE, _global)
register_fused(PerHeadRowMap, DENSE, _per_head)
