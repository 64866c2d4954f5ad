"""Runs the fine-tunings: the search of rate and warm-up of every model, and all tasks with it.

Besides what every study has, the work folder holds

    MODEL/TASK/lr_..._seed_.../   each fine-tuning (`finetune.py`)
    rows.parquet                  a row for each example of a predicted split, and fine-tuning
    submission/MODEL/             the official files for the GLUE server, where there is test text
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
from pathlib import Path

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lm_jax.parallel import sharding
from lm_jax.run.finished import Inputs, file_inputs
from lm_jax.run.tables import write_table
from lm_jax.study import Work
from lm_jax.train.step import check_batch
from protot_jax.studies.glue import numbers
from protot_jax.studies.glue.embedded import read_embedded
from protot_jax.studies.glue.encoding import encode_task
from protot_jax.studies.glue.finetune import (
    PREDICTIONS,
    Cell,
    Subject,
    fine_tune,
    row_length,
    warn_of_context,
)
from protot_jax.studies.glue.readers import TaskData, read_official
from protot_jax.studies.glue.results import (
    ROWS,
    DivergedTuning,
    FineTuneResult,
    GlueSummary,
    GridPoint,
    ModelSummary,
    TaskResult,
)
from protot_jax.studies.glue.settings import GlueConfig
from protot_jax.studies.glue.tasks import OFFICIAL, find
from protot_jax.training.saved_run import TrainedModel, load_run, open_run

TABLE, SUBMISSION = "rows.parquet", "submission"


def read_tasks(config: GlueConfig) -> dict[str, TaskData]:
    """The text of every task.

    Raises:
      UsageError: there is no such folder.
      BadInputError: a file or an asset is missing or cannot be used.
    """
    return {
        name: (
            read_official(name, Path(config.folder)) if name in OFFICIAL else read_embedded(name)
        ).limited(config.examples)
        for name in config.tasks
    }


def read_models(
    config: GlueConfig, runs: Mapping[str, Path], read: Callable[..., TrainedModel]
) -> dict[str, TrainedModel]:
    """The pretrained models by name, from their runs; `read` is `load_run` or `open_run`."""
    seed = None if config.run_seed < 0 else config.run_seed
    return {
        name: read(folder, seed=seed, best=config.checkpoint == "best")
        for name, folder in runs.items()
    }


def inputs(config: GlueConfig) -> Inputs:
    """The models by name and the folder of official tasks; the texts of others are pinned.

    A run that is no longer there is left out: what was made from it can be shown.
    """
    there = {name: folder for name, folder in config.named_runs().items() if folder.is_dir()}
    models = read_models(config, there, open_run)
    return _identities(models) | file_inputs({"config.folder": config.folder})


def _identities(models: Mapping[str, TrainedModel]) -> dict[str, str]:
    return {name: model.identity.text for name, model in models.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """One model on all tasks of a run."""

    name: str
    base: TrainedModel
    data: dict[str, TaskData]
    config: GlueConfig
    folder: Path
    mesh: jax.sharding.Mesh
    lost: list[DivergedTuning] = dataclasses.field(default_factory=list)

    def subject(self, task: str) -> Subject:
        """A task in the ids of the model."""
        length, pads = row_length(self.config, self.base)
        encoded = encode_task(
            self.data[task], find(task), self.base.tokenizer, length=length, pads=pads
        )
        return Subject(self.base, self.data[task], encoded)

    def tune(self, cell: Cell, subject: Subject) -> FineTuneResult:
        """One fine-tuning; it is among the `lost` if it diverged."""
        result = fine_tune(cell, subject, self.config, self.folder, self.mesh)
        if result.diverged is not None:
            one = DivergedTuning(**dataclasses.asdict(cell), reason=result.diverged)
            # The search may have had it.
            self.lost.extend([] if one in self.lost else [one])
        return result

    def search(self) -> tuple[GridPoint, ...]:
        """Every rate and warm-up on the search tasks; empty where there is nothing to choose."""
        config = self.config
        pairs = [(rate, warmup) for rate in config.learning_rates for warmup in config.warmups]
        if len(pairs) == 1:
            return ()
        scores: dict[tuple[float, float], dict[str, float]] = {pair: {} for pair in pairs}
        for task in config.searching_tasks():
            subject = self.subject(task)
            for pair, by_task in scores.items():
                cell = Cell(self.name, task, *pair, config.seeds[0])
                by_task[task] = self.tune(cell, subject).selection
        bad = {pair: [] for pair in pairs}
        for one in self.lost:
            bad[one.learning_rate, one.warmup].append(one.task)
        return tuple(
            GridPoint(*pair, by_task, float(np.mean(list(by_task.values()))), tuple(bad[pair]))
            for pair, by_task in scores.items()
        )

    def tune_all(self) -> tuple[ModelSummary, dict[str, list[FineTuneResult]]]:
        """Searches, then fine-tunes on every task with every seed; without those that diverged."""
        warn_of_context(self.config, self.base, self.name)
        grid, base, config = self.search(), self.base, self.config
        rate, warmup = choose(grid) if grid else (config.learning_rates[0], config.warmups[0])
        results: dict[str, list[FineTuneResult]] = {}
        for task in config.tasks:
            subject = self.subject(task)
            every = [
                self.tune(Cell(self.name, task, rate, warmup, seed), subject)
                for seed in config.seeds
            ]
            if ended := [one for one in every if one.diverged is None]:
                results[task] = ended
        model = base.described(
            ModelSummary,
            name=self.name,
            learning_rate=rate,
            warmup=warmup,
            grid=grid,
            row_length=row_length(config, base)[0],
            cut_texts=sum(one[0].truncated for one in results.values()),
        )
        return model, results


def choose(grid: tuple[GridPoint, ...]) -> tuple[float, float]:
    """Rate and warm-up of the best mean; below it are undefined ones, then those that diverged."""

    def rank(point: GridPoint) -> tuple[bool, float]:
        return not point.diverged, -math.inf if math.isnan(point.mean) else point.mean

    best = max(grid, key=rank)
    return best.learning_rate, best.warmup


def measure(config: GlueConfig, work: Work) -> GlueSummary:
    """Runs or resumes all fine-tunings, and writes rows and submission files."""
    mesh = sharding.make_mesh(*config.mesh)
    check_batch(config.batch_size, 1, mesh)
    # What cannot be read is refused before a model is loaded.
    data = read_tasks(config)
    texts = tuple(numbers.summarise_task(name, find(name), own) for name, own in data.items())
    models = read_models(config, config.named_runs(), load_run)
    digests = {f"{one.task}/{split}": own for one in texts for split, own in one.sha256.items()}
    work.record(
        data=_identities(models) | digests,
        tokenizer=",".join(dict.fromkeys(one.tokenizer.sha256 for one in models.values())),
    )
    summaries, submissions, tables = [], [], []
    results: list[TaskResult] = []
    lost: list[DivergedTuning] = []
    for name, base in models.items():
        job = Job(name, base, data, config, work.path, mesh)
        model, tuned = job.tune_all()
        lost += job.lost
        parts = [
            pq.read_table(work.path / one.place / PREDICTIONS).cast(ROWS)
            for of_task in tuned.values()
            for one in of_task
        ]
        rows = pa.concat_tables([ROWS.empty_table(), *parts])
        for task, of_task in tuned.items():
            results.append(
                numbers.summarise_result(
                    rows,
                    name,
                    task,
                    find(task),
                    data[task],
                    steps=[one.steps for one in of_task],
                    best_steps=[one.best_step for one in of_task],
                    resamples=config.resamples,
                )
            )
        best_seeds = {
            task: max(of_task, key=lambda one: (not math.isnan(one.selection), one.selection)).seed
            for task, of_task in tuned.items()
        }
        tested = {task: data[task] for task in tuned}
        submitted = numbers.submit(work.path / SUBMISSION / name, name, rows, tested, best_seeds)
        submissions += [submitted] if submitted else []
        summaries.append(model)
        tables.append(rows)
    write_table(work.path / TABLE, pa.concat_tables(tables))
    averages = [numbers.average(name, results) for name in models]
    return GlueSummary(
        models=tuple(summaries),
        tasks=texts,
        results=tuple(results),
        averages=tuple(filter(None, averages)),
        submissions=tuple(submissions),
        search_tasks=config.searching_tasks(),
        seeds=config.seeds,
        pooling=config.pooling,
        batch_size=config.batch_size,
        epochs=config.epochs,
        device=jax.devices()[0].device_kind,
        diverged=tuple(lost),
    )
