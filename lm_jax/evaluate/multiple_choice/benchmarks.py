"""The questions of several tasks by name, as the settings of a comparison list them."""

from collections.abc import Sequence

from lm_jax.errors import nearest
from lm_jax.evaluate.multiple_choice.questions import TASKS, Question, read
from lm_jax.evaluate.multiple_choice.truthfulqa import truthfulqa

TRUTHFULQA = "truthfulqa_mc1"


def task_problems(field: str, tasks: Sequence[str]) -> list[str]:
    """A sentence for each fault of a list of tasks; `field` is the name of the setting."""
    problems = [
        f"{field} has {task!r}{nearest(task, TASKS)}" for task in tasks if task not in TASKS
    ]
    if len(set(tasks)) < len(tasks):
        problems.append(f"{field} = {tuple(tasks)} names a task twice; name each once")
    return problems


def read_tasks(
    tasks: Sequence[str], *, truthfulqa_file: str = "", limit: int | None = None
) -> dict[str, list[Question]]:
    """The questions of every task, and of TruthfulQA's MC1 where a file of it is given.

    Args:
      tasks: names of `TASKS`.
      truthfulqa_file: TruthfulQA's file, as `truthfulqa` takes it; empty for none.
      limit: the first so many questions of each task; None for all.

    Raises:
      BadInputError: as from `read` and `truthfulqa`.
    """
    results = {task: read(task, limit=limit) for task in tasks}
    if truthfulqa_file:
        results[TRUTHFULQA] = truthfulqa(truthfulqa_file, limit=limit)
    return results
