"""Training loop, from the last checkpoint to the last step; resumable after a kill.

    for step in from the restored one:
        batch `step` -> update
        every few steps: read the losses, write them, stop if one is not finite
        every epoch (or so): evaluate, keep the best, stop early if perplexity rose
        save; end here if a stop was requested

Step k trains on batch k with random key k, and the whole state is saved. So a run that was killed
anywhere and started again ends with the same parameters, bit for bit, on the same mesh, in one
process or in several (`processes.py`).

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
import functools
import logging
import math
from pathlib import Path
import secrets
from typing import Any

import jax
from jax.sharding import Mesh

from lm_jax.checkpoint import local, manager
from lm_jax.errors import DivergedError
from lm_jax.model.flops import CONVENTIONS
from lm_jax.model.params import ParamTree
from lm_jax.parallel import sharding
from lm_jax.run import hang, processes, progress
from lm_jax.run import stop as stop_flag
from lm_jax.run.config import config_hash, to_plain
from lm_jax.run.files import read_json, storage_error, write_json
from lm_jax.run.provenance import collect_provenance
from lm_jax.train import launch, optim, profiling
from lm_jax.train.config import CheckpointPolicy, TrainConfig
from lm_jax.train.evaluate import Batches, Evaluation, evaluate
from lm_jax.train.metrics import STEPS, MetricWriter, count_steps
from lm_jax.train.objective import Objective
from lm_jax.train.state import TrainState, abstract_state, init_state
from lm_jax.train.step import (
    check_batch,
    loss_window,
    make_eval_step,
    make_train_step,
)
from lm_jax.train.throughput import Throughput, peak
from lm_jax.train.trackers import trackers

_log = logging.getLogger(__name__)
_RUN_ID = "run_id.json"

Measure = Callable[[ParamTree, int, Evaluation], Mapping[str, float]]
Criterion = Callable[[Evaluation], float]


@dataclasses.dataclass(frozen=True)
class EvalHistory:
    """Evaluation history of a run, kept in every checkpoint.

    `last` and `best` are losses per token of the evaluations so far, or what the `criterion` of
    `train` makes of them, `best_step` is the step of the best, and `stalled` counts the evaluations
    in a row without the gain that `TrainConfig.plateau` asks for.
    """

    last: float | None = None
    best: float | None = None
    best_step: int | None = None
    stopped_early: bool = False
    stalled: int = 0

    def with_loss(
        self, loss: float, step: int, config: TrainConfig, *, done: bool = False
    ) -> "EvalHistory":
        """The history after one more evaluation; `done` ends training whatever the loss."""
        rose = self.last is not None and loss > self.last
        better = self.best is None or loss < self.best
        plateau, stalled = config.plateau, 0
        if plateau is not None and self.best is not None and loss > self.best - plateau.min_gain:
            stalled = self.stalled + 1
        ended = plateau is not None and stalled >= plateau.patience
        return EvalHistory(
            last=loss,
            best=loss if better else self.best,
            best_step=step if better else self.best_step,
            stopped_early=(config.early_stop and rose) or ended or done,
            stalled=stalled,
        )


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """The state after the last step, and where its checkpoints are."""

    state: TrainState
    history: EvalHistory
    checkpoints: Path


def train(
    folder: Path,
    objective: Objective,
    config: TrainConfig,
    batches: Batches,
    validation: Batches | None = None,
    *,
    seed: int,
    mesh: Mesh,
    frozen: Any = (),
    base_sha256: str | None = None,
    policy: CheckpointPolicy | None = None,
    params: ParamTree | Callable[[], ParamTree] | None = None,
    decays: optim.Choice = optim.is_weight,
    group: optim.Group | None = None,
    measure: Measure | None = None,
    criterion: Criterion | None = None,
    done: Callable[[Evaluation], bool] | None = None,
    on_step: Callable[[int], None] | None = None,
    in_nats: bool = True,
) -> TrainResult:
    """Trains, or resumes training, in the folder of a run.

    Args:
      folder: an open work folder (`open_workdir`), or one below it; created if missing.
      objective: the training objective.
      config: the training configuration.
      batches: training batches; step k takes batch k. Of several processes, each returns its own
        block of rows (`sharding.batch_share`).
      validation: batches to evaluate on; None trains to the last step without evaluation.
      seed: random seed of the parameters and the dropout.
      mesh: the devices.
      frozen: the objective's parameters that are not trained, on the mesh.
      base_sha256: identity (`ModelIdentity.text`) of the model of `frozen`, or of the initial
        weights; checkpoints over another one are refused.
      policy: how often to log and save; None is the default `CheckpointPolicy`.
      params: initial parameters, or a function that makes them, which is called at a first start
        alone and whose result is kept by nobody; None draws them.
      decays: function that selects the parameters with weight decay.
      group: the group of a parameter by its path; an evaluation then has the norms of the last
        gradient by group, as `train/grad_norm/<group>`.
      measure: `measure(params, step, evaluation)`, further numbers by name for every evaluation.
      criterion: the finite number by which evaluations are compared, where lower is better; a
        function of an evaluation alone. None is its loss.
      done: whether training ends after this evaluation; a function of it alone.
      on_step: a function that is called with the number of updates after each of them.
      in_nats: whether the loss is in nats per token, so that evaluations have a perplexity.

    Raises:
      DivergedError: a loss or gradient is not finite; the last checkpoint is before it.
      StoppedError: a stop was requested, and the state is saved.
      CorruptError: a checkpoint or row file is damaged.
      UsageError: the folder holds a run with other settings or data; a batch does not divide.
      BadInputError: the folder holds a run over other weights.
      StorageError: a file could not be written.
    """
    policy = policy or CheckpointPolicy()
    rows, columns = batches.at(0)["tokens"].shape
    rows *= sharding.batch_share(mesh)[1]
    check_batch(rows, config.accumulate, mesh)
    identity = manager.Identity(
        config=objective.metadata() | {"train": to_plain(config), "seed": seed},
        fingerprint=batches.fingerprint,
        mesh=manager.mesh_sizes(mesh),
        packages=collect_provenance().packages,
        base_sha256=base_sha256,
    )
    saved = folder / manager.FOLDER
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise storage_error(folder, error) from error
    spec, aux_state = objective.spec, objective.init_state()
    optimizer, window = optim.adamw(spec, config, decays), loss_window(config)
    target = abstract_state(mesh, spec, optimizer, window=window, aux_state=aux_state)
    launched = launch.options()
    tier = launched.local_checkpoints and local.own_folder(launched.local_checkpoints, folder)
    bound_to = config_hash({"run": identity.config, "data": identity.fingerprint})
    run, restored = _run_id(folder), None
    shared = manager.newest(saved, identity, allow_fallback=policy.allow_fallback)
    if tier is not None:
        # Rows come before checkpoints: a folder that lacks them was set back.
        written = processes.on_first(lambda: count_steps(folder, bound_to, objective.columns))
        restored = local.restore(
            tier, target, identity, newer_than=shared or 0, up_to=written, run=run
        )
    if restored is None and shared is not None:
        restored = manager.load(saved, shared, target)
    init_key, step_key = jax.random.split(jax.random.key(seed))
    if restored is None:
        state = init_state(
            init_key,
            mesh,
            spec,
            optimizer,
            window=window,
            aux_state=aux_state,
            params=params() if callable(params) else params,
        )
        history = EvalHistory()
    else:
        state, history = restored.state, EvalHistory(**restored.notes["progress"])
        _log.info("continuing from step %d", int(state.step))
    first = step = int(state.step)
    writes, alone = processes.is_first(), jax.process_count() == 1

    update = make_train_step(objective, mesh, config, decays=decays, group=group)
    look = make_eval_step(objective, mesh)
    eval_every = config.eval_every or batches.per_epoch
    save = functools.partial(manager.save, saved, identity=identity, keep=policy.keep)
    throughput = Throughput(
        {each: objective.flops(rows, columns, each) for each in CONVENTIONS},
        peak(objective.dtype, tuple(mesh.devices.flat)) if writes else None,
    )
    _log.info("model: %s; peak: %s", throughput.flops, throughput.peak)
    with (
        profiling.Tracer(folder, done=first, total=config.steps, writes=writes) as tracer,
        progress.track("train", config.steps, done=first, quiet=not writes) as advance,
        MetricWriter(
            folder,
            saved,
            fingerprint=bound_to,
            trackers=trackers(launched.track, folder, first, identity.config) if writes else (),
            advance=advance,
            throughput=throughput,
            columns=objective.columns,
            writes=writes,
            in_nats=in_nats,
        ) as writer,
        hang.limit(launched.hang_limit),
    ):
        while step < config.steps and not history.stopped_early:
            with tracer.step(step + 1, before=state):
                batch = batches.at(step)
                tokens_BS = sharding.shard_batch(mesh, batch["tokens"])
                state, metrics = update(state, frozen, tokens_BS, step_key)
            step += 1
            tracer.after(step, outputs=state)
            writer.add(step, metrics, batch["document"])

            last = step == config.steps
            evaluates = validation is not None and (last or step % eval_every == 0)
            saves = last or evaluates or step % policy.save_every == 0
            logs = saves or step % policy.log_every == 0
            # Requests of other processes are read only where all wait for each other anyway.
            stop = (alone or logs) and processes.share_stop()
            saves = saves or stop
            saves_locally = tier is not None and not saves and step % launched.local_every == 0
            if saves or logs or saves_locally:
                writer.settle()
            if validation is not None and evaluates:
                result = evaluate(look, state.params, validation, mesh, frozen=frozen)
                if not math.isfinite(result.loss):
                    raise DivergedError(
                        f"the validation loss after step {step} is {result.loss}, so nothing was "
                        f"saved; the checkpoints before it are in {saved}"
                    )
                measured = {} if measure is None else dict(measure(state.params, step, result))
                if group is not None:
                    norms = sharding.fetch(metrics["grad_norms"])
                    measured |= {f"train/grad_norm/{name}": x for name, x in norms.items()}
                writer.evaluated(step, result, measured)
                ends = done is not None and done(result)
                compared = result.loss if criterion is None else criterion(result)
                history = history.with_loss(compared, step, config, done=ends)
            if saves:
                # Rows first: then every step before a checkpoint has its row.
                writer.flush()
                save(state, progress=dataclasses.asdict(history), best=history.best_step)
                writer.restart_clock()
            if tier is not None and saves_locally:
                writer.flush()
                so_far = dataclasses.asdict(history)
                local.save(tier, state, identity=identity, progress=so_far, run=run)
                writer.restart_clock()
            hang.progress()
            if on_step is not None:
                on_step(step)
            if stop:
                stop_flag.check(f"after step {step}, saved in {saved}")
        processes.on_first(writer.merge)
        if tier is not None:
            local.remove(tier)
    return TrainResult(state, history, saved)


def _run_id(folder: Path) -> str | None:
    """The random id that a run writes at its first start; None if it began without one."""
    file = folder / _RUN_ID

    def write() -> None:
        if not file.exists() and not (folder / STEPS).exists():
            write_json(file, {"id": secrets.token_hex(16)})

    processes.on_first(write)
    return read_json(file)["id"] if file.exists() else None
