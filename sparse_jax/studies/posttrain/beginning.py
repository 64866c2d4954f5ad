"""How a run of post-training begins: its parameters, and what it loses before its first update."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lm_jax.assets import published
from lm_jax.errors import UsageError
from lm_jax.model import params as params_lib
from lm_jax.model.params import ParamTree
from lm_jax.parallel import sharding
from lm_jax.run import processes
from lm_jax.run.files import write_json
from lm_jax.run.results import load_result
from lm_jax.train import optim
from lm_jax.train.objective import ignore_index_batch
from lm_jax.train.state import run_keys
from lm_jax.weights.load import load_pretrained
from lm_jax.weights.peft import load_peft
from sparse_jax.gates import model as sparse_model
from sparse_jax.gates.model import Gates, SparseModel, constant_gates
from sparse_jax.gates.objective import GATE_BIAS, WEIGHTS, Sparsifying
from sparse_jax.gates.opening import open_biases
from sparse_jax.studies.posttrain import export
from sparse_jax.studies.posttrain.evaluation import compare
from sparse_jax.studies.posttrain.results import StartResult
from sparse_jax.studies.posttrain.settings import PosttrainConfig
from sparse_jax.studies.posttrain.task import Task

START = "start.json"
# The least number of training windows whose scores decide with which biases gates start open.
_CALIBRATION_WINDOWS = 32


def allowances(config: PosttrainConfig) -> tuple[float, ...]:
    """Nats per token by which each update's bound is relaxed; () if none is."""
    if not config.relaxed:
        return ()
    rates = np.asarray(jax.vmap(optim.schedule(config.train))(np.arange(config.steps)))
    return tuple((config.relaxed / config.learning_rate * rates.astype(np.float64)).tolist())


def start(
    objective: Sparsifying, task: Task, bias_LN: np.ndarray | None = None, seed: int = 0
) -> ParamTree:
    """Initial parameters that are given: weights of the base, or adapters, with gate biases.

    With `config.start` they are those of an earlier run, and `bias_LN` its biases.
    """
    params: dict[str, Any] = {WEIGHTS: task.base.params}
    if task.config.start:
        params[WEIGHTS] = earlier_weights(task, objective)
    elif objective.adapters is not None:
        # As the loop draws those of the control.
        params |= params_lib.init(run_keys(seed)[0], {WEIGHTS: objective.spec[WEIGHTS]})
    if objective.learn_bias:
        shape = (task.base.cfg.num_layers, task.base.cfg.num_heads)
        params[GATE_BIAS] = np.full(shape, objective.bias, np.float32)
    return params if bias_LN is None else params | {GATE_BIAS: bias_LN}


def earlier_weights(task: Task, objective: Sparsifying) -> ParamTree:
    """The adapters of `config.start`, or with `config.full` its weights.

    Raises:
      UsageError: its adapters have another rank or strength, or adapt other weights.
      BadInputError: it holds no adapters, or they are of another base.
    """
    config, folder = task.config, published.resolve_model(task.config.start)
    if objective.adapters is None:
        return load_pretrained(folder, mesh=task.mesh, without_gates=True).params
    adapters, found = load_peft(folder, task.base)
    shapes, wanted = (
        {path: tuple(leaf.shape) for path, leaf in params_lib.by_path(tree).items()}
        for tree in (adapters, objective.spec[WEIGHTS])
    )
    if shapes != wanted or found.strength != objective.adapters.strength:
        raise UsageError(
            f"config.start = {config.start!r} has adapters of rank {found.rank} and alpha "
            f"{found.alpha:g} over {len(shapes) // 2} weights, and config.adapters asks for rank "
            f"{objective.adapters.rank} and alpha {objective.adapters.alpha:g} over "
            f"{len(wanted) // 2}; set config.adapters as they were"
        )
    return adapters


def earlier_gates(config: PosttrainConfig) -> Gates:
    """The gates of `config.start`.

    Raises:
      UsageError: they are of another kind than those of the settings.
      BadInputError, CorruptError: it is no sparse model.
    """
    _, gates = sparse_model.open_gates(config.start)
    for name in ("raw_gate", "renormalise"):
        if getattr(gates, name) != getattr(config, name):
            raise UsageError(
                f"config.{name} = {getattr(config, name)}, and the gates of config.start = "
                f"{config.start!r} have {getattr(gates, name)}; set it as they have it"
            )
    return gates


def measure_start(task: Task, folder: Path, objective: Sparsifying, seed: int) -> StartResult:
    """A run before its first update, from `start.json` if it is there; says what it loses.

    Raises:
      CorruptError: the file is damaged.
      StoppedError: a stop was requested during the evaluation.
    """
    file = folder / START
    if processes.on_first(file.exists):
        return load_result(file, StartResult)
    gates = _first_gates(task, objective, seed)
    sparse = SparseModel(task.base, gates, {})
    if task.config.start:
        merged = export.merge(task.base, objective, {WEIGHTS: earlier_weights(task, objective)})
        sparse = dataclasses.replace(merged, gates=gates)
    key = jax.random.key(seed)
    found = compare(task.base, sparse, task.validation, task.mesh, key=key)
    result = StartResult(
        difference=found.difference.estimate,
        divergence=found.ratio("divergence", "tokens").estimate,
        edges=found.ratio("open_edges", "pairs").estimate,
        bias=_rows(gates) if task.config.open_at_start or task.config.start else None,
    )
    processes.on_first(lambda: write_json(file, result))
    processes.note(
        f"before the first update {result.edges:.1%} of the edges are open, and the loss is "
        f"{result.difference:+.4f} nats per token against the dense model"
    )
    return load_result(file, StartResult)


def _rows(gates: Gates) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(map(float, row_N)) for row_N in np.asarray(gates.bias_LN))


def _first_gates(task: Task, objective: Sparsifying, seed: int) -> Gates:
    """Gates before the first update: an earlier run's, open ones, or those of one bias."""
    config, cfg = task.config, task.base.cfg
    if config.start:
        return earlier_gates(config)
    gates = constant_gates(
        cfg, objective.bias, raw_gate=objective.raw_gate, renormalise=objective.renormalise
    )
    if not config.open_at_start:
        return gates
    count = -(-_CALIBRATION_WINDOWS // config.batch_size)
    tokens_BS = np.concatenate([task.batches(seed).at(k)["tokens"] for k in range(count)])
    bias_LN = open_biases(
        cfg,
        task.base.params,
        ignore_index_batch(sharding.shard_batch(task.mesh, tokens_BS)),
        config.open_at_start,
        task.mesh,
        raw_gate=config.raw_gate,
        opened=config.opened,
    )
    return dataclasses.replace(gates, bias_LN=bias_LN)
