"""Attention with softmax in some heads and a trained recipe in the others, as token mixers.

`MATCHED` computes the frozen model and reports how far the replaced heads are from it, `HYBRID` the
model that results: softmax in the kept heads, the recipe in the replaced ones. Either reads the
frozen weights for softmax, and for the recipe the weights as they are, which may be adapted
(`lora.Adapted`); so kept heads have the queries, keys and values of the frozen model. The
projection of the output is one for all heads of a layer: under `HYBRID` its update counts in the
layers that have a replaced head, and in no other.

What is trained of the recipe is

    Hedgehog      W of queries for each head and W of keys for each KV head
    any map       low-rank adapters of weights of attention

Both mixers need the attend of `student_attend`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import UsageError
from lm_jax.model.attention import Fused, LayerAttend, PerLayer, fused, register_fused, softmax
from lm_jax.model.config import DecoderConfig
from lm_jax.model.layers import project
from lm_jax.model.lora import Adapted
from lm_jax.model.mixers import ATTENTION, AttentionMixer, Layer
from lm_jax.model.params import ParamTree
from lm_jax.model.sites import Scope, keep
from polyattn_jax.recipes.input_maps import with_inputs
from polyattn_jax.recipes.probe import DENSE
from polyattn_jax.recipes.row_maps import Map
from polyattn_jax.recipes.substitute import on_scores


@dataclasses.dataclass(frozen=True)
class Student:
    """The recipe in every head, computed as `DENSE`; reports the weights of a few queries.

    `data` of one layer holds `bias_N`, `heads_N` and, for a trained feature map, `matrices`.
    """

    map: Map
    queries: tuple[int, ...] = ()


def _student(attend: LayerAttend, q_BTNH, k_BSKH, v_BSKH, *, visibility, scale, cap):
    data, own = attend.data, attend.fn
    weights = with_inputs(own.map, q_BTNH, k_BSKH, scale, data.get("matrices"))
    queries = np.array(own.queries, np.int32)

    def with_rows(scores_BNTS: jax.Array):
        pattern_BNTS = weights(scores_BNTS, data["bias_N"][:, None, None])
        reports = {
            "rows_BNQS": pattern_BNTS[:, :, queries],
            "dead_BNT": (pattern_BNTS == 0.0).all(-1),
        }
        return pattern_BNTS, reports

    return on_scores(with_rows, q_BTNH, k_BSKH, v_BSKH, visibility, scale, cap)


register_fused(Student, DENSE, _student)


def student_attend(
    row_map: Map,
    bias_LN: jax.Array,
    heads_LN: jax.Array,
    *,
    matrices: ParamTree | None = None,
    queries: tuple[int, ...] = (),
) -> Fused:
    """The attend that the mixers need.

    Args:
      row_map: what replaces softmax.
      bias_LN: b of every head.
      heads_LN: true in the replaced heads.
      matrices: W of a trained feature map, "q" `[L, N, H, H]` and "k" `[L, K, H, H]`.
      queries: queries whose rows `MATCHED` reports on.
    """
    data: dict[str, Any] = {"bias_N": bias_LN, "heads_N": heads_LN}
    if matrices is not None:
        data["matrices"] = matrices
    own: Any = Student(row_map, queries)
    return fused(PerLayer(own, data), DENSE)


class TwoAttentions(AttentionMixer):
    """Attention with two sets of keys and values, of the frozen weights and of the trained ones."""

    def init_cache(self, cfg: DecoderConfig, batch: int, length: int, dtype: Any) -> Any:
        return [ATTENTION.init_cache(cfg, batch, length, dtype) for _ in range(2)]


@dataclasses.dataclass(frozen=True)
class MatchedAttention(TwoAttentions):
    """Softmax attention of the frozen weights, and how far the replaced heads are from it.

    Needs the attend of a `Student`. Reports, summed over the tokens of a row, `error_BN` and
    `energy_BN`, |z' - z|^2 and |z|^2, and, of the queries of the student, `s_BNQ` and
    `s_softmax_BNQ`: S on the key that softmax gives most weight.
    """

    def apply(
        self, p: ParamTree, x_BTD: jax.Array, cfg: DecoderConfig, layer: Layer, cache: Any
    ) -> tuple[jax.Array, Any]:
        queries = np.array(_student_of(layer).fn.queries, np.int32)
        out_BTD, (teacher, student), cache = _both(p, x_BTD, cfg, layer, cache, queries)
        before_BTNH, after_BTNH = (
            scope.records["attn.z"].astype(jnp.float32) for scope in (teacher, student)
        )
        valid_BT = layer.valid_BT
        valid_BT11 = jnp.ones(()) if valid_BT is None else valid_BT[:, :, None, None]
        error_BTNH = jnp.square(after_BTNH - before_BTNH) * valid_BT11
        rows_BNQS = teacher.records["attn.pattern"]
        target_BNQ = rows_BNQS.argmax(-1)
        layer.scope.aux |= {
            "error_BN": error_BTNH.sum((1, 3)),
            "energy_BN": (jnp.square(before_BTNH) * valid_BT11).sum((1, 3)),
            "s_BNQ": outweighed(student.aux["rows_BNQS"], target_BNQ),
            "s_softmax_BNQ": outweighed(rows_BNQS, target_BNQ),
        }
        return out_BTD, cache

    step = apply


@dataclasses.dataclass(frozen=True)
class HybridAttention(TwoAttentions):
    """Softmax in the kept heads, the recipe in the replaced ones. Needs a `Student`.

    Reports `dead_rows_B`, the count of rows of replaced heads that have no weight, as a
    substitution does; of queries that are no padding.
    """

    def apply(
        self, p: ParamTree, x_BTD: jax.Array, cfg: DecoderConfig, layer: Layer, cache: Any
    ) -> tuple[jax.Array, Any]:
        _, scopes, cache = _both(p, x_BTD, cfg, layer, cache, np.zeros(0, np.int32))
        teacher, student = scopes
        heads_N = _student_of(layer).data["heads_N"]
        heads_11N1, out = heads_N[None, None, :, None], p["o"]
        dead_BNT = student.aux["dead_BNT"] & heads_N[None, :, None]
        if layer.valid_BT is not None:
            dead_BNT &= layer.valid_BT[:, None, :]
        layer.scope.aux["dead_rows_B"] = dead_BNT.sum((1, 2))
        z_BTNH = jnp.where(heads_11N1, student.records["attn.z"], teacher.records["attn.z"])
        if isinstance(out, Adapted):
            out = dataclasses.replace(out, up=jnp.where(heads_N.any(), out.up, 0))
        return project("BTNH,NHD->BTD", z_BTNH, out, p.get("o_bias")), cache

    step = apply


MATCHED, HYBRID = MatchedAttention(), HybridAttention()


def _student_of(layer: Layer) -> Any:
    if not (isinstance(layer.attend, Fused) and isinstance(layer.attend.attend.fn, Student)):
        raise UsageError("mixer: trained heads need the attend of a Student; pass one to forward")
    return layer.attend.attend


def _both(
    p: ParamTree,
    x_BTD: jax.Array,
    cfg: DecoderConfig,
    layer: Layer,
    cache: Any,
    queries: np.ndarray,
) -> tuple[jax.Array, tuple[Scope, Scope], Any]:
    """Output of softmax on the frozen weights; what it and the student recorded; their caches."""
    caches = (None, None) if cache is None else cache
    frozen = {name: w.weight if isinstance(w, Adapted) else w for name, w in p.items()}
    teacher = Scope({}, {"attn.z": keep, "attn.pattern": lambda w_BNTS: w_BNTS[:, :, queries]})
    student = Scope({}, {"attn.z": keep})
    own = dataclasses.replace(layer, scope=teacher, attend=softmax)
    out_BTD, first = ATTENTION.apply(frozen, x_BTD, cfg, own, caches[0])
    of_student = dataclasses.replace(layer, scope=student)
    _, second = ATTENTION.apply(p, x_BTD, cfg, of_student, caches[1])
    return out_BTD, (teacher, student), None if cache is None else [first, second]


def outweighed(rows_BNQS: jax.Array, target_BNQ: jax.Array) -> jax.Array:
    """S of rows of weights: all other keys over the target; infinite where that has no weight."""
    keys_111S = jnp.arange(rows_BNQS.shape[-1])[None, None, None]
    is_target = keys_111S == target_BNQ[..., None]
    target = jnp.where(is_target, rows_BNQS, 0).sum(-1)
    live = target >= jnp.finfo(rows_BNQS.dtype).tiny
    others = jnp.where(is_target, 0, rows_BNQS).sum(-1)
    return jnp.where(live, others / jnp.where(live, target, 1), jnp.inf)
