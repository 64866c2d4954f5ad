"""The summary of a transcoder's training as text for a terminal."""

from sparse_jax.studies.transcoders.results import (
    Control,
    PromptScores,
    Reconstruction,
    TranscoderSummary,
)


def format_summary(summary: TranscoderSummary) -> str:
    """The lines that the command prints at its end."""
    window = "all later layers" if summary.window is None else f"{summary.window} layers"
    lines = [
        f"{summary.kind} transcoder of {summary.model}, {summary.features} features a layer into "
        f"{window}, {summary.parameters:,} parameters, {summary.tokens_seen:,} tokens seen",
        f"held out, {summary.validation_tokens:,} tokens: {_line(summary.reconstruction)}",
    ]
    if summary.batch_topk is not None:
        lines.append(f"before thresholds replaced BatchTopK: {_line(summary.batch_topk)}")
    if summary.batch_topk_graphs is not None:
        lines.append(f"attribution graphs before: {_scores(summary.batch_topk_graphs)}")
    each = summary.substitution
    lines.append(
        f"with all MLPs replaced, {each.tokens:,} tokens: {each.divergence:.3f} nats per token "
        f"from the model, the same next token at {100 * each.agreement:.1f} %"
    )
    lines.append(
        f"attribution graphs of {summary.graphs.prompts} prompts: {_scores(summary.graphs)}"
    )
    lines += [_control(each) for each in summary.controls]
    lines.append(f"{100 * summary.dead:.1f} % of features dead")
    if summary.ended == "l0":
        lines.append(f"training ended by stop_l0 after {summary.steps} updates")
    return "\n".join(lines)


def _scores(graphs: PromptScores | None) -> str:
    if graphs is None or graphs.mean is None:
        return "none, no feature is active" if graphs else "replacement 1 by construction"
    whole, pruned = graphs.mean.unpruned, graphs.mean.pruned
    return (
        f"replacement {whole.replacement:.3f} (pruned {pruned.replacement:.3f}), "
        f"completeness {whole.completeness:.3f} (pruned {pruned.completeness:.3f})"
    )


def _control(each: Control) -> str:
    trained = "" if each.steps is None else f", {each.steps:,} updates"
    return (
        f"control {each.name}, {each.parameters:,} parameters{trained}: {each.l0:.1f} active per "
        f"token, "
        f"{100 * each.unexplained:.1f} % unexplained, {_scores(each.graphs)}"
    )


def _line(result: Reconstruction) -> str:
    layers = ", ".join(f"{x:.1f}" for x in result.l0_by_layer)
    return (
        f"{result.l0:.1f} features active per token (by layer {layers}), "
        f"{100 * result.unexplained:.1f} % of the variance unexplained"
    )
