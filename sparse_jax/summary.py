"""The numbers of all runs of one post-training, over seeds, and the lines that a terminal shows.

Two things make a number uncertain. An interval resamples documents: it holds for the one model that
was trained. Another seed trains another model, and so does another processor or number of threads,
because sums are then rounded in another order; the range over seeds shows how far they differ.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import statistics

from lm_jax.run.results import Count
from lm_jax.statistics import Interval

ONE_RUN = "one run"
OF_INTERVALS = (
    "intervals: 95 %, over documents, of one trained model; another seed, processor or number of "
    "threads trains another"
)


@dataclasses.dataclass(frozen=True)
class Spread:
    """A number over seeds: its mean, its least and greatest, and how many runs it is of."""

    mean: float
    least: float
    most: float
    n: int


@dataclasses.dataclass(frozen=True)
class Rounding:
    """What merging adapters into weights of few digits cost.

    Attributes:
      dtype: of the weights.
      update_lost: share of the adapters' update that rounding takes.
      loss_before: in nats per token, with the adapters apart; null where it was not evaluated.
      loss_after: the same, merged, on the same windows.
    """

    dtype: str
    update_lost: float
    loss_before: float | None
    loss_after: float


@dataclasses.dataclass(frozen=True)
class RunResult:
    """One bound of one seed: `result.json`, on the held-out windows.

    Attributes:
      target: the bound of the loss, in nats per token.
      folder: of the run, in the work folder.
      loss: of the exported model, in nats per token.
      difference: the loss less the dense model's.
      edges: share of the visible edges that are open.
      open_edges_per_head: mean per head and window.
      strength: of the penalty at the end.
      tokens_seen: in training.
      rounding: null where all weights were trained.
    """

    seed: Count
    target: float
    folder: str
    loss: Interval
    dense_loss: Interval
    difference: Interval
    edges: Interval
    open_edges_per_head: float
    windows: Count
    validation_tokens: Count
    strength: float
    steps: Count
    tokens_seen: Count
    rounding: Rounding | None


@dataclasses.dataclass(frozen=True)
class ComparedRun(RunResult):
    """A run beside the control of its seed.

    Attributes:
      over_control: the loss less the control's; null without controls.
    """

    over_control: Interval | None


@dataclasses.dataclass(frozen=True)
class ControlResult:
    """The same training with every gate open: `result.json` of a control."""

    seed: Count
    folder: str
    loss: Interval
    difference: Interval
    steps: Count
    tokens_seen: Count
    rounding: Rounding | None


@dataclasses.dataclass(frozen=True)
class BoundSummary:
    """A bound with its share of edges and its losses over all seeds.

    Attributes:
      slack: the bound less the dense loss.
      over_control: null where not all runs have a control.
    """

    target: float
    slack: float
    seeds: tuple[Count, ...]
    edges: Spread
    loss: Spread
    difference: Spread
    over_control: Spread | None


@dataclasses.dataclass(frozen=True)
class SplitSize:
    """One split of the prepared data."""

    share: float
    documents: Count
    tokens: Count


@dataclasses.dataclass(frozen=True)
class CorpusSummary:
    """What was trained on."""

    source: str
    splits: dict[str, SplitSize]


@dataclasses.dataclass(frozen=True)
class PosttrainSummary:
    """Post-training under bounds: `summary.json`.

    Attributes:
      model: the folder or name of the base.
      dense_loss: of the base, in nats per token.
    """

    model: str
    model_sha256: str
    family: str
    context: Count
    corpus: CorpusSummary
    trained_parameters: Count
    dense_loss: float
    validation_tokens: Count
    seeds: tuple[Count, ...]
    bounds: tuple[BoundSummary, ...]
    runs: tuple[ComparedRun, ...]
    controls: tuple[ControlResult, ...]
    device: str


def spread(values: Sequence[float]) -> Spread:
    """The spread of one number of several runs."""
    return Spread(statistics.fmean(values), min(values), max(values), len(values))


def by_bound(result: Sequence[ComparedRun], dense: float) -> tuple[BoundSummary, ...]:
    """Every bound with its share of edges and its losses over all seeds.

    Args:
      result: numbers of runs, in order of seeds, each with all bounds in one order.
      dense: loss of the dense model.
    """
    rows = []
    for target in dict.fromkeys(run.target for run in result):
        own = [run for run in result if run.target == target]
        over = [run.over_control for run in own if run.over_control is not None]
        rows.append(
            BoundSummary(
                target=target,
                slack=target - dense,
                seeds=tuple(run.seed for run in own),
                edges=_over([run.edges for run in own]),
                loss=_over([run.loss for run in own]),
                difference=_over([run.difference for run in own]),
                over_control=_over(over) if len(over) == len(own) else None,
            )
        )
    return tuple(rows)


def _over(intervals: Sequence[Interval]) -> Spread:
    return spread([interval.estimate for interval in intervals])


def format_summary(summary: PosttrainSummary) -> str:
    """What a terminal shows of `summary.json`."""
    return "\n".join(_lines(summary))


def _lines(summary: PosttrainSummary) -> Iterator[str]:
    yield (
        f"dense: {summary.dense_loss:.4f} nats per token over "
        f"{summary.validation_tokens:,} tokens of {summary.corpus.source}"
    )
    several = len(summary.seeds) > 1
    for bound in summary.bounds:
        own = [run for run in summary.runs if run.target == bound.target]
        if several:
            yield f"target {bound.target:.4f}, {len(own)} seeds: {_between_seeds(bound)}"
        for run in own:
            head = f"  seed {run.seed}" if several else f"target {run.target:.4f}, {ONE_RUN}"
            yield f"{head}: {_of_run(run)}"
            yield from _rounding(run)
    for control in summary.controls:
        seed = f"seed {control.seed}" if several else ONE_RUN
        less = format_signed(control.difference)
        yield f"control, every gate open, {seed}: loss {less} against dense"
        yield from _rounding(control)
    yield OF_INTERVALS


def _between_seeds(bound: BoundSummary) -> str:
    edges = bound.edges
    parts = [
        f"{100 * edges.mean:.2f} % of edges open ({100 * edges.least:.2f} to "
        f"{100 * edges.most:.2f} between seeds)",
        f"loss {format_spread(bound.difference)} against dense",
    ]
    if bound.over_control:
        parts.append(f"{format_spread(bound.over_control)} against the control")
    return ", ".join(parts)


def _of_run(run: ComparedRun) -> str:
    edges = run.edges
    parts = [
        f"{100 * edges.estimate:.2f} % of edges open ({100 * edges.low:.2f} to "
        f"{100 * edges.high:.2f})",
        f"loss {format_signed(run.difference)} against dense",
    ]
    if run.over_control:
        parts.append(f"{format_signed(run.over_control)} against the control")
    return ", ".join([*parts, f"{run.tokens_seen:,} tokens seen"])


def _rounding(run: RunResult | ControlResult) -> Iterator[str]:
    if line := format_rounding(run.rounding):
        yield f"  {line}"


def format_rounding(rounding: Rounding | None) -> str:
    """What merging adapters into weights of few digits cost; "" where it costs nothing."""
    if rounding is None or not rounding.update_lost:
        return ""
    before = "" if rounding.loss_before is None else f"goes from {rounding.loss_before:.4f} to "
    return (
        f"merged into {rounding.dtype} weights: rounding takes "
        f"{rounding.update_lost:.1%} of the update, and the loss {before or 'is '}"
        f"{rounding.loss_after:.4f}; "
        "--config.export_dtype=float32 --resume=force exports it again without rounding"
    )


def format_spread(spread: Spread) -> str:
    """A difference of losses over seeds."""
    return f"{spread.mean:+.4f} ({spread.least:+.4f} to {spread.most:+.4f} between seeds)"


def format_signed(interval: Interval) -> str:
    """A difference of losses with its interval."""
    return f"{interval.estimate:+.4f} ({interval.low:+.4f} to {interval.high:+.4f})"
