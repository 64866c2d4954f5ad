"""Findings of the circuit study in sentences, for the terminal and for the page."""

from collections.abc import Iterator, Sequence

from lm_jax.report.markup import number
from lm_jax.report.tables import interval_text
from lm_jax.statistics import Interval
from sparse_jax.studies.circuits.results import (
    CircuitSummary,
    CurveResult,
    PlaceEffect,
    Ratio,
    TaskResult,
)
from sparse_jax.studies.circuits.settings import COMPONENTS

COMPONENT = {name: name.replace("_", " ") for name in COMPONENTS}
# What is patched by layer and position, by its name in `place_patching.PLACES`.
PLACE = {
    "resid_pre": "residual stream",
    "attn_out": "attention output",
    "mlp_out": "MLP output",
    "head_out": "head output",
    "query": "query",
    "key": "key (of key heads)",
    "value": "value (of key heads)",
}
SCOPE = {"prompt": "per prompt", "task": "per task"}


def findings(summary: CircuitSummary) -> list[str]:
    """Sizes of circuits and their ratios, and which models do not solve which task."""
    return [
        sentence
        for task in summary.tasks
        if task.rephrases is None
        for sentence in _task_findings(summary, task.name)
    ]


def answer(summary: CircuitSummary, result: TaskResult) -> str | None:
    """Which head carries a task in a model, in a sentence; None where heads were not patched."""
    if not result.heads:
        return None
    if not result.solved:
        return f"{result.model} does not solve {result.task}, so no head carries it."
    best, *others = result.heads
    metric = next(each.metric for each in summary.tasks if each.name == result.task)
    noised = summary.config.direction == "noising"
    before = result.clean if noised else result.corrupt
    other, other_run = ("corrupt", "a clean") if noised else ("clean", "a corrupt")
    n = best.effect.n
    interval = interval_text(best.effect, "+.2f")
    text = (
        f"{best.name} carries {result.task} in {result.model}: with its output of the {other} "
        f"prompt in {other_run} run, the {metric.replace('_', ' ')} goes from "
        f"{number(before.estimate, '.2f')} to {number(best.metric, '.2f')} (change {interval}, "
        f"n = {n})."
    )
    if others:
        next_ones = ", ".join(
            f"{each.name} {number(each.effect.estimate, '+.2f')}" for each in others
        )
        text += f" Then {next_ones}."
    return text


def place_name(effect: PlaceEffect) -> str:
    """Where an effect of a place is, without its position: layer 5, or L5H1 of a head.

    Of a key or value it is the head that several query heads may read.
    """
    if effect.head is None:
        return f"layer {effect.layer}"
    return f"L{effect.layer}H{effect.head}"


def place_sentences(result: TaskResult) -> Iterator[str]:
    """Sentences on where the effect of each patched place is largest."""
    for own in result.places:
        first, *others = own.strongest
        text = (
            f"{result.task}, {PLACE[own.place]} of {result.model} patched by layer and position "
            f"({own.direction}): largest at {place_name(first)}, position {first.position} "
            f"({interval_text(first.effect, '+.2f')}, n = {first.effect.n})"
        )
        then = ", ".join(
            f"{place_name(each)} at {each.position} {number(each.effect.estimate, '+.2f')}"
            for each in others
        )
        yield f"{text}{'; then ' + then if then else ''}."


def pruned_sentences(result: TaskResult) -> Iterator[str]:
    """Sentences on what circuits of edge pruning explain."""
    for own in result.pruned:
        yield (
            f"{result.task}, {own.size:,} of {result.components['component_edges']:,} component "
            f"edges of {result.model} found by edge pruning explain "
            f"{interval_text(own.pruned, '.2f')}; as many by attribution "
            f"{number(own.attributed.estimate, '.2f')}, in random order "
            f"{number(own.drawn.estimate, '.2f')}."
        )


def left_out(summary: CircuitSummary) -> list[str]:
    """How many examples of each task were drawn and left out, and why; none where all fit."""
    return [
        f"{task.name}: {task.drawn:,} examples drawn and {task.kept:,} kept; left out were "
        + ", ".join(f"{count:,} x {reason}" for reason, count in task.dropped.items())
        for task in summary.tasks
        if task.dropped
    ]


# Rankings whose ratios are printed, and how they are named.
_RANKED = {
    ("signed", "prompt"): "per prompt",
    ("signed", "task"): "per task",
    ("absolute", "prompt"): "per prompt by absolute effect",
    ("absolute", "task"): "per task by absolute effect",
}


def curve(
    result: TaskResult,
    component: str,
    ablation: str,
    ranking: str = "signed",
    scope: str = "prompt",
) -> CurveResult | None:
    """The curve with these labels, if it was measured."""
    for each in result.curves:
        if (each.component, each.ablation, each.ranking, each.scope) == (
            *(component, ablation, ranking, scope),
        ):
            return each
    return None


def count_spec(count: float) -> str:
    """How a count of components is written that may be a mean: whole from a hundred on."""
    return ",.0f" if count >= 100 else ""


def format_count(count: float) -> str:
    """A count of components that may be a mean."""
    return number(count, count_spec(count))


def format_random(ratio: Ratio) -> str:
    """The ratio of random orders, to be read beside that of the ranked circuits."""
    return "–" if ratio.random is None else number(ratio.random.estimate, ".2f")


def format_size(interval: Interval | None) -> str:
    """The size of a circuit with its interval."""
    return interval_text(interval, count_spec(interval.estimate) if interval else "")


def prompt_count(summary: CircuitSummary, task: str) -> str:
    """What a task's intervals rest on: prompts, and pairs where some share their clean prompt."""
    prompts = next(each.clean.n for each in summary.results if each.task == task)
    pairs = next((each.kept for each in summary.tasks if each.name == task), prompts)
    return f"{prompts} prompts" + (f" ({pairs} pairs)" if pairs != prompts else "")


def unsolved(summary: CircuitSummary, task: str) -> Iterator[str]:
    """A sentence for each model that does not solve the task."""
    for each in summary.results:
        if each.task == task and not each.solved:
            yield (
                f"{task}: {each.model} does not solve it (right in "
                f"{100 * each.accuracy.estimate:.0f} % of {each.accuracy.n} prompts, the bar is "
                f"{100 * summary.config.accuracy_bar:g} %; clean minus corrupt metric "
                f"{interval_text(each.change)})."
            )


def _task_findings(summary: CircuitSummary, task: str) -> Iterator[str]:
    config = summary.config
    results = [each for each in summary.results if each.task == task]
    n = prompt_count(summary, task)
    yield from filter(None, (answer(summary, each) for each in results))
    for each in results:
        yield from place_sentences(each)
        yield from pruned_sentences(each)
    yield from unsolved(summary, task)
    for component in config.components:
        ablation = config.ablations_of(component)[0]
        parts = []
        for each in results:
            signed, absolute, random = (
                curve(each, component, ablation, ranking)
                for ranking in ("signed", "absolute", "random")
            )
            assert signed is not None and absolute is not None and random is not None, (
                "measured for every component"
            )
            chance = "–" if random.crossing is None else format_count(random.crossing.estimate)
            parts.append(
                f"{each.model} {format_size(signed.crossing)} of "
                f"{number(each.components[component])} (by absolute effect: "
                f"{format_size(absolute.crossing)}; random order: {chance})"
            )
        yield (
            f"{task}, {COMPONENT[component]} that explain {100 * config.fraction:g} % of a "
            f"prompt's metric, n = {n}: {'; '.join(parts)}."
        )
        ratios = [
            each
            for each in summary.ratios
            if (each.task, each.component, each.ablation) == (task, component, ablation)
            and (each.ranking, each.scope) in _RANKED
        ]
        yield from ratio_sentences(f"{task}, {COMPONENT[component]}", ratios)


def ratio_sentences(subject: str, ratios: Sequence[Ratio]) -> Iterator[str]:
    """One sentence for each pair of models; where there is a sparse one, for its pairs alone."""
    pairs = dict.fromkeys((each.reference, each.model) for each in ratios)
    sparse = [pair for pair in pairs if pair[1] == "sparse"]
    for pair in sparse or pairs:
        own = [each for each in ratios if (each.reference, each.model) == pair]
        ranked = [
            f"{interval_text(each.ratio, '.2f')} ranked {_RANKED[each.ranking, each.scope]}"
            for each in own
            if each.ratio
        ]
        if ranked:
            n = next(each.ratio.n for each in own if each.ratio)
            ranked.append(f"{format_random(own[0])} in random order")
            ranked.append(f"n = {n} prompts of one pair of models")
        missing: dict[str, list[str]] = {}
        for each in own:
            if not each.ratio:
                missing.setdefault(each.why, []).append(_RANKED[each.ranking, each.scope])
        reasons = [
            f"no ratio{f' {_ranking_names(names)}' * (len(names) < len(own))}, as {why}"
            for why, names in missing.items()
        ]
        yield f"{subject}, {' : '.join(pair)}: {'; '.join([*ranked, *reasons])}."


def _ranking_names(names: Sequence[str]) -> str:
    return "ranked " + ", ".join(names)
