"""Post-trains a pretrained model to sparse attention under a bound on its loss.

    iaj sparse posttrain --config=sparse/quickstart --workdir=runs/sparse_quickstart
    iaj sparse posttrain --config=sparse/smollm2 --config.seeds="(0, 1, 2)" --workdir=runs/sparse

1. Settings that do not fit the model are refused before anything is written. The corpus is
   tokenized with the model's tokenizer and split into windows; then the weights are loaded.
2. The dense model is evaluated. A target below its loss is refused; usually the target is its loss
   plus a slack.
3. Each run, one per seed and target, trains in its own folder, from its last checkpoint if there is
   one.
4. Adapters are merged into the weights; the model is compared with the dense one and exported.
5. With `control`, a further run of each seed trains on the same text with every gate open; with
   `slack_over="control"` it comes first, and bounds are relative to its loss.

The work folder then holds

    data/                    the prepared corpus
    dense.json               the dense model's loss, evaluated once
    seed_<n>/target_<nats>/  one run: checkpoints, metrics.parquet, evaluations.parquet
                             (`lm_jax.train.loop`), the exported model and more (`export.py`)
    seed_<n>/control/        with `control`, the same training with every gate open, and the dense
                             model that it gives; its loss that bounds refer to (`task.py`)
    summary.json             every number that is printed at the end (`results.PosttrainSummary`)
    report.html              curves, edges by layer and head, attention before and after

The same command resumes a killed run, which ends with the same parameters; on another mesh or
device with nearly the same. `--resume=force` under other settings renames the folders of earlier
runs and trains again.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lm_jax.errors import CorruptError
from lm_jax.model import lora
from lm_jax.model import params as params_lib
from lm_jax.model.params import ParamTree
from lm_jax.model.precision import exact_jit
from lm_jax.run import cli, processes
from lm_jax.run.config import from_plain
from lm_jax.run.files import to_jsonable, write_json, write_text
from lm_jax.run.finished import Inputs, finish_time, mark_finished
from lm_jax.run.provenance import collect_provenance, read_provenance, record_provenance
from lm_jax.run.results import load_result
from lm_jax.statistics import Interval
from lm_jax.text.corpora import corpus_inputs
from lm_jax.text.preparation import SplitSize
from lm_jax.train.config import MAY_CHANGE, CheckpointPolicy, TrainConfig
from lm_jax.train.evaluate import Evaluation
from lm_jax.train.loop import TrainResult, train
from lm_jax.train.metrics import METRICS
from lm_jax.weights import hub
from lm_jax.weights.load import Pretrained, identities
from sparse_jax.gates.geco import GecoConfig
from sparse_jax.gates.model import SparseModel
from sparse_jax.gates.objective import GATE_BIAS, WEIGHTS, Sparsifying
from sparse_jax.studies.posttrain import export, patterns
from sparse_jax.studies.posttrain import report as report_page
from sparse_jax.studies.posttrain.config import PosttrainConfig
from sparse_jax.studies.posttrain.evaluation import PairedEvaluation, compare, difference
from sparse_jax.studies.posttrain.report_text import format_summary
from sparse_jax.studies.posttrain.results import (
    ComparedRun,
    ControlResult,
    CorpusSummary,
    PosttrainSummary,
    Rounding,
    RunResult,
    by_bound,
)
from sparse_jax.studies.posttrain.task import (
    Task,
    bounds,
    claim_run,
    control_loss,
    dense_loss,
    open_task,
)

CONTROL, SUMMARY, REPORT = "control", "summary.json", "report.html"
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
    )


def start(objective: Sparsifying, task: Task) -> ParamTree:
    """Initial parameters where all weights are trained: those of the base, and gate biases."""
    params: dict[str, Any] = {WEIGHTS: task.base.params}
    if objective.learn_bias:
        shape = (task.base.cfg.num_layers, task.base.cfg.num_heads)
        params[GATE_BIAS] = np.full(shape, objective.bias, np.float32)
    return params


def train_once(task: Task, folder: Path, objective: Sparsifying, seed: int) -> TrainResult:
    """Trains to the last step, from the last checkpoint in `folder`."""
    config = task.config
    settings = TrainConfig(
        steps=config.steps,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        warmup=config.warmup,
        clip_norm=config.clip_norm or None,
        skip_sigma=config.skip_sigma or None,
        accumulate=config.accumulate,
        eval_every=config.eval_every,
        early_stop=False,
    )
    needs_dense = objective.adapters is not None or objective.distill > 0
    return train(
        folder,
        objective,
        settings,
        task.batches(seed),
        task.validation,
        seed=seed,
        mesh=task.mesh,
        frozen=task.base.params if needs_dense else (),
        base_sha256=task.base.identity.text,
        policy=CheckpointPolicy(
            save_every=config.save_every, log_every=10, allow_fallback=config.allow_fallback
        ),
        # Adapters are initialised at random, weights are those of the base.
        params=start(objective, task) if config.full else None,
        measure=edge_metrics,
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


def seed_folder(folder: Path, seed: int) -> Path:
    """Folder of the runs of one seed."""
    return folder / f"seed_{seed}"


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
        objective = objective_of(task, over, _losses(control, config.steps))
    else:
        objective = objective_of(task, target)
    run = train_once(task, folder, objective, seed)
    merged, evaluation, rounding = merge_and_compare(task, objective, run)
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
    )
    heads = patterns.named(config.heads, task.base.cfg.num_layers, task.base.cfg.num_heads)
    texts = [patterns.trace_patterns(task.base, merged, text, heads) for text in config.texts]
    adapters = None if config.full else run.state.params[WEIGHTS]
    export.export(folder, config, merged, adapters, result, evaluation, texts)
    return load_result(folder / export.RESULT, RunResult)


def _losses(folder: Path, steps: int) -> tuple[float, ...]:
    """The training loss of every update of a run, in nats per token."""
    losses = pq.read_table(folder / METRICS)["loss"].to_pylist()
    if len(losses) != steps:
        raise CorruptError(
            f"{folder / METRICS} has {len(losses)} updates of {steps}; remove {folder} and run "
            "again"
        )
    return tuple(losses)


def train_control(task: Task, seed: int) -> ControlResult:
    """Trains with every gate open, evaluates and exports the model, and returns the numbers."""
    folder = seed_folder(task.folder, seed) / CONTROL
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


def over_control(task: Task, result: RunResult, controls: Path) -> Interval:
    """Loss of a run minus that of its seed's control, on the same windows.

    `controls` is the work folder of the post-training whose controls are compared with.
    """
    control = seed_folder(controls, result.seed) / CONTROL
    tables = (
        pq.read_table(folder / export.WINDOWS) for folder in (task.folder / result.folder, control)
    )
    return difference(*tables)


def edge_metrics(params: ParamTree, step: int, result: Evaluation) -> dict[str, float]:
    """Loss and share of open edges of an evaluation: over all edges, and as the mean over layers.

    Layers with a window have fewer edges than others.
    """
    del params, step
    open_LN, pairs_L = result.sums["open_edges"], result.sums["pairs"]
    share_L = open_LN.mean(1) / pairs_L
    return {
        "validation/loss": result.loss,
        "validation/edges": float(open_LN.sum() / (pairs_L.sum() * open_LN.shape[1])),
        "validation/edges_layer_mean": float(share_L.mean()),
    }


def inputs(config: PosttrainConfig) -> Inputs:
    """The model and the text of a post-training, without loading weights."""
    text = corpus_inputs({"config.corpus": config.corpus.source})
    return identities({"model": config.model}) | text


def run(
    config: PosttrainConfig, folder: Path, *, force: bool = False, controls: Path | None = None
) -> PosttrainSummary:
    """Runs or resumes every seed and target in an open work folder and returns the summary.

    Args:
      config: the settings.
      folder: the work folder.
      force: rename runs of other settings or weights, and train again.
      controls: work folder of another post-training of the same model on the same text and seeds,
        whose controls serve in place of its own.
    """
    given = inputs(config)
    task = open_task(config, folder, force=force)
    manifest = task.prepared.manifest
    origin = collect_provenance(
        seeds={f"run {i}": seed for i, seed in enumerate(config.seeds)},
        dtype=config.dtype,
        data=hub.identity("model", task.base.identity.text, task.base.revision)
        | {"documents": manifest["documents_sha256"]}
        | dict(manifest["sources"]),
        tokenizer=manifest["tokenizer_sha256"],
    )
    processes.on_first(lambda: record_provenance(folder, origin))
    dense = dense_loss(task)
    result: list[ComparedRun] = []
    trained_controls: list[ControlResult] = []
    for seed in config.seeds:
        control = None
        control_folder = seed_folder(controls or folder, seed) / CONTROL
        if controls is not None:
            control = load_result(control_folder / export.RESULT, ControlResult)
        elif config.slack_over == "control":
            control = train_control(task, seed)
        over = control_loss(control_folder) if config.slack_over == "control" else None
        targets = bounds(config, dense.loss, over)
        if processes.is_first():
            bounds_text = ", ".join(f"{target:.4f}" for target in targets)
            print(
                f"dense {dense.loss:.4f} nats per token on {dense.tokens:,} tokens; target "
                f"{bounds_text}"
            )
        of_seed = [train_target(task, seed, target, control_folder) for target in targets]
        if config.control and controls is None:
            trained_controls.append(control or train_control(task, seed))
        for number, each in enumerate(of_seed):
            more = over_control(task, each, controls or folder) if config.control else None
            if more is not None:
                export.add_control(folder / each.folder, more)
            own = {field.name: getattr(each, field.name) for field in dataclasses.fields(each)}
            result.append(ComparedRun(**own, bound=number, over_control=more))
    summary = PosttrainSummary(
        model=config.model,
        model_sha256=task.base.sha256,
        family=task.base.cfg.family,
        context=config.context,
        corpus=CorpusSummary(
            source=config.corpus.source,
            splits={name: SplitSize(**split) for name, split in manifest["splits"].items()},
        ),
        trained_parameters=params_lib.count(objective_of(task, dense.loss).spec),
        dense_loss=dense.loss,
        validation_tokens=dense.tokens,
        seeds=config.seeds,
        bounds=by_bound(result, dense.loss),
        runs=tuple(result),
        controls=tuple(trained_controls),
        device=jax.devices()[0].device_kind,
    )

    def conclude() -> None:
        _conclude(config, folder, summary, controls or folder)
        mark_finished(folder, given)

    processes.on_first(conclude)
    return summary


def _conclude(
    config: PosttrainConfig, folder: Path, summary: PosttrainSummary, controls: Path
) -> None:
    write_json(folder / SUMMARY, summary)
    summary = load_result(folder / SUMMARY, PosttrainSummary)
    results = []
    for run in summary.runs:
        moving: tuple[float, ...] = ()
        if config.paired:
            losses = _losses(seed_folder(controls, run.seed) / CONTROL, config.steps)
            moving = tuple(loss + config.slacks[run.bound] for loss in losses)
        results.append(report_page.read(folder / run.folder, moving))
    origin = to_jsonable(read_provenance(folder))
    page = report_page.build(config, summary, results, provenance=origin)
    write_text(folder / REPORT, page)


def main(arguments: cli.Arguments) -> None:
    """The command."""
    config = cast(ConfigDict, arguments.config)
    frozen = from_plain(config, PosttrainConfig)
    force = arguments.resume == "force"
    opened = processes.open_shared_workdir(
        arguments.folder, config, resume=arguments.resume, may_change=MAY_CHANGE
    )
    with opened as folder:
        # With force, a finished folder is checked again: its weights may have been replaced.
        done = None if force else finish_time(folder, inputs(frozen))
        if not done:
            run(frozen, folder, force=force)
        summary = load_result(folder / SUMMARY, PosttrainSummary)
    if processes.is_first():
        print(*[f"finished {done}"] * bool(done), format_summary(summary), sep="\n")


if __name__ == "__main__":
    cli.app(
        main, config="sparse/smollm2", config_class=PosttrainConfig, distributed=True, training=True
    )
