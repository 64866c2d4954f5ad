"""Softmax as an attend that also sums what tells types of heads apart (Appendix H)."""

from flax import struct
import jax
import jax.numpy as jnp

from lm_jax.model.attention import softmax


@struct.dataclass
class HeadProbe:
    """Softmax as an attend that also sums the features over the rows of each prompt.

    `successors_BT` holds for each query the key after the earlier occurrence of its token, -1
    where there is none or the query is padding; `valid_BT` says which queries are no padding.
    """

    successors_BT: jax.Array
    valid_BT: jax.Array

    def __call__(self, scores_BNTS: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        pattern_BNTS = softmax(scores_BNTS)
        queries_T = jnp.arange(scores_BNTS.shape[2], dtype=jnp.int32)
        return pattern_BNTS, self.sums(pattern_BNTS, queries_T, jnp.ones_like(queries_T, bool))

    def sums(
        self, pattern_BNTS: jax.Array, queries_T: jax.Array, counted_T: jax.Array
    ) -> dict[str, jax.Array]:
        """The features `[B, N]` summed over the counted rows of the queries at `queries_T`."""
        S = pattern_BNTS.shape[-1]
        valid_B1T = self.valid_BT[:, queries_T][:, None] & counted_T[None, None]
        planted_B1T = self.successors_BT[:, queries_T][:, None]
        on_planted_B1TS = planted_B1T[..., None] == jnp.arange(S, dtype=jnp.int32)[None, None, None]
        logs_BNTS = jnp.log(jnp.where(pattern_BNTS > 0, pattern_BNTS, 1.0))
        away_BNT = queries_T[None, None] - pattern_BNTS.argmax(-1)
        by_row = {
            "sink": pattern_BNTS[..., 0],
            "induction": jnp.where(on_planted_B1TS, pattern_BNTS, 0.0).sum(-1),
            "distance": away_BNT.astype(pattern_BNTS.dtype),
            "entropy": -(pattern_BNTS * logs_BNTS).sum(-1),
        }
        return {name: jnp.where(valid_B1T, x, 0.0).sum(-1) for name, x in by_row.items()}
