"""Text of post-training results, for the terminal and for the page."""

from collections.abc import Iterator, Sequence

from lm_jax.report import Cell, cell
from lm_jax.report.markup import number
from lm_jax.statistics import Interval
from sparse_jax.gates.geco import Strength
from sparse_jax.studies.posttrain.limits import CEILING, FLOOR, PATIENCE, swing
from sparse_jax.studies.posttrain.results import (
    BoundSummary,
    ComparedRun,
    ControlResult,
    PosttrainSummary,
    Rounding,
    RunResult,
    Spread,
)
from sparse_jax.studies.posttrain.settings import PosttrainConfig

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
    for index, bound in enumerate(summary.bounds):
        own = [run for run in summary.runs if run.bound == index]
        if several:
            yield f"target {bound.target:.4f}, {len(own)} seeds: {_bound_text(bound)}"
        for run in own:
            head = f"  seed {run.seed}" if several else f"target {run.target:.4f}, {ONE_RUN}"
            yield f"{head}: {_run_text(run)}"
            if text := start_text(run):
                yield f"  {text}"
            yield from _rounding_lines(run)
    for control in summary.controls:
        seed = f"seed {control.seed}" if several else ONE_RUN
        less = format_signed(control.difference)
        yield f"control, every gate open, {seed}: loss {less} against dense"
        yield from _rounding_lines(control)
    yield INTERVALS


def _bound_text(bound: BoundSummary) -> str:
    edges = bound.edges
    parts = [
        f"{100 * edges.mean:.2f} % of edges open ({100 * edges.least:.2f} to "
        f"{100 * edges.most:.2f} between seeds)",
        f"loss {format_spread(bound.difference)} against dense",
    ]
    if bound.over_control:
        parts.append(f"{format_spread(bound.over_control)} against the control")
    if bound.divergence:
        parts.append(f"divergence {bound.divergence.mean:.4f}")
    return ", ".join(parts)


def _run_text(run: ComparedRun) -> str:
    edges = run.edges
    parts = [
        f"{100 * edges.estimate:.2f} % of edges open ({100 * edges.low:.2f} to "
        f"{100 * edges.high:.2f})",
        f"loss {format_signed(run.difference)} against dense",
    ]
    if run.over_control:
        parts.append(f"{format_signed(run.over_control)} against the control")
    if run.divergence:
        parts.append(f"divergence {run.divergence.estimate:.4f}")
    return ", ".join([*parts, f"{run.tokens_seen:,} tokens seen"])


def start_text(run: RunResult) -> str:
    """What a run loses before its first update; "" where it was not measured."""
    if run.start is None:
        return ""
    return (
        f"before the first update, with {run.start.edges:.1%} of the edges open: loss "
        f"{run.start.difference:+.4f} against dense, divergence {run.start.divergence:.4f}"
    )


def control_text(run: RunResult, strengths: Sequence[float], settings: Strength) -> Iterator[str]:
    """Sentences on a run before its first update, and on the course of its strength."""
    if text := start_text(run):
        yield f"{text.capitalize()}."
    if settings.least == settings.most:
        return
    yield (
        f"The strength was between {min(strengths):.3g} and {max(strengths):.3g}, and fell by a "
        f"factor of {swing(strengths):.3g} from a value before it. A large factor is a swing: "
        "edges answer late, and are closed too far and opened again."
    )
    yield from limit_lines(run, settings)


def limit_lines(run: RunResult, settings: Strength) -> Iterator[str]:
    """A sentence for each limit that the strength was on for many updates."""
    for count, limit in ((run.at_floor, FLOOR), (run.at_ceiling, CEILING)):
        if count >= PATIENCE:
            value = getattr(settings, limit.setting)
            yield (
                f"The strength was at config.strength.{limit.setting} = {value:g} for {count} of "
                f"{run.steps} updates: {limit.meaning}."
            )


def _rounding_lines(run: RunResult | ControlResult) -> Iterator[str]:
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
        return number(spread.mean, "+.4f")
    mean, least, most = (number(x, "+.4f") for x in (spread.mean, spread.least, spread.most))
    return f"{mean} ({least} to {most} between seeds)"


def format_signed(interval: Interval) -> str:
    """Text of a difference of losses with its interval."""
    ends = (interval.estimate, interval.low, interval.high)
    estimate, low, high = (number(x, "+.4f") for x in ends)
    return f"{estimate} ({low} to {high})"


def interval_cell(interval: Interval | None, spec: str, scale: float = 1.0) -> Cell:
    """The estimate with its interval below it."""
    if interval is None:
        return cell(None)
    low, high = (number(scale * x, spec) for x in (interval.low, interval.high))
    return cell(scale * interval.estimate, note=f"[{low}, {high}]", spec=spec)


def range_text(value: Spread | None, spec: str, scale: float = 1.0) -> str:
    """Text of a mean over seeds with the least and the greatest."""
    if value is None:
        return "–"
    mean, least, most = (number(scale * x, spec) for x in (value.mean, value.least, value.most))
    return f"{mean} ({least} to {most})"


def terms(config: PosttrainConfig) -> dict[str, str]:
    """What the words of the page mean, for the method that ran."""
    score = "the score without its scale" if config.raw_gate else "the scaled score"
    sampled = "in training it is sampled"
    if config.by_rule:
        sampled += f", and in the last {config.by_rule:.0%} of the updates open by this rule too"
    if config.by_rule == 1:
        sampled = "in training too"
    bound = "A loss in nats per token, given in the config."
    if not config.targets:
        bound = f"The {config.slack_over} model's loss on the held-out text, and a slack."
    if config.constraint == "divergence":
        bound = "A divergence from the dense model in nats per token, given in the config."
    if config.paired:
        bound += (
            " In training it is that of the control at the same update, on the same batch, and the "
            "slack."
        )
    return {
        "edge": "A query that reads a key in one head: T (T + 1) / 2 per head in a window of T "
        "tokens.",
        "open": "The gate of the edge passes its softmax weight on"
        + ", divided by the sum of those that are open" * config.renormalise
        + f". In evaluation a gate is open where its logit, {score} plus a bias, is above 0; "
        f"{sampled}.",
        "loss": "Mean negative log-likelihood of the next token, in nats.",
        "bound": bound,
        "divergence": "Mean over tokens of KL(dense || sparse) of the next token, in nats: on text "
        "that the dense model wrote, the expected loss minus the dense model's.",
        "strength": "Factor of the penalty, which is the expected share of open edges summed over "
        f"layers. It rises while the {config.constraint} is below its bound, and falls while it is "
        "above.",
        "interval": "95 %, from resampling documents, for one trained model.",
    }
