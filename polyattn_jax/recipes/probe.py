"""Softmax attention that also reports on the score rows of chosen queries.

`Probe` asks for it; the reports of a layer, which `lm_jax.forward` stacks over layers in `aux`, are

    rows      `RowStats` at each bias and for each kind of target
    softmax   S of softmax itself on the same rows, the control that S_p is read against
    change    how much the head's output changes where r^p replaces softmax (`output_change`)
    features  weight on the first position and on the answer, distance of the largest weight

All of it is reduced inside the layer: nothing of the size of a score matrix leaves it. The change
of the output needs the values, which an attend that is a function of scores never sees, so a
`Probe` is computed by name: `lm_jax.fused(probe, "dense")`, or "kernels" of
`polyattn_jax.recipes.fused`.
"""

from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from lm_jax.model.attention import attention, register_fused, softmax
from lm_jax.model.sites import Scope
from polyattn_jax.recipes import row_maps
from polyattn_jax.recipes.diagnostic import RowStats, row_stats

DENSE = "dense"
DEGREES = (2, 4, 8, 16)


@struct.dataclass
class Probe:
    """Which rows to report on: `answers_BQ` holds key indices, -1 for a query without one.

    `degrees` are those of S_p and of the change, an int where p is whole.
    """

    queries_BQ: jax.Array
    answers_BQ: jax.Array
    biases: jax.Array
    degrees: tuple[int | float, ...] = struct.field(pytree_node=False, default=DEGREES)


def rows_at(rows_BNTS: jax.Array, positions_BQ: jax.Array) -> jax.Array:
    """The rows of chosen queries, `[B, N, Q, S]`."""
    return jnp.take_along_axis(rows_BNTS, positions_BQ[:, None, :, None], axis=2)


def targets(probe: Probe, num_heads: int) -> dict[str, jax.Array | None]:
    """The `target` of `row_stats` for each kind of target, None for the argmax."""
    B, Q = probe.answers_BQ.shape
    answers_BNQ = jnp.broadcast_to(probe.answers_BQ[:, None, :], (B, num_heads, Q))
    return {"argmax": None, "answer": answers_BNQ}


def score_rows(probe: Probe, scores_BNQS: jax.Array) -> dict[str, RowStats]:
    """`RowStats` of the rows for each bias: leaves `[bias, B, N, Q, ...]`, by kind of target.

    A query without an answer key has target -1 and the status INVALID under "answer".
    """

    def at_bias(bias: jax.Array) -> dict[str, RowStats]:
        return {
            name: row_stats(scores_BNQS, degrees=probe.degrees, bias=bias, target=target)
            for name, target in targets(probe, scores_BNQS.shape[1]).items()
        }

    return jax.vmap(at_bias)(probe.biases)


def reports(probe: Probe, scores_BNQS: jax.Array, v_BSKH: jax.Array) -> dict[str, Any]:
    """All reports but `rows`, from the masked float32 scores of the chosen queries."""
    control = {
        name: row_stats(scores_BNQS, row_map=row_maps.softmax, target=target).s_p[..., 0]
        for name, target in targets(probe, scores_BNQS.shape[1]).items()
    }
    return {
        "softmax": control,
        "change": output_change(scores_BNQS, v_BSKH, probe.biases, probe.degrees),
        "features": row_features(softmax(scores_BNQS), probe.queries_BQ, probe.answers_BQ),
    }


def output_change(
    scores_BNQS: jax.Array,
    v_BSKH: jax.Array,
    biases: jax.Array,
    degrees: tuple[int | float, ...] = DEGREES,
) -> jax.Array:
    """||z_p - z|| / ||z|| for each degree: `[bias, B, N, Q, degree]`.

    z = sum_j w_j v_j is the head's output (`attn.z`) with softmax weights, z_p the output of the
    same head on the same scores and values with r^p / sum r^p. So this is the substitution in one
    head at a time, and what it passes on to later layers is left out. Norms are Euclidean over the
    head's width, in float32. A dead row writes zeros and changes by 1; where z is 0 the change is 0
    if z_p is 0 too, else inf.
    """
    z_BNQH = head_output(softmax(scores_BNQS), v_BSKH)

    def at_bias(bias: jax.Array) -> jax.Array:
        moved = [
            relative_change(head_output(row_maps.relu_power(p)(scores_BNQS, bias), v_BSKH), z_BNQH)
            for p in degrees
        ]
        return jnp.stack(moved, axis=-1)

    return jax.vmap(at_bias)(biases)


def head_output(pattern_BNQS: jax.Array, v_BSKH: jax.Array) -> jax.Array:
    """The output `[B, N, Q, H]` of heads with the given weights, in float32."""
    B, N, Q, S = pattern_BNQS.shape
    K = v_BSKH.shape[2]
    pattern_BKGQS = pattern_BNQS.reshape(B, K, N // K, Q, S)
    v_BSKH = v_BSKH.astype(jnp.float32)
    z = jnp.einsum("BKGQS,BSKH->BKGQH", pattern_BKGQS, v_BSKH, precision="highest")
    return z.reshape(B, N, Q, -1)


def relative_change(after_BNQH: jax.Array, before_BNQH: jax.Array) -> jax.Array:
    """The ratio ||after - before|| / ||before|| per row `[B, N, Q]`, as `output_change` has it."""
    size_BNQ = jnp.linalg.norm(before_BNQH, axis=-1)
    moved_BNQ = jnp.linalg.norm(after_BNQH - before_BNQH, axis=-1)
    ratio = moved_BNQ / jnp.where(size_BNQ > 0, size_BNQ, 1.0)
    return jnp.where(size_BNQ > 0, ratio, jnp.where(moved_BNQ > 0, jnp.inf, 0.0))


def row_features(
    rows_BNQS: jax.Array, queries_BQ: jax.Array, answers_BQ: jax.Array
) -> dict[str, jax.Array]:
    """Row features `[B, N, Q]`: weight on the first position, on the answer, argmax distance."""
    answer_BNQ1 = jnp.broadcast_to(
        jnp.maximum(answers_BQ, 0)[:, None, :, None], (*rows_BNQS.shape[:-1], 1)
    )
    on_answer = jnp.take_along_axis(rows_BNQS, answer_BNQ1, axis=-1)[..., 0]
    return {
        "sink": rows_BNQS[..., 0],
        "on_answer": jnp.where(answers_BQ[:, None, :] >= 0, on_answer, 0.0),
        "distance": queries_BQ[:, None, :] - rows_BNQS.argmax(-1),
    }


def _dense(probe: Probe, q_BTNH, k_BSKH, v_BSKH, *, visibility, scale: float, cap: float | None):
    """The probe on whole score matrices, those that softmax itself reads."""

    def with_rows(scores_BNTS: jax.Array):
        return softmax(scores_BNTS), {"scores": rows_at(scores_BNTS, probe.queries_BQ)}

    scope = Scope({}, {})
    z_BTNH = attention(
        q_BTNH, k_BSKH, v_BSKH, visibility, attend=with_rows, scale=scale, cap=cap, scope=scope
    )
    scores_BNQS = scope.aux["scores"]
    return z_BTNH, {"rows": score_rows(probe, scores_BNQS), **reports(probe, scores_BNQS, v_BSKH)}


register_fused(Probe, DENSE, _dense)
