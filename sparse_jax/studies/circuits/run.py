"""Measures every model on every task.

Besides what every study has, the work folder holds

    rows.parquet     metrics, effects and curves by prompt (`measurements`)
    attributions/    attributions of all edges, from which these are ranked
    mib/             scores of component edges in MIB's format, by task and model (`mib`)
    drawn/           patterns and edges of one prompt, by task and model (`results.DrawnPrompt`)
"""

import collections
from collections.abc import Mapping
import dataclasses
import itertools
from pathlib import Path

import jax
import pyarrow as pa

from lm_jax.run.config import config_hash, to_plain
from lm_jax.run.files import make_folder, write_json
from lm_jax.run.rows import RowStore, Unit
from lm_jax.run.units import measure_units
from lm_jax.study import Work
from lm_jax.weights import hub
from sparse_jax.circuits.component_graph import ComponentGraph
from sparse_jax.circuits.mib import save_graph
from sparse_jax.circuits.runs import Batch, CircuitModel
from sparse_jax.circuits.tasks import Task
from sparse_jax.studies.circuits import numbers
from sparse_jax.studies.circuits.inputs import Inputs
from sparse_jax.studies.circuits.measurements import SCHEMA, head_importance, select
from sparse_jax.studies.circuits.parts import (
    ATTRIBUTION,
    ATTRIBUTIONS,
    FIGURES,
    VALUES,
    Part,
    plan,
)
from sparse_jax.studies.circuits.piece import Measurement, SourceCircuit
from sparse_jax.studies.circuits.results import CircuitSummary, TaskFacts, drawn_file
from sparse_jax.studies.circuits.settings import CircuitConfig, task_name

ROWS, MIB = "rows", "mib"
# Of rows, whose meaning may change with the program; those of places have estimates since.
_FORMAT, _OF_PLACES = 6, 7


@dataclasses.dataclass(frozen=True)
class Step:
    """One part of one model on one task."""

    role: str
    task: str
    part: Part

    @property
    def unit(self) -> Unit:
        """The key of the step in the store of rows."""
        return (self.role, self.task, *self.part.unit)

    def __str__(self) -> str:
        return f"{self.role} on {self.task}: {self.part}"


def measure(config: CircuitConfig, work: Work) -> CircuitSummary:
    """Measures what has not been measured; returns the summary.

    Raises:
      CorruptError: a stored part is damaged.
      StoppedError: on a signal, after the part that was under way.
    """
    inputs: Inputs = work.loaded
    models, tasks = inputs.models, inputs.tasks
    digests = {name: task.manifest.sha256 for name, task in tasks.items()}
    identities = {role: each.identity.text for role, each in models.items()}
    weights = [
        hub.identity(role, identities[role], each.opened.revision) for role, each in models.items()
    ]
    work.record(
        data={**collections.ChainMap(*weights), **digests},
        tokenizer=next(iter(models.values())).tokenizer.sha256,
    )
    # Rows of other models or settings are never in one table, not even by force.
    bound = dataclasses.replace(work, fingerprint=fingerprint(config, identities, digests))
    with bound.store(VALUES, shards=ATTRIBUTIONS) as attributions, bound.store(SCHEMA) as rows:
        measure_units(
            rows,
            "circuits",
            {step.unit: step for step in steps(config, inputs)},
            Steps(config, work.path, inputs, rows, attributions).measure,
            noun="forward passes",
            label=str,
            cost=lambda step: step.part.passes,
        )
        table = bound.merge(rows, ROWS)
    rephrased = sources(config)
    return numbers.summarise(
        config,
        tuple(model.facts for model in models.values()),
        tuple(task_facts(name, task, rephrased.get(name)) for name, task in tasks.items()),
        table,
        prompts={name: task.prompt_B for name, task in tasks.items()},
        device=jax.devices()[0].device_kind,
    )


def fingerprint(config: CircuitConfig, models: Mapping[str, str], tasks: Mapping[str, str]) -> str:
    """Hash of what decides the rows.

    Args:
      config: settings.
      models: identities of the models, by role.
      tasks: digests of the tasks' examples, by name.
    """
    return config_hash(
        {
            "format": _OF_PLACES if config.patch else _FORMAT,
            "config": to_plain(config),
            "models": models,
            "tasks": tasks,
        }
    )


def steps(config: CircuitConfig, inputs: Inputs) -> list[Step]:
    """All parts in the order of measurement: model by model, task by task."""
    rephrased = sources(config) if "heads" in config.components else {}
    batches = {name: Batch.of(task) for name, task in inputs.tasks.items()}
    return [
        Step(role, name, part)
        for (role, model), name in itertools.product(inputs.models.items(), inputs.tasks)
        for part in plan(config, model.opened.cfg, batches[name], transfer=name in rephrased)
    ]


class Steps:
    """Measures steps in their order; the model of the last one stays loaded.

    Args:
      config: settings.
      folder: work folder.
      inputs: models and tasks.
      rows: the store of the steps' rows.
      attributions: the store of attributions, which steps make that rank by them.
    """

    def __init__(
        self,
        config: CircuitConfig,
        folder: Path,
        inputs: Inputs,
        rows: RowStore,
        attributions: RowStore,
    ) -> None:
        self._config, self._folder, self._inputs = config, folder, inputs
        self._rows, self._attributions = rows, attributions
        self._role, self._piece = "", ("", "")
        self._model: CircuitModel | None = None
        self._measurement: Measurement | None = None

    def measure(self, step: Step) -> pa.Table:
        """The rows of a step; those of the steps before it are stored."""
        piece = step.role, step.task
        measurement = self._measurement_of(piece)
        if step.part == FIGURES:
            return self._draw(piece, measurement)
        source = None
        if step.part.measurement == "transfer":
            first = sources(self._config)[step.task]
            source = source_circuit(self._config, self._rows.read(), step.role, first)
        return measurement.measure(step.part, source)

    def _measurement_of(self, piece: tuple[str, str]) -> Measurement:
        role, task = piece
        if self._measurement is None or self._piece != piece:
            self._measurement = None
            if self._model is None or self._role != role:
                # Weights are let go before those of the next model are loaded.
                self._model = None
                self._role, self._model = role, self._inputs.models[role].load(self._config.dtype)
            names = {"task": task, "model": role}
            self._piece = piece
            self._measurement = Measurement(
                self._config, names, self._model, self._inputs.tasks[task], self._stored
            )
        return self._measurement

    def _stored(self, part: Part) -> pa.Table:
        """The table of a part of the piece that is measured."""
        unit = (*self._piece, *part.unit)
        if part.measurement != ATTRIBUTION:
            return self._rows.read_unit(unit)
        if unit not in self._attributions:
            self._attributions.append(unit, self._measurement_of(self._piece).measure(part, None))
        return self._attributions.read_unit(unit)

    def _draw(self, piece: tuple[str, str], measurement: Measurement) -> pa.Table:
        """Writes the drawn prompt and the scores of component edges; they have no rows."""
        role, name = piece
        model = self._inputs.models[role]
        drawn = drawn_file(self._folder, role, name)
        make_folder(drawn.parent)
        write_json(drawn, measurement.drawn(model.tokenizer))
        if "component_edges" in self._config.components:
            exported = self._folder / MIB / f"{name}_{role}.json"
            make_folder(exported.parent)
            wide = ComponentGraph.of(model.opened.cfg).ungrouped()
            save_graph(exported, wide, measurement.scores_UR())
        return SCHEMA.empty_table()


def source_circuit(config: CircuitConfig, table: pa.Table, role: str, task: str) -> SourceCircuit:
    """The circuit of heads of a task that was measured before, for another wording.

    Args:
      config: settings.
      table: rows of all steps so far.
      role: role of the model.
      task: name of the task.
    """
    own = select(table, task=task, model=role)
    importance_LN = head_importance(own, config.direction).mean(2)
    return SourceCircuit(importance_LN, numbers.needed(config, own))


def sources(config: CircuitConfig) -> dict[str, str]:
    """The task whose other wording a task is, by its name."""
    return {task_name(new): task_name(old) for old, new in config.rephrasings.items()}


def task_facts(name: str, task: Task, rephrases: str | None) -> TaskFacts:
    """The prompts of a task in numbers, and its first example."""
    manifest, first, lengths_B = task.manifest, task.examples[0], task.arrays.lengths_B
    return TaskFacts(
        name=name,
        rephrases=rephrases,
        metric=manifest.metric,
        seed=manifest.seed,
        drawn=manifest.drawn,
        kept=manifest.kept,
        dropped=manifest.dropped,
        sha256=manifest.sha256,
        shortest=int(lengths_B.min()),
        longest=int(lengths_B.max()),
        clean=first.clean,
        corrupt=first.corrupt,
        answers=first.answers,
        wrong_answers=first.wrong_answers,
    )
