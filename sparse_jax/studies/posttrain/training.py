"""Training of one run, under a bound or with every gate open: to its exported model and numbers."""

from collections.abc import Sequence
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lm_jax.model import lora
from lm_jax.model.params import ParamTree
from lm_jax.model.precision import exact_jit
from lm_jax.run.results import load_result
from lm_jax.train.config import CheckpointPolicy
from lm_jax.train.evaluate import Evaluation
from lm_jax.train.loop import Hooks, TrainResult, TrainRun, train
from lm_jax.train.metrics import METRICS
from lm_jax.weights.load import Pretrained
from sparse_jax.gates.geco import GecoConfig
from sparse_jax.gates.model import SparseModel
from sparse_jax.gates.objective import WEIGHTS, Sparsifying
from sparse_jax.studies.posttrain import export, patterns
from sparse_jax.studies.posttrain.beginning import allowances, measure_start, start
from sparse_jax.studies.posttrain.evaluation import PairedEvaluation, compare
from sparse_jax.studies.posttrain.kinds import edge_kinds, shares
from sparse_jax.studies.posttrain.limits import StrengthWatch, at_limits
from sparse_jax.studies.posttrain.results import ControlResult, Rounding, RunResult
from sparse_jax.studies.posttrain.task import (
    Task,
    claim_run,
    control_folder,
    control_loss,
    control_losses,
    seed_folder,
)

# Bias of a gate logit with which every gate is open, whatever the noise, and has no gradient.
_ALWAYS_OPEN = 1e6


def objective_of(task: Task, target: float, reference: tuple[float, ...] = ()) -> Sparsifying:
    """The objective of a run with this bound on the loss.

    With `reference`, a loss in nats per token for each update, the bound is above those.
    """
    config = task.config
    dual = GecoConfig(target=target, steps=config.steps, **dataclasses.asdict(config.strength))
    return Sparsifying(
        task.base.cfg,
        dual,
        adapters=None if config.full else config.adapters,
        bias=config.bias,
        learn_bias=config.learn_bias,
        raw_gate=config.raw_gate,
        renormalise=config.renormalise,
        distill=config.distill,
        temperature=config.temperature,
        reference=reference,
        rule_from=round((1 - config.by_rule) * config.steps) if config.by_rule else None,
        dtype=config.dtype,
        remat=config.remat,
        constraint=config.constraint,
        loss_share=config.loss_share,
    )


def train_once(
    task: Task,
    folder: Path,
    objective: Sparsifying,
    seed: int,
    bias: Sequence[Sequence[float]] | None = None,
) -> TrainResult:
    """Trains to the last step, from the last checkpoint in `folder`; `bias` opens the gates."""
    config = task.config
    bias_LN = None if bias is None else np.array(bias, np.float32)
    settings = config.train
    if not objective.learn_bias:
        # Of a control, which has no biases.
        settings = dataclasses.replace(settings, rate_factors=())
    given = functools.partial(start, objective, task, bias_LN, seed)
    needs_dense = objective.adapters is not None or objective.distill > 0
    watch = (StrengthWatch(folder.name, config.strength),) if objective.dual.adapts else ()
    return train(
        folder,
        TrainRun(
            objective=objective,
            config=settings,
            batches=task.batches(seed),
            validation=task.validation,
            seed=seed,
            frozen=task.base.params if needs_dense else (),
            base_sha256=task.base.identity.text,
            # Adapters are initialised at random, weights are those of the base.
            params=given if config.full or bias_LN is not None else None,
        ),
        task.mesh,
        CheckpointPolicy(
            save_every=config.save_every, log_every=10, allow_fallback=config.allow_fallback
        ),
        Hooks(measure=edge_metrics, trackers=watch),
    )


def merge_and_compare(
    task: Task, objective: Sparsifying, run: TrainResult
) -> tuple[SparseModel, PairedEvaluation, Rounding | None]:
    """The merged model of a run, its evaluation against the dense one, and the cost of rounding.

    The last is None where all weights were trained, which are float32 in training and after.
    Otherwise it holds the share of the adapters' update that is lost (`lora.rounding`) and the loss
    in nats per token before and after merging, on the same windows.
    """
    wide = jnp.dtype(jnp.float32) if task.config.export_dtype == "float32" else None
    params = run.state.params
    merged = export.merge(task.base, objective, params, dtype=wide)
    dense = task.base if wide is None else _in_dtype(task.base, wide)
    result = compare(dense, merged, task.validation, task.mesh)
    if objective.adapters is None:
        return merged, result, None
    lost = exact_jit(functools.partial(lora.rounding, settings=objective.adapters, dtype=wide))
    rounding = Rounding(
        dtype=str(wide or jnp.dtype(task.config.dtype)),
        update_lost=float(lost(task.base.params, params[WEIGHTS])),
        loss_before=run.history.last,
        loss_after=result.ratio("sparse_nll", "tokens").estimate,
    )
    return merged, result, rounding


def _in_dtype(base: Pretrained, dtype: Any) -> Pretrained:
    return dataclasses.replace(base, params=jax.tree.map(lambda x: x.astype(dtype), base.params))


def train_target(task: Task, seed: int, target: float, control: Path | None = None) -> RunResult:
    """Trains under one bound, evaluates and exports the model, and returns the numbers.

    `control` is the folder of the seed's control, for `paired`.
    """
    folder = seed_folder(task.folder, seed) / f"target_{target:.4f}"
    # The result is written last, after the export.
    if claim_run(task, folder, seed=seed, target=target, result=export.RESULT):
        return load_result(folder / export.RESULT, RunResult)
    config = task.config
    if config.paired:
        assert control is not None
        over = target - control_loss(control)
        objective = objective_of(task, over, control_losses(control, config.steps))
    else:
        objective = objective_of(task, target, allowances(config))
    begin = measure_start(task, folder, objective, seed)
    run = train_once(task, folder, objective, seed, begin.bias)
    merged, evaluation, rounding = merge_and_compare(task, objective, run)
    strengths = pq.read_table(folder / METRICS)["strength"].to_pylist()
    kinds = edge_kinds(merged, task.validation.examples)
    at_floor, at_ceiling = at_limits(strengths, config.strength)
    result = RunResult(
        seed=seed,
        target=target,
        folder=folder.relative_to(task.folder).as_posix(),
        loss=evaluation.ratio("sparse_nll", "tokens"),
        dense_loss=evaluation.ratio("dense_nll", "tokens"),
        difference=evaluation.difference,
        edges=evaluation.ratio("open_edges", "pairs"),
        open_edges_per_head=float(evaluation.open_LN.mean()) / evaluation.windows.num_rows,
        windows=evaluation.windows.num_rows,
        validation_tokens=pc.sum(evaluation.windows["tokens"]).as_py(),
        strength=float(run.state.aux_state.strength),
        steps=int(run.state.step),
        tokens_seen=tokens_seen(folder),
        rounding=rounding,
        divergence=evaluation.ratio("divergence", "tokens"),
        start=begin,
        at_floor=at_floor,
        at_ceiling=at_ceiling,
        kinds=shares(kinds),
    )
    heads = patterns.named(config.heads, task.base.cfg.num_layers, task.base.cfg.num_heads)
    texts = [patterns.trace_patterns(task.base, merged, text, heads) for text in config.texts]
    adapters = None if config.full else run.state.params[WEIGHTS]
    export.export(folder, config, merged, adapters, result, evaluation, texts, kinds)
    return load_result(folder / export.RESULT, RunResult)


def train_control(task: Task, seed: int) -> ControlResult:
    """Trains with every gate open, evaluates and exports the model, and returns the numbers."""
    folder = control_folder(task.folder, seed)
    if (folder / export.RESULT).exists():
        # Folders from before this file was written have it before another export.
        control_loss(folder)
    if claim_run(task, folder, seed=seed, target=None, result=export.RESULT):
        return load_result(folder / export.RESULT, ControlResult)
    objective = dataclasses.replace(
        objective_of(task, 0.0),
        dual=GecoConfig.fixed(task.config.strength.least),
        bias=_ALWAYS_OPEN,
        learn_bias=False,
        rule_from=None,
    )
    run = train_once(task, folder, objective, seed)
    merged, evaluation, rounding = merge_and_compare(task, objective, run)
    result = ControlResult(
        seed=seed,
        folder=folder.relative_to(task.folder).as_posix(),
        loss=evaluation.ratio("sparse_nll", "tokens"),
        difference=evaluation.difference,
        steps=int(run.state.step),
        tokens_seen=tokens_seen(folder),
        rounding=rounding,
    )
    export.export_control(folder, task.config, merged, evaluation, result)
    return load_result(folder / export.RESULT, ControlResult)


def tokens_seen(folder: Path) -> int:
    """Number of tokens predicted in training."""
    return int(pc.sum(pq.read_table(folder / METRICS)["tokens"]).as_py())


def edge_metrics(params: ParamTree, step: int, result: Evaluation) -> dict[str, float]:
    """Loss and share of open edges of an evaluation: over all edges, and as the mean over layers.

    Layers with a window have fewer edges than others.
    """
    del params, step
    open_LN, pairs_L = result.sums["open_edges"], result.sums["pairs"]
    share_L = open_LN.mean(1) / pairs_L
    more = {}
    if "divergence" in result.sums:
        more["validation/divergence"] = float(result.sums["divergence"]) / result.tokens
    return more | {
        "validation/loss": result.loss,
        "validation/edges": float(open_LN.sum() / (pairs_L.sum() * open_LN.shape[1])),
        "validation/edges_layer_mean": float(share_L.mean()),
    }
