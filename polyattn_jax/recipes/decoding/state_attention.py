"""Decoding with a recipe in every head, in memory that does not grow with the text.

A KV cache has every key. A recipe with a window needs the last w keys and the first few alone, a
feature map or the Taylor map needs of all keys outside its window only sums over them (`sums`), and
the gated delta rule needs its memory (`delta_attention`; `linear_state` counts all):

    mixer = polyattn_jax.state_mixer("window:w=64,sinks=4")
    lm_jax.generate(model.params, prompts, model.cfg, mixer=mixer, max_new_tokens=32)

What is computed is what `forward` with the recipe's attend computes, whole rows of scores, to
rounding, where no product of features underflows there (`FeatureMap.scores`: Performer at scores in
the hundreds; here such a key has its weight once it is in the sums, and may have none before). The
keys that a chunk of a text can tell apart are those of the cache and its own; a query's weights on
them are those of the recipe, and everything earlier is in the sums. A key enters the sums when its
chunk ends and it has left the window, or at once without one.

There is no state for a map without finite features, none for a trained map, and none where a layer
has a sliding window beside sums, since keys that leave that window would have to be taken out.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from lm_jax.errors import UsageError
from lm_jax.model.config import DecoderConfig
from lm_jax.model.layers import softcap
from polyattn_jax.recipes.decoding.constant_memory import Chunk, ConstantMemory, einsum
from polyattn_jax.recipes.decoding.delta_attention import DeltaAttention
from polyattn_jax.recipes.decoding.sums import FeatureSums, Held, Sums, TaylorSums
from polyattn_jax.recipes.delta_maps import GatedDelta
from polyattn_jax.recipes.feature_maps import FeatureMap
from polyattn_jax.recipes.field_maps import FieldMap
from polyattn_jax.recipes.row_maps import parse_recipe, resolve_bias


def state_mixer(text: str, *, bias: Any = None) -> ConstantMemory:
    """A mixer that decodes with a recipe in every head, in constant memory.

    Args:
      text: `window:w=,sinks=`; `elu1`, `hedgehog`, `performer:m=,seed=` or `taylor2:b=`, each with
        `w=,sinks=,gamma=` or without; or `gdn:distance=`.
      bias: the mean distances `[L, N]` of `gdn`, or b_auto of `taylor2`, where its recipe has no
        number of its own.

    Raises:
      UsageError: a recipe that cannot be read, one that has no such state, or one without its bias.
    """
    recipe = parse_recipe(text)
    row_map = recipe.map
    if isinstance(row_map, GatedDelta):
        return DeltaAttention.of(resolve_bias(recipe, {str(recipe.bias): bias}))
    known = isinstance(row_map, FieldMap) and row_map.kind in ("window", "taylor2")
    if not (isinstance(row_map, FeatureMap) or known):
        raise UsageError(
            f"recipe {recipe.spec!r} cannot be decoded in constant memory here; name a window "
            "(window:w=64,sinks=4), a feature map (elu1, hedgehog, performer:m=256, taylor2) or a "
            "delta rule (gdn:distance=20), or decode with its attend and a KV cache"
        )
    if recipe.tabled:
        raise UsageError(
            f"recipe {recipe.spec!r} has a bias of each head, and the sums of all heads have one "
            "here; write b=<number>"
        )
    return StateAttention(map=row_map, bias=float(resolve_bias(recipe, bias)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateAttention(ConstantMemory):
    """A window, a feature map, the Taylor map or both in all heads; `state_mixer` builds it.

    The cache of a layer has the keys and values of the sinks and of the window, `[B, K, R, H]` with
    R = sinks + w, one more than the position of each, `[B, R]`, 0 for none, and the sums over keys
    outside of it (`sums`). `bias` is that of the Taylor map.
    """

    map: Any
    bias: float = 0.0

    @property
    def compared(self) -> int:
        """Tokens after which every slot of the window has had two keys."""
        return 2 * self.map.w + self.map.sinks + 1

    def empty(self, cfg: DecoderConfig, batch: int, dtype: Any) -> Held:
        """No keys, and sums of nothing."""
        B, K, H, R = batch, cfg.num_kv_heads, cfg.head_dim, self.map.w + self.map.sinks
        held = {name: jnp.zeros((B, K, R, H), dtype) for name in ("k", "v")}
        held["place"] = jnp.zeros((B, R), jnp.int32)
        return held if self._sums is None else held | self._sums.empty(B, K, H)

    @property
    def _sums(self) -> Sums | None:
        """The sums over keys outside of the window; None for a window alone."""
        if isinstance(self.map, FeatureMap):
            return FeatureSums(self.map)
        return TaylorSums(self.bias) if self.map.kind == "taylor2" else None

    def check(self, cfg: DecoderConfig) -> None:
        """Raises UsageError for a model without such a state."""
        super().check(cfg)
        if self._sums is not None and any(cfg.layer_windows):
            raise UsageError(
                "mixer: this model has layers with a sliding window, and keys that leave it cannot "
                "be taken out of a state; name a recipe window:w=,sinks= for it"
            )
        if isinstance(self._sums, TaylorSums) and cfg.score_softcap is not None:
            raise UsageError(
                "mixer: this model caps its scores by a tanh, so that weights of taylor2 are no "
                "polynomial of keys; decode with its attend and a KV cache"
            )

    def chunk(self, held: Held, chunk: Chunk, cfg: DecoderConfig) -> tuple[jax.Array, Held]:
        """What C queries read, in float32, and the cache after them."""
        sums = self._sums
        k_BSKH = jnp.concatenate([held["k"].swapaxes(1, 2), chunk.k_BCKH], 1).astype(jnp.float32)
        v_BSKH = jnp.concatenate([held["v"].swapaxes(1, 2), chunk.v_BCKH], 1).astype(jnp.float32)
        place_BS = jnp.concatenate([held["place"], chunk.place_BC], 1)
        B, C, N, H = chunk.q_BCNH.shape
        K = k_BSKH.shape[2]
        q_BCKGH = chunk.q_BCNH.astype(jnp.float32).reshape(B, C, K, N // K, H)

        log_BKGCS = self._log_weights(q_BCKGH, k_BSKH, place_BS, chunk, cfg)
        earlier = None if sums is None else sums.read(held, q_BCKGH, cfg.scale)
        z_BKGCH = _read(log_BKGCS, v_BSKH, earlier)
        z_BCNH = z_BKGCH.transpose(0, 3, 1, 2, 4).reshape(B, C, N, H)

        w, sinks = self.map.w, self.map.sinks
        last_B1 = place_BS.max(1, keepdims=True)
        after = dict(held)
        if sums is not None:
            leaves_BS = (place_BS > sinks) & (place_BS <= last_B1 - w)
            after |= sums.added(held, k_BSKH, v_BSKH, leaves_BS, cfg.scale)
        if w + sinks:
            after |= _kept(held, chunk.start_B, chunk.k_BCKH, chunk.v_BCKH, last_B1, w, sinks)
        return z_BCNH, after

    def _log_weights(
        self,
        q_BCKGH: jax.Array,
        k_BSKH: jax.Array,
        place_BS: jax.Array,
        chunk: Chunk,
        cfg: DecoderConfig,
    ) -> jax.Array:
        """Logarithms `[B, K, G, C, S]` of weights on the keys that are told apart."""
        B, C, K, G, H = q_BCKGH.shape
        N, S = K * G, k_BSKH.shape[1]
        query_BC1 = (chunk.start_B[:, None] + 1 + jnp.arange(C)[None])[..., None]
        place_B1S = place_BS[:, None]
        age_BCS = query_BC1 - place_B1S
        seen_BCS = (place_B1S > 0) & (age_BCS >= 0)
        if chunk.window is not None:
            seen_BCS &= age_BCS < chunk.window
        inside_BCS = seen_BCS & ((age_BCS < self.map.w) | (place_B1S <= self.map.sinks))
        z_BKGCS = softcap(
            einsum("BCKGH,BSKH->BKGCS", q_BCKGH, k_BSKH) * cfg.scale, cfg.score_softcap
        )
        z_BNCS = jnp.where(seen_BCS[:, None], z_BKGCS.reshape(B, N, C, S), -jnp.inf)
        inside_BNCS = jnp.broadcast_to(inside_BCS[:, None], z_BNCS.shape)
        if isinstance(self.map, FeatureMap):
            q_BCNH = q_BCKGH.reshape(B, C, N, H)
            log_BNCS = self.map.log_weights(
                q_BCNH, k_BSKH, cfg.scale, z_BNCS, inside_BNTS=inside_BNCS
            )
        elif self._sums is not None:
            log_BNCS = self._log_taylor(z_BNCS, inside_BNCS)
        else:
            log_BNCS = jnp.where(inside_BNCS, z_BNCS, -jnp.inf)
        return log_BNCS.reshape(B, K, G, C, S)

    def _log_taylor(self, z_BNCS: jax.Array, inside_BNCS: jax.Array) -> jax.Array:
        """Logarithms of the Taylor polynomial's weights, and of softmax's inside its window."""
        u_BNCS = jnp.where(z_BNCS == -jnp.inf, 0, z_BNCS) + self.bias
        log_BNCS = jnp.log(((1 + u_BNCS) ** 2 + 1) / 2)
        if self.map.w:
            log_BNCS = jnp.where(inside_BNCS, u_BNCS + math.log(self.map.gamma), log_BNCS)
        return jnp.where(z_BNCS == -jnp.inf, -jnp.inf, log_BNCS)


def _read(
    log_BKGCS: jax.Array, v_BSKH: jax.Array, earlier: tuple[jax.Array, jax.Array] | None
) -> jax.Array:
    """Averages `[B, K, G, C, H]` of values: of the keys told apart and of the sums over others.

    Args:
      log_BKGCS: logarithms of weights, -inf for a key without weight.
      v_BSKH: values.
      earlier: logarithms of the weights of all other keys, and their averages (`sums.Sums.read`);
        None without any.
    """
    peak_BKGC = log_BKGCS.max(-1)
    if earlier is not None:
        peak_BKGC = jnp.maximum(peak_BKGC, earlier[0])
    peak_BKGC1 = jnp.where(jnp.isneginf(peak_BKGC), 0, peak_BKGC)[..., None]
    weight_BKGCS = jnp.exp(log_BKGCS - peak_BKGC1)
    out_BKGCH = einsum("BKGCS,BSKH->BKGCH", weight_BKGCS, v_BSKH)
    total_BKGC1 = weight_BKGCS.sum(-1, keepdims=True)
    if earlier is not None:
        log_BKGC, average_BKGCH = earlier
        weight_BKGC1 = jnp.exp(log_BKGC[..., None] - peak_BKGC1)
        out_BKGCH += weight_BKGC1 * average_BKGCH
        total_BKGC1 += weight_BKGC1
    return out_BKGCH / jnp.where(total_BKGC1 > 0, total_BKGC1, 1)


def _kept(
    held: dict[str, jax.Array],
    start_B: jax.Array,
    k_BCKH: jax.Array,
    v_BCKH: jax.Array,
    last_B1: jax.Array,
    w: int,
    sinks: int,
) -> dict[str, jax.Array]:
    """The keys of the sinks and of the window; position p is in slot sinks + (p - sinks) mod w."""
    first_1R = jnp.arange(1, sinks + 1, dtype=jnp.int32)[None]
    place_BR = jnp.broadcast_to(first_1R, (len(last_B1), sinks))
    if w:
        # The latest position of each slot.
        slot_1W = jnp.arange(w, dtype=jnp.int32)[None]
        latest_BW = last_B1 - (last_B1 - 1 - sinks - slot_1W) % w
        place_BR = jnp.concatenate([place_BR, jnp.where(latest_BW > sinks, latest_BW, 0)], 1)
    start_B1 = start_B[:, None]
    new_BR = (place_BR > start_B1) & (place_BR <= last_B1)
    index_BR = jnp.clip(place_BR - start_B1 - 1, 0, k_BCKH.shape[1] - 1)

    def chosen(before_BKRH: jax.Array, x_BCKH: jax.Array) -> jax.Array:
        taken = jnp.take_along_axis(x_BCKH, index_BR[:, :, None, None], axis=1).swapaxes(1, 2)
        return jnp.where(new_BR[:, None, :, None], taken.astype(before_BKRH.dtype), before_BKRH)

    return {
        "k": chosen(held["k"], k_BCKH),
        "v": chosen(held["v"], v_BCKH),
        "place": jnp.where(new_BR, place_BR, held["place"]),
    }
