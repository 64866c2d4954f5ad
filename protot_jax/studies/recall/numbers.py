"""Statistics of the recall suite: the content of `summary.json` from the rows of `rows.parquet`."""

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from lm_jax import statistics
from protot_jax.analysis.recall import Condition, Task, chance
from protot_jax.studies.recall.results import (
    SCHEMA,
    VERSION,
    ConditionResult,
    DivergedTraining,
    ModelSize,
    RecallSummary,
    SeedAccuracy,
)
from protot_jax.studies.recall.settings import RecallConfig
from protot_jax.training.seeds import over_seeds

Columns = Mapping[str, np.ndarray]


def summarise(
    config: RecallConfig,
    table: pa.Table,
    *,
    sizes: tuple[ModelSize, ...],
    device: str,
    diverged: Sequence[DivergedTraining] = (),
) -> RecallSummary:
    """The summary of all rows.

    Args:
      config: settings of the suite.
      table: rows, as `results.ROWS` declares them.
      sizes: sizes of the models.
      device: device that trained them.
      diverged: trainings without rows.
    """
    # A null is no pair.
    columns = {
        name: table[name].fill_null(0).to_numpy() if name == "pairs" else table[name].to_numpy()
        for name in table.column_names
    }
    results = [
        result
        for task in config.task_names
        for model in config.models
        for result in _of_model(
            config,
            columns,
            task,
            model,
            {one.learning_rate for one in diverged if (one.model, one.task) == (model, task)},
        )
    ]
    return RecallSummary(SCHEMA, VERSION, config, sizes, tuple(results), device, tuple(diverged))


def _of_model(
    config: RecallConfig, columns: Columns, task: Task, model: str, diverged: Collection[float]
) -> Iterator[ConditionResult]:
    own = _where(columns, task=task, model=model)
    tried = {
        rate: _accuracy(_where(own, split="choice", learning_rate=rate))
        for rate in config.learning_rates
        if rate not in diverged
    }
    if not tried:
        return
    rate = max(tried, key=tried.__getitem__)
    own = _where(own, split="test", learning_rate=rate)
    for condition in config.measured(task):
        here = _where(own, length=condition.length, pairs=condition.pairs or 0)
        by_seed = tuple(_of_seed(_where(here, seed=seed), seed) for seed in config.seeds)
        yield ConditionResult(
            task=task,
            model=model,
            learning_rate=rate,
            length=condition.length,
            pairs=condition.pairs,
            over_seeds=over_seeds([each.accuracy.estimate for each in by_seed]),
            by_seed=by_seed,
            chance=chance(condition, config.vocab_size),
            longer=condition.length > config.train_length,
        )


def _of_seed(rows: Columns, seed: int) -> SeedAccuracy:
    # All sequences of a condition have as many queries, so that the mean of shares is the share.
    shares = rows["right"] / rows["asked"]
    interval = statistics.clustered_bootstrap(
        shares, rows["sequence"], within=(0.0, 1.0), seed=seed
    )
    return SeedAccuracy(seed, interval)


def _accuracy(rows: Columns) -> float:
    return float(rows["right"].sum() / rows["asked"].sum())


def _where(columns: Columns, **values: object) -> dict[str, np.ndarray]:
    """The rows that have these values."""
    kept = np.logical_and.reduce([columns[name] == value for name, value in values.items()])
    return {name: column[kept] for name, column in columns.items()}


def find(summary: RecallSummary, model: str, condition: Condition) -> ConditionResult:
    """The result of a model in a condition."""
    (result,) = (
        each
        for each in summary.results
        if each.model == model and (each.task, each.length, each.pairs) == tuple(condition)
    )
    return result
