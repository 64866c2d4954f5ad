"""Trains the heads, and measures them before and after.

Besides what every study has, the work folder holds

    data/             the prepared corpus
    calibration.json  b_auto, where the recipe asks for it (`bias_tables` for one of each head)
    train/            checkpoints, metrics.parquet, evaluations.parquet (`lm_jax.train.loop`)
    train_logits/     the same of the second stage, if there is one
    rows.parquet      one row per head, before and after the first stage (`results.ROWS`)
    losses.parquet    one row per window, before and after the first stage (`results.LOSSES`)
    logits.parquet    one row per window, after either stage (`results.LOGITS`)
    trained/          what the last stage left, as `polyattn_jax.load_trained` reads it
"""

import dataclasses
from pathlib import Path
import shutil
from typing import Any

import jax

from lm_jax.evaluate.samples import sampled_inputs
from lm_jax.model import params as params_lib
from lm_jax.model.params import ParamTree
from lm_jax.run.finished import Inputs, file_inputs
from lm_jax.run.tables import write_table
from lm_jax.study import Work
from lm_jax.train.config import CheckpointPolicy
from lm_jax.train.loop import TrainResult, TrainRun, train
from lm_jax.weights import hub
from lm_jax.weights.load import identities
from polyattn_jax.audit.audited_model import model_identity
from polyattn_jax.audit.results.provenance import read_provenance
from polyattn_jax.recipes.hybrid_recipe import HybridRecipe
from polyattn_jax.recipes.row_maps import parse_recipe
from polyattn_jax.recipes.trained_heads import TrainedHeads, save_trained
from polyattn_jax.studies.distill.matching import HeadMatching, LogitMatching, Matching
from polyattn_jax.studies.distill.measure import head_table, logit_table, loss_table, measure
from polyattn_jax.studies.distill.numbers import summarise, summarise_logits
from polyattn_jax.studies.distill.results import DistillSummary
from polyattn_jax.studies.distill.settings import DistillConfig
from polyattn_jax.studies.distill.task import (
    TRAIN,
    TRAIN_LOGITS,
    Onward,
    Task,
    logits_of,
    objective_of,
    open_task,
)

TRAINED = "trained"


def inputs(config: DistillConfig) -> Inputs:
    """The model, the heads and the text of a training."""
    return {
        **identities({"model": config.model}, model_identity),
        **file_inputs({"config.hybrid": config.hybrid}),
        **sampled_inputs(config.corpus),
    }


def train_heads(task: Task, objective: HeadMatching, folder: Path) -> TrainResult:
    """Trains to the last step, from the last checkpoint in `folder`."""
    return _train(
        task,
        folder,
        objective=objective,
        config=task.config.train,
        batches=task.batches,
        frozen=task.base.params,
    )


def train_logits(
    task: Task, objective: LogitMatching, first: ParamTree, folder: Path, *, frozen: Any = None
) -> TrainResult:
    """The second stage, from the parameters of the first or the last checkpoint in `folder`.

    It reads the text that follows the first stage's.

    Args:
      task: the model and its data.
      objective: the objective.
      first: parameters that the first stage ended with.
      folder: folder of the checkpoints.
      frozen: what the objective has as `frozen`; None is the model.
    """
    config = task.config
    return _train(
        task,
        folder,
        objective=objective,
        config=config.train_logits,
        batches=Onward(task.batches, config.steps),
        params=lambda: objective.begun(first, config.seed),
        frozen=task.base.params if frozen is None else frozen,
    )


def _train(task: Task, folder: Path, **of_stage: Any) -> TrainResult:
    config = task.config
    run = TrainRun(
        validation=task.validation,
        seed=config.seed,
        base_sha256=task.base.identity.text,
        in_nats=False,
        **of_stage,
    )
    policy = CheckpointPolicy(
        save_every=config.save_every, log_every=10, allow_fallback=config.allow_fallback
    )
    return train(folder, run, task.mesh, policy)


def train_and_measure(config: DistillConfig, work: Work) -> DistillSummary:
    """Trains or resumes it, writes the trained heads, and measures them."""
    folder = work.path
    task = open_task(config, folder)
    manifest = task.prepared.manifest
    work.record(
        data=hub.identity("model", task.base.identity.text, task.base.revision)
        | {"documents": manifest["documents_sha256"]}
        | dict(manifest["sources"]),
        tokenizer=manifest["tokenizer_sha256"],
    )
    objective = objective_of(task, folder)
    params = train_heads(task, objective, folder / TRAIN).state.params
    stages: list[tuple[Matching, ParamTree]] = [(objective, params)]
    logits = logits_of(task, objective) if config.logit_steps else None
    if logits is not None:
        params = train_logits(task, logits, params, folder / TRAIN_LOGITS).state.params
        stages.append((logits, params))
    heads = HybridRecipe(
        version=1,
        model=config.model,
        model_sha256=task.base.identity.text,
        recipe=task.hybrid.recipe if task.hybrid else parse_recipe(config.recipe).spec,
        bias=objective.bias,
        layers=objective.cfg.num_layers,
        heads=objective.cfg.num_heads,
        replaced=objective.replaced,
    )
    shutil.rmtree(folder / TRAINED, ignore_errors=True)
    save_trained(folder / TRAINED, TrainedHeads(heads, stages[-1][0].adapters, dict(params)))
    # Adapters change nothing at first, and matrices are the identity: the recipe as it is.
    untrained = params_lib.init(jax.random.key(config.seed), objective.spec)
    before, *after = (measure(task, *stage) for stage in [(objective, untrained), *stages])
    by_head, losses = head_table(objective, before, after[0]), loss_table(before, after[0])
    source = read_provenance(folder, config)
    write_table(folder / "rows.parquet", by_head, source)
    write_table(folder / "losses.parquet", losses, source)
    summary = summarise(task, objective, (before, after[0]), (by_head, losses), folder)
    if logits is None:
        return summary
    windows = logit_table(*after)
    write_table(folder / "logits.parquet", windows, source)
    return dataclasses.replace(summary, logits=summarise_logits(task, logits, windows, folder))
