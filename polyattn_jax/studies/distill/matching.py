"""Heads whose recipe is trained to give the output that softmax gives: mixers and objective.

After the attention transfer of Hedgehog (Zhang et al. 2024, arXiv:2402.04347), on outputs in place
of patterns. Every layer reads the residual stream of the frozen model, whose heads give z with
softmax; the replaced heads give z' on the same stream with the recipe and what is trained of it,

    Hedgehog      W of queries for each head and W of keys for each KV head, from W = 1
    other maps    low-rank adapters on the projections of queries and keys, from no change

and the loss is the mean over replaced heads of sum |z' - z|^2 / sum |z|^2 over the tokens of a
batch. So layers are trained at once and independently, and no gradient passes through the MLPs.

`MATCHED` computes the frozen model and reports the errors, `HYBRID` the model that results: softmax
in the kept heads, the recipe in the replaced ones, each head with its own queries and keys.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import UsageError
from lm_jax.model import lora
from lm_jax.model import params as params_lib
from lm_jax.model.attention import Fused, LayerAttend, PerLayer, fused, register_fused, softmax
from lm_jax.model.config import DecoderConfig
from lm_jax.model.decoder import Output, forward, param_spec
from lm_jax.model.flops import Causal, forward_flops
from lm_jax.model.layers import project
from lm_jax.model.lora import Adapted, LoraConfig
from lm_jax.model.mixers import ATTENTION, AttentionMixer, Layer, Mixer
from lm_jax.model.params import ParamSpec, ParamTree
from lm_jax.model.sites import Scope, keep
from lm_jax.run.config import stored_fields, to_plain
from lm_jax.train.objective import (
    LMBatch,
    MakeBatch,
    Numbers,
    Stateless,
    ignore_index_batch,
    input_length,
)
from polyattn_jax.recipes.feature_maps import FeatureMap, with_inputs
from polyattn_jax.recipes.probe import DENSE
from polyattn_jax.recipes.row_maps import Map
from polyattn_jax.recipes.substitute import on_scores

MAPS, ADAPTERS = "maps", "adapters"


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
        return pattern_BNTS, {"rows_BNQS": pattern_BNTS[:, :, queries]}

    return on_scores(with_rows, q_BTNH, k_BSKH, v_BSKH, visibility, scale, cap)


register_fused(Student, DENSE, _student)


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
    """Softmax in the kept heads, the recipe in the replaced ones. Needs a `Student`."""

    def apply(
        self, p: ParamTree, x_BTD: jax.Array, cfg: DecoderConfig, layer: Layer, cache: Any
    ) -> tuple[jax.Array, Any]:
        _, scopes, cache = _both(p, x_BTD, cfg, layer, cache, np.zeros(0, np.int32))
        teacher, student = scopes
        heads_11N1 = _student_of(layer).data["heads_N"][None, None, :, None]
        z_BTNH = jnp.where(heads_11N1, student.records["attn.z"], teacher.records["attn.z"])
        return project("BTNH,NHD->BTD", z_BTNH, p["o"], p.get("o_bias")), cache

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


@dataclasses.dataclass(frozen=True)
class HeadMatching(Stateless):
    """The relative error of the replaced heads, as an objective of `lm_jax.train`.

    `frozen` is the model. Evaluations weight the error of a batch by its tokens.

    Attributes:
      cfg: the model.
      row_map: what replaces softmax.
      bias: b of all heads, or by layer and head.
      replaced: (layer, head) of every replaced head.
      adapters: adapters of queries and keys; not read for a feature map with matrices of its own.
      make_batch: function from rows of ids to inputs, targets and masks.
    """

    cfg: DecoderConfig
    row_map: Map
    bias: float | tuple[tuple[float, ...], ...]
    replaced: tuple[tuple[int, int], ...]
    adapters: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    make_batch: MakeBatch = ignore_index_batch
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not self.replaced:
            raise UsageError("distill: no head is replaced; name a hybrid that replaces some")
        self.cfg.check_equal_blocks("distill: training of replaced heads")

    @property
    def trains_maps(self) -> bool:
        """Whether the matrices of a feature map are trained, and not adapters."""
        return isinstance(self.row_map, FeatureMap) and self.row_map.trained

    @property
    def spec(self) -> ParamTree:
        if not self.trains_maps:
            return {ADAPTERS: lora.adapter_spec(param_spec(self.cfg), self.adapters)}
        H, L = self.cfg.head_dim, self.cfg.num_layers
        sizes = {"q": ("N", self.cfg.num_heads), "k": ("K", self.cfg.num_kv_heads)}
        return {
            MAPS: {
                name: ParamSpec((count, H, H), f"{letter}HH", _identity).stacked(L)
                for name, (letter, count) in sizes.items()
            }
        }

    def metadata(self) -> dict[str, Any]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["make_batch"] = self.make_batch.__qualname__
        fields["row_map"] = {
            "class": type(self.row_map).__qualname__,
            **stored_fields(self.row_map),
        }
        return to_plain({"head_matching": fields})

    def normalizers(self, tokens_BS: jax.Array) -> Numbers:
        return {"tokens": jnp.maximum(self.make_batch(tokens_BS).loss_mask_BT.sum(), 1)}

    def loss_terms(
        self,
        params: ParamTree,
        frozen: Any,
        aux_state: Any,
        tokens_BS: jax.Array,
        normalizers: Numbers,
        rng: jax.Array,
    ) -> tuple[jax.Array, Numbers]:
        del aux_state, normalizers, rng
        output = self.run(params, frozen, self.make_batch(tokens_BS), mixer=MATCHED)
        loss = self._error(output)
        return loss, {"loss": loss}

    def flops(self, rows: int, columns: int, causal: Causal) -> int:
        read = input_length(self.make_batch, rows, columns)
        forward = forward_flops(self.cfg, ATTENTION, read, causal=causal)
        student = 3 * forward.mixing + forward.projections
        return rows * (forward.total + student + 6 * read * params_lib.count(self.spec))

    def evaluate(self, params: ParamTree, frozen: Any, tokens_BS: jax.Array) -> Numbers:
        batch = self.make_batch(tokens_BS)
        tokens = batch.loss_mask_BT.sum()
        output = self.run(params, frozen, batch, mixer=MATCHED)
        return {"loss": self._error(output) * tokens, "tokens": tokens}

    def run(
        self,
        params: ParamTree,
        frozen: Any,
        batch: LMBatch,
        *,
        mixer: Mixer,
        queries: tuple[int, ...] = (),
    ) -> Output:
        """The forward pass with `MATCHED` or `HYBRID`, and S at these queries under the former."""
        weights, attend = self.weights_and_attend(params, frozen, queries)
        return forward(
            weights,
            batch.input_BT,
            self.cfg,
            attend=attend,
            mixer=mixer,
            valid_BT=batch.input_mask_BT,
        )

    def weights_and_attend(
        self, params: ParamTree, frozen: Any, queries: tuple[int, ...] = ()
    ) -> tuple[ParamTree, Fused]:
        """The weights and the attend that `MATCHED` and `HYBRID` need."""
        weights, data = frozen, self._data()
        if self.trains_maps:
            data["matrices"] = params[MAPS]
        else:
            weights = lora.attach(frozen, params[ADAPTERS], self.adapters)
        student: Any = Student(self.row_map, queries)
        return weights, fused(PerLayer(student, data), DENSE)

    @property
    def heads_LN(self) -> np.ndarray:
        """The replaced heads as a mask."""
        mask = np.zeros((self.cfg.num_layers, self.cfg.num_heads), bool)
        mask[tuple(np.transpose(self.replaced))] = True
        return mask

    def _data(self) -> dict[str, Any]:
        bias_LN = np.broadcast_to(np.asarray(self.bias, np.float32), self.heads_LN.shape)
        return {"bias_N": jnp.asarray(bias_LN), "heads_N": jnp.asarray(self.heads_LN)}

    def _error(self, output: Output) -> jax.Array:
        error_LN, energy_LN = (output.aux[name].sum(1) for name in ("error_BN", "energy_BN"))
        ratio_LN = error_LN / jnp.maximum(energy_LN, jnp.finfo(jnp.float32).tiny)
        return jnp.where(self.heads_LN, ratio_LN, 0).sum() / len(self.replaced)


def _identity(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    del key
    return jnp.broadcast_to(jnp.eye(shape[-1], dtype=dtype), shape)
