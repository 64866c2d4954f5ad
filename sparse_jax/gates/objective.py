"""The objective of sparse post-training: few open edges at a bounded loss.

Sparse Attention Post-Training, Eq. 4, 5 and 7 and section 3.3, as an objective of the shared
training loop (`lm_jax.train.objective`):

    CE + s sum_l E|A_l| + w T^2 KL(dense || sparse)

CE is the mean over tokens, E|A_l| the expected share of open edges among the visible pairs of layer
l, over all its heads, and s the strength, which `geco` adapts so that CE stays at its target. All
weights are trained, or adapters over frozen ones (`lm_jax.model.lora`); the teacher of the
divergence is the initial model with its dense attention.

With the constraint "divergence" it is that which is bounded, in place of the loss,

    KL(dense || sparse) + s sum_l E|A_l|

On text sampled from the dense model the expected loss of the sparse model minus that of the dense
one is this divergence, which a forward pass gives exactly for every token. The loss of a batch
varies far more than the slack of its bound, and can be lowered by learning the text.
"""

import dataclasses
import functools
import hashlib
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import UsageError
from lm_jax.model import lora
from lm_jax.model import params as params_lib
from lm_jax.model.config import DecoderConfig
from lm_jax.model.decoder import Output, forward, param_spec
from lm_jax.model.flops import Causal, forward_flops
from lm_jax.model.mixers import ATTENTION, AttentionMixer
from lm_jax.model.params import ParamTree, constant
from lm_jax.run.config import LATER, stored_fields, to_plain
from lm_jax.train import losses
from lm_jax.train.objective import (
    LMBatch,
    MakeBatch,
    Numbers,
    cast_params,
    dtype_problems,
    ignore_index_batch,
    input_length,
    mixer_metadata,
    nll,
)
from sparse_jax.gates import geco
from sparse_jax.gates.attend import by_kernels, gated
from sparse_jax.gates.geco import Dual, GecoConfig

WEIGHTS, GATE_BIAS = "weights", "gate_bias"
Constraint = Literal["loss", "divergence"]


@dataclasses.dataclass(frozen=True)
class Sparsifying:
    """Few open edges at a bounded loss.

    Trained parameters are `{"weights": ...}`, adapters or all weights, and with `learn_bias` also
    `"gate_bias"` [L, N]. `frozen` is the dense model where there are adapters or a teacher, and
    () otherwise. A step reports `edges`, the expected share of open edges (the mean over layers);
    `divergence`, in nats per token; and `strength`, the s of that step. An evaluation, in which
    gates are open where their logit is above 0, counts `open_edges` [L, N] and the `pairs` [L] of
    one head.

    Attributes:
      cfg: the model.
      dual: the target and the update rule of the strength.
      adapters: the weights to adapt; None trains all.
      bias: the bias of the gate logits; with `learn_bias`, its initial value.
      learn_bias: whether to train one bias per layer and head.
      raw_gate: Eq. 1 as printed (`attend.gated`).
      renormalise: an ablation of Eq. 2 (`attend.gated`).
      distill: weight w of the divergence from the dense model; 0 leaves the teacher out.
      temperature: T of both distributions in the divergence.
      reference: nats per token that `dual.target` is above, by update: losses that another model
        had on its batch, or what a relaxed bound allows; () where the target is the bound.
      rule_from: updates after which gates open by rule in training too, as in evaluation, with a
        straight-through gradient; None samples them to the end.
      dtype: dtype of the computation.
      remat: whether to keep only the residual stream of each layer for the backward pass.
      loss_share: share of the positions, drawn anew for each update and the same in all rows, whose
        loss and divergence enter it. They stand for all: the sums are divided by the share. Logits
        take most of the time of a small model with a large vocabulary.
      constraint: what the target bounds: "loss", or "divergence", which is then minimised in place
        of the loss and needs `distill` and `temperature` of 1. An evaluation then has the sum of
        `divergence` too.
      make_batch: function from rows of ids to inputs, targets and masks.
      mixer: causal or bidirectional attention.

    Raises:
      UsageError: `distill`, `temperature`, `constraint`, `loss_share` or `dtype` is out of range.
    """

    cfg: DecoderConfig
    dual: GecoConfig
    adapters: lora.LoraConfig | None = None
    bias: float = 0.0
    learn_bias: bool = False
    raw_gate: bool = False
    renormalise: bool = False
    distill: float = 1.0
    temperature: float = 1.0
    reference: tuple[float, ...] = ()
    rule_from: int | None = None
    dtype: str = "float32"
    remat: bool = False
    make_batch: MakeBatch = ignore_index_batch
    mixer: AttentionMixer = ATTENTION
    constraint: Constraint = dataclasses.field(default="loss", metadata=LATER)
    loss_share: float = dataclasses.field(default=1.0, metadata=LATER)

    def __post_init__(self) -> None:
        problems = []
        if self.distill < 0:
            problems.append(f"distill = {self.distill} must be at least 0")
        if self.temperature <= 0:
            problems.append(f"temperature = {self.temperature} must be above 0")
        if self.constraint not in get_args(Constraint):
            problems.append(f"constraint = {self.constraint!r} must be 'loss' or 'divergence'")
        if self.on_divergence and (self.distill, self.temperature) != (1, 1):
            problems.append("constraint = 'divergence' needs distill = 1 and temperature = 1")
        if not 0 < self.loss_share <= 1:
            problems.append(f"loss_share = {self.loss_share} must be above 0 and at most 1")
        problems += dtype_problems(self.dtype)
        if problems:
            raise UsageError("; ".join(problems))

    @property
    def on_divergence(self) -> bool:
        """Whether the divergence is minimised and bounded, and not the loss."""
        return self.constraint == "divergence"

    @property
    def columns(self) -> tuple[str, ...]:
        return "edges", "divergence", "strength"

    @property
    def spec(self) -> ParamTree:
        weights = param_spec(self.cfg)
        if self.adapters is not None:
            weights = lora.adapter_spec(weights, self.adapters)
        spec: dict[str, Any] = {WEIGHTS: weights}
        if self.learn_bias:
            shape = (self.cfg.num_layers, self.cfg.num_heads)
            spec[GATE_BIAS] = constant(self.bias, shape, "LN")
        return spec

    def metadata(self) -> dict[str, Any]:
        fields = stored_fields(self)
        fields["make_batch"] = self.make_batch.__qualname__
        # Runs from before there was another mixer have no such entry.
        if fields.pop("mixer") != ATTENTION:
            fields["mixer"] = mixer_metadata(self.mixer)
        fields["reference"] = hashlib.sha256(np.array(self.reference, "<f4").tobytes()).hexdigest()
        return to_plain({"sparsifying": fields})

    def init_state(self) -> Dual:
        return geco.init(self.dual, self.reference)

    def normalizers(self, tokens_BS: jax.Array) -> Numbers:
        batch = self.make_batch(tokens_BS)
        return {
            "tokens": jnp.maximum(jnp.sum(batch.loss_mask_BT), 1),
            "pairs": jnp.maximum(self._pairs_L(batch.input_mask_BT), 1),
        }

    def _pairs_L(self, input_mask_BT: jax.Array) -> jax.Array:
        """Visible pairs of a query and a key, by layer; padding is at the end of a row.

        In float32: 64 rows of 2,048 tokens have more in 32 heads than int32 can count.
        """
        if not self.mixer.causal:
            length_B = input_mask_BT.sum(1, dtype=jnp.float32)
            return jnp.full(self.cfg.num_layers, length_B @ length_B)
        # Query t sees t + 1 keys, or those of its window.
        T = input_mask_BT.shape[1]
        window_L1 = np.array([w or T for w in self.cfg.layer_windows])[:, None]
        visible_LT = jnp.asarray(np.minimum(np.arange(1, T + 1), window_L1), jnp.float32)
        return jnp.dot(visible_LT, input_mask_BT.sum(0, dtype=jnp.float32), precision="highest")

    def loss_terms(
        self,
        params: ParamTree,
        frozen: Any,
        aux_state: Dual,
        tokens_BS: jax.Array,
        normalizers: Numbers,
        rng: jax.Array,
    ) -> tuple[jax.Array, Numbers]:
        batch = self.make_batch(tokens_BS)

        def terms(
            params: ParamTree, mode: str, key: jax.Array | None = None
        ) -> tuple[losses.Sums, jax.Array]:
            output = self.run(params, frozen, batch, mode=mode, key=key)
            edges_L = output.aux["expected_edges_BN"].sum((1, 2))
            return self._sums(output, params, frozen, batch, rng), edges_L

        sampled = functools.partial(terms, mode="sample", key=rng)
        if self.rule_from is None:
            sums, edges_L = sampled(params)
        else:
            by_rule = functools.partial(terms, mode="threshold")
            late = aux_state.updates >= self.rule_from
            sums, edges_L = jax.lax.cond(late, by_rule, sampled, params)
        loss, divergence = (
            sums.loss / normalizers["tokens"],
            sums.divergence / normalizers["tokens"],
        )
        share_L = edges_L / (normalizers["pairs"] * self.cfg.num_heads)
        minimised = geco.lagrangian(
            sums.minimised / normalizers["tokens"], share_L.sum(), aux_state
        )
        metrics = {"loss": loss, "edges": share_L.mean(), "divergence": divergence}
        return minimised, metrics

    def update(self, aux_state: Dual, metrics: Numbers) -> tuple[Dual, Numbers]:
        bounded = metrics["divergence" if self.on_divergence else "loss"]
        after = geco.update(aux_state, bounded, self.dual)
        return after, {"strength": aux_state.strength}

    def flops(self, rows: int, columns: int, causal: Causal) -> int:
        read = input_length(self.make_batch, rows, columns)
        forward = forward_flops(self.cfg, self.mixer, read, causal=causal)
        teacher = forward.total * bool(self.distill)
        # Of logits: forward and backward, and the teacher's.
        left_out = round((1 - self.loss_share) * forward.logits)
        teacher -= left_out * bool(self.distill)
        if self.adapters is None:
            return rows * (3 * (forward.total - left_out) + teacher)
        # Frozen weights need no gradient; every adapter adds its own products.
        adapted = 6 * read * params_lib.count(self.spec[WEIGHTS])
        weights = forward.weights - left_out
        return rows * (2 * weights + 3 * forward.mixing + adapted + teacher)

    def evaluate(self, params: ParamTree, frozen: Any, tokens_BS: jax.Array) -> Numbers:
        batch = self.make_batch(tokens_BS)
        output = self.run(params, frozen, batch, mode="threshold")
        weights = self._weights(params, frozen)
        more = {}
        if self.on_divergence:
            model = losses.Predictor(output.hidden, weights)
            kl_BT = losses.token_divergence(model, self._teacher(frozen, batch), self.cfg)
            more["divergence"] = jnp.sum(jnp.where(batch.loss_mask_BT, kl_BT, 0.0))
        return more | {
            "loss": nll(output, weights, self.cfg, batch).sum(),
            "tokens": batch.loss_mask_BT.sum(),
            "open_edges": output.aux["open_edges_BN"].sum(1, dtype=jnp.float32),
            "pairs": output.aux["pairs_B"].sum(1, dtype=jnp.float32),
        }

    def run(
        self,
        params: ParamTree,
        frozen: Any,
        batch: LMBatch,
        *,
        mode: str,
        key: jax.Array | None = None,
        **forwarded: Any,
    ) -> Output:
        """The forward pass of the gated model, in the dtype of the computation.

        Args:
          params: trained parameters, as in `spec`.
          frozen: the dense model, or ().
          batch: the model inputs.
          mode: mode of the gates (`attend.gated`).
          key: random key of the gate noise in mode "sample".
          **forwarded: further arguments of `forward`; those that record or edit scores need the
            unfused `attend.gated` instead of this method.
        """
        weights = self._weights(params, frozen)
        attend = gated(
            self.cfg,
            mode=mode,
            key=key,
            bias=params.get(GATE_BIAS, self.bias),
            valid_BT=batch.input_mask_BT,
            raw_gate=self.raw_gate,
            renormalise=self.renormalise,
        )
        return forward(
            weights,
            batch.input_BT,
            self.cfg,
            attend=by_kernels(attend),
            mixer=self.mixer,
            valid_BT=batch.input_mask_BT,
            remat=self.remat,
            **forwarded,
        )

    def _weights(self, params: ParamTree, frozen: Any) -> Any:
        """Weights of the gated model, in the dtype of the computation."""
        if self.adapters is None:
            return self._low(params[WEIGHTS])
        low = jax.tree.map(lambda x: x.astype(self.dtype), params[WEIGHTS])
        return lora.attach(self._low(frozen), low, self.adapters)

    def _sums(
        self, output: Output, params: ParamTree, frozen: Any, batch: LMBatch, rng: jax.Array
    ) -> losses.Sums:
        """Sums of losses over the tokens of `batch`, or estimates by the share of them drawn."""
        teacher = self._teacher(frozen, batch) if self.distill else None
        model = losses.Predictor(output.hidden, self._weights(params, frozen))
        target_BC, loss_mask_BC = batch.target_BT, batch.loss_mask_BT
        T = target_BC.shape[1]
        drawn = max(round(self.loss_share * T), 1)
        if drawn < T:
            at_C = jax.random.permutation(jax.random.fold_in(rng, 1), T)[:drawn]
            model = model._replace(hidden_BTD=model.hidden_BTD[:, at_C])
            if teacher is not None:
                teacher = teacher._replace(hidden_BTD=teacher.hidden_BTD[:, at_C])
            target_BC, loss_mask_BC = target_BC[:, at_C], loss_mask_BC[:, at_C]
        sums = losses.summed(
            model,
            target_BC,
            loss_mask_BC,
            self.cfg,
            teacher=teacher,
            distill=self.distill,
            temperature=self.temperature,
            likelihood=0.0 if self.on_divergence else 1.0,
        )
        return sums if drawn == T else jax.tree.map(lambda x: x * (T / drawn), sums)

    def _teacher(self, frozen: Any, batch: LMBatch) -> losses.Predictor:
        """The dense model on `batch`."""
        dense = self._low(frozen)
        output = forward(
            dense, batch.input_BT, self.cfg, mixer=self.mixer, valid_BT=batch.input_mask_BT
        )
        return losses.Predictor(output.hidden, dense)

    def _low(self, weights: ParamTree) -> dict[str, Any]:
        return cast_params(weights, _weights_spec(self.cfg), self.dtype)


@functools.lru_cache(maxsize=8)
def _weights_spec(cfg: DecoderConfig) -> ParamTree:
    return param_spec(cfg)
