"""What mixers that decode in memory of one size have in common: chunks, and what they refuse.

A text is read in chunks. A mixer says what is held, what the queries of a chunk read, and what is
held after them (`state_attention` and `delta_attention`).
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from lm_jax.errors import UsageError
from lm_jax.model.attention import Fused, softmax
from lm_jax.model.config import DecoderConfig
from lm_jax.model.mixers import AttentionMixer, Layer
from lm_jax.model.sites import SCORE_SITES

# Tokens that are read at once.
_CHUNK = 128


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Some tokens of one layer: what its heads read and write.

    `place_BC` is one more than the position of a token, 0 where it is padding; `start_B` is the
    position of the first; `window` is the model's own in this layer, or None; `layer` its number.
    """

    q_BCNH: jax.Array
    k_BCKH: jax.Array
    v_BCKH: jax.Array
    place_BC: jax.Array
    start_B: jax.Array
    window: jax.Array | None
    layer: jax.Array | int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstantMemory(AttentionMixer):
    """Attention of one recipe in all heads, whose cache has one size."""

    separates_documents: ClassVar[bool] = False

    @property
    def compared(self) -> int:
        """Tokens after which all that is held has been written over at least once."""
        raise NotImplementedError

    def empty(self, cfg: DecoderConfig, batch: int, dtype: Any) -> dict[str, jax.Array]:
        """What is held before the first token."""
        raise NotImplementedError

    def chunk(
        self, held: dict[str, jax.Array], chunk: Chunk, cfg: DecoderConfig
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """What the queries of a chunk read, `[B, C, N, H]` in float32, and what is held after."""
        raise NotImplementedError

    def check(self, cfg: DecoderConfig) -> None:
        """Raises UsageError for a model whose layers have no such memory."""
        if isinstance(cfg.kv, int) or cfg.stacks[0].lends:
            raise UsageError(
                "mixer: this model's layers read keys of other layers, which a state does not hold;"
                " decode with the recipe's attend and a KV cache"
            )
        if any(rope and len(rope.lengths(2**30)) > 1 for rope in (cfg.rope, cfg.local_rope)):
            raise UsageError(
                "mixer: rotations of this model depend on the length of the text, and a state has "
                "rotated keys; decode with the recipe's attend and a KV cache"
            )

    def init_cache(self, cfg: DecoderConfig, batch: int, length: int, dtype: Any) -> Any:
        """An empty cache; it does not depend on `length`."""
        del length
        self.check(cfg)
        return self.empty(cfg, batch, dtype)

    def attend(
        self,
        q_BTNH: jax.Array,
        heads: dict[str, jax.Array],
        cfg: DecoderConfig,
        layer: Layer,
        cache: Any,
    ) -> tuple[jax.Array, Any]:
        """What the heads read, and the cache, after T tokens in chunks."""
        self.check(cfg)
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
            held = self.empty(cfg, B, heads["k"].dtype)
        else:
            held = {name: part.read() for name, part in cache.items()}
        # In int32 whatever the program's widest integers are, as the cache is.
        positions_BT = layer.positions_BT.astype(jnp.int32)
        place_BT, start_B = positions_BT + 1, positions_BT[:, 0]
        if layer.valid_BT is not None:
            place_BT = jnp.where(layer.valid_BT, place_BT, 0)
        C = min(T, _CHUNK)

        def step(carry: Any, tokens: Any) -> Any:
            held, start_B = carry
            q_BCNH, k_BCKH, v_BCKH, place_BC = tokens
            chunk = Chunk(q_BCNH, k_BCKH, v_BCKH, place_BC, start_B, layer.window, layer.index)
            z_BCNH, held = self.chunk(held, chunk, cfg)
            return (held, start_B + C), z_BCNH

        def split(x: jax.Array) -> jax.Array:
            more = [(0, 0), (0, -T % C)] + [(0, 0)] * (x.ndim - 2)
            x = jnp.pad(x, more)
            return x.reshape(B, -1, C, *x.shape[2:]).swapaxes(0, 1)

        tokens = q_BTNH, heads["k"], heads["v"], place_BT
        (held, _), z_ZBCNH = jax.lax.scan(step, (held, start_B), jax.tree.map(split, tokens))
        z_BTNH = z_ZBCNH.swapaxes(0, 1).reshape(B, -1, *z_ZBCNH.shape[3:])[:, :T]
        z_BTNH = layer.scope("attn.z", z_BTNH.astype(heads["v"].dtype))
        return z_BTNH, None if cache is None else held


def einsum(spec: str, *arrays: jax.Array) -> jax.Array:
    """`jnp.einsum` with products that are not rounded to a narrower dtype."""
    return jnp.einsum(spec, *arrays, precision="highest")
