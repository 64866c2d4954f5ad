"""Settings of multiple choice."""

import dataclasses
from typing import Annotated, Literal

from lm_jax.evaluate import multiple_choice
from lm_jax.evaluate.multiple_choice import TASKS
from lm_jax.run.settings import READS_MODEL, Reads, at_least
from lm_jax.study import Settings

# What the dense model is called in results.
DENSE = "dense"


@dataclasses.dataclass(frozen=True)
class MultipleChoiceConfig(Settings):
    """Everything that decides the result.

    Attributes:
      dense: a local folder, a .gguf file, or a name of iaj fetch --list, with which all others are
        compared.
      controls: further dense models, as the control of a post-training, with which the sparse ones
        are compared too: what closing edges costs is the change from it.
      sparse: folders that `iaj sparse posttrain` exported, or names such as pair_192_sparse.
      tasks: tasks to answer: arc_easy, piqa, openbookqa (`lm_jax.evaluate.multiple_choice.TASKS`).
      truthfulqa: a file of TruthfulQA, whose MC1 is then a further task.
      limit: the first so many questions of each task; 0 for all.
      batch_tokens: the most tokens in a batch, of which all logits are held at once.
      dtype: dtype of the weights and of the computation.
    """

    dense: Annotated[str, READS_MODEL] = "smollm2"
    controls: Annotated[tuple[str, ...], READS_MODEL] = ()
    sparse: Annotated[tuple[str, ...], READS_MODEL] = ()
    tasks: Annotated[tuple[str, ...], Reads("name", dict.fromkeys(TASKS, ("mc",)))] = tuple(TASKS)
    truthfulqa: str = ""
    limit: Annotated[int, at_least(0)] = 500
    batch_tokens: Annotated[int, at_least(1)] = 1024
    dtype: Literal["float32", "bfloat16"] = "float32"

    def problems(self) -> list[str]:
        problems = multiple_choice.task_problems("config.tasks", self.tasks)
        if not self.tasks and not self.truthfulqa:
            problems.append("config.tasks names no task, and config.truthfulqa no file; give one")
        others = self.controls + self.sparse
        if len(set(others)) < len(others):
            problems.append(
                f"config.controls = {self.controls} and config.sparse = {self.sparse} name a model "
                "twice; name each once"
            )
        problems += [
            f"config.{name} has {DENSE!r}, as the dense model is called; write ./dense"
            for name in ("controls", "sparse")
            if DENSE in getattr(self, name)
        ]
        return problems


def smoke(config: MultipleChoiceConfig) -> MultipleChoiceConfig:
    """Two questions of each task."""
    return dataclasses.replace(config, limit=2)
