"""How many prompts of the circuit tasks each model of the pair answers right.

Prompts come from the generators of the training text, with another seed. Those that stand in the
training text as they are, which happens where a task has few different prompts, are left out.
"""

from collections.abc import Sequence
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import BadInputError
from lm_jax.run import stop
from lm_jax.statistics import clustered_bootstrap, wilson
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.weights.load import load_pretrained
from sparse_jax import model as sparse_model
from sparse_jax.circuits.metrics import METRICS
from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.circuits.tasks import Task, make_task
from sparse_jax.model import SPARSE
from sparse_jax.pair.results import ScoredModel, TaskScore, UnscoredTask

# The generators' seed, which no training text has.
_SEED = 2**31


@dataclasses.dataclass(frozen=True)
class ScoredTask:
    """A task under the pair's tokenizer.

    Attributes:
      unseen_B: false for prompts that stand in the training text.
    """

    task: Task
    unseen_B: np.ndarray


def make_tasks(
    names: Sequence[str],
    tokenizer: Tokenizer,
    texts: Sequence[Path],
    *,
    prompts: int,
    context: int,
) -> tuple[list[ScoredTask], tuple[UnscoredTask, ...]]:
    """The tasks that the tokenizer can spell, and the others with the reason.

    Args:
      names: of generators.
      tokenizer: of the pair.
      texts: files of `corpus.write_corpora`.
      prompts: to draw for each task.
      context: positions of the models.
    """
    training_prompts: set[str] = set()
    for file in texts:
        with file.open(encoding="utf-8") as lines:
            rows = (json.loads(line) for line in lines)
            training_prompts.update(*(row.get("prompts", ()) for row in rows))
    tasks, unscored = [], []
    for name in names:
        try:
            task = make_task(name, tokenizer, count=prompts, seed=_SEED, max_length=context)
        except BadInputError as error:
            unscored.append(UnscoredTask(name, str(error)))
            continue
        unseen = [
            not any(each.clean + answer in training_prompts for answer in each.answers)
            for each in task.examples
        ]
        if sum(unseen) < 2:
            unscored.append(UnscoredTask(name, "the training text has all prompts that were drawn"))
            continue
        tasks.append(ScoredTask(task, np.array(unseen)))
    return tasks, tuple(unscored)


def score(
    folder: Path, models: Sequence[ScoredModel], tasks: Sequence[ScoredTask], *, context: int
) -> tuple[TaskScore, ...]:
    """Every model on every task.

    Args:
      folder: work folder of the pair.
      models: dense and sparse.
      tasks: of `make_tasks`.
      context: length to which prompts are padded, so that all of them share a program.

    Raises:
      StoppedError: the command was asked to stop.
    """
    results = []
    for each in models:
        stop.check(f"before the tasks of {each.folder}")
        results += _score(each, _load(folder / each.folder), tasks, context)
    return tuple(results)


def _load(folder: Path) -> CircuitModel:
    load = sparse_model.load if (folder / SPARSE).is_file() else load_pretrained
    return CircuitModel.of(load(folder))


def _score(
    named: ScoredModel, model: CircuitModel, tasks: Sequence[ScoredTask], context: int
) -> list[TaskScore]:
    results = []
    for scored in tasks:
        arrays, manifest = scored.task.arrays, scored.task.manifest
        clean_B, corrupt_B = (
            np.asarray(
                METRICS[manifest.metric](
                    *_logits(model, tokens_BT, arrays.valid_BT, arrays.position_B, context),
                    jax.tree.map(jnp.asarray, arrays.continuations),
                )
            )[scored.unseen_B]
            for tokens_BT in (arrays.clean_BT, arrays.corrupt_BT)
        )
        change_B = clean_B - corrupt_B
        results.append(
            TaskScore(
                task=manifest.name,
                model=named,
                metric=manifest.metric,
                accuracy=wilson(int((clean_B > 0).sum()), len(clean_B)),
                change=clustered_bootstrap(change_B, np.arange(len(change_B)), seed=0),
            )
        )
    return results


def _logits(
    model: CircuitModel,
    tokens_BT: np.ndarray,
    valid_BT: np.ndarray,
    position_B: np.ndarray,
    context: int,
) -> tuple[jax.Array, jax.Array]:
    """Logits `[B, V]` of the continuation and of the token after it."""
    longer = ((0, 0), (0, context - tokens_BT.shape[1]))
    at_B2 = np.stack([position_B, np.minimum(position_B + 1, context - 1)], 1)
    logits_B2V = _forward(
        model, np.pad(tokens_BT, longer), np.pad(valid_BT, longer), jnp.asarray(at_B2)
    )
    return logits_B2V[:, 0], logits_B2V[:, 1]


@jax.jit
def _forward(
    model: CircuitModel, tokens_BT: jax.Array, valid_BT: jax.Array, at_B2: jax.Array
) -> jax.Array:
    return model.forward(tokens_BT, valid_BT, logits_at=at_B2).logits
