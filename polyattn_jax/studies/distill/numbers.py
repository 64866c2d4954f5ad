"""The content of a distillation's summary.json."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from scipy import stats

from lm_jax import statistics
from lm_jax.model import params as params_lib
from lm_jax.statistics import Interval
from lm_jax.train.metrics import METRICS
from polyattn_jax.audit.results.provenance import read_provenance
from polyattn_jax.recipes.row_maps import parse_recipe
from polyattn_jax.studies.distill.matching import HeadMatching, LogitMatching
from polyattn_jax.studies.distill.results import (
    LOGITS,
    LOSSES,
    DistillSummary,
    HeadRepair,
    LogitStage,
)
from polyattn_jax.studies.distill.settings import DistillConfig
from polyattn_jax.studies.distill.task import TRAIN, TRAIN_LOGITS, Task


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
    ratio = _ratio(config, documents)
    mask = objective.heads_LN
    errors = [m["error"][:, mask].sum(1, dtype=np.float64) for m in (before, after)]
    energy = before["energy"][:, mask].sum(1, dtype=np.float64)
    names = [field.name for field in dataclasses.fields(HeadRepair)]
    replaced = heads.filter(pc.field("replaced")).select(names).to_pylist()
    by_head = tuple(HeadRepair(**row) for row in replaced)
    safe = [np.nan if head.safe_before is None else head.safe_before for head in by_head]
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
        trained_tokens=_trained_tokens(folder / TRAIN),
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


def summarise_logits(
    task: Task, objective: LogitMatching, windows: pa.Table, folder: Path
) -> LogitStage:
    """What the second stage changes, from the rows of `results.LOGITS`."""
    c = {name: windows[name].to_numpy() for name in LOGITS.names}
    per_token = functools.partial(_ratio(task.config, c["document"]), below=c["tokens"])
    return LogitStage(
        targets=objective.adapters.targets,
        parameters=params_lib.count(objective.spec),
        steps=task.config.logit_steps,
        trained_tokens=_trained_tokens(folder / TRAIN_LOGITS),
        divergence_before=per_token(c["divergence_first"]),
        divergence_after=per_token(c["divergence_second"]),
        divergence_change=per_token(c["divergence_second"] - c["divergence_first"]),
        after=per_token(c["second"] - c["softmax"]),
        change=per_token(c["second"] - c["first"]),
    )


def _ratio(config: DistillConfig, documents: np.ndarray) -> Callable[..., Interval]:
    return functools.partial(
        statistics.clustered_ratio,
        clusters=documents,
        resamples=config.resamples,
        seed=config.seed,
    )


def _trained_tokens(folder: Path) -> int:
    return int(pc.sum(pq.read_table(folder / METRICS)["tokens"]).as_py())


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
        pairs,
        np.arange(len(pairs)),
        spearman,
        resamples=config.resamples,
        within=(-1.0, 1.0),
        seed=config.seed,
    )
