"""Fine-tunes trained models on sentence tasks: GLUE's, or embedded ones.

    iaj protot glue --config=protot/glue --config.runs="('runs/speeches',)" --workdir=runs/glue
    iaj protot glue --config=protot/glue:official --config.folder=GLUE \\
        --config.runs="('protot=runs/protot','llama=runs/llama')" --workdir=runs/official

Prototype Transformer, appendix A.4:

1. Every model is fine-tuned on the search tasks at each learning rate and warm-up, and the pair of
   the best mean metric on their selection splits is taken for all tasks.
2. With it, every model is fine-tuned on every task, once for each seed. The weights of the best
   evaluation predict.
3. Metrics are set beside those of the most frequent class, on the same examples.

The folder of the official files is the user's: `CoLA/train.tsv` and so on. Other tasks need no
folder: `iaj fetch films mc wiki` brings their text. The work folder then has

    MODEL/TASK/lr_..._seed_.../   each fine-tuning (`finetune.py`)
    rows.parquet                  a row for each example of a predicted split, and fine-tuning
    submission/MODEL/             the official files for the GLUE server, where there is test text
    summary.json                  every number of the page (`results.GlueSummary`)
    report.html                   one offline page, with the paper's tables

The same command resumes a killed run; finished fine-tunings are not repeated, nor are those that
diverged: these count as worse than all others in the choice, and have no results.
"""

from collections.abc import Mapping
import dataclasses
import math
from pathlib import Path

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lm_jax.model.decoder import count_params
from lm_jax.parallel import sharding
from lm_jax.run import cli, terminal
from lm_jax.run.config import from_plain
from lm_jax.run.files import to_jsonable, write_json, write_text
from lm_jax.run.finished import Inputs, file_inputs, finish_time, is_finished, mark_finished
from lm_jax.run.provenance import collect_provenance, read_provenance, record_provenance
from lm_jax.run.results import load_result
from lm_jax.run.tables import write_table
from lm_jax.run.workdir import open_workdir
from lm_jax.train.config import MAY_CHANGE
from lm_jax.train.step import check_batch
from protot_jax.studies.glue import report, report_text, summary
from protot_jax.studies.glue.config import GlueConfig
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
from protot_jax.studies.glue.tasks import OFFICIAL, find
from protot_jax.training.saved_run import TrainedModel, load_run

SUMMARY, PAGE, TABLE, SUBMISSION = "summary.json", "report.html", "rows.parquet", "submission"


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


def load_models(config: GlueConfig, runs: Mapping[str, Path]) -> dict[str, TrainedModel]:
    """The pretrained models by name, from their runs."""
    seed = None if config.run_seed < 0 else config.run_seed
    return {
        name: load_run(folder, seed=seed, best=config.checkpoint == "best")
        for name, folder in runs.items()
    }


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

    def run(self) -> tuple[ModelSummary, dict[str, list[FineTuneResult]]]:
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
        model = ModelSummary(
            name=self.name,
            kind=base.config.model,
            parameters=count_params(base.cfg, mixer=base.mixer),
            context=base.cfg.max_length,
            step=base.step,
            sha256=base.sha256,
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


def inputs(config: GlueConfig, models: Mapping[str, TrainedModel]) -> Inputs:
    """The models by name and the folder of official tasks; the texts of others are pinned."""
    files = file_inputs({"config.folder": config.folder})
    return {name: model.identity.text for name, model in models.items()} | files


def run(config: GlueConfig, folder: Path) -> GlueSummary:
    """Runs or resumes in an open work folder, writes its files and returns the summary."""
    data_ways, fsdp, tensor = config.mesh
    mesh = sharding.make_mesh(data=data_ways, fsdp=fsdp, tensor=tensor)
    check_batch(config.batch_size, 1, mesh)
    # What cannot be read is refused before a model is loaded.
    data = read_tasks(config)
    models = load_models(config, config.named_runs())
    given = inputs(config, models)
    sources = {
        f"{name}/{split}": sha256
        for name, own in data.items()
        for split, sha256 in summary.summarise_task(name, find(name), own).sha256.items()
    }
    record_provenance(
        folder,
        collect_provenance(
            seeds={f"run {i}": seed for i, seed in enumerate(config.seeds)},
            dtype=config.dtype,
            data=dict(given) | sources,
            tokenizer=",".join(dict.fromkeys(one.tokenizer.sha256 for one in models.values())),
        ),
    )
    summaries, submissions, tables = [], [], []
    results: list[TaskResult] = []
    lost: list[DivergedTuning] = []
    for name, base in models.items():
        job = Job(name, base, data, config, folder, mesh)
        model, tuned = job.run()
        lost += job.lost
        parts = [
            pq.read_table(folder / _cell(one).place / PREDICTIONS).cast(ROWS)
            for of_task in tuned.values()
            for one in of_task
        ]
        rows = pa.concat_tables([ROWS.empty_table(), *parts])
        for task, of_task in tuned.items():
            results.append(
                summary.summarise_result(
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
        submitted = summary.submit(folder / SUBMISSION / name, name, rows, tested, best_seeds)
        submissions += [submitted] if submitted else []
        summaries.append(model)
        tables.append(rows)
    write_table(folder / TABLE, pa.concat_tables(tables))
    averages = [summary.average(name, results) for name in models]
    written = GlueSummary(
        models=tuple(summaries),
        tasks=tuple(summary.summarise_task(name, find(name), data[name]) for name in data),
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
    write_json(folder / SUMMARY, written)
    # The page is rendered from the file, not from the numbers in memory.
    stored = load_result(folder / SUMMARY, GlueSummary)
    provenance = to_jsonable(read_provenance(folder))
    write_text(folder / PAGE, report.build(stored, provenance=provenance))
    mark_finished(folder, given)
    return stored


def _cell(result: FineTuneResult) -> Cell:
    fields = [field.name for field in dataclasses.fields(Cell)]
    return Cell(**{name: getattr(result, name) for name in fields})


def format_summary(result: GlueSummary) -> str:
    """The main metrics for a terminal, each beside the constant prediction's."""
    heads, *rows = report_text.result_rows(result)
    table = terminal.format_table(heads, rows, left=range(4))
    return "\n".join([table, *map(report_text.divergence, result.diverged)])


def main(arguments: cli.Arguments) -> None:
    """The command."""
    config = from_plain(arguments.config, GlueConfig)
    config.named_runs()
    with open_workdir(
        arguments.folder, arguments.config, resume=arguments.resume, may_change=MAY_CHANGE
    ) as work:
        done = None
        if is_finished(work.path):
            there = {name: run for name, run in config.named_runs().items() if run.is_dir()}
            done = finish_time(work.path, inputs(config, load_models(config, there)))
            print(f"finished {done}")
        result = load_result(work.path / SUMMARY, GlueSummary) if done else run(config, work.path)
        print(format_summary(result))
        print(work.path / PAGE)


if __name__ == "__main__":
    cli.app(main, config="protot/glue", config_class=GlueConfig, training=True)
