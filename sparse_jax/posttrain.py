"""Makes the attention of a pretrained model sparse at a bounded loss.

    python -m sparse_jax.posttrain --config=configs/sparse/smollm2.py --workdir=runs/sparse

1. The model is loaded, and the corpus tokenized with its tokenizer and cut into windows.
2. The dense model is evaluated. A target below its loss is refused; usually the target is its loss
   and a slack.
3. For each target a run trains in a folder of its own, from its last checkpoint if there is one.
4. The result is merged into one model, which is evaluated beside the dense one and exported.
5. With `control`, a last run keeps every edge: it learns the text as the others do.

The work folder then holds

    data/                  the prepared corpus
    target_<nats>/         one run: checkpoints, metrics.parquet, evaluations.parquet
                           (`lm_jax.train.loop`), the exported model and more (`results.py`)
    control/               the same training with every gate open, if the config asks for it, and
                           the dense model that it makes
    summary.json           every number that is printed at the end
    report.html            curves, edges by layer and head, attention before and after

A killed run is started again with the same command, and ends with the same parameters.
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

from lm_jax import launch, processes, report, runs, sharding
from lm_jax import params as params_lib
from lm_jax.errors import BadInputError, UsageError
from lm_jax.hf.load import Pretrained, load_pretrained
from lm_jax.params import ParamTree
from lm_jax.stats import Interval
from lm_jax.train.config import TrainConfig, Upkeep
from lm_jax.train.data import Batches, Examples, OnePass
from lm_jax.train.evaluate import Evaluation, evaluate
from lm_jax.train.loop import train
from lm_jax.train.metrics import METRICS
from lm_jax.train.objective import LanguageModelling, next_token_or_void
from lm_jax.train.prepare import Prepared, prepare_corpus
from lm_jax.train.state import TrainState
from lm_jax.train.step import make_eval_step
from sparse_jax import patterns, results
from sparse_jax import report as pages
from sparse_jax.config import PosttrainConfig
from sparse_jax.evaluation import compare, difference
from sparse_jax.geco import GecoSettings
from sparse_jax.model import SparseModel
from sparse_jax.objective import GATE_BIAS, WEIGHTS, Sparsifying

DATA, CONTROL, SUMMARY, REPORT = "data", "control", "summary.json", "report.html"
# As the bias of a gate's logit: open whatever is drawn, and without a gradient.
_ALWAYS_OPEN = 1e6


@dataclasses.dataclass(frozen=True)
class Job:
    """What all runs of one command share."""

    config: PosttrainConfig
    folder: Path
    mesh: jax.sharding.Mesh
    base: Pretrained
    prepared: Prepared
    train: Batches
    validation: OnePass


def open_job(config: PosttrainConfig, folder: Path) -> Job:
    """Loads the model and prepares its data.

    Raises:
      BadInputError: the model has no tokenizer, or the corpus not one batch of windows.
    """
    data, fsdp, tensor = config.mesh
    mesh = sharding.make_mesh(data=data, fsdp=fsdp, tensor=tensor)
    base = load_pretrained(config.model, dtype=_frozen_dtype(config), mesh=mesh)
    if base.tokenizer is None:
        raise BadInputError(
            f"model {config.model!r} has no tokenizer; put its tokenizer.json beside the weights"
        )
    if config.context > base.cfg.max_length:
        raise UsageError(
            f"config.context = {config.context} is beyond the {base.cfg.max_length} positions of "
            f"{config.model}; lower it"
        )
    prepared = prepare_corpus(folder / DATA, config.corpus, tokenizer=base.tokenizer)
    cut = functools.partial(
        Examples, prepared, context=config.context, mode="window", vocab_size=base.cfg.vocab_size
    )
    index, count = sharding.batch_share(mesh)
    share = {"batch_size": config.batch_size, "process_index": index, "process_count": count}
    return Job(
        config,
        folder,
        mesh,
        base,
        prepared,
        Batches(cut("train"), seed=config.seed, **share),
        OnePass(cut("validation", limit=config.validation_documents), **share),
    )


def dense_loss(job: Job) -> Evaluation:
    """Evaluates the dense model on the validation windows."""
    objective = LanguageModelling(job.base.cfg, dtype=job.config.dtype, cutting=next_token_or_void)
    return evaluate(make_eval_step(objective, job.mesh), job.base.params, job.validation, job.mesh)


def targets(config: PosttrainConfig, dense: float) -> list[float]:
    """The bound of each run, in nats per token.

    Raises:
      UsageError: one is below the dense model's loss.
    """
    if not config.targets:
        return [dense + slack for slack in config.slacks]
    if low := [target for target in config.targets if target < dense]:
        raise UsageError(
            f"config.targets has {low[0]:g} nats per token, and the dense model reaches "
            f"{dense:.4f} on the same text; give targets above that, or --config.slacks"
        )
    return list(config.targets)


def objective_of(job: Job, target: float) -> Sparsifying:
    """What one run minimises."""
    config = job.config
    dual = GecoSettings(target=target, **dataclasses.asdict(config.strength))
    return Sparsifying(
        job.base.cfg,
        dual,
        adapters=None if config.full else config.adapters,
        bias=config.bias,
        learn_bias=config.learn_bias,
        raw_gate=config.raw_gate,
        distill=config.distill,
        temperature=config.temperature,
        dtype=config.dtype,
        remat=config.remat,
    )


def start(objective: Sparsifying, job: Job) -> ParamTree:
    """All weights as training finds them, and gates with the bias of the config."""
    params: dict[str, Any] = {WEIGHTS: job.base.params}
    if objective.learn_bias:
        shape = (job.base.cfg.num_layers, job.base.cfg.num_heads)
        params[GATE_BIAS] = np.full(shape, objective.bias, np.float32)
    return params


def train_once(job: Job, folder: Path, objective: Sparsifying) -> tuple[TrainState, SparseModel]:
    """Trains to the end, from the last checkpoint in `folder`; returns also the model it makes."""
    config = job.config
    settings = TrainConfig(
        steps=config.steps,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        warmup=config.warmup,
        clip_norm=config.clip_norm or None,
        accumulate=config.accumulate,
        eval_every=config.eval_every,
        early_stop=False,
    )
    needs_dense = objective.adapters is not None or objective.distill > 0
    state = train(
        folder,
        objective,
        settings,
        job.train,
        job.validation,
        seed=config.seed,
        mesh=job.mesh,
        frozen=job.base.params if needs_dense else (),
        upkeep=Upkeep(save_every=config.save_every, log_every=10),
        # Adapters are drawn; weights begin as they are.
        params=start(objective, job) if config.full else None,
        measure=edges_in_all,
    ).state
    return state, results.merge(job.base, objective, state.params)


def train_target(job: Job, target: float) -> dict[str, Any]:
    """Trains under one bound to the end, evaluates and exports the result; returns its numbers."""
    folder = job.folder / f"target_{target:.4f}"
    # Written last of all, after the export.
    if processes.on_first(lambda: (folder / results.RESULT).exists()):
        return runs.read_json(folder / results.RESULT)
    config, objective = job.config, objective_of(job, target)
    state, merged = train_once(job, folder, objective)
    found = compare(job.base, merged, job.validation, job.mesh)
    result = {
        "target": target,
        "folder": folder.name,
        "loss": found.ratio("sparse_nll", "tokens"),
        "dense_loss": found.ratio("dense_nll", "tokens"),
        "difference": found.difference,
        "edges": found.ratio("open_edges", "pairs"),
        "open_edges_per_head": float(found.open_LN.mean()) / found.windows.num_rows,
        "windows": found.windows.num_rows,
        "validation_tokens": pc.sum(found.windows["tokens"]).as_py(),
        "strength": float(state.extra.strength),
        "steps": int(state.step),
        "tokens_seen": tokens_seen(folder),
    }
    heads = patterns.named(config.heads, job.base.cfg.num_layers, job.base.cfg.num_heads)
    shown = [patterns.look(job.base, merged, text, heads) for text in config.texts]
    adapters = None if config.full else state.params[WEIGHTS]
    results.export(folder, config, merged, adapters, result, found, shown)
    return runs.read_json(folder / results.RESULT)


def train_control(job: Job) -> dict[str, Any]:
    """Trains as every run does but with no edge ever closed; returns its numbers."""
    folder = job.folder / CONTROL
    if processes.on_first(lambda: (folder / results.RESULT).exists()):
        return runs.read_json(folder / results.RESULT)
    objective = dataclasses.replace(
        objective_of(job, 0.0),
        dual=GecoSettings.fixed(job.config.strength.least),
        bias=_ALWAYS_OPEN,
        learn_bias=False,
    )
    state, merged = train_once(job, folder, objective)
    found = compare(job.base, merged, job.validation, job.mesh)
    result = {
        "loss": found.ratio("sparse_nll", "tokens"),
        "difference": found.difference,
        "steps": int(state.step),
        "tokens_seen": tokens_seen(folder),
    }
    results.export_control(folder, merged, found, result)
    return runs.read_json(folder / results.RESULT)


def tokens_seen(folder: Path) -> int:
    """Tokens predicted in training."""
    return int(pc.sum(pq.read_table(folder / METRICS)["tokens"]).as_py())


def beside_control(job: Job, result: dict[str, Any]) -> Interval:
    """The loss of one run over the control's, on the same windows."""
    tables = (
        pq.read_table(job.folder / name / results.WINDOWS) for name in (result["folder"], CONTROL)
    )
    return difference(*tables)


def edges_in_all(params: ParamTree, step: int, found: Evaluation) -> dict[str, float]:
    """The share of open edges in an evaluation, as the mean over layers and as they are counted."""
    del params, step
    open_LN, pairs_L = found.sums["open_edges"], found.sums["pairs"]
    share_L = open_LN.mean(1) / pairs_L
    return {
        "validation/loss": found.loss,
        "validation/edges": float(open_LN.sum() / (pairs_L.sum() * open_LN.shape[1])),
        "validation/edges_layer_mean": float(share_L.mean()),
    }


def _frozen_dtype(config: PosttrainConfig) -> Any:
    # Trained weights are float32; frozen ones are only ever read in the dtype of the computation.
    return jnp.float32 if config.full else jnp.dtype(config.dtype)


def run(config: PosttrainConfig, folder: Path) -> dict[str, Any]:
    """Runs or resumes every target in an open work folder and returns the summary."""
    job = open_job(config, folder)
    # A head that is not there is refused now, not after the training.
    patterns.named(config.heads, job.base.cfg.num_layers, job.base.cfg.num_heads)
    manifest = job.prepared.manifest
    origin = runs.provenance(
        seeds={"run": config.seed},
        dtype=config.dtype,
        data={"documents": manifest["documents_sha256"]} | dict(manifest["sources"]),
        tokenizer=manifest["tokenizer_sha256"],
    )
    processes.on_first(lambda: runs.record_provenance(folder, origin))
    dense = dense_loss(job)
    bounds = targets(config, dense.loss)
    if processes.is_first():
        shown = ", ".join(f"{target:.4f}" for target in bounds)
        print(f"dense {dense.loss:.4f} nats per token on {dense.tokens:,} tokens; target {shown}")
    summary = {
        "model": config.model,
        "model_sha256": job.base.sha256,
        "family": job.base.cfg.family,
        "context": config.context,
        "corpus": {"source": config.corpus.source, "splits": manifest["splits"]},
        "trained_parameters": params_lib.count(objective_of(job, bounds[0]).spec),
        "dense_loss": dense.loss,
        "validation_tokens": dense.tokens,
        "runs": [train_target(job, target) for target in bounds],
        "control": train_control(job) if config.control else None,
        "device": jax.devices()[0].device_kind,
    }
    if config.control:
        summary["over_control"] = [beside_control(job, each) for each in summary["runs"]]
    processes.on_first(lambda: _conclude(folder, summary))
    return summary


def _conclude(folder: Path, summary: dict[str, Any]) -> None:
    runs.write_json(folder / SUMMARY, summary)
    summary = runs.read_json(folder / SUMMARY)
    found = [pages.read(folder / run["folder"]) for run in summary["runs"]]
    origin = runs.read_json(folder / runs.PROVENANCE)
    report.write(folder / REPORT, pages.build(summary, found, provenance=origin))
    runs.mark_finished(folder)


def told(summary: dict[str, Any]) -> str:
    """The summary for a terminal."""
    lines = [
        f"dense: {summary['dense_loss']:.4f} nats per token over "
        f"{summary['validation_tokens']:,} tokens of {summary['corpus']['source']}"
    ]
    for each in summary["runs"]:
        edges = each["edges"]
        lines.append(
            f"target {each['target']:.4f}: {100 * edges['estimate']:.2f} % of edges open "
            f"({100 * edges['low']:.2f} to {100 * edges['high']:.2f}), loss "
            f"{_signed(each['difference'])} against dense, {each['tokens_seen']:,} tokens seen"
        )
    if summary["control"]:
        less = summary["control"]["difference"]
        lines.append(f"control, every gate open: loss {_signed(less)} against dense")
        lines += [
            f"target {each['target']:.4f}: loss {_signed(more)} against the control"
            for each, more in zip(summary["runs"], summary["over_control"], strict=True)
        ]
    return "\n".join(lines)


def _signed(interval: dict[str, float]) -> str:
    return "{estimate:+.4f} ({low:+.4f} to {high:+.4f})".format_map(interval)


def main(arguments: launch.Arguments) -> None:
    """The command."""
    config = cast(ConfigDict, arguments.config)
    settled = launch.freeze(config, PosttrainConfig)
    with processes.open_workdir(arguments.folder, config, resume=arguments.resume) as folder:
        done = runs.finished(folder)
        if not done:
            run(settled, folder)
        summary = runs.read_json(folder / SUMMARY)
    if processes.is_first():
        print(*[f"finished {done}"] * bool(done), told(summary), sep="\n")


if __name__ == "__main__":
    launch.app(main, config="configs/sparse/smollm2.py", distributed=True, training=True)
