"""A circuit of heads on another wording of its task, computed from the rows of both."""

import numpy as np
import pyarrow as pa
from scipy import stats

from lm_jax.statistics import Interval, cluster_interval
from sparse_jax.circuits import curves
from sparse_jax.circuits.discover import Curve
from sparse_jax.studies.circuits.measurements import head_importance, read_curve, select
from sparse_jax.studies.circuits.results import Transfer
from sparse_jax.studies.circuits.settings import CircuitConfig


def transfer(
    config: CircuitConfig,
    table: pa.Table,
    model: str,
    source: str,
    task: str,
    prompt_B: np.ndarray,
) -> Transfer:
    """A circuit of heads on another wording of its task."""
    there = [select(table, task=name, model=model) for name in (source, task)]
    first_LN, second_LN = (head_importance(each, config.direction).mean(2) for each in there)
    labels = {"component": "heads", "ablation": config.ablations[0], "scope": "task"}
    transferred, own = (
        read_curve(there[1], **labels, ranking=ranking) for ranking in ("transferred", "own")
    )
    size = int(own.sizes[0])
    orders = [np.argsort(-each, axis=None, kind="stable") for each in (first_LN, second_LN)]
    kept = [set(order[:size].tolist()) for order in orders]
    shared = size * size / first_LN.size

    return Transfer(
        model=model,
        source=source,
        task=task,
        size=size,
        jaccard=len(kept[0] & kept[1]) / len(kept[0] | kept[1]),
        jaccard_by_chance=shared / (2 * size - shared),
        spearman=spearman(first_LN.ravel(), second_LN.ravel()),
        transferred=explained_interval(config, transferred, prompt_B),
        own=explained_interval(config, own, prompt_B),
    )


def explained_interval(config: CircuitConfig, circuit: Curve, prompt_B: np.ndarray) -> Interval:
    """Explained effect of a circuit of one size with its interval over prompts."""
    return cluster_interval(
        np.stack([circuit.metric_KB[0], circuit.empty_B, circuit.whole_B], 1),
        prompt_B,
        lambda rows: float(curves.explained(rows[:, :1].T, rows[:, 1], rows[:, 2])[0]),
        resamples=config.resamples,
        seed=config.seed,
    )


def spearman(first: np.ndarray, second: np.ndarray) -> float | None:
    """Rank correlation; None where one side does not vary."""
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(stats.spearmanr(first, second).statistic)
