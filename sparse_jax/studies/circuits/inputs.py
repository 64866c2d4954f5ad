"""What circuits are found in: models without their weights, and the prompts of tasks."""

from collections.abc import Mapping
import dataclasses
import functools
from pathlib import Path

import jax.numpy as jnp

from lm_jax.assets import published
from lm_jax.errors import BadInputError, UsageError
from lm_jax.run.finished import file_inputs
from lm_jax.run.identity import ModelIdentity
from lm_jax.study import Opened
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.weights.load import OpenedModel, identities, load_pretrained, open_pretrained
from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.circuits.tasks import Task, check_disjoint, load_task, make_task
from sparse_jax.gates import model as sparse_model
from sparse_jax.gates.model import SPARSE
from sparse_jax.studies.circuits.results import ModelFacts
from sparse_jax.studies.circuits.settings import CircuitConfig, is_file, task_name
from sparse_jax.studies.pair.corpus import read_prompts


@dataclasses.dataclass(frozen=True)
class StudyModel:
    """A model whose config and tokenizer are read and whose weights are not."""

    facts: ModelFacts
    opened: OpenedModel
    tokenizer: Tokenizer
    folder: Path | None

    @property
    def identity(self) -> ModelIdentity:
        """The identity of the model with its gates, if it has any."""
        if self.folder is None:
            return self.opened.identity
        return sparse_model.open_identity(self.folder)

    def load(self, dtype: str) -> CircuitModel:
        """The model with its weights."""
        kind = jnp.dtype(dtype)
        if self.folder is None:
            return CircuitModel.of(load_pretrained(self.facts.source, dtype=kind))
        return CircuitModel.of(sparse_model.load(self.folder, dtype=kind))


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Everything that the study reads.

    Attributes:
      models: models by role.
      tasks: tasks by name, the same prompts for all models.
    """

    models: Mapping[str, StudyModel]
    tasks: Mapping[str, Task]


def open_inputs(config: CircuitConfig) -> Opened:
    """The models by role and the files of tasks, without loading weights.

    Raises:
      BadInputError: a model cannot be used.
    """
    models = {}
    for role, source in config.models.items():
        models |= identities({role: source}, functools.partial(_identity, role))
    files = [source for source in config.task_sources if is_file(source)]
    digests = file_inputs({f"file {source}": source for source in (*files, *config.trained_on)})
    return Opened(models | digests, load=functools.partial(read, config))


def _identity(role: str, source: str) -> ModelIdentity:
    return open_model(role, source).identity


def read(config: CircuitConfig) -> Inputs:
    """Opens the models, and reads or makes the prompts of all tasks.

    Raises:
      UsageError, BadInputError: as `open_model` and `read_tasks`.
    """
    models = {role: open_model(role, source) for role, source in config.models.items()}
    return Inputs(models, read_tasks(config, models))


def open_model(role: str, source: str) -> StudyModel:
    """Reads what is needed of a model before its weights.

    Args:
      role: dense, control or sparse.
      source: what `lm_jax.load_pretrained` takes, or the folder of a sparse model, or one with such
        a folder called `model` (a run of post-training).

    Raises:
      BadInputError: it is something else, or has no tokenizer.
    """
    place = published.resolve_model(source)
    folder = next((each for each in (place, place / "model") if (each / SPARSE).is_file()), None)
    try:
        named = source if folder is None else folder
        opened = open_pretrained(named, without_gates=folder is not None)
    except BadInputError as error:
        raise BadInputError(
            f"--{role}={source}: {error}; it takes a Hugging Face folder, a .gguf file, a folder "
            "made by iaj convert, a name of iaj fetch --list, or the exported folder of "
            "iaj sparse posttrain"
        ) from error
    if opened.tokenizer is None:
        raise BadInputError(
            f"--{role}={source} has no tokenizer; put its tokenizer.json beside the weights"
        )
    if role == "sparse" and folder is None:
        raise BadInputError(
            f"--sparse={source} has no {SPARSE}, so it is no sparse model; give the folder that "
            "iaj sparse posttrain exported"
        )
    if folder is not None:
        sparse_model.read_note(folder)
    facts = ModelFacts(
        role=role,
        source=source,
        sha256=opened.identity.weights,
        family=opened.cfg.family,
        layers=opened.cfg.num_layers,
        heads=opened.cfg.num_heads,
        gated=folder is not None,
    )
    return StudyModel(facts, opened, opened.tokenizer, folder)


def read_tasks(config: CircuitConfig, models: Mapping[str, StudyModel]) -> dict[str, Task]:
    """All tasks by name, the same prompts for all models.

    Raises:
      UsageError: models have different tokenizers, or `config.shown` is no prompt.
      BadInputError: a task cannot be made or read (`tasks.make_task`, `tasks.load_task`,
        `read_prompts`).
    """
    digests = {model.tokenizer.sha256 for model in models.values()}
    if len(digests) > 1:
        raise UsageError(
            f"{' and '.join(f'--{role}' for role in models)} have different tokenizers, so that "
            "their prompts and edges cannot be compared; give models of one tokenizer"
        )
    tokenizer = next(iter(models.values())).tokenizer
    longest = min(model.opened.cfg.max_length for model in models.values())
    trained_on = read_prompts(map(Path, config.trained_on))
    results: dict[str, Task] = {}
    for source in config.task_sources:
        if is_file(source):
            metric = {"metric": config.metric} if config.metric else {}
            task = load_task(source, tokenizer, max_length=longest, **metric)
        else:
            task = make_task(
                source,
                tokenizer,
                count=config.count,
                seed=config.seed,
                metric=config.metric or None,
                trained_on=trained_on,
                max_length=longest,
            )
        if task.prompt_B.max() == 0:
            held = "one example" if len(task.examples) == 1 else "one clean prompt"
            raise BadInputError(f"{source}: {held}; intervals need two or more prompts")
        if config.shown >= len(task.examples):
            raise UsageError(
                f"config.shown = {config.shown}, and {source} has {len(task.examples)} prompts, "
                "counted from 0; give a smaller number"
            )
        results[task_name(source)] = task
    for old, new in config.rephrasings.items():
        check_disjoint(results[task_name(old)], results[task_name(new)])
    return results
