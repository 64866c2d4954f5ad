"""Decoding with a recipe in every head, in memory that does not grow with the text.

A KV cache has every key. A recipe with a window needs the last w keys and the first few alone, and
a feature map needs of all keys outside its window only the sums over them of phi(k) v^T and phi(k)
(`linear_state` counts both):

    mixer = polyattn_jax.state_mixer("window:w=64,sinks=4")
    lm_jax.generate(model.params, prompts, model.cfg, mixer=mixer, max_new_tokens=32)

What is computed is what `forward` with the recipe's attend computes, whole rows of scores, to
rounding, where no product of features underflows there (`FeatureMap.scores`: Performer at scores in
the hundreds; here such a key has its weight once it is in the sums, and may have none before). A
text is read in chunks. The keys that a chunk can tell apart are those of the cache and
its own; a query's weights on them are those of the recipe, and everything earlier is in the sums. A
key enters the sums when its chunk ends and it has left the window, or at once without one.

Features are kept as logarithms, and each has its largest logarithm over keys taken out of its sum,
so that no sum overflows. There is no state for a map without finite features, none for a trained
map, and none where a layer has a sliding window beside a feature map, since keys that leave that
window would have to be taken out of the sums.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from lm_jax.errors import UsageError
from lm_jax.model.attention import Fused, softmax
from lm_jax.model.config import DecoderConfig
from lm_jax.model.layers import softcap
from lm_jax.model.mixers import AttentionMixer, Layer
from lm_jax.model.sites import SCORE_SITES
from polyattn_jax.recipes.feature_maps import FeatureMap
from polyattn_jax.recipes.field_maps import FieldMap
from polyattn_jax.recipes.row_maps import parse_recipe

# Tokens that are read at once.
_CHUNK = 128


def state_mixer(text: str) -> "StateAttention":
    """A mixer that decodes with a recipe in every head, in constant memory.

    Args:
      text: `window:w=,sinks=`, or `elu1`, `hedgehog` or `performer:m=,seed=`, each with
        `w=,sinks=,gamma=` or without.

    Raises:
      UsageError: a recipe that cannot be read, or one that has no such state.
    """
    recipe = parse_recipe(text)
    row_map = recipe.map
    window = isinstance(row_map, FieldMap) and row_map.kind == "window"
    if not (isinstance(row_map, FeatureMap) or window):
        raise UsageError(
            f"recipe {recipe.spec!r} cannot be decoded in constant memory here; name a window "
            "(window:w=64,sinks=4) or a feature map (elu1, hedgehog, performer:m=256), or decode "
            "with its attend and a KV cache"
        )
    return StateAttention(map=row_map)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateAttention(AttentionMixer):
    """Attention with one recipe in all heads, whose cache has one size; `state_mixer` builds it.

    The cache of a layer has the keys and values of the sinks and of the window, `[B, K, R, H]` with
    R = sinks + w, one more than the position of each, `[B, R]`, 0 for none, and of a feature map
    the sums `[B, K, F, H]` and `[B, K, F]` with the logarithms `[B, K, F]` that are taken out.
    """

    map: Any
    separates_documents: ClassVar[bool] = False

    def init_cache(self, cfg: DecoderConfig, batch: int, length: int, dtype: Any) -> Any:
        """An empty cache; it does not depend on `length`."""
        del length
        self._check(cfg)
        B, K, H, R = batch, cfg.num_kv_heads, cfg.head_dim, self.map.w + self.map.sinks
        cache = {name: jnp.zeros((B, K, R, H), dtype) for name in ("k", "v")}
        cache["place"] = jnp.zeros((B, R), jnp.int32)
        if isinstance(self.map, FeatureMap):
            F = self.map.size(H)
            cache |= {
                "values": jnp.zeros((B, K, F, H), jnp.float32),
                "weights": jnp.zeros((B, K, F), jnp.float32),
                "top": jnp.zeros((B, K, F), jnp.float32),
            }
        return cache

    def attend(
        self,
        q_BTNH: jax.Array,
        heads: dict[str, jax.Array],
        cfg: DecoderConfig,
        layer: Layer,
        cache: Any,
    ) -> tuple[jax.Array, Any]:
        """What the heads read, and the cache, after T tokens in chunks."""
        self._check(cfg)
        own = layer.attend.attend if isinstance(layer.attend, Fused) else layer.attend
        if getattr(own, "func", own) is not softmax:
            raise UsageError("attend: this mixer has a recipe of its own; leave attend out")
        if layer.scope.touches(SCORE_SITES) or layer.dropout.active:
            raise UsageError(
                "edits, record or dropout: this mixer forms no rows of scores; pass the recipe as "
                "an attend (polyattn_jax.recipe) to touch attn.scores or attn.pattern"
            )
        B, T = q_BTNH.shape[:2]
        if cache is None:
            held = self.init_cache(cfg, B, 0, heads["k"].dtype)
        else:
            held = {name: part.read() for name, part in cache.items()}
        # In int32 whatever the program's widest integers are, as the cache is.
        positions_BT = layer.positions_BT.astype(jnp.int32)
        place_BT, start_B = positions_BT + 1, positions_BT[:, 0]
        if layer.valid_BT is not None:
            place_BT = jnp.where(layer.valid_BT, place_BT, 0)
        tokens = q_BTNH, heads["k"], heads["v"], place_BT
        C = min(T, _CHUNK)

        def step(carry: Any, chunk: Any) -> Any:
            held, start_B = carry
            z_BCNH, held = self._chunk(held, start_B, *chunk, cfg=cfg, window=layer.window)
            return (held, start_B + C), z_BCNH

        def split(x: jax.Array) -> jax.Array:
            more = [(0, 0), (0, -T % C)] + [(0, 0)] * (x.ndim - 2)
            x = jnp.pad(x, more)
            return x.reshape(B, -1, C, *x.shape[2:]).swapaxes(0, 1)

        (held, _), z_ZBCNH = jax.lax.scan(step, (held, start_B), jax.tree.map(split, tokens))
        z_BTNH = z_ZBCNH.swapaxes(0, 1).reshape(B, -1, *z_ZBCNH.shape[3:])[:, :T]
        z_BTNH = layer.scope("attn.z", z_BTNH.astype(heads["v"].dtype))
        return z_BTNH, None if cache is None else held

    def _check(self, cfg: DecoderConfig) -> None:
        if isinstance(cfg.kv, int) or cfg.stacks[0].lends:
            raise UsageError(
                "mixer: this model's layers read keys of other layers, which a state does not hold;"
                " decode with the recipe's attend and a KV cache"
            )
        if isinstance(self.map, FeatureMap) and any(cfg.layer_windows):
            raise UsageError(
                "mixer: this model has layers with a sliding window, and keys that leave it cannot "
                "be taken out of a state; name a recipe window:w=,sinks= for it"
            )
        if any(rope and len(rope.lengths(2**30)) > 1 for rope in (cfg.rope, cfg.local_rope)):
            raise UsageError(
                "mixer: rotations of this model depend on the length of the text, and a state has "
                "rotated keys; decode with the recipe's attend and a KV cache"
            )

    def _chunk(
        self,
        held: dict[str, jax.Array],
        start_B: jax.Array,
        q_BCNH: jax.Array,
        k_BCKH: jax.Array,
        v_BCKH: jax.Array,
        place_BC: jax.Array,
        *,
        cfg: DecoderConfig,
        window: jax.Array | None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """What C queries read, in float32, and the cache after them."""
        w, sinks = self.map.w, self.map.sinks
        k_BSKH = jnp.concatenate([held["k"].swapaxes(1, 2), k_BCKH], 1)
        v_BSKH = jnp.concatenate([held["v"].swapaxes(1, 2), v_BCKH], 1)
        place_BS = jnp.concatenate([held["place"], place_BC], 1)
        last_B1 = place_BS.max(1, keepdims=True)
        query_BC1 = (start_B[:, None] + 1 + jnp.arange(q_BCNH.shape[1])[None])[..., None]
        place_B1S = place_BS[:, None]
        age_BCS = query_BC1 - place_B1S
        seen_BCS = (place_B1S > 0) & (age_BCS >= 0)
        if window is not None:
            seen_BCS &= age_BCS < window
        inside_BCS = seen_BCS & ((age_BCS < w) | (place_B1S <= sinks))

        B, C, N, H = q_BCNH.shape
        S, K = k_BSKH.shape[1:3]
        q, k, v = (x.astype(jnp.float32) for x in (q_BCNH, k_BSKH, v_BSKH))
        q_BCKGH = q.reshape(B, C, K, N // K, H)
        z_BKGCS = softcap(_einsum("BCKGH,BSKH->BKGCS", q_BCKGH, k) * cfg.scale, cfg.score_softcap)
        z_BNCS = jnp.where(seen_BCS[:, None], z_BKGCS.reshape(B, N, C, S), -jnp.inf)
        inside_BNCS = jnp.broadcast_to(inside_BCS[:, None], z_BNCS.shape)
        features = isinstance(self.map, FeatureMap)
        if features:
            log_BNCS = self.map.log_weights(q, k, cfg.scale, z_BNCS, inside_BNTS=inside_BNCS)
        else:
            log_BNCS = jnp.where(inside_BNCS, z_BNCS, -jnp.inf)

        log_BKGCS = log_BNCS.reshape(B, K, N // K, C, S)
        peak_BKGC, a_BKGCF = log_BKGCS.max(-1), None
        if features:
            a_BKGCF = self.map.log_features(q_BCKGH, cfg.scale).transpose(0, 2, 3, 1, 4)
            a_BKGCF += held["top"][:, :, None, None]
            some = (held["weights"] > 0)[:, :, None, None]
            a_BKGCF = jnp.where(some, a_BKGCF, -jnp.inf)
            peak_BKGC = jnp.maximum(peak_BKGC, a_BKGCF.max(-1))
        peak_BKGC1 = jnp.where(jnp.isneginf(peak_BKGC), 0, peak_BKGC)[..., None]
        weight_BKGCS = jnp.exp(log_BKGCS - peak_BKGC1)
        out_BKGCH = _einsum("BKGCS,BSKH->BKGCH", weight_BKGCS, v)
        total_BKGC = weight_BKGCS.sum(-1)
        if a_BKGCF is not None:
            phi_BKGCF = jnp.exp(a_BKGCF - peak_BKGC1)
            out_BKGCH += _einsum("BKGCF,BKFH->BKGCH", phi_BKGCF, held["values"])
            total_BKGC += _einsum("BKGCF,BKF->BKGC", phi_BKGCF, held["weights"])
        z_BKGCH = out_BKGCH / jnp.where(total_BKGC > 0, total_BKGC, 1)[..., None]
        z_BCNH = z_BKGCH.transpose(0, 3, 1, 2, 4).reshape(B, C, N, H)

        after = dict(held)
        if features:
            leaves_BS = (place_BS > sinks) & (place_BS <= last_B1 - w)
            after |= _added(held, self.map.log_features(k, cfg.scale), v, leaves_BS)
        if w + sinks:
            after |= _kept(held, start_B, k_BCKH, v_BCKH, last_B1, w, sinks)
        return z_BCNH, after


def _added(
    held: dict[str, jax.Array], log_BSKF: jax.Array, v_BSKH: jax.Array, leaves_BS: jax.Array
) -> dict[str, jax.Array]:
    """The sums with the keys that leave the window."""
    log_BKSF = jnp.where(leaves_BS[..., None, None], log_BSKF, -jnp.inf).swapaxes(1, 2)
    before_BKF = jnp.where(held["weights"] > 0, held["top"], -jnp.inf)
    top_BKF = jnp.maximum(before_BKF, log_BKSF.max(2))
    top_BKF = jnp.where(jnp.isneginf(top_BKF), 0, top_BKF)
    factor_BKF, phi_BKSF = jnp.exp(before_BKF - top_BKF), jnp.exp(log_BKSF - top_BKF[:, :, None])
    values = held["values"] * factor_BKF[..., None]
    return {
        "values": values + _einsum("BKSF,BSKH->BKFH", phi_BKSF, v_BSKH),
        "weights": held["weights"] * factor_BKF + phi_BKSF.sum(2),
        "top": top_BKF,
    }


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


def _einsum(spec: str, *arrays: jax.Array) -> jax.Array:
    return jnp.einsum(spec, *arrays, precision="highest")
