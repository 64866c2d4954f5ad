"""Exact patching of the residual stream, attention, MLPs and heads at single positions.

A place is patched at one position of one layer alone (`patching` says what a patch is):

    resid_pre    what enters the layer        head_out   the output z of each of its heads
    attn_out     what its attention adds      query      the query of each head, as scored
    mlp_out      what its MLP adds            key        the key of each key head, as scored
                                              value      the value of each key head

TransformerLens has them as `get_act_patch_resid_pre`, `_attn_out`, `_mlp_out` and
`_attn_head_{out,q,k,v}_by_pos`; its `_attn_head_out_all_pos` is `patching.head_effects`. Values are
of the corrupt prompt in the clean run by noising, and, as there, of the clean prompt in the corrupt
run by denoising. Positions count from the first token of each prompt.
"""

from collections.abc import Mapping
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import UsageError, nearest
from lm_jax.model.config import DecoderConfig
from lm_jax.model.edits import Replace
from lm_jax.model.precision import exact_jit
from lm_jax.model.sites import keep
from sparse_jax.circuits.patching import Direction, sides
from sparse_jax.circuits.runs import Batch, CircuitModel, measure
from sparse_jax.circuits.upper_runs import UnpatchedRun, measure_from, sweep, unpatched

# The site of each place.
PLACES: Mapping[str, str] = types.MappingProxyType(
    {
        "resid_pre": "resid_pre",
        "attn_out": "attn.out",
        "mlp_out": "mlp.out",
        "head_out": "attn.z",
        "query": "attn.rot_q",
        "key": "attn.rot_k",
        "value": "attn.v",
    }
)


# Places that heads have.
OF_HEADS = frozenset({"head_out", "query", "key", "value"})


def heads_of(cfg: DecoderConfig, place: str) -> int | None:
    """How many heads have a place of this kind in each layer; None where the layer has one.

    Raises:
      UsageError: no such place.
    """
    if place not in PLACES:
        raise UsageError(f"there is no place {place!r}{nearest(place, PLACES)}")
    if place not in OF_HEADS:
        return None
    return cfg.num_kv_heads if place in ("key", "value") else cfg.num_heads


def place_effects(
    model: CircuitModel,
    batch: Batch,
    place: str,
    *,
    direction: Direction = "noising",
    at_once: int = 8,
) -> np.ndarray:
    """Exact effect of patching a place at each position of each layer.

    No run is made for positions at which no prompt can change the metric: those before the first
    token in which any pair differs, and those after the last one at which logits are read. There,
    and where a prompt has padding, the effect is 0 exactly.

    Args:
      model: a dense or sparse model.
      batch: the prompts.
      place: name in `PLACES`.
      direction: see the head of `patching`.
      at_once: patches side by side, which bounds the memory.

    Returns:
      Effects `[L, T, B]`; where heads have the place (`heads_of`), `[L, N, T, B]`.

    Raises:
      UsageError: no such place or direction.
    """
    heads = heads_of(model.cfg, place)
    run_BT, other_BT = sides(batch, direction)
    B, T = run_BT.shape
    L, N = model.cfg.num_layers, heads or 1
    differ_T = (np.asarray(batch.clean_BT) != np.asarray(batch.corrupt_BT)).any(0)
    positions = np.arange(np.argmax(differ_T), int(np.max(batch.read_BQ)) + 1)
    effects = np.zeros((L, N, T, B), np.float32)
    if differ_T.any() and len(positions):
        values = _run_and_values(model, batch, run_BT, other_BT, place)
        program = functools.partial(_patch_places, model, batch, run_BT, *values, place=place)
        grid = np.meshgrid(np.arange(L), np.arange(N), positions, indexing="ij")
        which_X3 = np.stack([axis.ravel() for axis in grid], 1)
        found_XB = np.asarray(sweep(program, which_X3, which_X3[:, 0], at_once))
        effects[tuple(which_X3.T)] = found_XB
    return effects if heads else effects[:, 0]


@functools.partial(exact_jit, static_argnames="place")
def _run_and_values(
    model: CircuitModel, batch: Batch, run_BT: jax.Array, other_BT: jax.Array, place: str
) -> tuple[UnpatchedRun, jax.Array, jax.Array]:
    """The run that is patched, its values at the place, and the other run's."""
    site = PLACES[place]
    run, own = unpatched(model, batch, run_BT, record=(site,))
    _, other = measure(model, batch, other_BT, record={site: keep})
    return run, own[site], other[site]


@functools.partial(exact_jit, static_argnames="place")
def _patch_places(
    model: CircuitModel,
    batch: Batch,
    run_BT: jax.Array,
    run: UnpatchedRun,
    own: jax.Array,
    other: jax.Array,
    which_X3: jax.Array,
    place: str,
) -> jax.Array:
    """The effect of each of some patches: layer, head (0 where there are none) and position."""
    site, T, heads = PLACES[place], run_BT.shape[1], heads_of(model.cfg, place)
    first = which_X3[:, 0].min()

    def patched(which_3: jax.Array) -> jax.Array:
        layer, head, position = which_3
        mask = jnp.zeros((model.cfg.num_layers, T), bool).at[layer, position].set(True)
        here, there = own[layer, :, position], other[layer, :, position]
        if heads:
            mask = mask[:, :, None] & (jnp.arange(heads) == head)[None, None]
            here, there = here[:, head], there[:, head]
        mask = mask[:, None].reshape(*mask[:, None].shape, *[1] * (own.ndim - mask.ndim - 1))
        metric_B = measure_from(model, batch, run_BT, run, first, {site: Replace(other, mask)})
        changed_B = (here != there).any(1) & batch.valid_BT[:, position]
        return run.effects(metric_B, changed_B)

    return jax.vmap(patched)(which_X3)
