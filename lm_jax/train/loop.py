"""Training loop, from the last checkpoint to the last step; resumable after a kill.

    for step in from the restored one:
        batch `step` -> update
        every few steps: read the losses, write them, stop if one is not finite
        every epoch (or so): evaluate, keep the best, stop early if perplexity rose
        save; end here if a stop was requested

Step k trains on batch k with random key k, and the whole state is saved. So a run that was killed
anywhere and started again ends with the same parameters, bit for bit, on the same mesh, in one
process or in several (`processes.py`). On a GPU that holds where its programs repeat themselves:
the gradient of cuDNN's attention does with XLA_FLAGS=--xla_gpu_deterministic_ops=true.

Files in the run's folder, beside its checkpoints (`checkpoint.manager`):

    steps/, evaluations/          the rows so far, and in the end metrics.parquet and
                                  evaluations.parquet (`metrics.py`)
    tensorboard/                  the same numbers as events (`trackers.py`)
    profile/                      traces of the steps of `--profile` (`profiling.py`)
    diverged.json                 step, document ids and norms, if a number was not finite
    run_id.json                   random id, by which its local checkpoints (`checkpoint.local`) are
                                  told from those of an earlier run in the same place
"""

from collections.abc import Callable, Mapping
import dataclasses
import logging
import math
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from lm_jax.checkpoint import manager
from lm_jax.errors import DivergedError
from lm_jax.model.flops import CONVENTIONS
from lm_jax.model.params import ParamTree
from lm_jax.parallel import sharding
from lm_jax.run import hang, processes, progress
from lm_jax.run import stop as stop_flag
from lm_jax.run.config import to_plain
from lm_jax.run.provenance import collect_provenance
from lm_jax.train import launch, optim, profiling
from lm_jax.train.config import CheckpointPolicy, TrainConfig
from lm_jax.train.evaluate import Batches, Evaluation, evaluate
from lm_jax.train.metrics import MetricWriter
from lm_jax.train.objective import Objective
from lm_jax.train.resume import EvalHistory, RunCheckpoints
from lm_jax.train.state import StateLayout, TrainState, run_keys
from lm_jax.train.step import Metrics, check_batch, make_eval_step, make_train_step
from lm_jax.train.throughput import Throughput, peak
from lm_jax.train.trackers import Tracker, trackers

_log = logging.getLogger(__name__)

Measure = Callable[[ParamTree, int, Evaluation], Mapping[str, float]]
Criterion = Callable[[Evaluation], float]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TrainRun:
    """What is trained, and on what.

    Attributes:
      objective: the training objective.
      config: the training configuration.
      batches: training batches; step k takes batch k. Of several processes, each returns its own
        block of rows (`sharding.batch_share`).
      seed: random seed of the parameters and the dropout.
      validation: batches to evaluate on; None trains to the last step without evaluation.
      frozen: the objective's parameters that are not trained, on the mesh.
      base_sha256: identity (`ModelIdentity.text`) of the model of `frozen`, or of the initial
        weights; checkpoints over another one are refused.
      params: initial parameters, or a function that makes them, which is called at a first start
        alone and whose result is kept by nobody; None draws them.
      decays: function that selects the parameters with weight decay.
      group: the group of a parameter by its path; an evaluation then has the norms of the last
        gradient by group, as `train/grad_norm/<group>`.
      in_nats: whether the loss is in nats per token, so that evaluations have a perplexity.
    """

    objective: Objective
    config: TrainConfig
    batches: Batches
    seed: int
    validation: Batches | None = None
    frozen: Any = ()
    base_sha256: str | None = None
    params: ParamTree | Callable[[], ParamTree] | None = None
    decays: optim.Choice = optim.is_weight
    group: optim.Group | None = None
    in_nats: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hooks:
    """Functions that a run calls after its evaluations and steps.

    Attributes:
      measure: `measure(params, step, evaluation)`, further numbers by name for every evaluation.
      criterion: the finite number by which evaluations are compared, where lower is better; a
        function of an evaluation alone. None is its loss.
      done: whether training ends after this evaluation; a function of it alone.
      on_step: a function that is called with the number of updates after each of them.
      trackers: trackers that get the numbers besides those of the command line.
    """

    measure: Measure | None = None
    criterion: Criterion | None = None
    done: Callable[[Evaluation], bool] | None = None
    on_step: Callable[[int], None] | None = None
    trackers: tuple[Tracker, ...] = ()


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """The state after the last step, and where its checkpoints are."""

    state: TrainState
    history: EvalHistory
    checkpoints: Path


def train(
    folder: Path,
    run: TrainRun,
    mesh: Mesh,
    policy: CheckpointPolicy | None = None,
    hooks: Hooks | None = None,
) -> TrainResult:
    """Trains, or resumes training, in the folder of a run.

    Args:
      folder: an open work folder (`open_workdir`), or one below it; created if missing.
      run: the objective, its settings and its data.
      mesh: the devices.
      policy: how often to log and save; None is the default `CheckpointPolicy`.
      hooks: functions to call after evaluations and steps.

    Raises:
      DivergedError: a loss or gradient is not finite; the last checkpoint is before it.
      StoppedError: a stop was requested, and the state is saved.
      CorruptError: a checkpoint or row file is damaged.
      UsageError: the folder holds a run with other settings or data; a batch does not divide.
      BadInputError: the folder holds a run over other weights.
      StorageError: a file could not be written.
    """
    policy, hooks = policy or CheckpointPolicy(), hooks or Hooks()
    rows, columns = run.batches.at(0)["tokens"].shape
    rows *= sharding.batch_share(mesh)[1]
    check_batch(rows, run.config.accumulate, mesh)
    identity = manager.Identity(
        config=run.objective.metadata() | {"train": to_plain(run.config), "seed": run.seed},
        fingerprint=run.batches.fingerprint,
        mesh=manager.mesh_sizes(mesh),
        packages=collect_provenance().packages,
        base_sha256=run.base_sha256,
    )
    saved = RunCheckpoints(folder, identity, policy, run.objective.columns)
    init_key, step_key = run_keys(run.seed)
    state, history = _restore_or_start(run, mesh, saved, init_key)
    first, writes = int(state.step), processes.is_first()
    throughput = Throughput(
        {each: run.objective.flops(rows, columns, each) for each in CONVENTIONS},
        peak(run.objective.dtype, tuple(mesh.devices.flat)) if writes else None,
    )
    _log.info("model: %s; peak: %s", throughput.flops, throughput.peak)
    launched, settings = launch.options(), identity.config
    with (
        profiling.Tracer(folder, done=first, total=run.config.steps, writes=writes) as tracer,
        progress.track("train", run.config.steps, done=first, quiet=not writes) as advance,
        MetricWriter(
            folder,
            saved.folder,
            fingerprint=saved.fingerprint,
            trackers=(*trackers(launched.track, folder, first, settings), *hooks.trackers)
            if writes
            else (),
            advance=advance,
            throughput=throughput,
            columns=run.objective.columns,
            writes=writes,
            in_nats=run.in_nats,
        ) as writer,
        hang.limit(launched.hang_limit),
    ):
        loop = _Loop(run, mesh, policy, hooks, saved, writer, state, history)
        # The loop has the only reference, so that an update frees the state before it.
        del state
        loop.train(tracer, step_key)
        processes.on_first(writer.merge)
        saved.remove_local()
    return TrainResult(loop.state, loop.history, saved.folder)


def _restore_or_start(
    run: TrainRun, mesh: Mesh, saved: RunCheckpoints, key: jax.Array
) -> tuple[TrainState, EvalHistory]:
    """The state and the evaluations of the last checkpoint, or those before the first step."""
    layout = StateLayout.of(run.objective, mesh, run.config, run.decays)
    if restored := saved.restore(layout.abstract()):
        _log.info("continuing from step %d", int(restored.state.step))
        return restored.state, EvalHistory(**restored.notes["progress"])
    params = run.params() if callable(run.params) else run.params
    return layout.init(key, params), EvalHistory()


@dataclasses.dataclass
class _Loop:
    """A run at one of its steps: the state, the evaluations so far, and where both are kept."""

    run: TrainRun
    mesh: Mesh
    policy: CheckpointPolicy
    hooks: Hooks
    saved: RunCheckpoints
    writer: MetricWriter
    state: TrainState
    history: EvalHistory

    def train(self, tracer: profiling.Tracer, key: jax.Array) -> None:
        """Trains to the last step, or to the evaluation that ends the run."""
        run, step = self.run, int(self.state.step)
        update = make_train_step(
            run.objective, self.mesh, run.config, decays=run.decays, group=run.group
        )
        while step < run.config.steps and not self.history.stopped_early:
            with tracer.step(step + 1, before=self.state):
                batch = run.batches.at(step)
                tokens_BS = sharding.shard_batch(self.mesh, batch["tokens"])
                self.state, metrics = update(self.state, run.frozen, tokens_BS, key)
            step += 1
            tracer.after(step, outputs=self.state)
            self.writer.add(step, metrics, batch["document"])
            self.after(step, metrics)

    def after(self, step: int, metrics: Metrics) -> None:
        """Evaluates, logs and saves where this is due after a step; ends a run that is to stop."""
        run, policy = self.run, self.policy
        last = step == run.config.steps
        eval_every = run.config.eval_every or run.batches.per_epoch
        evaluates = run.validation is not None and (last or step % eval_every == 0)
        saves = last or evaluates or step % policy.save_every == 0
        logs = saves or step % policy.log_every == 0
        # Requests of other processes are read only where all wait for each other anyway.
        stop = (jax.process_count() == 1 or logs) and processes.share_stop()
        saves = saves or stop
        saves_locally = not saves and self.saved.saves_locally(step)
        if saves or logs or saves_locally:
            self.writer.settle()
        if evaluates:
            self.evaluate(step, metrics)
        if saves or saves_locally:
            # Rows first: then every step before a checkpoint has its row.
            self.writer.flush()
            save = self.saved.save if saves else self.saved.save_locally
            save(self.state, self.history)
            self.writer.restart_clock()
        hang.progress()
        if self.hooks.on_step is not None:
            self.hooks.on_step(step)
        if stop:
            stop_flag.check(f"after step {step}, saved in {self.saved.folder}")

    def evaluate(self, step: int, metrics: Metrics) -> None:
        """Evaluates the parameters, writes the numbers, and adds them to the history."""
        run, hooks, params = self.run, self.hooks, self.state.params
        assert run.validation is not None
        look = make_eval_step(run.objective, self.mesh)
        result = evaluate(look, params, run.validation, self.mesh, frozen=run.frozen)
        if not math.isfinite(result.loss):
            raise DivergedError(
                f"the validation loss after step {step} is {result.loss}, so nothing was saved; "
                f"the checkpoints before it are in {self.saved.folder}"
            )
        measured = {} if hooks.measure is None else dict(hooks.measure(params, step, result))
        if run.group is not None:
            norms = sharding.fetch(metrics["grad_norms"])
            measured |= {f"train/grad_norm/{name}": x for name, x in norms.items()}
        self.writer.evaluated(step, result, measured)
        ends = hooks.done is not None and hooks.done(result)
        compared = result.loss if hooks.criterion is None else hooks.criterion(result)
        self.history = self.history.with_loss(compared, step, run.config, done=ends)
