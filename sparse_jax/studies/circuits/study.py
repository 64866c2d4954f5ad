"""Runs the study: tasks, then every model on every task, then the summary and the report.

The work folder then holds

    shards/          the rows of each part (`parts`), so that a killed study resumes
    attributions/    attributions of all edges, from which these are ranked
    rows.parquet     all of them (`measurements`)
    mib/             scores of component edges in MIB's format, by task and model (`mib`)
    drawn/           patterns and edges of one prompt, by task and model (`results.DrawnPrompt`)
    summary.json     every number (`results.CircuitSummary`)
    report.html      the page, one offline file
"""

import collections
from collections.abc import Mapping
import dataclasses
import functools
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import pyarrow as pa

from lm_jax.errors import BadInputError, UsageError
from lm_jax.run import progress, stop
from lm_jax.run.config import config_hash, to_plain
from lm_jax.run.files import storage_error, to_jsonable, write_json, write_text
from lm_jax.run.finished import Inputs, file_inputs
from lm_jax.run.identity import ModelIdentity
from lm_jax.run.provenance import collect_provenance, read_provenance, record_provenance
from lm_jax.run.results import load_result
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.weights import hub
from lm_jax.weights.load import OpenedModel, identities, load_pretrained, open_pretrained
from sparse_jax.circuits.component_graph import ComponentGraph
from sparse_jax.circuits.mib import save_graph
from sparse_jax.circuits.runs import Batch, CircuitModel
from sparse_jax.circuits.tasks import Task, check_disjoint, load_task, make_task
from sparse_jax.gates import model as sparse_model
from sparse_jax.gates.model import SPARSE
from sparse_jax.studies.circuits import analysis, report
from sparse_jax.studies.circuits.config import CircuitConfig, is_file, task_name
from sparse_jax.studies.circuits.measurements import SCHEMA, head_importance, select
from sparse_jax.studies.circuits.parts import FIGURES, PartStore, plan
from sparse_jax.studies.circuits.piece import Measurement, SourceCircuit
from sparse_jax.studies.circuits.results import CircuitSummary, DrawnPrompt, ModelFacts, TaskFacts
from sparse_jax.studies.pair.corpus import read_prompts

ROWS, DRAWN, MIB = "rows.parquet", "drawn", "mib"
SUMMARY, REPORT = "summary.json", "report.html"
# Of rows, whose meaning may change with the program.
_FORMAT = 6


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


def inputs(config: CircuitConfig) -> Inputs:
    """The models by role and the files of tasks, without loading weights.

    Raises:
      BadInputError: a model cannot be used.
    """
    models = {}
    for role, source in config.models.items():
        models |= identities({role: source}, functools.partial(_identity, role))
    files = [source for source in config.task_sources if is_file(source)]
    return models | file_inputs(
        {f"file {source}": source for source in (*files, *config.trained_on)}
    )


def _identity(role: str, source: str) -> ModelIdentity:
    return open_model(role, source).identity


def run(config: CircuitConfig, folder: Path) -> CircuitSummary:
    """Measures what has not been measured in an open work folder; returns the summary.

    Raises:
      BadInputError: a model or task that cannot be used.
      CorruptError: a stored part is damaged.
      StoppedError: on a signal, after the part that was under way.
    """
    models = {role: open_model(role, source) for role, source in config.models.items()}
    tasks = read_tasks(config, models)
    identity = {
        "format": _FORMAT,
        "config": to_plain(config),
        "models": {role: each.identity.text for role, each in models.items()},
        "tasks": {name: task.manifest.sha256 for name, task in tasks.items()},
    }
    weights = [
        hub.identity(role, identity["models"][role], each.opened.revision)
        for role, each in models.items()
    ]
    origin = collect_provenance(
        seeds={"study": config.seed},
        dtype=config.dtype,
        data={**collections.ChainMap(*weights), **identity["tasks"]},
        tokenizer=next(iter(models.values())).tokenizer.sha256,
    )
    record_provenance(folder, origin)
    with PartStore(folder, config_hash(identity)) as store:
        measure_parts(config, folder, store, models, tasks)
        table = store.rows.merge(folder / ROWS)
    summary = summarise(config, models, tasks, table)
    write_json(folder / SUMMARY, summary)
    drawn = {
        (role, name): load_result(drawn_file(folder, role, name), DrawnPrompt)
        for role in models
        for name in tasks
    }
    page = report.build(summary, drawn, provenance=to_jsonable(read_provenance(folder)))
    write_text(folder / REPORT, page)
    return summary


def measure_parts(
    config: CircuitConfig,
    folder: Path,
    store: PartStore,
    models: Mapping[str, StudyModel],
    tasks: Mapping[str, Task],
) -> None:
    """Measures and stores every part that is not done, with a line of progress for each."""
    sources = _sources(config) if "heads" in config.components else {}
    batches = {name: Batch.of(task) for name, task in tasks.items()}
    plans = {
        (role, name): plan(config, model.opened.cfg, batches[name], transfer=name in sources)
        for role, model in models.items()
        for name in tasks
    }
    todo = {
        piece: [part for part in parts if not store.has(piece, part)]
        for piece, parts in plans.items()
    }
    total, left = (
        sum(part.passes for parts in each.values() for part in parts) for each in (plans, todo)
    )
    finished, count = 0, store.rows.count_rows()
    with progress.track(
        "circuits", total, unit="forward passes", done=total - left, every=0.0
    ) as advance:
        for role, model in models.items():
            if not any(todo[role, name] for name in tasks):
                continue
            loaded = model.load(config.dtype)
            for name, task in tasks.items():
                piece = (role, name)
                stored = functools.partial(store.read, piece)
                names = {"task": name, "model": role}
                measurement = Measurement(config, names, loaded, task, stored)
                for part in todo[piece]:
                    text = f"{role} on {name}: {part}"
                    stop.check(f"before {text}")
                    advance(finished, note=f"{count:,} rows; now {text}")
                    if part == FIGURES:
                        table = draw(config, folder, measurement, model, piece)
                    else:
                        source = None
                        if part.measurement == "transfer":
                            source = source_circuit(config, store, role, sources[name])
                        table = measurement.measure(part, source)
                    store.append(piece, part, table)
                    finished = part.passes
                    count += len(table) if table.schema.equals(SCHEMA) else 0
            del loaded
        advance(finished, note=f"{count:,} rows")


def source_circuit(config: CircuitConfig, store: PartStore, role: str, task: str) -> SourceCircuit:
    """The circuit of heads of a task that was measured before, for another wording."""
    table = select(store.rows.read(), task=task, model=role)
    importance_LN = head_importance(table, config.direction).mean(2)
    return SourceCircuit(importance_LN, analysis.needed(config, table))


def draw(
    config: CircuitConfig,
    folder: Path,
    measurement: Measurement,
    model: StudyModel,
    piece: tuple[str, str],
) -> pa.Table:
    """Writes the drawn prompt and the scores of component edges of a piece; they have no rows."""
    role, name = piece
    path, exported = drawn_file(folder, role, name), folder / MIB / f"{name}_{role}.json"
    scored = "component_edges" in config.components
    for file in (path, *[exported] * scored):
        try:
            file.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise storage_error(file.parent, error) from error
    write_json(path, measurement.drawn(model.tokenizer))
    if scored:
        wide = ComponentGraph.of(model.opened.cfg).ungrouped()
        save_graph(exported, wide, measurement.scores_UR())
    return SCHEMA.empty_table()


def drawn_file(folder: Path, role: str, task: str) -> Path:
    """Where the drawn prompt of a piece is."""
    return folder / DRAWN / f"{task}_{role}.json"


def _sources(config: CircuitConfig) -> dict[str, str]:
    """The task whose other wording a task is, by its name."""
    return {task_name(new): task_name(old) for old, new in config.rephrasings.items()}


def open_model(role: str, source: str) -> StudyModel:
    """Reads what is needed of a model before its weights.

    Args:
      role: dense, control or sparse.
      source: what `lm_jax.load_pretrained` takes, or the folder of a sparse model, or one with such
        a folder called `model` (a run of post-training).

    Raises:
      BadInputError: it is none of these, or has no tokenizer.
    """
    folder = next(
        (each for each in (Path(source), Path(source, "model")) if (each / SPARSE).is_file()), None
    )
    try:
        named = source if folder is None else folder
        opened = open_pretrained(named, without_gates=folder is not None)
    except BadInputError as error:
        raise BadInputError(
            f"--{role}={source}: {error}; it takes a Hugging Face folder, a .gguf file, a folder "
            "made by iaj convert, a name of the manifest (iaj fetch), or the exported folder of "
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
      BadInputError: as of `tasks.make_task`, `tasks.load_task` and `read_prompts`.
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
        if len(task.examples) < 2:
            raise BadInputError(f"{source}: one example; intervals need two or more prompts")
        if config.shown >= len(task.examples):
            raise UsageError(
                f"config.shown = {config.shown}, and {source} has {len(task.examples)} prompts, "
                "counted from 0; give a smaller number"
            )
        results[task_name(source)] = task
    for old, new in config.rephrasings.items():
        check_disjoint(results[task_name(old)], results[task_name(new)])
    return results


def summarise(
    config: CircuitConfig,
    models: Mapping[str, StudyModel],
    tasks: Mapping[str, Task],
    table: pa.Table,
) -> CircuitSummary:
    """Every number of the study, from its rows."""
    sources = _sources(config)
    results = []
    with progress.track("intervals", len(tasks) * len(models) + 1, unit="results") as advance:
        for name, role in itertools.product(tasks, models):
            own = select(table, task=name, model=role)
            results.append(analysis.task_result(config, own, name, role))
            advance(note=f"{role} on {name}")
        ratios = tuple(analysis.ratios(config, table, results))
        transfers = tuple(
            analysis.transfer(config, table, role, old, new)
            for new, old in sources.items()
            for role in models
            if "heads" in config.components
        )
        advance(note="ratios")
    return CircuitSummary(
        config=config,
        models=tuple(model.facts for model in models.values()),
        tasks=tuple(task_facts(name, task, sources.get(name)) for name, task in tasks.items()),
        results=tuple(results),
        ratios=ratios,
        transfers=transfers,
        device=jax.devices()[0].device_kind,
    )


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
