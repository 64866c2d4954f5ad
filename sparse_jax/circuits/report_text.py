"""Findings of the circuit study in sentences, for the terminal and for the page."""

from collections.abc import Iterator

from lm_jax.report.markup import number
from lm_jax.statistics import Interval
from sparse_jax.circuits.results import CircuitSummary, CurveResult, TaskResult

COMPONENT = {
    "heads": "heads",
    "token_edges": "token edges",
    "component_edges": "component edges",
}


def findings(summary: CircuitSummary) -> list[str]:
    """Sizes of circuits and their ratios, and which models do not solve which task."""
    return [
        sentence
        for task in summary.tasks
        if task.rephrases is None
        for sentence in _of_task(summary, task.name)
    ]


# Rankings whose ratios are printed, and how they are named.
_RANKED = {
    ("signed", "prompt"): "",
    ("absolute", "prompt"): " (ranked per prompt, by absolute effect)",
    ("absolute", "task"): " (ranked per task, by absolute effect)",
}


def curve(
    result: TaskResult,
    component: str,
    ablation: str,
    ranking: str = "signed",
    scope: str = "prompt",
) -> CurveResult | None:
    """The curve of these names, if it was asked for."""
    for each in result.curves:
        if (each.component, each.ablation, each.ranking, each.scope) == (
            *(component, ablation, ranking, scope),
        ):
            return each
    return None


def format_interval(interval: Interval | None, spec: str = "") -> str:
    """An estimate with its interval."""
    if interval is None:
        return "–"
    ends = (number(end, spec) for end in (interval.estimate, interval.low, interval.high))
    estimate, low, high = ends
    return f"{estimate} [{low}, {high}]"


def _of_task(summary: CircuitSummary, task: str) -> Iterator[str]:
    config = summary.config
    results = [each for each in summary.results if each.task == task]
    for each in results:
        if not each.solved:
            yield (
                f"{task}: {each.model} does not solve it (right in "
                f"{100 * each.accuracy.estimate:.0f} % of {each.accuracy.n} prompts, the bar is "
                f"{100 * config.accuracy_bar:g} %; clean minus corrupt metric "
                f"{format_interval(each.change)})."
            )
    for component in config.components:
        ablation = config.ablations_of(component)[0]
        parts = []
        for each in results:
            own = curve(each, component, ablation)
            random = curve(each, component, ablation, "random")
            assert own is not None and random is not None, "measured for every component"
            chance = "–" if random.crossing is None else number(random.crossing.estimate)
            parts.append(
                f"{each.model} {format_interval(own.crossing)} of "
                f"{number(each.components[component])} (random order: {chance})"
            )
        yield (
            f"{task}, {COMPONENT[component]} that explain {100 * config.fraction:g} % of a "
            f"prompt's metric: {'; '.join(parts)}."
        )
        for ratio in summary.ratios:
            names = (ratio.task, ratio.component, ratio.ablation)
            ranked = (ratio.ranking, ratio.scope)
            if names != (task, component, ablation) or ranked not in _RANKED:
                continue
            pair = f"{ratio.reference} : {ratio.model}{_RANKED[ranked]}"
            yield (
                f"{task}, {COMPONENT[component]}, {pair}: {format_interval(ratio.ratio, '.2f')}."
                if ratio.ratio
                else f"{task}, {COMPONENT[component]}, {pair}: no ratio, as {ratio.why}."
            )
