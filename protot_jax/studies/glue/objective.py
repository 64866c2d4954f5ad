"""Classification and regression of whole texts, as an objective of the shared training loop.

Prototype Transformer, appendix A.4: the last hidden states of the pretrained decoder, then

    x_D      = pool(hidden_TD)                over the positions of the text
    logits_Y = dropout(x_D) w_DY + bias_Y     Y outputs of the head

with the cross entropy of Y classes, or for a score (Y = 1) the squared error. All weights are
trained. Rows are those of `encoding`: ids, then the target.

The paper does not say what is pooled. The released code takes the mean over all positions, those of
padding too, which then depends on how long the row was made; `POOLINGS` has that as "released".
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lm_jax.errors import UsageError
from lm_jax.model.config import DecoderConfig
from lm_jax.model.decoder import forward, param_spec
from lm_jax.model.flops import Causal, forward_flops
from lm_jax.model.layers import Dropout
from lm_jax.model.mixers import Mixer
from lm_jax.model.params import ParamSpec, ParamTree, zeros
from lm_jax.run.config import to_plain
from lm_jax.train import optim
from lm_jax.train.objective import (
    PAD,
    Numbers,
    Stateless,
    cast_params,
    dtype_problems,
    is_cast,
    mixer_metadata,
)
from protot_jax.studies.glue import metrics

MODEL, HEAD = "model", "head"
PoolingName = Literal["mean", "last", "released"]


class Pooling(NamedTuple):
    """How positions become one vector: a function, and whether padding is hidden from the model."""

    pool: Callable[[jax.Array, jax.Array], jax.Array]
    hides_padding: bool


def mean_pool(hidden_BTD: jax.Array, held_BT: jax.Array) -> jax.Array:
    """The mean over the positions that are not padding, `[B, D]`."""
    weight_BT = held_BT / jnp.maximum(held_BT.sum(1, keepdims=True), 1)
    return jnp.einsum("BT,BTD->BD", weight_BT.astype(hidden_BTD.dtype), hidden_BTD)


def last_pool(hidden_BTD: jax.Array, held_BT: jax.Array) -> jax.Array:
    """The last position that is not padding, `[B, D]`."""
    last_B11 = jnp.maximum(held_BT.sum(1) - 1, 0)[:, None, None]
    return jnp.take_along_axis(hidden_BTD, last_B11, axis=1)[:, 0]


def _mean_of_all(hidden_BTD: jax.Array, held_BT: jax.Array) -> jax.Array:
    del held_BT
    return hidden_BTD.mean(1)


POOLINGS: Mapping[PoolingName, Pooling] = {
    "mean": Pooling(mean_pool, True),
    "last": Pooling(last_pool, True),
    "released": Pooling(_mean_of_all, False),
}


class TextBatch(NamedTuple):
    """Ids and targets of a batch; `held` is false at padding, in a row of padding everywhere.

    `class_B` is int32 and `score_B` the same 32 bits as a float: the objective's kind of target
    says which is meant.
    """

    input_BT: jax.Array
    held_BT: jax.Array
    class_B: jax.Array
    score_B: jax.Array

    @property
    def weight_B(self) -> jax.Array:
        """1 for an example, 0 for a row of padding."""
        return self.held_BT[:, 0].astype(jnp.float32)


def text_batch(rows_BS: jax.Array) -> TextBatch:
    """Ids and targets of encoded rows."""
    input_BT, target_B = rows_BS[:, :-1], rows_BS[:, -1]
    score_B = jax.lax.bitcast_convert_type(target_B, jnp.float32)
    return TextBatch(input_BT, input_BT != PAD, target_B, score_B)


@dataclasses.dataclass(frozen=True)
class TextPrediction(Stateless):
    """The mean loss of the head's outputs over examples.

    `loss` is per example: nats for classes, the squared error of the standardised score for one
    output. A step counts tokens that are read, an evaluation counts examples.

    Attributes:
      cfg, mixer: the pretrained model.
      outputs: the number of classes; 1 for a score.
      pooling: a name of `POOLINGS`.
      dtype: dtype of the model's computation; the head is float32.
      head_dropout: rate of dropout before the head.
      casts: the model's parameters that are cast to `dtype`.

    Raises:
      UsageError: for an unsupported dtype or dropout.
    """

    cfg: DecoderConfig
    mixer: Mixer
    outputs: int
    pooling: PoolingName = "mean"
    dtype: str = "float32"
    head_dropout: float = 0.1
    casts: optim.Choice = is_cast

    def __post_init__(self) -> None:
        problems = dtype_problems(self.dtype)
        if not 0 <= self.head_dropout < 1:
            problems.append(f"head_dropout = {self.head_dropout} must be at least 0 and below 1")
        if problems:
            raise UsageError("; ".join(problems))

    @property
    def head_spec(self) -> dict[str, ParamSpec]:
        """The declaration of the head, which starts at N(0, 0.02)."""
        return {
            "w": ParamSpec((self.cfg.hidden_size, self.outputs), "DY"),
            "bias": zeros((self.outputs,), "Y"),
        }

    @property
    def spec(self) -> ParamTree:
        return {MODEL: param_spec(self.cfg, self.mixer), HEAD: self.head_spec}

    def metadata(self) -> dict[str, Any]:
        own = {
            "outputs": self.outputs,
            "pooling": self.pooling,
            "dtype": self.dtype,
            "head_dropout": self.head_dropout,
        }
        return {
            "model": to_plain(self.cfg),
            "mixer": mixer_metadata(self.mixer),
            "text_prediction": own,
        }

    def normalizers(self, tokens_BS: jax.Array) -> Numbers:
        batch = text_batch(tokens_BS)
        return {
            "tokens": jnp.maximum(jnp.sum(batch.held_BT), 1),
            "examples": jnp.maximum(jnp.sum(batch.weight_B), 1),
        }

    def predict(
        self, params: ParamTree, rows_BS: jax.Array, rng: jax.Array | None = None
    ) -> jax.Array:
        """The outputs of the head, float32 `[B, Y]`: logits of classes, or standardised scores.

        Args:
          params: parameters, as `spec` declares them.
          rows_BS: encoded rows, whose targets are not read.
          rng: key of the head's dropout; None drops nothing.
        """
        batch = text_batch(rows_BS)
        pool, hides_padding = POOLINGS[self.pooling]
        model = cast_params(params[MODEL], param_spec(self.cfg, self.mixer), self.dtype, self.casts)
        output = forward(
            model,
            batch.input_BT,
            self.cfg,
            mixer=self.mixer,
            valid_BT=batch.held_BT if hides_padding else None,
        )
        x_BD = pool(output.hidden, batch.held_BT).astype(jnp.float32)
        x_BD = Dropout(self.head_dropout, rng)(x_BD, HEAD)
        head = params[HEAD]
        return jnp.einsum("BD,DY->BY", x_BD, head["w"]) + head["bias"][None]

    def _losses(self, logits_BY: jax.Array, batch: TextBatch) -> jax.Array:
        if self.outputs == 1:
            loss_B = jnp.square(logits_BY[:, 0] - batch.score_B)
        else:
            loss_B = optax.softmax_cross_entropy_with_integer_labels(logits_BY, batch.class_B)
        return jnp.where(batch.weight_B > 0, loss_B, 0.0)

    def loss_terms(
        self,
        params: ParamTree,
        frozen: Any,
        aux_state: Any,
        tokens_BS: jax.Array,
        normalizers: Numbers,
        rng: jax.Array,
    ) -> tuple[jax.Array, Numbers]:
        del frozen, aux_state
        loss_B = self._losses(self.predict(params, tokens_BS, rng), text_batch(tokens_BS))
        loss = loss_B.sum() / normalizers["examples"]
        return loss, {"loss": loss}

    def flops(self, rows: int, columns: int, causal: Causal) -> int:
        model = forward_flops(self.cfg, self.mixer, columns - 1, causal=causal)
        head = 2 * self.cfg.hidden_size * self.outputs
        # The gradient of a product is two products; the unembedding is not computed.
        return 3 * rows * (model.total - model.logits + head)

    def evaluate(self, params: ParamTree, frozen: Any, tokens_BS: jax.Array) -> Numbers:
        del frozen
        batch = text_batch(tokens_BS)
        logits_BY = self.predict(params, tokens_BS)
        weight_B = batch.weight_B
        sums = {
            "loss": self._losses(logits_BY, batch).sum(),
            "tokens": weight_B.sum().astype(jnp.int32),
        }
        if self.outputs == 1:
            score_B = jnp.where(weight_B > 0, batch.score_B, 0.0)
            sums[metrics.MOMENTS] = metrics.moments_of(logits_BY[:, 0], score_B, weight_B)
        else:
            sums[metrics.COUNTS] = metrics.counts_of(
                logits_BY.argmax(1), batch.class_B, weight_B, self.outputs
            )
        return sums
