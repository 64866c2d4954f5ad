"""How many prompts of the circuit tasks each model of the pair answers right.

Prompts come from the generators of the training text, with another seed. Those that stand in the
training text as they are, which happens where a task has few different prompts, are left out, and
others drawn in their place.
"""

from collections.abc import Sequence, Set
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import BadInputError
from lm_jax.model.precision import exact_jit
from lm_jax.run import processes, stop
from lm_jax.statistics import cluster_interval, wilson
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.weights.load import load_pretrained
from sparse_jax.circuits.metrics import METRICS, answers_right
from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.circuits.tasks import Task, make_task
from sparse_jax.gates import model as sparse_model
from sparse_jax.gates.model import SPARSE
from sparse_jax.studies.pair.results import ScoredModel, TaskScore, UnscoredTask

# The generators' seed, which no training text has.
_SEED = 2**31


def make_tasks(
    names: Sequence[str],
    tokenizer: Tokenizer,
    trained_on: Set[str],
    *,
    prompts: int,
    context: int,
) -> tuple[list[Task], tuple[UnscoredTask, ...]]:
    """The tasks that have unseen prompts for the tokenizer, and the others with the reason.

    Args:
      names: names of generators.
      tokenizer: tokenizer of the pair.
      trained_on: prompts of the training text (`corpus.read_prompts`).
      prompts: number of prompts of each task.
      context: positions of the models.
    """
    tasks, unscored = [], []
    for name in names:
        try:
            task = make_task(
                name,
                tokenizer,
                count=prompts,
                seed=_SEED,
                trained_on=trained_on,
                max_length=context,
            )
        except BadInputError as error:
            unscored.append(UnscoredTask(name, str(error)))
        else:
            tasks.append(task)
    return tasks, tuple(unscored)


def score(
    folder: Path, models: Sequence[ScoredModel], tasks: Sequence[Task], *, context: int
) -> tuple[TaskScore, ...]:
    """Every model on every task.

    Args:
      folder: work folder of the pair.
      models: dense and sparse.
      tasks: tasks that `make_tasks` returned.
      context: length to which prompts are padded, so that all of them share a program.

    Raises:
      StoppedError: the command was asked to stop.
    """
    results = []
    for each in models:
        if processes.share_stop():
            stop.check(f"before the tasks of {each.folder}")
        results += _score(each, _load(folder / each.folder), tasks, context)
    return tuple(results)


def _load(folder: Path) -> CircuitModel:
    load = sparse_model.load if (folder / SPARSE).is_file() else load_pretrained
    return CircuitModel.of(load(folder))


def _score(
    named: ScoredModel, model: CircuitModel, tasks: Sequence[Task], context: int
) -> list[TaskScore]:
    results = []
    for task in tasks:
        arrays, manifest = task.arrays, task.manifest
        continuations = jax.tree.map(jnp.asarray, arrays.continuations)
        clean, corrupt = (
            _logits(model, tokens_BT, arrays.valid_BT, arrays.position_B, context)
            for tokens_BT in (arrays.clean_BT, arrays.corrupt_BT)
        )
        value = METRICS[manifest.metric]
        change_B = np.asarray(value(*clean, continuations) - value(*corrupt, continuations))
        right_B = np.asarray(answers_right(manifest.metric, *clean, continuations))
        results.append(
            TaskScore(
                task=manifest.name,
                model=named,
                metric=manifest.metric,
                accuracy=wilson(int(right_B.sum()), len(right_B)),
                change=cluster_interval(change_B, np.arange(len(change_B)), seed=0),
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


@exact_jit
def _forward(
    model: CircuitModel, tokens_BT: jax.Array, valid_BT: jax.Array, at_B2: jax.Array
) -> jax.Array:
    return model.forward(tokens_BT, valid_BT, logits_at=at_B2).logits
