"""Numbers of the circuit study, computed from its rows: rows in, summary out.

Intervals resample clean prompts, each with all of its pairs (`lm_jax.statistics.cluster_interval`;
fewer than five have none), so that their `n` counts prompts; `TaskFacts.kept` counts pairs. A
ratio of two models' sizes resamples their prompts together, because they are the same. Both are
of one pair of models: no interval covers what another training run would change.
"""

from collections.abc import Iterator, Mapping, Sequence
import itertools
import math
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from lm_jax.run import progress
from lm_jax.statistics import FEWEST_CLUSTERS, Interval, cluster_interval, wilson
from sparse_jax.circuits import curves
from sparse_jax.circuits.agreement import rank_correlation
from sparse_jax.circuits.discover import Curve
from sparse_jax.studies.circuits.kinds import KINDS
from sparse_jax.studies.circuits.measurements import (
    array,
    head_importance,
    importance,
    read_curve,
    select,
)
from sparse_jax.studies.circuits.place_numbers import places
from sparse_jax.studies.circuits.pruned import RANKINGS, pruned_circuits
from sparse_jax.studies.circuits.results import (
    Agreement,
    CircuitSummary,
    CurvePoint,
    CurveResult,
    HeadEffect,
    ModelFacts,
    Ratio,
    TaskFacts,
    TaskResult,
)
from sparse_jax.studies.circuits.settings import CircuitConfig
from sparse_jax.studies.circuits.transfer import transfer

# Heads that a page names.
_NAMED = 5
# Rankings of circuits that have no curve.
_AT_ONE_SIZE = ("transferred", "own", *RANKINGS)
_KEYS = ("component", "ablation", "ranking", "scope")


def summarise(
    config: CircuitConfig,
    models: Sequence[ModelFacts],
    tasks: Sequence[TaskFacts],
    table: pa.Table,
    *,
    prompts: Mapping[str, np.ndarray],
    device: str,
) -> CircuitSummary:
    """The summary.

    Args:
      config: settings.
      models: facts of the models, in the order of their results.
      tasks: prompts of the tasks in numbers, in that order too.
      table: all rows.
      prompts: number of each pair's clean prompt, from 0, by task (`Task.prompt_B`).
      device: kind of the device that measured.
    """
    results = []
    with progress.track("intervals", len(tasks) * len(models) + 1, unit="results") as advance:
        for task, model in itertools.product(tasks, models):
            own = select(table, task=task.name, model=model.role)
            results.append(task_result(config, own, task.name, model.role, prompts[task.name]))
            advance(note=f"{model.role} on {task.name}")
        compared = tuple(ratios(config, table, results, prompts))
        transfers = tuple(
            transfer(config, table, model.role, task.rephrases, task.name, prompts[task.name])
            for task in tasks
            for model in models
            if task.rephrases is not None and "heads" in config.components
        )
        advance(note="ratios")
    return CircuitSummary(
        config=config,
        models=tuple(models),
        tasks=tuple(tasks),
        results=tuple(results),
        ratios=compared,
        transfers=transfers,
        device=device,
    )


def task_result(
    config: CircuitConfig, table: pa.Table, task: str, model: str, prompt_B: np.ndarray
) -> TaskResult:
    """Everything about one model on one task, from the rows of that piece."""
    names = {"task": task, "model": model}
    clean_B, _ = array(table, ["prompt"], quantity="metric", method="clean")
    corrupt_B, _ = array(table, ["prompt"], quantity="metric", method="corrupt")
    # A prompt is right if it is in all of its pairs, which are not independent.
    wrong_P = curves.sum_by_prompt((~(clean_B > 0)).astype(int), prompt_B)
    accuracy = wilson(int((wrong_P == 0).sum()), len(wrong_P))
    change = mean(config, clean_B - corrupt_B, prompt_B)
    chosen = select(table, quantity="curve")
    kinds = sorted({tuple(row[key] for key in _KEYS) for row in chosen.select(_KEYS).to_pylist()})
    results = tuple(
        curve_result(config, table, *kind, prompt_B=prompt_B)
        for kind in kinds
        if kind[2] not in _AT_ONE_SIZE
    )
    return TaskResult(
        **names,
        accuracy=accuracy,
        solved=accuracy.estimate >= config.accuracy_bar and change.low > 0,
        clean=mean(config, clean_B, prompt_B),
        corrupt=mean(config, corrupt_B, prompt_B),
        change=change,
        components={each.component: each.points[-1].size for each in results},
        open={
            name: float(np.mean(array(table, ["prompt"], quantity="open", component=name)[0]))
            for name in config.components
        },
        agreements=tuple(agreements(table)),
        curves=results,
        heads=tuple(strongest_heads(config, table, prompt_B))
        if "heads" in config.components
        else (),
        places=tuple(places(config, table, prompt_B)),
        pruned=tuple(pruned_circuits(config, table, prompt_B)),
    )


def strongest_heads(
    config: CircuitConfig, table: pa.Table, prompt_B: np.ndarray
) -> Iterator[HeadEffect]:
    """The heads whose exact patching changes the mean metric most, of the rows of one piece."""
    importance_LNB = head_importance(table, config.direction)
    run = "clean" if config.direction == "noising" else "corrupt"
    metric_B, _ = array(table, ["prompt"], quantity="metric", method=run)
    effect_LNB = importance(importance_LNB, config.direction)
    if not effect_LNB.size:
        return
    mean_LN = effect_LNB.mean(-1)
    for place in np.argsort(-np.abs(mean_LN), axis=None)[:_NAMED]:
        layer, head = map(int, np.unravel_index(place, mean_LN.shape))
        effect = mean(config, effect_LNB[layer, head], prompt_B)
        yield HeadEffect(layer, head, effect, float(metric_B.mean()) + effect.estimate)


def mean(config: CircuitConfig, values_B: np.ndarray, prompt_B: np.ndarray) -> Interval:
    """Mean over pairs with its interval over prompts."""
    return cluster_interval(values_B, prompt_B, resamples=config.resamples, seed=config.seed)


def curve_result(
    config: CircuitConfig,
    table: pa.Table,
    component: str,
    ablation: str,
    ranking: Literal["signed", "absolute", "random"],
    scope: Literal["prompt", "task"],
    prompt_B: np.ndarray,
) -> CurveResult:
    """Explained effect by size with intervals, crossing, CPR, CMD and area."""
    labels = dict(zip(_KEYS, (component, ablation, ranking, scope), strict=True))
    curve = read_curve(table, **labels)
    taken, explained = curve.sizes, curve.explained
    errors, ends = curves.explained_intervals(
        curve.metric_KB,
        curve.empty_B,
        curve.whole_B,
        prompt_B=prompt_B,
        seed=config.seed,
        resamples=config.resamples,
    )
    by_size = dict(zip(taken.tolist(), explained.tolist(), strict=True)) | {0: 0.0}
    shares = curves.MIB_FRACTIONS
    at_shares = [by_size[int(share * taken[-1])] for share in shares]
    cpr, cmd = curves.cpr_cmd(shares, at_shares)
    points = zip(taken.tolist(), explained.tolist(), errors.tolist(), ends.tolist(), strict=True)
    return CurveResult(
        component=component,
        ablation=ablation,
        ranking=ranking,
        scope=scope,
        points=tuple(CurvePoint(size, value, error, *end) for size, value, error, end in points),
        crossing=crossings(config, [curve], prompt_B),
        cpr=cpr,
        cmd=cmd,
        log_area=curves.log_area(shares, at_shares),
    )


def crossings(
    config: CircuitConfig, measured: Sequence[Curve], prompt_B: np.ndarray
) -> Interval | None:
    """Crossing of one curve, or that of the first over that of the second.

    Args:
      config: settings of the study.
      measured: one or two curves on the same prompts.
      prompt_B: number of each pair's clean prompt.

    Returns:
      None where a curve does not reach the fraction, for all prompts or some resample of them.
    """
    sizes = measured[0].sizes
    # The interval of a size interpolated in its logarithm could leave the range of sizes.
    within = (sizes[0], sizes[-1]) if len(measured) == 1 else (0.0, math.inf)
    stacked = [np.stack([each.empty_B, each.whole_B, *each.metric_KB], 1) for each in measured]
    widths = [0, *itertools.accumulate(each.shape[1] for each in stacked)]

    def statistic(rows: np.ndarray) -> float:
        crossings = []
        for each, start, end in zip(measured, widths[:-1], widths[1:], strict=True):
            empty, whole, *metric = rows[:, start:end].T
            drawn = Curve(each.sizes, np.array(metric), empty, whole)
            crossings.append(curves.crossing(drawn.sizes, drawn.explained, config.fraction))
        return crossings[0] / crossings[1] if len(crossings) > 1 else crossings[0]

    result = cluster_interval(
        np.concatenate(stacked, 1),
        prompt_B,
        statistic,
        resamples=config.resamples,
        # Sizes are above 0, and compared by how many times more one is.
        log=True,
        within=within,
        seed=config.seed,
    )
    ends = (result.estimate, result.low, result.high)
    return None if any(map(math.isnan, ends)) else result


def agreements(table: pa.Table) -> Iterator[Agreement]:
    """Rank correlations of exact effects and estimates, by component, direction, method, rules."""
    effects = select(table, quantity="effect")
    names = ("component", "direction", "method", "rules")
    kinds = {tuple(row[name] for name in names) for row in effects.select(list(names)).to_pylist()}
    for component, direction, method, rules in sorted(each for each in kinds if each[3]):
        own = select(effects, component=component, direction=direction)
        places = list(KINDS[component].columns)
        sides = []
        for side in (select(own, method="exact"), select(own, method=method, rules=rules)):
            # In order of first appearance, which is the same for all of them.
            means = side.group_by(places, use_threads=False)
            sides.append(means.aggregate([("value", "mean")])["value_mean"].to_numpy())
        yield Agreement(
            component, method, rules, direction, len(sides[0]), rank_correlation(*sides)
        )


def ratios(
    config: CircuitConfig,
    table: pa.Table,
    results: Sequence[TaskResult],
    prompts: Mapping[str, np.ndarray],
) -> Iterator[Ratio]:
    """Sizes of the dense and of the control model's circuits over those of the others."""
    by_model = {(each.task, each.model): each for each in results}
    for result in results:
        for reference in ("dense", "control"):
            other = by_model.get((result.task, reference))
            if other is None or other is result or result.model == "dense":
                continue
            for curve in result.curves:
                if curve.ranking == "random":
                    continue
                labels: dict[str, Any] = {key: getattr(curve, key) for key in _KEYS}
                chance = labels | {"ranking": "random", "scope": "prompt"}
                pair, random = (
                    [
                        read_curve(select(table, task=each.task, model=each.model), **some)
                        for each in (other, result)
                    ]
                    for some in (labels, chance)
                )
                prompt_B = prompts[result.task]
                why = _no_ratio(config, (other, result), pair, random, prompt_B)
                yield Ratio(
                    task=result.task,
                    **labels,
                    model=result.model,
                    reference=reference,
                    ratio=None if why else crossings(config, pair, prompt_B),
                    random=crossings(config, random, prompt_B),
                    why=why,
                )


def _no_ratio(
    config: CircuitConfig,
    results: Sequence[TaskResult],
    measured: Sequence[Curve],
    random: Sequence[Curve],
    prompt_B: np.ndarray,
) -> str:
    """Why no ratio of these curves is claimed; "" where one may be.

    Args:
      config: settings of the study.
      results: results of the two models.
      measured: curves of the models, as `crossings` takes them.
      random: curves of the models with components in random order.
      prompt_B: number of each pair's clean prompt.
    """
    prompts = len(np.unique(prompt_B))
    if prompts < FEWEST_CLUSTERS:
        return f"{prompts} prompts allow no interval, which needs {FEWEST_CLUSTERS}"
    if unsolved := [each.model for each in results if not each.solved]:
        return f"{' and '.join(unsolved)} did not solve the task"
    # Explained effect is a share of this change; one of either sign divides by noise.
    changes = [mean(config, each.whole_B - each.empty_B, prompt_B) for each in measured]
    unchanged = [
        each.model for each, change in zip(results, changes, strict=True) if not change.low > 0
    ]
    if unchanged:
        return (
            f"ablating all components of {' and '.join(unchanged)} does not reliably lower the "
            "metric (the 95 % interval of m(model) - m(empty) is not above 0)"
        )
    found = [[crossings(config, [each], prompt_B) for each in some] for some in (measured, random)]
    for what, sizes in zip(("the circuit", "random orders"), found, strict=True):
        short = [each.model for each, size in zip(results, sizes, strict=True) if size is None]
        if short:
            return (
                f"{what} of {' and '.join(short)} explained less than {config.fraction:g} of the "
                "effect at every size, for all prompts or some bootstrap sample of them"
            )
    # A circuit cannot be smaller than the first size, so that a ratio to one says nothing of it.
    floor = [
        each.model
        for each, own, size in zip(results, measured, found[0], strict=True)
        if size and size.estimate <= own.sizes[0]
    ]
    if floor:
        return f"the circuit of {' and '.join(floor)} is one component, the least there is"
    # Open edges come first in both orders: then a ratio would be that of how many are open.
    by_chance = [
        each.model
        for each, own, other in zip(results, measured, random, strict=True)
        if not ((gain := crossings(config, [other, own], prompt_B)) and gain.low > 1)
    ]
    if by_chance:
        return (
            f"the circuit of {' and '.join(by_chance)} is not reliably smaller than that of random "
            "order (the 95 % interval of how many times is not above 1)"
        )
    return ""


def needed(config: CircuitConfig, table: pa.Table) -> int:
    """Heads of the task's circuit that explains the fraction, in the rows of one piece."""
    labels = {"component": "heads", "ablation": config.ablations[0]}
    curve = read_curve(table, **labels, ranking="signed", scope="task")
    return curves.needed(curve.sizes, curve.explained, config.fraction)
