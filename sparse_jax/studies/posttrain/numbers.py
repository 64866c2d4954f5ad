"""The summary of a post-training: its runs by bound, with means and ranges over seeds."""

from collections.abc import Sequence
import statistics

import jax

from lm_jax.model import params as params_lib
from lm_jax.statistics import Interval
from lm_jax.text.preparation import SplitSize
from sparse_jax.studies.posttrain.results import (
    BoundSummary,
    ComparedRun,
    ControlResult,
    CorpusSummary,
    DenseResult,
    PosttrainSummary,
    Spread,
)
from sparse_jax.studies.posttrain.task import Task
from sparse_jax.studies.posttrain.training import objective_of


def summarise(
    task: Task,
    dense: DenseResult,
    runs: Sequence[ComparedRun],
    controls: Sequence[ControlResult],
) -> PosttrainSummary:
    """The summary of all runs, in order of seeds, and of the controls trained beside them."""
    config, cfg = task.config, task.base.cfg
    splits = task.prepared.manifest["splits"]
    return PosttrainSummary(
        model=config.model,
        model_sha256=task.base.sha256,
        family=cfg.family,
        context=config.context,
        corpus=CorpusSummary(
            source=config.corpus.source,
            splits={name: SplitSize(**split) for name, split in splits.items()},
        ),
        trained_parameters=params_lib.count(objective_of(task, dense.loss).spec),
        dense_loss=dense.loss,
        validation_tokens=dense.tokens,
        seeds=config.seeds,
        bounds=by_bound(runs, 0.0 if config.constraint == "divergence" else dense.loss),
        runs=tuple(runs),
        controls=tuple(controls),
        device=jax.devices()[0].device_kind,
    )


def spread(values: Sequence[float]) -> Spread:
    """The spread of one number of several runs."""
    return Spread(statistics.fmean(values), min(values), max(values), len(values))


def by_bound(result: Sequence[ComparedRun], dense: float) -> tuple[BoundSummary, ...]:
    """Every bound with its share of edges and its losses over all seeds.

    Args:
      result: numbers of runs, in order of seeds, each with all bounds in one order.
      dense: what bounds are above: the loss of the dense model, or 0 for its divergence.
    """
    rows = []
    for bound in dict.fromkeys(run.bound for run in result):
        own = [run for run in result if run.bound == bound]
        target = statistics.fmean(run.target for run in own)
        divergence = [run.divergence for run in own if run.divergence is not None]
        over = [run.over_control for run in own if run.over_control is not None]
        rows.append(
            BoundSummary(
                target=target,
                slack=target - dense,
                seeds=tuple(run.seed for run in own),
                edges=_spread_of([run.edges for run in own]),
                loss=_spread_of([run.loss for run in own]),
                difference=_spread_of([run.difference for run in own]),
                over_control=_spread_of(over) if len(over) == len(own) else None,
                divergence=_spread_of(divergence) if len(divergence) == len(own) else None,
            )
        )
    return tuple(rows)


def _spread_of(intervals: Sequence[Interval]) -> Spread:
    return spread([interval.estimate for interval in intervals])
