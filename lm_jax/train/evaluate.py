"""Perplexity over a split, in two means that are often mixed up.

exp of the mean loss per token is the perplexity of the text. exp of the mean over batches of each
batch's mean loss weights a token of a short batch more; the code released with Prototype
Transformer reports that one. Both are returned, with the number of tokens behind them.
"""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any, Protocol

import jax
from jax.sharding import Mesh
import numpy as np

from lm_jax.errors import BadInputError
from lm_jax.model.params import ParamTree
from lm_jax.parallel import sharding
from lm_jax.run import processes, stop
from lm_jax.train.step import EvalStep


class Batches(Protocol):
    """Batches as a function of their number alone, so that a run can resume anywhere.

    `at(k)` returns host arrays: `tokens`, int32 `[B, context + 1]`, 0 at padding, and `document`,
    int64 `[B]`. `fingerprint` identifies the data and their order.
    """

    fingerprint: str
    per_epoch: int

    def at(self, k: int) -> dict[str, np.ndarray]:
        """Batch k = 0, 1, ... of all epochs."""
        ...


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Mean losses in nats: per token, and over batches; and the number of predicted tokens.

    `sums` holds the objective's other counts over all batches, by name.
    """

    loss: float
    batch_mean_loss: float
    tokens: int
    sums: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """exp of the loss per token; inf where that overflows."""
        return _exp(self.loss)

    @property
    def batch_mean_perplexity(self) -> float:
        """exp of the mean of batch means, as the released code reports."""
        return _exp(self.batch_mean_loss)


def _exp(loss: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp(loss))


def evaluate(
    step: EvalStep,
    params: ParamTree,
    batches: Batches,
    mesh: Mesh,
    *,
    frozen: Any = (),
    stoppable: bool = False,
) -> Evaluation:
    """Runs `step` (`make_eval_step`) over one epoch of `batches`.

    Args:
      step: function that computes the sums of a batch.
      params: the parameters to evaluate.
      batches: the batches to evaluate on.
      mesh: the devices.
      frozen: the objective's parameters that are not trained, on the mesh.
      stoppable: whether to end at a request to stop; for a pass that has nothing to save. Processes
        share their requests after every batch.

    Raises:
      BadInputError: if there is no token to predict.
      StoppedError: a stop was requested, if `stoppable`.
    """
    sums_of_batches: list[Any] = []
    for k in range(batches.per_epoch):
        sums_of_batches.append(
            step(params, frozen, sharding.shard_batch(mesh, batches.at(k)["tokens"]))
        )
        if stoppable:
            # Otherwise dispatched batches would still run after the request.
            jax.block_until_ready(sums_of_batches[-1])
            stop_between(k + 1, batches.per_epoch)
    losses = [(float(each["loss"]), int(each["tokens"])) for each in sums_of_batches]
    counted = [(total, count) for total, count in losses if count]
    if not counted:
        raise BadInputError("the split holds no token to predict; give it longer documents")
    tokens = sum(count for _, count in counted)
    further = sums_of_batches[0].keys() - {"loss", "tokens"}
    return Evaluation(
        loss=math.fsum(total for total, _ in counted) / tokens,
        batch_mean_loss=math.fsum(total / count for total, count in counted) / len(counted),
        tokens=tokens,
        # 32 bits may not hold a count over all batches, and 24 of a float may not hold one exactly.
        sums={
            name: np.sum([_wide(each[name]) for each in sums_of_batches], axis=0)
            for name in sorted(further)
        },
    )


def stop_between(done: int, total: int) -> None:
    """Ends an evaluation after `done` of `total` batches, if any process was asked to stop.

    Raises:
      StoppedError: it was. Every process must call this.
    """
    if done < total and processes.share_stop():
        stop.check(f"after batch {done} of {total} of an evaluation")


def _wide(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.astype(np.int64 if np.issubdtype(x.dtype, np.integer) else np.float64)
