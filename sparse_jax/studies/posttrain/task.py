"""Model, data and dense loss that all runs of one post-training share.

    dense.json                    the dense loss (`results.DenseResult`), written once
    seed_<n>/control/loss.json    that of a control (`results.ControlLoss`), written once
    shared_controls.json          where the controls are, if not here (`results.SharedControls`)

Bounds are relative to one of them. A resumed run reads it back: a second evaluation may differ in
its last bits on another mesh or device, or in another dtype of the export, and every bound with it.
"""

import dataclasses
import functools
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pyarrow.parquet as pq

from lm_jax.errors import BadInputError, CorruptError, UsageError
from lm_jax.evaluate.samples import prepare_samples
from lm_jax.model import lora
from lm_jax.model.decoder import param_spec
from lm_jax.parallel import sharding
from lm_jax.run import processes
from lm_jax.run.config import config_difference, to_plain
from lm_jax.run.files import write_json
from lm_jax.run.identity import difference
from lm_jax.run.results import load_result
from lm_jax.text.examples import Batches, Examples, OnePass
from lm_jax.text.preparation import prepare_on_first
from lm_jax.text.prepared import Prepared
from lm_jax.train.config import MAY_CHANGE
from lm_jax.train.evaluate import evaluate
from lm_jax.train.metrics import METRICS
from lm_jax.train.objective import LanguageModelling, ignore_index_batch
from lm_jax.train.step import check_batch, make_eval_step
from lm_jax.weights.load import OpenedModel, Pretrained, open_pretrained
from sparse_jax.gates import model as sparse_model
from sparse_jax.studies.posttrain import patterns
from sparse_jax.studies.posttrain.export import RESULT
from sparse_jax.studies.posttrain.results import (
    ControlLoss,
    ControlResult,
    DenseResult,
    SharedControls,
)
from sparse_jax.studies.posttrain.run_identity import claim_folder
from sparse_jax.studies.posttrain.settings import PosttrainConfig

DATA, DENSE, LOSS = "data", "dense.json", "loss.json"
CONTROL, SHARED = "control", "shared_controls.json"
# Fields that decide which runs there are, and nothing within a run.
_CHOOSE_RUNS = ("slacks", "slack_over", "targets", "seeds", "control")
# Fields that decide only the report and the export of a run.
_REPORT_FIELDS = ("texts", "heads", "export_dtype")


@dataclasses.dataclass(frozen=True)
class Task:
    """The model, its data and the devices; `force` is `--resume=force`."""

    config: PosttrainConfig
    folder: Path
    mesh: jax.sharding.Mesh
    base: Pretrained
    prepared: Prepared
    examples: Examples
    validation: OnePass
    force: bool = False

    def batches(self, seed: int) -> Batches:
        """Training batches of a run with this seed."""
        return Batches(
            self.examples, seed=seed, **sharding.own_block(self.mesh, self.config.batch_size)
        )


def open_model(config: PosttrainConfig) -> OpenedModel:
    """Reads the model's config and tokenizer but no weights, and checks the settings against it.

    Raises:
      UsageError: the model has too few positions, or lacks the heads or the weights to adapt.
      BadInputError: there is no such model, or it has no tokenizer.
    """
    model = open_pretrained(config.model)
    if model.tokenizer is None:
        raise BadInputError(
            f"model {config.model!r} has no tokenizer; put its tokenizer.json beside the weights"
        )
    if config.context > model.cfg.max_length:
        raise UsageError(
            f"config.context = {config.context} is beyond the {model.cfg.max_length} positions of "
            f"{config.model}; lower it"
        )
    patterns.named(config.heads, model.cfg.num_layers, model.cfg.num_heads)
    if not config.full:
        lora.adapter_spec(param_spec(model.cfg), config.adapters)
    return model


def open_task(config: PosttrainConfig, folder: Path, *, force: bool = False) -> Task:
    """Prepares the data of the model, and loads its weights after every other check.

    Raises:
      UsageError: as `open_model`; the batch does not divide over the devices.
      BadInputError: as `open_model`; the corpus is missing, or has less than one batch of windows.
    """
    mesh = sharding.make_mesh(*config.mesh)
    # Not among the inputs: what has finished can be shown on a machine with fewer devices.
    check_batch(config.batch_size, config.accumulate, mesh)
    model = open_model(config)
    prepare_samples(folder / DATA, config.corpus, context=config.context, tokenizer=model.tokenizer)
    prepared = prepare_on_first(folder / DATA, config.corpus, tokenizer=model.tokenizer)
    windows = functools.partial(
        Examples, prepared, context=config.context, mode="window", vocab_size=model.cfg.vocab_size
    )
    share = sharding.own_block(mesh, config.batch_size)
    examples = windows("train")
    validation = OnePass(windows("validation", limit=config.validation_documents), **share)
    # Refuses a corpus of less than one batch.
    Batches(examples, seed=config.seeds[0], **share)
    # Trained weights are float32; frozen ones are only read in the dtype of the computation.
    dtype = jnp.float32 if config.full else jnp.dtype(config.dtype)
    base = model.load(dtype=dtype, mesh=mesh)
    return Task(config, folder, mesh, base, prepared, examples, validation, force)


def seed_folder(folder: Path, seed: int) -> Path:
    """Folder of the runs of one seed."""
    return folder / f"seed_{seed}"


def control_folder(folder: Path, seed: int) -> Path:
    """Folder of the control of one seed."""
    return seed_folder(folder, seed) / CONTROL


def share_controls(folder: Path, controls: Path) -> None:
    """Says in a work folder that its controls are in another one."""
    shared = SharedControls(os.path.relpath(controls, folder))
    processes.on_first(lambda: write_json(folder / SHARED, shared))


def controls_of(folder: Path) -> Path:
    """The work folder whose controls a post-training is compared with.

    Raises:
      CorruptError: its file is damaged.
    """
    file = folder / SHARED
    return folder / load_result(file, SharedControls).folder if file.exists() else folder


def dense_loss(task: Task) -> DenseResult:
    """The dense model's loss on the validation windows, from `dense.json` if it is there.

    Raises:
      BadInputError: the file belongs to another model.
      UsageError: the file belongs to other windows or another dtype.
      CorruptError: the file is damaged.
      StoppedError: a stop was requested while the model was evaluated.
    """
    file = task.folder / DENSE
    identity = {
        "base_sha256": task.base.identity.text,
        "validation": task.validation.fingerprint,
        "dtype": task.config.dtype,
    }
    if not processes.on_first(lambda: _is_stored(file, identity, task)):
        objective = LanguageModelling(
            task.base.cfg, dtype=task.config.dtype, make_batch=ignore_index_batch
        )
        step = make_eval_step(objective, task.mesh)
        result = evaluate(step, task.base.params, task.validation, task.mesh, stoppable=True)
        dense = DenseResult(**identity, loss=result.loss, tokens=result.tokens)
        processes.on_first(lambda: write_json(file, dense))
    return load_result(file, DenseResult)


def _is_stored(file: Path, identity: dict[str, str], task: Task) -> bool:
    if not file.exists():
        return False
    stored = load_result(file, DenseResult)
    other = difference(stored.base_sha256, identity["base_sha256"], where=file)
    others = {name: value for name, value in identity.items() if name != "base_sha256"}
    changes = config_difference({name: getattr(stored, name) for name in others}, others)
    if not (other or changes) or task.force:
        return not (other or changes)
    remedy = "choose another --workdir, or begin again with --resume=force"
    if other:
        raise BadInputError(
            f"the runs in {file.parent} began with another model than {task.config.model}, with "
            f"{other}; put that back, {remedy}"
        )
    raise UsageError(f"{file} is of {', '.join(changes)}; {remedy}")


def control_loss(control: Path) -> float:
    """The loss of a control that bounds refer to, from `loss.json` in its folder if it is there.

    Raises:
      CorruptError: the file is damaged.
    """
    file = control / LOSS

    def store() -> None:
        if not file.exists():
            result = load_result(control / RESULT, ControlResult)
            write_json(file, ControlLoss(result.loss.estimate))

    processes.on_first(store)
    return load_result(file, ControlLoss).loss


def control_losses(folder: Path, steps: int) -> tuple[float, ...]:
    """The training loss of every update of a control, in nats per token.

    Raises:
      CorruptError: updates are missing.
    """
    losses = pq.read_table(folder / METRICS)["loss"].to_pylist()
    if len(losses) != steps:
        raise CorruptError(
            f"{folder / METRICS} has {len(losses)} updates of {steps}; remove {folder} and run "
            "again"
        )
    return tuple(losses)


def bounds(config: PosttrainConfig, dense: float, control: float | None = None) -> list[float]:
    """The bound of each run of a seed, in nats per token.

    Args:
      config: absolute targets, or slacks.
      dense: loss of the dense model.
      control: loss of the control of this seed; slacks are above it, if it is given.

    Raises:
      UsageError: a target is below the loss that it could at best reach.
    """
    if config.constraint == "divergence":
        return list(config.slacks)
    if not config.targets:
        reference = dense if control is None else control
        return [reference + slack for slack in config.slacks]
    least = dense if control is None else min(dense, control)
    if low := [target for target in config.targets if target < least]:
        raise UsageError(
            f"config.targets has {low[0]:g} nats per token, and the dense model reaches "
            f"{least:.4f} on the same text; give targets above that, or --config.slacks"
        )
    return list(config.targets)


def claim_run(task: Task, folder: Path, *, seed: int, target: float | None, result: str) -> bool:
    """Binds the folder of one run (`claim_folder`); `target` is None for the control."""
    config = to_plain(task.config)
    shown = {name: config.pop(name) for name in _REPORT_FIELDS}
    # The identity stands for the model, wherever its folder is.
    for name in (*_CHOOSE_RUNS, *MAY_CHANGE, "model"):
        config.pop(name)
    start = config.pop("start", "")
    begun = {"start_sha256": sparse_model.open_identity(start).text} if start else {}
    trained = begun | {
        "seed": seed,
        "target": target,
        "base_sha256": task.base.identity.text,
        "data": task.batches(seed).fingerprint,
        "validation": task.validation.fingerprint,
    }
    return claim_folder(
        folder, trained=trained | config, shown=shown, result=result, force=task.force
    )
