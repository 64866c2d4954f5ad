"""Trains the heads that a recipe replaces to match softmax, and measures what that repairs.

    iaj polyattn distill --config=polyattn/distill --workdir=runs/distill
    iaj polyattn distill --config=polyattn/distill --config.model=FOLDER \
        --config.recipe=performer:m=256 --config.hybrid=heads.json --workdir=runs/mine

1. The corpus is tokenized with the model's tokenizer and split; b_auto is calibrated if the recipe
   asks for it.
2. Adapters of queries and keys, or the matrices of a feature map, are trained on the outputs of the
   frozen model's heads (`matching.py`), in `train/`, from the last checkpoint if there is one.
3. On held-out windows, before and after: S of the rows of every head, the error of its output, and
   the loss of the frozen model and of the hybrid.
4. Does the safe share of a head before training predict what training repairs? A rank correlation
   over heads.

The work folder then holds

    data/             the prepared corpus
    calibration.json  b_auto, where the recipe asks for it (`bias_tables` for one of each head)
    train/            checkpoints, metrics.parquet, evaluations.parquet (`lm_jax.train.loop`)
    rows.parquet      one row per head (`distill_results.ROWS`)
    losses.parquet    one row per window (`distill_results.LOSSES`)
    summary.json      every number of the report
    report.html       the report, one offline file

The same command resumes a killed run, which ends with the same parameters.
"""

from collections.abc import Mapping
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from scipy import stats

from lm_jax import statistics
from lm_jax.errors import BadInputError, UsageError
from lm_jax.model import lora
from lm_jax.model import params as params_lib
from lm_jax.model.decoder import param_spec
from lm_jax.model.params import ParamTree
from lm_jax.parallel import sharding
from lm_jax.parallel.kernels import under_mesh
from lm_jax.run import cli
from lm_jax.run.config import from_plain
from lm_jax.run.files import write_json, write_text
from lm_jax.run.provenance import collect_provenance, record_provenance
from lm_jax.run.results import load_result
from lm_jax.run.tables import write_table
from lm_jax.run.workdir import finish_time, mark_finished, open_workdir
from lm_jax.statistics import Interval
from lm_jax.text.examples import Batches, Examples, OnePass
from lm_jax.text.preparation import Prepared, prepare_corpus
from lm_jax.train.config import MAY_CHANGE, CheckpointPolicy, TrainConfig
from lm_jax.train.evaluate import stop_between
from lm_jax.train.loop import TrainResult, train
from lm_jax.train.metrics import METRICS
from lm_jax.train.objective import nll
from lm_jax.train.step import check_batch
from lm_jax.weights import hub
from lm_jax.weights.load import Pretrained, open_pretrained
from polyattn_jax import bias_tables, stages
from polyattn_jax.audited_model import AuditedModel
from polyattn_jax.config import AuditConfig
from polyattn_jax.distill_config import DistillConfig
from polyattn_jax.distill_results import LOSSES, ROWS, DistillSummary, HeadRepair
from polyattn_jax.hybrid_recipe import HybridRecipe, replaced_heads
from polyattn_jax.matching import HYBRID, MATCHED, HeadMatching
from polyattn_jax.provenance import read_provenance
from polyattn_jax.report import distilled
from polyattn_jax.row_maps import parse_recipe, resolve_bias

DATA, TRAIN, SUMMARY, REPORT = "data", "train", "summary.json", "report.html"
# Queries of a window whose rows are read.
QUERIES = 16


@dataclasses.dataclass(frozen=True)
class Task:
    """The model, its data and the devices."""

    config: DistillConfig
    mesh: jax.sharding.Mesh
    base: Pretrained
    hybrid: HybridRecipe | None
    prepared: Prepared
    batches: Batches
    validation: OnePass


def open_task(config: DistillConfig, folder: Path) -> Task:
    """Prepares the data of the model, and loads its weights after every other check.

    Raises:
      UsageError: the batch does not divide over the devices, or the model has too few positions or
        lacks the weights to adapt.
      BadInputError: there is no such model or it has no tokenizer; the corpus has less than one
        batch of windows; the hybrid is of another model.
      CorruptError: the file of the hybrid is damaged.
    """
    data, fsdp, tensor = config.mesh
    mesh = sharding.make_mesh(data=data, fsdp=fsdp, tensor=tensor)
    check_batch(config.batch_size, 1, mesh)
    hybrid = load_result(config.hybrid, HybridRecipe) if config.hybrid else None
    opened = open_pretrained(config.model)
    opened.cfg.check_equal_blocks("config.model: distill")
    if opened.tokenizer is None:
        raise BadInputError(
            f"model {config.model!r} has no tokenizer; put its tokenizer.json beside the weights"
        )
    if config.context > opened.cfg.max_length:
        raise UsageError(
            f"config.context = {config.context} is beyond the {opened.cfg.max_length} positions of "
            f"{config.model}; lower it"
        )
    lora.adapter_spec(param_spec(opened.cfg), config.adapters)
    prepared = prepare_corpus(folder / DATA, config.corpus, tokenizer=opened.tokenizer)
    windows = functools.partial(
        Examples, prepared, context=config.context, mode="window", vocab_size=opened.cfg.vocab_size
    )
    index, count = sharding.batch_share(mesh)
    share = {"batch_size": config.batch_size, "process_index": index, "process_count": count}
    batches = Batches(windows("train"), seed=config.seed, **share)
    validation = OnePass(windows("validation", limit=config.validation_documents), **share)
    base = opened.load(dtype=jnp.float32, mesh=mesh)
    if hybrid is not None and hybrid.model_sha256 != base.sha256:
        raise BadInputError(
            f"{config.hybrid} is of weights {hybrid.model_sha256[:12]}, and {config.model} has "
            f"{base.sha256[:12]}; search the heads of this model, iaj polyattn check --hybrid=FILE"
        )
    return Task(config, mesh, base, hybrid, prepared, batches, validation)


def objective_of(task: Task, folder: Path) -> HeadMatching:
    """The objective: the recipe, its bias and the heads that it replaces."""
    cfg, hybrid = task.base.cfg, task.hybrid
    replaced = replaced_heads(np.ones((cfg.num_layers, cfg.num_heads), bool))
    if hybrid is not None:
        recipe, bias, replaced = parse_recipe(hybrid.recipe), hybrid.bias, hybrid.replaced
    else:
        recipe = parse_recipe(task.config.recipe)
        bias = bias_tables.plain(_bias(task, folder))
    return HeadMatching(cfg, recipe.map, bias, replaced, task.config.adapters)


def _bias(task: Task, folder: Path) -> Any:
    """The bias of the recipe, calibrated at the context if need be."""
    config, recipe = task.config, parse_recipe(task.config.recipe)
    settings = AuditConfig(
        model=config.model,
        recipes=(recipe.spec,),
        niah_lengths=(config.context,),
        sweep_length=config.context,
        induction_n=0,
        mqar_n=0,
        budget=config.budget,
        seed=config.seed,
        resamples=config.resamples,
    )
    audited = AuditedModel(task.base, task.mesh, settings)
    b_auto = stages.calibrated(audited, folder).bias if recipe.bias == "auto" else None
    named = bias_tables.calibrated(audited, folder, settings.by_name, b_auto)
    return resolve_bias(recipe, named)


def train_heads(task: Task, objective: HeadMatching, folder: Path) -> TrainResult:
    """Trains to the last step, from the last checkpoint in `folder`."""
    config = task.config
    settings = TrainConfig(
        steps=config.steps,
        learning_rate=config.learning_rate,
        weight_decay=0.0,
        warmup=config.warmup,
        clip_norm=config.clip_norm or None,
        eval_every=config.eval_every,
        early_stop=False,
    )
    return train(
        folder,
        objective,
        settings,
        task.batches,
        task.validation,
        seed=config.seed,
        mesh=task.mesh,
        frozen=task.base.params,
        base_sha256=task.base.sha256,
        policy=CheckpointPolicy(
            save_every=config.save_every, log_every=10, allow_fallback=config.allow_fallback
        ),
        in_nats=False,
    )


def measure(task: Task, objective: HeadMatching, params: ParamTree) -> dict[str, np.ndarray]:
    """Errors, S and losses of every held-out window, with these parameters.

    Returns arrays whose first axis is the window: `document`, `tokens`, `softmax` and `hybrid`
    (sums in nats), `error`, `energy` `[W, L, N]`, `s`, `s_softmax` `[W, L, N, Q]`, and `read`
    `[W, Q]`, false where a query is padding.

    Raises:
      StoppedError: a stop was requested.
    """
    queries = tuple(int(q) for q in np.arange(1, QUERIES + 1) * task.config.context // QUERIES - 1)
    queries = tuple(sorted({max(q, 1) for q in queries}))
    run = functools.partial(_of_windows, objective, queries)
    step = jax.jit(
        under_mesh(run, task.mesh),
        in_shardings=(None, None, sharding.batch_sharding(task.mesh)),
        out_shardings=sharding.replicated(task.mesh),
    )
    results, documents = [], []
    for k in range(task.validation.per_epoch):
        batch = task.validation.at(k)
        tokens_BS = sharding.shard_batch(task.mesh, batch["tokens"])
        results.append(jax.tree.map(np.asarray, step(params, task.base.params, tokens_BS)))
        documents.append(batch["document"])
        stop_between(k + 1, task.validation.per_epoch)
    document = np.concatenate(documents)
    real = document >= 0
    columns = {name: np.concatenate([r[name] for r in results])[real] for name in results[0]}
    return columns | {"document": document[real]}


def _of_windows(
    objective: HeadMatching,
    queries: tuple[int, ...],
    params: ParamTree,
    frozen: ParamTree,
    tokens_BS: jax.Array,
) -> dict[str, jax.Array]:
    batch = objective.make_batch(tokens_BS)
    matched = objective.run(params, frozen, batch, mixer=MATCHED, queries=queries)
    hybrid = objective.run(params, frozen, batch, mixer=HYBRID)
    of_heads = {
        name: jnp.moveaxis(matched.aux[source], 0, 1)
        for name, source in (
            ("error", "error_BN"),
            ("energy", "energy_BN"),
            ("s", "s_BNQ"),
            ("s_softmax", "s_softmax_BNQ"),
        )
    }
    return {
        "tokens": batch.loss_mask_BT.sum(1),
        "softmax": nll(matched, frozen, objective.cfg, batch),
        "hybrid": nll(hybrid, frozen, objective.cfg, batch),
        "read": batch.input_mask_BT[:, np.array(queries)],
        **of_heads,
    }


def run(config: DistillConfig, folder: Path) -> DistillSummary:
    """Runs or resumes the training in an open work folder and returns the summary."""
    task = open_task(config, folder)
    manifest = task.prepared.manifest
    record_provenance(
        folder,
        collect_provenance(
            seeds={"distill": config.seed},
            dtype="float32",
            data=hub.identity("model", task.base.sha256, task.base.revision)
            | {"documents": manifest["documents_sha256"]}
            | dict(manifest["sources"]),
            tokenizer=manifest["tokenizer_sha256"],
        ),
    )
    objective = objective_of(task, folder)
    trained = train_heads(task, objective, folder / TRAIN)
    # Adapters change nothing at first, and matrices are the identity: the recipe as it is.
    untrained = params_lib.init(jax.random.key(config.seed), objective.spec)
    before, after = (measure(task, objective, p) for p in (untrained, trained.state.params))
    by_head, losses = head_table(objective, before, after), loss_table(before, after)
    source = read_provenance(folder, config)
    write_table(folder / "rows.parquet", by_head, source)
    write_table(folder / "losses.parquet", losses, source)
    summary = summarise(task, objective, (before, after), (by_head, losses), folder)
    write_json(folder / SUMMARY, summary)
    write_text(folder / REPORT, distilled.build(summary))
    return summary


def head_table(
    objective: HeadMatching, before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]
) -> pa.Table:
    """One row per head (`distill_results.ROWS`)."""
    heads_LN = objective.heads_LN
    energy_LN = before["energy"].sum(0, dtype=np.float64)
    read_WQ = before["read"]
    columns: dict[str, list[Any]] = {name: [] for name in ROWS.names}

    def own(measured: Mapping[str, np.ndarray], name: str, place: tuple[int, int]) -> np.ndarray:
        return measured[name][:, place[0], place[1]][read_WQ]

    for place in np.ndindex(*heads_LN.shape):
        rows = {
            "layer": place[0],
            "head": place[1],
            "replaced": bool(heads_LN[place]),
            "rows": int(read_WQ.sum()),
            "safe_softmax": float((own(before, "s_softmax", place) < 1).mean()),
        }
        for stage, measured in (("before", before), ("after", after)):
            s = own(measured, "s", place)
            error = measured["error"].sum(0, dtype=np.float64)[place]
            rows |= {
                f"safe_{stage}": float((s < 1).mean()),
                f"s_{stage}": float(np.median(s)),
                f"error_{stage}": error / energy_LN[place] if energy_LN[place] else np.nan,
            }
        for name, values in columns.items():
            values.append(rows[name])
    return pa.table(columns, schema=ROWS)


def loss_table(before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]) -> pa.Table:
    """One row per window (`distill_results.LOSSES`)."""
    columns = {name: before[name] for name in ("document", "tokens", "softmax")}
    columns |= {"before": before["hybrid"], "after": after["hybrid"]}
    return pa.table({name: pa.array(columns[name]) for name in LOSSES.names}).cast(LOSSES)


def summarise(
    task: Task,
    objective: HeadMatching,
    measured: tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]],
    tables: tuple[pa.Table, pa.Table],
    folder: Path,
) -> DistillSummary:
    """The content of summary.json."""
    config, (before, after), (heads, losses) = task.config, measured, tables
    hybrid = task.hybrid
    documents, c = before["document"], {name: losses[name].to_numpy() for name in LOSSES.names}
    ratio = functools.partial(
        statistics.clustered_ratio,
        clusters=documents,
        resamples=config.resamples,
        seed=config.seed,
    )
    mask = objective.heads_LN
    errors = [m["error"][:, mask].sum(1, dtype=np.float64) for m in (before, after)]
    energy = before["energy"][:, mask].sum(1, dtype=np.float64)
    names = [field.name for field in dataclasses.fields(HeadRepair)]
    replaced = heads.filter(pc.field("replaced")).select(names).to_pylist()
    by_head = tuple(HeadRepair(**row) for row in replaced)
    safe = [head.safe_before for head in by_head]
    rank = functools.partial(rank_correlation, safe, config=config)
    return DistillSummary(
        model=config.model,
        model_sha256=task.base.sha256,
        provenance=read_provenance(folder, config),
        recipe=hybrid.recipe if hybrid else parse_recipe(config.recipe).spec,
        bias=objective.bias,
        trained="matrices of the feature map"
        if objective.trains_maps
        else "adapters of queries and keys",
        parameters=params_lib.count(objective.spec),
        layers=objective.cfg.num_layers,
        heads=objective.cfg.num_heads,
        replaced=len(by_head),
        steps=config.steps,
        trained_tokens=int(pc.sum(pq.read_table(folder / TRAIN / METRICS)["tokens"]).as_py()),
        windows=len(documents),
        documents=len(set(documents.tolist())),
        tokens=int(c["tokens"].sum()),
        error_before=ratio(errors[0], energy),
        error_after=ratio(errors[1], energy),
        error_change=ratio(errors[1] - errors[0], energy),
        softmax_loss=ratio(c["softmax"], c["tokens"]),
        before=ratio(c["before"] - c["softmax"], c["tokens"]),
        after=ratio(c["after"] - c["softmax"], c["tokens"]),
        change=ratio(c["after"] - c["before"], c["tokens"]),
        error_rank=rank([head.error_before for head in by_head]),
        repair_rank=rank([head.repaired for head in by_head]),
        after_rank=rank([head.error_after for head in by_head]),
        by_head=by_head,
    )


def rank_correlation(
    first: list[float], second: list[float], *, config: DistillConfig
) -> Interval | None:
    """Spearman's rank correlation with an interval that resamples heads.

    None for fewer than three heads, or where one of the two is the same in all of them. A resample
    of which that holds has no order and counts as 0.
    """
    pairs = np.stack([first, second], 1)
    pairs = pairs[np.isfinite(pairs).all(1)]
    if len(pairs) < 3 or (pairs == pairs[0]).all(0).any():
        return None

    def spearman(rows: np.ndarray) -> float:
        if (rows == rows[0]).all(0).any():
            return 0.0
        return float(stats.spearmanr(rows[:, 0], rows[:, 1]).statistic)

    return statistics.clustered_bootstrap(
        pairs, np.arange(len(pairs)), spearman, resamples=config.resamples, seed=config.seed
    )


def main(arguments: cli.Arguments) -> None:
    """The command."""
    config = from_plain(arguments.config, DistillConfig)
    opened = open_workdir(
        arguments.folder, arguments.config, resume=arguments.resume, may_change=MAY_CHANGE
    )
    with opened as work:
        if done := finish_time(work.path):
            print(f"finished {done}")
        else:
            run(config, work.path)
            mark_finished(work.path)
        print(distilled.format_summary(load_result(work.path / SUMMARY, DistillSummary)))


if __name__ == "__main__":
    cli.app(main, config="polyattn/distill", config_class=DistillConfig, training=True)
