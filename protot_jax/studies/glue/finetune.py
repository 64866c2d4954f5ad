"""One fine-tuning of one model on one task, in a folder of its own; resumable.

The folder of a fine-tuning holds `metrics.parquet` and `evaluations.parquet` of the training loop,
its settings in `config.json` (`GlueConfig.of_fine_tuning`), and in the end

    predictions.parquet    a row per example of every split but the training split (`results.ROWS`)
    result.json            `results.FineTuneResult`; with it the fine-tuning counts as done

A fine-tuning that diverges has the reason in its result, and no predictions. The weights that
predict are those of the evaluation with the best main metric on the selection
split. Checkpoints are removed once the predictions are written.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import math
from pathlib import Path
import shutil
from typing import Any

from absl import logging
import jax
from jax.sharding import Mesh
import numpy as np
import pyarrow as pa

from lm_jax.checkpoint import manager
from lm_jax.errors import DivergedError, UsageError
from lm_jax.model import params as params_lib
from lm_jax.model.params import ParamTree
from lm_jax.model.precision import exact_jit
from lm_jax.parallel import sharding
from lm_jax.parallel.kernels import under_mesh
from lm_jax.run.config import config_hash
from lm_jax.run.files import storage_error, write_json
from lm_jax.run.results import load_result
from lm_jax.run.tables import write_table
from lm_jax.run.workdir import CONFIG_FILE, config_changes, list_changes
from lm_jax.train.config import CheckpointPolicy, Plateau, train_config
from lm_jax.train.evaluate import Evaluation, stop_between
from lm_jax.train.loop import Hooks, TrainResult, TrainRun, train
from protot_jax.studies.glue import metrics
from protot_jax.studies.glue.encoding import Encoded, EvalBatches, Rows, TrainBatches
from protot_jax.studies.glue.objective import HEAD, MODEL, POOLINGS, TextPrediction
from protot_jax.studies.glue.readers import TaskData
from protot_jax.studies.glue.results import ROWS, Cell, FineTuneResult
from protot_jax.studies.glue.settings import GlueConfig
from protot_jax.studies.glue.tasks import Task, find
from protot_jax.training import diverged
from protot_jax.training.pretrain import casts, decays
from protot_jax.training.saved_run import TrainedModel

RESULT, PREDICTIONS = "result.json", "predictions.parquet"
# The criterion of an undefined metric, which is never the best: others are in -1..1.
_WORST = 2.0


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A model with a task in its ids."""

    base: TrainedModel
    data: TaskData
    encoded: Encoded

    @property
    def length(self) -> int:
        """Ids of a row."""
        return self.encoded.train.rows_NS.shape[1] - 1

    @property
    def sha256(self) -> str:
        """Digest of the model and of all rows."""
        return self._digest(self.base.identity.text)

    @property
    def digests(self) -> tuple[str, str]:
        """The digest, and the one that an earlier version stored, of the checkpoint alone."""
        return self.sha256, self._digest(self.base.sha256)

    def _digest(self, model: str) -> str:
        encoded = self.encoded
        rows = [encoded.train, encoded.selection, *encoded.predicted.values()]
        return config_hash([model, *(one.fingerprint for one in rows)])


def row_length(config: GlueConfig, base: TrainedModel) -> tuple[int, bool]:
    """The most ids of a row, and whether every row is padded to it (`encode_task`).

    A recurrent mixer reads rows of any length, and attention at most those of its context.
    """
    most = config.max_length
    if not base.mixer.recurrent:
        most = min(most, base.cfg.max_length)
    return most, not POOLINGS[config.pooling].hides_padding


def warn_of_context(config: GlueConfig, base: TrainedModel, name: str) -> None:
    """Logs that the rows of a model are shorter than `config.max_length`, where they are."""
    length, _ = row_length(config, base)
    if length < config.max_length:
        logging.warning(
            "%s: rows have at most %d ids, the context of its attention, in place of "
            "config.max_length = %d; a recurrent model beside it reads longer ones",
            name,
            length,
            config.max_length,
        )


def objective_of(config: GlueConfig, base: TrainedModel, task: Task) -> TextPrediction:
    """The objective of fine-tuning a model on a task."""
    return TextPrediction(
        base.cfg,
        base.mixer,
        task.outputs,
        config.pooling,
        config.dtype,
        config.head_dropout,
        casts,
    )


def fine_tune(
    cell: Cell, subject: Subject, config: GlueConfig, folder: Path, mesh: Mesh
) -> FineTuneResult:
    """Fine-tunes, or resumes it, unless it is done; returns the stored result.

    Args:
      cell: the rate, warm-up and seed.
      subject: the model and the task.
      config: what all fine-tunings share.
      folder: the open work folder of the run.
      mesh: the devices.

    Raises:
      UsageError: the folder is of other settings, weights or text.
      As `lm_jax.train.loop.train`.
    """
    own = folder / cell.place
    _bind(own, config)
    if not (own / RESULT).is_file():
        try:
            result = _tune(cell, subject, config, own, mesh)
        except DivergedError as error:
            none = {"steps": 0, "best_step": 0, "stopped_early": False, "selection": math.nan}
            result = _result(cell, subject, diverged=diverged.reason(error, own), **none)
            print(f"{cell.place} diverged: {result.diverged}", flush=True)
        write_json(own / RESULT, result)
    stored = load_result(own / RESULT, FineTuneResult)
    if stored.length != subject.length:
        raise UsageError(
            f"{own} holds a fine-tuning on rows of {stored.length} ids, and rows have "
            f"{subject.length} now; choose another --workdir, or another config.max_length"
        )
    if stored.inputs not in subject.digests:
        raise UsageError(
            f"{own} holds a fine-tuning of another model or another text; put those back, or "
            "choose another --workdir"
        )
    shutil.rmtree(own / manager.FOLDER, ignore_errors=True)
    return stored


def _bind(own: Path, config: GlueConfig) -> None:
    """Writes the settings of a fine-tuning into its folder, or compares them with those there."""
    settings = config.of_fine_tuning
    if (own / CONFIG_FILE).is_file():
        if changes := config_changes(own, settings):
            raise UsageError(
                f"{own} holds a fine-tuning with {list_changes(changes)}; put that back, remove "
                "the folder, or choose another --workdir"
            )
    elif (own / RESULT).is_file() or (own / manager.FOLDER).is_dir():
        raise UsageError(
            f"{own} is of an earlier version, which did not store the settings of a fine-tuning; "
            "remove the folder, or choose another --workdir"
        )
    else:
        try:
            own.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(own, error) from error
        write_json(own / CONFIG_FILE, settings)


def _tune(
    cell: Cell, subject: Subject, config: GlueConfig, own: Path, mesh: Mesh
) -> FineTuneResult:
    """Trains, or resumes it, and writes the predictions of the best weights."""
    task, objective = find(cell.task), objective_of(config, subject.base, find(cell.task))
    result = _train(cell, subject, config, own, mesh, objective)
    best = result.history.best_step or int(result.state.step)
    params = result.state.params
    if best != int(result.state.step):
        wanted = sharding.abstract(objective.spec, mesh=mesh)
        params = manager.load_params(result.checkpoints, best, wanted)
    run = functools.partial(_outputs, params, objective, mesh, config.batch_size)
    write_table(own / PREDICTIONS, _predictions(cell, task, subject, run))
    compared = result.history.best
    undefined = compared is None or compared == _WORST
    return _result(
        cell,
        subject,
        steps=int(result.state.step),
        best_step=best,
        stopped_early=result.history.stopped_early,
        selection=math.nan if undefined else -compared,
    )


def _train(
    cell: Cell,
    subject: Subject,
    config: GlueConfig,
    own: Path,
    mesh: Mesh,
    objective: TextPrediction,
) -> TrainResult:
    encoded, task = subject.encoded, find(cell.task)
    batches = TrainBatches(encoded.train, batch_size=config.batch_size, seed=cell.seed)
    steps = config.epochs * batches.per_epoch
    settings = train_config(
        config,
        steps=min(steps, config.max_steps) if config.max_steps else steps,
        learning_rate=cell.learning_rate,
        warmup=cell.warmup,
        early_stop=False,
        schedule="linear",
        plateau=Plateau(config.min_gain, config.patience),
    )
    head = params_lib.init(jax.random.key(cell.seed), {HEAD: objective.head_spec})
    return train(
        own,
        TrainRun(
            objective=objective,
            config=settings,
            batches=batches,
            validation=EvalBatches(encoded.selection, batch_size=config.batch_size),
            seed=cell.seed,
            base_sha256=subject.base.identity.text,
            params={MODEL: subject.base.params, **head},
            decays=decays,
            in_nats=False,
        ),
        mesh,
        CheckpointPolicy(keep=1, allow_fallback=config.allow_fallback),
        Hooks(
            measure=functools.partial(_measure, task),
            criterion=functools.partial(criterion, task),
        ),
    )


def criterion(task: Task, evaluation: Evaluation) -> float:
    """The main metric with its sign turned; above every other where it is undefined."""
    value = metrics.from_sums(task.main, evaluation.sums)
    return _WORST if math.isnan(value) else -value


def _measure(task: Task, params: ParamTree, step: int, evaluation: Evaluation) -> dict[str, float]:
    del params, step
    # Ranks need all predictions at once.
    names = [name for name in task.metrics if name != "spearman"]
    return {f"selection/{name}": metrics.from_sums(name, evaluation.sums) for name in names}


@functools.lru_cache(maxsize=8)
def _make_predict(objective: TextPrediction, mesh: Mesh) -> Callable[..., jax.Array]:
    return exact_jit(
        under_mesh(objective.predict, mesh),
        in_shardings=(
            sharding.param_shardings(mesh, objective.spec),
            sharding.batch_sharding(mesh),
        ),
        out_shardings=sharding.replicated(mesh),
    )


def _outputs(
    params: ParamTree, objective: TextPrediction, mesh: Mesh, batch_size: int, rows: Rows
) -> np.ndarray:
    """The outputs of the head for every example, float32 `[n, Y]`.

    Raises:
      StoppedError: a stop was requested; the trained weights are saved.
    """
    predict, batches = _make_predict(objective, mesh), EvalBatches(rows, batch_size=batch_size)
    parts = []
    for k in range(batches.per_epoch):
        rows_BS = sharding.shard_batch(mesh, batches.at(k)["tokens"])
        parts.append(np.asarray(predict(params, rows_BS)))
        stop_between(k + 1, batches.per_epoch)
    return np.concatenate(parts)[: rows.count]


def predictions_of(task: Task, encoded: Encoded, outputs: np.ndarray) -> np.ndarray:
    """Classes, or scores in the task's unit and bounds, float64 `[n]`, of outputs `[n, Y]`."""
    if task.labels:
        return outputs.argmax(1).astype(np.float64)
    scale = encoded.scale
    scores = scale.mean + scale.deviation * outputs[:, 0].astype(np.float64)
    return scores if task.bounds is None else scores.clip(*task.bounds)


def _predictions(
    cell: Cell, task: Task, subject: Subject, run: Callable[[Rows], np.ndarray]
) -> pa.Table:
    """`results.ROWS` of the selection split and of all that is reported or submitted."""
    encoded, data = subject.encoded, subject.data
    splits: dict[str, Any] = {"selection": (data.selection, encoded.selection)}
    for name, split in data.predicted.items():
        splits[name] = split, encoded.predicted[name]
    if data.selected_on_evaluated:
        del splits["selection"]
    tables = []
    for name, (split, rows) in splits.items():
        outputs = run(rows)
        n = len(outputs)
        constants: Mapping[str, Any] = dataclasses.asdict(cell) | {"split": name}
        columns = {column: [value] * n for column, value in constants.items()}
        targets = [None] * n if split.targets is None else split.targets
        columns |= {
            "example": np.arange(n),
            "target": targets,
            "prediction": predictions_of(task, encoded, outputs),
            "outputs": outputs.tolist(),
        }
        tables.append(pa.table({f.name: pa.array(columns[f.name], f.type) for f in ROWS}))
    return pa.concat_tables(tables)


def _result(cell: Cell, subject: Subject, **outcome: Any) -> FineTuneResult:
    return FineTuneResult(
        **dataclasses.asdict(cell),
        truncated=subject.encoded.train.truncated,
        length=subject.length,
        inputs=subject.sha256,
        **outcome,
    )
