"""What a hybrid with trained heads loses on texts and on answers, whatever its heads are."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.model.params import ParamTree
from lm_jax.model.precision import exact_jit
from lm_jax.train.objective import LMBatch, nll
from polyattn_jax.audit.audited_model import AuditedModel
from polyattn_jax.audit.measure import judged
from polyattn_jax.recipes.trained_attention import HYBRID
from polyattn_jax.recipes.trained_heads import ReplacedHeads
from polyattn_jax.suites import Suite, batches


@dataclasses.dataclass(frozen=True)
class Scores:
    """Losses of one hybrid.

    Attributes:
      text: loss on the texts, nats per token.
      answer: loss on the answers, nats per token of an answer, the mean over prompts.
      right: number of prompts that greedy decoding answers.
      prompts: number of prompts.
    """

    text: float
    answer: float
    right: int
    prompts: int


@dataclasses.dataclass(frozen=True)
class Scored:
    """A model with the texts and prompts that its hybrids are measured on."""

    audited: AuditedModel
    texts: Suite
    prompts: Suite

    def measure(self, objective: ReplacedHeads, params: ParamTree, heads_LN: np.ndarray) -> Scores:
        """The losses with the trained recipe in the heads of a mask; with none, of the model.

        Args:
          objective: recipe and adapters; one object for all sets, which then compile once.
          params: what was trained.
          heads_LN: true in the replaced heads.
        """
        audited, size = self.audited, self.audited.config.batch_size
        model, heads = audited.model.params, jnp.asarray(heads_LN)
        loss, tokens = 0.0, 0
        for batch in batches(self.texts, size):
            arrays = audited.put(batch.tokens_BT, batch.lengths_B)
            loss_B = np.asarray(_of_texts(params, model, *arrays, heads, objective=objective))
            loss += loss_B[batch.valid_B].sum(dtype=np.float64)
            tokens += int((batch.lengths_B - 1)[batch.valid_B].sum())
        answer, right = [], []
        for batch in batches(self.prompts, size):
            arrays = audited.put(
                batch.tokens_BT, batch.lengths_B, batch.query_positions_BQ, batch.target_BQ
            )
            found = _of_prompts(params, model, *arrays, heads, objective=objective)
            own = {name: np.asarray(value)[batch.valid_B] for name, value in found.items()}
            answer += own["loss"].astype(np.float64).tolist()
            right += (own["predicted"] == own["target"]).tolist()
        return Scores(float(loss / tokens), float(np.mean(answer)), sum(right), len(right))


def _batch(tokens_BT: jax.Array, lengths_B: jax.Array) -> LMBatch:
    """A batch of whole prompts, of which every token but the first is predicted."""
    positions_1T = jnp.arange(tokens_BT.shape[1])[None, :]
    valid_BT = positions_1T < lengths_B[:, None]
    next_BT = jnp.roll(tokens_BT, -1, axis=1)
    return LMBatch(tokens_BT, valid_BT, next_BT, positions_1T < lengths_B[:, None] - 1)


@functools.partial(exact_jit, static_argnames="objective")
def _of_texts(
    params: Any,
    model: Any,
    tokens_BT: jax.Array,
    lengths_B: jax.Array,
    heads_LN: jax.Array,
    *,
    objective: ReplacedHeads,
) -> jax.Array:
    """The loss of each text, nats, summed over its tokens."""
    batch = _batch(tokens_BT, lengths_B)
    out = objective.run(params, model, batch, mixer=HYBRID, heads_LN=heads_LN)
    return nll(out, model, objective.cfg, batch)


@functools.partial(exact_jit, static_argnames="objective")
def _of_prompts(
    params: Any,
    model: Any,
    tokens_BT: jax.Array,
    lengths_B: jax.Array,
    queries_BQ: jax.Array,
    target_BQ: jax.Array,
    heads_LN: jax.Array,
    *,
    objective: ReplacedHeads,
) -> dict[str, jax.Array]:
    """How each answer is given, as `audit.measure.answers`."""
    batch = _batch(tokens_BT, lengths_B)
    out = objective.run(params, model, batch, mixer=HYBRID, heads_LN=heads_LN, logits_at=queries_BQ)
    return judged(out.logits, target_BQ)
