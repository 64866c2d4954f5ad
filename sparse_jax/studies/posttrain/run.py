"""Trains every seed under every bound, with the controls that they are compared with.

Besides what every study has, the work folder holds

    data/                    the prepared corpus
    dense.json               the dense model's loss, evaluated once
    seed_<n>/target_<nats>/  one run: checkpoints, metrics.parquet, evaluations.parquet
                             (`lm_jax.train.loop`), the exported model and more (`export.py`)
    seed_<n>/control/        with `control`, the same training with every gate open, and the dense
                             model that it gives; its loss that bounds refer to (`task.py`)
"""

import dataclasses
from pathlib import Path

import pyarrow.parquet as pq

from lm_jax.evaluate.samples import sampled_inputs
from lm_jax.run import processes
from lm_jax.run.finished import Inputs
from lm_jax.run.results import load_result
from lm_jax.statistics import Interval
from lm_jax.study import Work
from lm_jax.weights import hub
from lm_jax.weights.load import is_there
from sparse_jax.gates import model as sparse_model
from sparse_jax.studies.posttrain import export
from sparse_jax.studies.posttrain.beginning import earlier_gates
from sparse_jax.studies.posttrain.evaluation import difference
from sparse_jax.studies.posttrain.numbers import summarise
from sparse_jax.studies.posttrain.results import (
    ComparedRun,
    ControlResult,
    PosttrainSummary,
    RunResult,
)
from sparse_jax.studies.posttrain.settings import PosttrainConfig
from sparse_jax.studies.posttrain.task import (
    Task,
    bounds,
    control_folder,
    control_loss,
    dense_loss,
    open_model,
    open_task,
    share_controls,
)
from sparse_jax.studies.posttrain.training import train_control, train_target


def inputs(config: PosttrainConfig) -> Inputs:
    """The model and the text of a post-training, without loading weights.

    Raises:
      UsageError, BadInputError: the model does not fit the settings (`open_model`).
    """
    text = sampled_inputs(config.corpus)
    if config.start:
        earlier_gates(config)
        text["config.start"] = sparse_model.open_identity(config.start).text
    if not is_there(config.model):
        return text
    return {"model": open_model(config).identity.text} | text


def train_all(
    config: PosttrainConfig, work: Work, controls: Path | None = None
) -> PosttrainSummary:
    """Runs or resumes every seed and target.

    Args:
      config: the settings.
      work: the open work folder; with `force`, runs of other settings or weights are renamed, and
        trained again.
      controls: work folder of another post-training of the same model on the same text and seeds,
        whose controls serve in place of its own.
    """
    task = open_task(config, work.path, force=work.force)
    manifest = task.prepared.manifest
    work.record(
        data=hub.identity("model", task.base.identity.text, task.base.revision)
        | {"documents": manifest["documents_sha256"]}
        | dict(manifest["sources"]),
        tokenizer=manifest["tokenizer_sha256"],
    )
    if controls is not None:
        share_controls(work.path, controls)
    dense = dense_loss(task)
    results: list[ComparedRun] = []
    trained: list[ControlResult] = []
    for seed in config.seeds:
        control = _control_before(task, seed, controls)
        place = control_folder(controls or work.path, seed)
        over = control_loss(place) if config.slack_over == "control" else None
        targets = bounds(config, dense.loss, over)
        if processes.is_first():
            bounds_text = ", ".join(f"{target:.4f}" for target in targets)
            print(
                f"dense {dense.loss:.4f} nats per token on {dense.tokens:,} tokens; target "
                f"{bounds_text}"
            )
        of_seed = [train_target(task, seed, target, place) for target in targets]
        if config.control and controls is None:
            trained.append(control or train_control(task, seed))
        results += [_compare(task, each, number, place) for number, each in enumerate(of_seed)]
    return summarise(task, dense, results, trained)


def _control_before(task: Task, seed: int, controls: Path | None) -> ControlResult | None:
    """The control of a seed, where bounds are relative to it or another training has it."""
    if controls is not None:
        return load_result(control_folder(controls, seed) / export.RESULT, ControlResult)
    return train_control(task, seed) if task.config.slack_over == "control" else None


def _compare(task: Task, result: RunResult, bound: int, control: Path) -> ComparedRun:
    """A run beside the control of its seed, which its exported model names too."""
    more = _control_difference(task, result, control) if task.config.control else None
    if more is not None:
        export.add_control(task.folder / result.folder, more)
    own = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    return ComparedRun(**own, bound=bound, over_control=more)


def _control_difference(task: Task, result: RunResult, control: Path) -> Interval:
    """Loss of a run minus that of its seed's control, on the same windows."""
    tables = (
        pq.read_table(folder / export.WINDOWS) for folder in (task.folder / result.folder, control)
    )
    return difference(*tables)
