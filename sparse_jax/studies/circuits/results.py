"""Results of the circuit study: the dataclasses of `summary.json` and of the drawn prompt.

    summary.json              CircuitSummary
    drawn/<task>_<model>.json DrawnPrompt: patterns and edges of one prompt

Everything in the summary but the facts of models and tasks is computed from `rows.parquet`
(`numbers`). Intervals are at 95 %, over prompts, as `lm_jax.statistics.cluster_interval` makes
them, and hold for the one pair of models that was trained; accuracies have Wilson intervals, and
rank correlations resample components.
"""

import dataclasses
from pathlib import Path
from typing import Literal

from lm_jax.run.results import Count, Real, Share
from lm_jax.statistics import Interval
from sparse_jax.studies.circuits.settings import CircuitConfig

Ranking = Literal["signed", "absolute", "random"]
Scope = Literal["prompt", "task"]
DRAWN = "drawn"


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """A model of the study.

    Attributes:
      role: dense, control or sparse.
      source: the folder or name that was given.
      sha256: digest of the weights.
      gated: whether it has gates on its edges.
    """

    role: str
    source: str
    sha256: str
    family: str
    layers: Count
    heads: Count
    gated: bool


@dataclasses.dataclass(frozen=True)
class TaskFacts:
    """The prompts of a task, the same for all models.

    Attributes:
      rephrases: the task of which this is another wording, or null.
      metric: name in `sparse_jax.circuits.metrics.METRICS`.
      seed: seed of the generator; null for a file.
      drawn: examples tried.
      kept: examples used, which are pairs of prompts; a user's file may repeat a clean prompt.
      dropped: number of the others, by reason.
      sha256: digest of the examples.
      shortest, longest: tokens of a prompt.
      clean, corrupt, answers, wrong_answers: the first example.
    """

    name: str
    rephrases: str | None
    metric: str
    seed: int | None
    drawn: Count
    kept: Count
    dropped: dict[str, Count]
    sha256: str
    shortest: Count
    longest: Count
    clean: str
    corrupt: str
    answers: tuple[str, ...]
    wrong_answers: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """Explained effect of the circuit of one size, with its standard error over prompts."""

    size: Count
    explained: Real
    standard_error: Real
    low: Real
    high: Real


@dataclasses.dataclass(frozen=True)
class CurveResult:
    """Explained effect of circuits of growing size.

    Attributes:
      component: heads, token_edges or component_edges.
      ablation: what replaces the others.
      ranking: how components are ranked: by the signed effect, by its absolute value, or at random
        (the mean of several draws).
      scope: whether each prompt has a ranking of its own, or the task has one.
      crossing: number of components that explain the chosen fraction; null where ablating all of
        them changes nothing.
      cpr, cmd: the trapezoids of MIB at its shares, over the circuits of this curve: components
        that query heads share count once, and nothing is pruned. `mib.evaluate` gives MIB's own.
      log_area: mean explained effect over the logarithm of the share of components, at MIB's
        shares.
    """

    component: str
    ablation: str
    ranking: Ranking
    scope: Scope
    points: tuple[CurvePoint, ...]
    crossing: Interval | None
    cpr: Real
    cmd: Real
    log_area: Real


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Rank correlation between exact patching and an estimate, of effects averaged over prompts.

    Attributes:
      method: attribution (patching), eap or eap_ig.
      rules: name of its gradient rules in `sparse_jax.circuits.rules.RULES`.
      direction: noising or denoising.
      compared: number of components; of edges, those of the sample.
      spearman: rank correlation, with an interval over bootstrap samples of the compared components
        for these prompts; null where one side does not vary.
    """

    component: str
    method: str
    rules: str
    direction: str
    compared: Count
    spearman: Interval | None


@dataclasses.dataclass(frozen=True)
class HeadEffect:
    """What one head carries of a task, by exact patching.

    Attributes:
      layer, head: the head.
      effect: mean change of the metric where the head alone has the output of the other prompt: of
        clean prompts by noising, of corrupt ones by denoising.
      metric: mean metric with that output.
    """

    layer: Count
    head: Count
    effect: Interval
    metric: Real

    @property
    def name(self) -> str:
        """The head as papers write it: L5H1."""
        return f"L{self.layer}H{self.head}"


@dataclasses.dataclass(frozen=True)
class PlaceEffect:
    """What one place carries of a task at one position, by exact patching.

    Attributes:
      layer: layer.
      head: the head, of a place that heads have (`place_patching.OF_HEADS`); null for others.
      position: position, from that of the first token.
      effect: mean change of the metric with the value of the other prompt there.
    """

    layer: Count
    head: Count | None
    position: Count
    effect: Interval


@dataclasses.dataclass(frozen=True)
class PlaceAgreement:
    """How an estimate of the effects of places ranks them, beside exact patching.

    Effects are means over prompts of their absolute values (AtP*, arXiv:2403.00745), of all places
    from the first position on at which any has an effect; what is below 2^-20 of the largest is
    rounding, and counts as 0.

    Attributes:
      method: atp (the gradient), atp_star (queries and keys by the true change of the softmax) or
        graddrop (that without the branches of each layer in turn).
      compared: number of places.
      spearman: rank correlation, with an interval over bootstrap samples of the places; null where
        one side does not vary.
      lower: share of the places whose estimate is at most the median: one half, or more of them if
        several are equal.
      missed: largest exact effect among these, as a share of the largest of all.
    """

    method: str
    compared: Count
    spearman: Interval | None
    lower: Real
    missed: Real


@dataclasses.dataclass(frozen=True)
class PlaceEffects:
    """Exact patching of one kind of place, position by position.

    Attributes:
      place: name in `sparse_jax.circuits.place_patching.PLACES`.
      direction: noising or denoising.
      mean: mean effect over prompts by layer and position; of a place of heads, where there is
        one such table for each head, that of the head of largest absolute mean effect.
      strongest: the largest mean effects, the largest first.
      agreements: how estimates of them agree; none in files of earlier versions.
    """

    place: str
    direction: str
    mean: tuple[tuple[Real, ...], ...]
    strongest: tuple[PlaceEffect, ...]
    agreements: tuple[PlaceAgreement, ...] = ()


@dataclasses.dataclass(frozen=True)
class PrunedCircuit:
    """A circuit of component edges that edge pruning found, beside others of its size.

    Attributes:
      ablation: what replaces the other edges.
      size: number of edges, the same for all three.
      pruned: explained effect of the circuit that edge pruning found for the task.
      attributed: explained effect of the edges of highest signed attribution, of the task.
      drawn: explained effect of edges in random order.
    """

    ablation: str
    size: Count
    pruned: Interval
    attributed: Interval
    drawn: Interval


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """One model on one task.

    Attributes:
      accuracy: share of clean prompts with a positive metric, in all of their pairs.
      solved: whether that reaches `config.accuracy_bar`, and `change` is above 0 with its interval:
        a model that answers corrupt prompts alike does not read what the task asks for.
      clean, corrupt: mean metric.
      change: mean difference of the metric, clean minus corrupt prompt.
      components: number of components by kind; of token edges, those of the longest prompt.
      open: mean number of components of a prompt that carry any weight, by kind.
      heads: the heads of largest mean effect, the largest first; none where heads were not patched,
        or by a version that did not keep them.
      places: what was patched by layer and position (`config.patch`).
      pruned: circuits that edge pruning found (`config.pruned`).
    """

    task: str
    model: str
    accuracy: Interval
    solved: bool
    clean: Interval
    corrupt: Interval
    change: Interval
    components: dict[str, Count]
    open: dict[str, float]
    agreements: tuple[Agreement, ...]
    curves: tuple[CurveResult, ...]
    heads: tuple[HeadEffect, ...] = ()
    places: tuple[PlaceEffects, ...] = ()
    pruned: tuple[PrunedCircuit, ...] = ()


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How many times fewer components one model's circuit has than another's.

    Attributes:
      ranking: ranking of both curves; never random.
      model, reference: the size of the reference's circuit is divided by that of the model's.
      ratio: null where there are too few prompts for an interval, or one of the two does not solve
        the task, keeps its metric with all components ablated (the interval of the mean change is
        not above 0), has a circuit of one component, the least there is, or one that is not
        reliably smaller than that of random order, or has no crossing.
      random: the same of random orders, for comparison; null where they have no crossing.
      why: the reason for that of `ratio`, else "".
    """

    task: str
    component: str
    ablation: str
    ranking: Ranking
    scope: Scope
    model: str
    reference: str
    ratio: Interval | None
    random: Interval | None
    why: str


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A circuit of heads, found on one task, on another wording of it.

    Attributes:
      source, task: task on which the circuit was found, and task on which it was evaluated.
      size: number of heads of the circuit that explains the fraction on the source.
      jaccard: overlap of the two tasks' circuits of that size.
      jaccard_by_chance: overlap of two random circuits with the mean number of shared heads.
      spearman: rank correlation of the importances of all heads; null where one does not vary.
      transferred, own: explained effect on the task of the source's circuit, and of the task's own
        circuit of that size.
    """

    model: str
    source: str
    task: str
    size: Count
    jaccard: Share
    jaccard_by_chance: Share
    spearman: float | None
    transferred: Interval
    own: Interval


@dataclasses.dataclass(frozen=True)
class CircuitSummary:
    """Circuits of dense and sparse models: `summary.json`."""

    config: CircuitConfig
    models: tuple[ModelFacts, ...]
    tasks: tuple[TaskFacts, ...]
    results: tuple[TaskResult, ...]
    ratios: tuple[Ratio, ...]
    transfers: tuple[Transfer, ...]
    device: str


@dataclasses.dataclass(frozen=True)
class HeadPattern:
    """A needed head with its attention weights by query and key, rounded to two digits."""

    layer: Count
    head: Count
    importance: float
    weights: tuple[tuple[Share, ...], ...]


@dataclasses.dataclass(frozen=True)
class NeededEdge:
    """A needed token edge, from a key to the query that reads it."""

    layer: Count
    head: Count
    query: Count
    key: Count
    weight: Share
    importance: float


@dataclasses.dataclass(frozen=True)
class DrawnPrompt:
    """Circuits of one prompt, ranked by itself, as they are drawn.

    Attributes:
      tokens: tokens of the clean prompt.
      answer: the first right continuation.
      metric: metric of the model on this prompt.
      heads_needed, edges_needed: components that explain the fraction; 0 where these circuits were
        not asked for.
      heads, edges: these components, in order of importance; at most a number that can be drawn.
    """

    task: str
    model: str
    tokens: tuple[str, ...]
    answer: str
    metric: float
    heads_needed: Count
    edges_needed: Count
    heads: tuple[HeadPattern, ...]
    edges: tuple[NeededEdge, ...]


def drawn_file(folder: Path, role: str, task: str) -> Path:
    """Where the drawn prompt of a model on a task is in the work folder."""
    return folder / DRAWN / f"{task}_{role}.json"
