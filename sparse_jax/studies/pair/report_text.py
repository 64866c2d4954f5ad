"""Text of the pair's results, for the terminal."""

from collections.abc import Iterator, Sequence

from sparse_jax.studies.pair.numbers import by_role
from sparse_jax.studies.pair.results import PairSummary
from sparse_jax.studies.posttrain.report_text import ONE_RUN, format_signed, format_spread


def format_summary(summary: PairSummary) -> str:
    """The results of `summary.json` as lines of a terminal."""
    return "\n".join(_lines(summary))


def _lines(summary: PairSummary) -> Iterator[str]:
    dense = summary.dense
    ended = "plateau" if dense.reached_plateau else "no plateau yet"
    yield (
        f"dense: {dense.parameters:,} parameters, {dense.plateau.steps:,} updates to "
        f"{dense.plateau.loss:.4f} nats per token held out ({ended}), after "
        f"{dense.cooldown.steps:,} more with a falling rate {dense.cooldown.loss:.4f}"
    )
    yield (
        f"on the held-out text of post-training: {summary.dense_loss:.4f} over "
        f"{summary.validation_tokens:,} tokens"
    )
    for control in summary.controls:
        yield f"control, seed {control.seed}: {format_signed(control.difference)} against dense"
    for variant in summary.variants:
        for bound in variant.bounds:
            edges = bound.edges
            over = bound.over_control
            against = "" if over is None else f", loss {format_spread(over)} against the control"
            seeds = (
                f" ({100 * edges.least:.3f} to {100 * edges.most:.3f} between {edges.n} seeds)"
                if edges.n > 1
                else f", {ONE_RUN}"
            )
            yield f"{variant.variant}: {100 * edges.mean:.3f} % of edges open{seeds}{against}"
    for task in dict.fromkeys(score.task for score in summary.scores):
        rates = [
            f"{role} {format_range([100 * each.accuracy.estimate for each in scores])}"
            for role, scores in by_role(summary, task).items()
        ]
        yield f"{task}, % right of prompts that no text of training has: {', '.join(rates)}"
    for left in summary.unscored:
        yield f"{left.task} is left out: {left.reason}"


def format_range(values: Sequence[float]) -> str:
    """One number, or the mean with the least and the greatest."""
    if len(values) == 1:
        return f"{values[0]:.0f}"
    return f"{sum(values) / len(values):.0f} ({min(values):.0f} to {max(values):.0f})"
