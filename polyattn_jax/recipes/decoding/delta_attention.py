"""Decoding with the gated delta rule in every head: the recurrence of `delta_maps`, token by token.

Heads that read one key head share its memory S `[H, H]`, since they have its keys, values and mean
distance. Padding neither writes nor lets anything fade.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from iaj_kernels.delta_rule.api import delta_rule
from lm_jax.errors import UsageError
from lm_jax.model.config import DecoderConfig
from polyattn_jax.recipes.decoding.constant_memory import Chunk, ConstantMemory
from polyattn_jax.recipes.delta_maps import unit

# A logarithm whose exponential is 0 in float32, for a head that looks at its own token alone.
_NOTHING_LEFT = -110.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaAttention(ConstantMemory):
    """The gated delta rule in all heads; `state_mixer` builds it.

    The cache of a layer has the memory of each key head, `[B, K, H, H]`, of keys by values.

    Attributes:
      distance: mean distance m in tokens, of all heads or by layer and head.
    """

    distance: float | tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, distance: Any) -> "DeltaAttention":
        """The mixer of a number, or of a table `[L, N]`.

        Raises:
          UsageError: a table of another shape.
        """
        table = np.asarray(distance, float)
        if table.ndim == 0:
            return cls(distance=float(table))
        if table.ndim != 2:
            raise UsageError(
                f"bias has shape {table.shape}; gdn has one mean distance of each head, [L, N], or "
                "gdn:distance=<number>"
            )
        return cls(distance=tuple(map(tuple, table.tolist())))

    @property
    def compared(self) -> int:
        """Tokens after which a memory has been written: one."""
        return 1

    def empty(self, cfg: DecoderConfig, batch: int, dtype: Any) -> dict[str, jax.Array]:
        """Empty memories, in float32 whatever the dtype of the keys."""
        del dtype
        H = cfg.head_dim
        return {"memory": jnp.zeros((batch, cfg.num_kv_heads, H, H), jnp.float32)}

    def check(self, cfg: DecoderConfig) -> None:
        """Raises UsageError for a model without such a state, or that the table does not fit."""
        super().check(cfg)
        if any(cfg.layer_windows):
            raise UsageError(
                "mixer: this model has layers with a sliding window, and what leaves it cannot be "
                "taken out of a memory; name a recipe window:w=,sinks= for it"
            )
        if isinstance(self.distance, float):
            return
        L, N, K = cfg.num_layers, cfg.num_heads, cfg.num_kv_heads
        table_LN = np.array(self.distance)
        if table_LN.shape != (L, N):
            raise UsageError(
                f"bias has shape {table_LN.shape}, and these layers are {L} of {N} heads; measure "
                "the mean distances on this model"
            )
        if np.ptp(table_LN.reshape(L, K, N // K), axis=-1).any():
            raise UsageError(
                "bias differs in heads that read one key head, whose memory they share; give them "
                "one mean distance"
            )

    def chunk(
        self, held: dict[str, jax.Array], chunk: Chunk, cfg: DecoderConfig
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """What C queries read, in float32, and the memories after them."""
        N = chunk.q_BCNH.shape[2]
        G = N // cfg.num_kv_heads
        table = jnp.asarray(self.distance, jnp.float32)
        m_N = jnp.broadcast_to(table[chunk.layer] if table.ndim else table, (N,))
        m_N = jnp.maximum(m_N, 0)
        writes_BC1 = (chunk.place_BC > 0)[..., None]
        left_N = jnp.where(m_N > 0, -jnp.log1p(1 / jnp.where(m_N > 0, m_N, 1)), _NOTHING_LEFT)
        left_N = jnp.maximum(left_N, _NOTHING_LEFT)

        def by_query_head(x: jax.Array, axis: int) -> jax.Array:
            return jnp.repeat(x.astype(jnp.float32), G, axis)

        z_BCNH, memory_BNHH = delta_rule(
            unit(chunk.q_BCNH.astype(jnp.float32)),
            by_query_head(unit(chunk.k_BCKH.astype(jnp.float32)), 2),
            by_query_head(chunk.v_BCKH, 2),
            jnp.where(writes_BC1, (1 / (1 + m_N))[None, None], 0),
            log_decay=jnp.where(writes_BC1, left_N[None, None], 0),
            scale=1.0,
            initial_state=by_query_head(held["memory"], 1),
            return_state=True,
        )
        return z_BCNH, {"memory": memory_BNHH[:, ::G]}
