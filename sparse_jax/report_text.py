"""Text of post-training results, for the terminal and for the page."""

from collections.abc import Iterator

from lm_jax.statistics import Interval
from sparse_jax.results import (
    BoundSummary,
    ComparedRun,
    ControlResult,
    PosttrainSummary,
    Rounding,
    RunResult,
    Spread,
)

ONE_RUN = "one run"
INTERVALS = (
    "intervals: 95 %, over documents, of one trained model; another seed, processor or number of "
    "threads trains another"
)


def format_summary(summary: PosttrainSummary) -> str:
    """The results of `summary.json` as lines of a terminal."""
    return "\n".join(_lines(summary))


def _lines(summary: PosttrainSummary) -> Iterator[str]:
    yield (
        f"dense: {summary.dense_loss:.4f} nats per token over "
        f"{summary.validation_tokens:,} tokens of {summary.corpus.source}"
    )
    several = len(summary.seeds) > 1
    for number, bound in enumerate(summary.bounds):
        own = [run for run in summary.runs if run.bound == number]
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
    yield INTERVALS


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
    """The cost of merging adapters into weights of a lower precision; "" where there is none."""
    if rounding is None or not rounding.update_lost:
        return ""
    before = "" if rounding.loss_before is None else f"changes from {rounding.loss_before:.4f} to "
    return (
        f"merged into {rounding.dtype} weights: rounding loses "
        f"{rounding.update_lost:.1%} of the update, and the loss {before or 'is '}"
        f"{rounding.loss_after:.4f}; "
        "--config.export_dtype=float32 --resume=force exports it again without rounding"
    )


def format_spread(spread: Spread) -> str:
    """Text of a difference of losses over seeds."""
    if spread.n == 1:
        return f"{spread.mean:+.4f}"
    return f"{spread.mean:+.4f} ({spread.least:+.4f} to {spread.most:+.4f} between seeds)"


def format_signed(interval: Interval) -> str:
    """Text of a difference of losses with its interval."""
    return f"{interval.estimate:+.4f} ({interval.low:+.4f} to {interval.high:+.4f})"
