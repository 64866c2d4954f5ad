"""Softmax attention that also reports on the score rows of chosen queries.

`Probe` is an attend whose aux holds, for each layer, the `RowStats` of those rows at several biases
and for two kinds of target, and the features of the paper's head types (Appendix H). Nothing of the
size of a score matrix leaves the layer.
"""

from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from lm_jax.attention import softmax
from polyattn_jax.diagnostic import RowStats, row_stats

DEGREES = (2, 4, 8, 16)
TARGETS = ("argmax", "answer")


@struct.dataclass
class Probe:
    """The attend. `answers_BQ` holds key indices, -1 for a query without an answer key."""

    queries_BQ: jax.Array
    answers_BQ: jax.Array
    biases: jax.Array

    def __call__(self, scores_BNTS: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
        pattern_BNTS = softmax(scores_BNTS)
        aux = {
            "rows": score_rows(scores_BNTS, self.queries_BQ, self.answers_BQ, self.biases),
            "features": pattern_rows(pattern_BNTS, self.queries_BQ, self.answers_BQ),
        }
        return pattern_BNTS, aux


def rows_at(rows_BNTS: jax.Array, positions_BQ: jax.Array) -> jax.Array:
    """The rows of chosen queries, `[B, N, Q, S]`."""
    return jnp.take_along_axis(rows_BNTS, positions_BQ[:, None, :, None], axis=2)


def score_rows(
    scores_BNTS: jax.Array, queries_BQ: jax.Array, answers_BQ: jax.Array, biases: jax.Array
) -> dict[str, RowStats]:
    """`RowStats` of chosen rows for each bias: leaves `[bias, B, N, Q, ...]`, by kind of target.

    A query without an answer key has target -1 and the status INVALID under "answer".
    """
    rows_BNQS = rows_at(scores_BNTS, queries_BQ)
    target_BNQ = jnp.broadcast_to(answers_BQ[:, None, :], rows_BNQS.shape[:-1])
    targets = {"argmax": None, "answer": target_BNQ}

    def at_bias(bias: jax.Array) -> dict[str, RowStats]:
        return {
            name: row_stats(rows_BNQS, degrees=DEGREES, bias=bias, target=target)
            for name, target in targets.items()
        }

    return jax.vmap(at_bias)(biases)


def pattern_rows(
    pattern_BNTS: jax.Array, queries_BQ: jax.Array, answers_BQ: jax.Array
) -> dict[str, jax.Array]:
    """Per row `[B, N, Q]`: weight on the first position, on the answer, distance of the argmax."""
    return row_features(rows_at(pattern_BNTS, queries_BQ), queries_BQ, answers_BQ)


def row_features(
    rows_BNQS: jax.Array, queries_BQ: jax.Array, answers_BQ: jax.Array
) -> dict[str, jax.Array]:
    """As `pattern_rows`, of the chosen rows themselves."""
    answer_BNQ1 = jnp.broadcast_to(
        jnp.maximum(answers_BQ, 0)[:, None, :, None], (*rows_BNQS.shape[:-1], 1)
    )
    on_answer = jnp.take_along_axis(rows_BNQS, answer_BNQ1, axis=-1)[..., 0]
    return {
        "sink": rows_BNQS[..., 0],
        "on_answer": jnp.where(answers_BQ[:, None, :] >= 0, on_answer, 0.0),
        "distance": queries_BQ[:, None, :] - rows_BNQS.argmax(-1),
    }
