"""The summary of attribution graphs as text for a terminal, and sentences that the page has too."""

from collections.abc import Iterator, Mapping, Sequence
import math
from statistics import fmean, median
from types import MappingProxyType

from lm_jax.report.markup import number
from lm_jax.report.tables import interval_text
from lm_jax.statistics import Interval
from sparse_jax.studies.graphs.intervened import GroupIntervention
from sparse_jax.studies.graphs.results import (
    PLAUSIBLE,
    EdgeCounts,
    GraphResult,
    GraphSummary,
    MassRatio,
    ModelFacts,
)

NAMES = {"heads": "heads", "pairs": "key-query pairs"}
EDGES = {"any": "all", "different": "between different positions"}


def summary_lines(
    summary: GraphSummary,
    answers: Mapping[str, str] = MappingProxyType({}),
    opening: Sequence[str] = (),
) -> list[str]:
    """The lines that the command prints at its end.

    Args:
      summary: numbers of all graphs.
      answers: sentence of each graph, by its file; graphs without one begin with their numbers.
      opening: sentences that come first, where there are several graphs.
    """
    lines = [*opening]
    for graph in summary.graphs:
        lines += [answers[graph.file]] if graph.file in answers else []
        lines += _graph_lines(graph)
    if summary.config.neurons:
        lines.append("features are neurons of the models' MLPs; this is no transcoder")
    for each in summary.models:
        lines += [_fit_line(each)] if each.unexplained else []
        # Of TopK k features are active at every token.
        lines += [_active_line(each)] if each.active and each.kind != "topk" else []
    if len(summary.graphs) == 1:
        lines += [*_layer_errors(summary.graphs[0]), *_supernode_lines(summary.graphs[0])]
        lines += _score_lines(summary.graphs[0])
    labels = [
        f"{each.role}: {each.labelled} of {each.features} shown features have a label (judge: "
        f"{each.judge})"
        for each in summary.features
        if each.labelled or each.judge != "null"
    ]
    stable = [
        f"{each.role}, {each.kind or 'all'}: graphs of one meaning overlap by "
        f"{format_interval(each.within)} in the mass of heads, with other kinds of prompts by "
        f"{format_interval(each.across)}"
        for each in summary.stability
    ]
    # What opens the text has the count and the ratios of all absolute masses.
    compared = [f"  left out: {each.slug}, as {each.why}" for each in summary.compared if each.why]
    ratios = [line for each in summary.ratios if (line := format_ratio(each)) not in opening]
    return [*lines, *labels, *compared, *ratios, *stable]


def _fit_line(model: ModelFacts) -> str:
    """How much a transcoder of unknown origin leaves out."""
    low, high = (100 * end for end in (min(model.unexplained), max(model.unexplained)))
    much = "" if high < 100 * PLAUSIBLE else "; more than 60 % in one layer is much"
    return (
        f"{model.transcoder} does not say of which model it is; it leaves out {low:.3g} to "
        f"{high:.3g} % of the variance of MLP outputs, by layer{much}"
    )


# Of so many times more active features, training left out the first token.
_LEFT_OUT = 10


def _active_line(model: ModelFacts) -> str:
    """How many features are active, and whether the first token was part of training."""
    after, first = (
        f"{min(numbers):.3g} to {max(numbers):.3g}"
        for numbers in (model.active, model.active_first)
    )
    more = median(
        one / max(other, 1.0) for one, other in zip(model.active_first, model.active, strict=True)
    )
    advice = ""
    if more >= _LEFT_OUT and not model.skip_start:
        advice = (
            "; so many more there suggest that training left the first token out: "
            "--config.skip_start=1 does, too"
        )
    return (
        f"{model.transcoder}: {after} features are active at a token, by layer, and {first} at the "
        f"first{advice}"
    )


def _layer_errors(graph: GraphResult) -> list[str]:
    """The certificates of each layer; rows are of readings in it, those of the logits last."""
    rows = [*map("{:.1e}".format, graph.row_error)]
    mediation = " ".join(map("{:.1e}".format, graph.mediation_error))
    return [
        f"  errors of rows by layer: {' '.join(rows[:-1])}, logits {rows[-1]}",
        f"  errors of mediation by layer: {mediation}",
    ]


def _supernode_lines(graph: GraphResult) -> Iterator[str]:
    """The supernode with the largest effect, with nothing frozen."""
    for one in strongest_supernode(graph):
        free = next(each for each in one.outcomes if each.mode == "free")
        first = free.top[0]
        yield (
            f"  supernode “{one.label}” ({len(one.members)} nodes) times {one.factor:g}: the logit "
            f"of {graph.logits[0].token!r} changes by {free.change:.2f} (predicted "
            f"{one.predicted:.2f}), next is {first.token!r} {100 * first.probability:.1f} %"
        )


def _score_lines(graph: GraphResult) -> Iterator[str]:
    """How far supernodes act as one thing, means over those that have the figures."""
    scores = graph.supernode_scores
    if both := [s for s in scores if math.isfinite(s.within) and math.isfinite(s.outside)]:
        yield (
            f"  {_supernodes(len(both))}: effects of removing two members have a mean cosine of "
            f"{fmean(s.within for s in both):.2f}, those of a member and another feature of its "
            f"layers {fmean(s.outside for s in both):.2f}"
        )
    if known := [s.off for s in scores if math.isfinite(s.off)]:
        yield (
            f"  {_supernodes(len(known))}: removing all members is {100 * fmean(known):.0f} % off "
            "the sum of removing each"
        )


def _supernodes(count: int) -> str:
    return f"{count} supernode{'s' * (count != 1)}"


def _graph_lines(graph: GraphResult) -> Iterator[str]:
    sizes, whole, pruned = graph.sizes, graph.scores.unpruned, graph.scores.pruned
    tokens = ", ".join(f"{each.token!r} {100 * each.probability:.1f} %" for each in graph.logits)
    yield f"  {graph.role}, {graph.slug}: {sizes.tokens} tokens, then {tokens}"
    yield (
        f"  {sizes.features:,} active features, of which {sizes.kept_features:,} are kept with "
        f"{sizes.kept_errors:,} errors and {sizes.kept_edges:,} edges"
    )
    yield (
        f"  replacement {whole.replacement:.3f} (pruned {pruned.replacement:.3f}), completeness "
        f"{whole.completeness:.3f} ({pruned.completeness:.3f}), over nodes with inputs "
        f"{whole.completeness_with_inputs:.3f} ({pruned.completeness_with_inputs:.3f})"
    )
    yield (
        f"  largest relative error of a row {max(graph.row_error):.1e}, of the mediation of "
        f"{sizes.mediated_edges:,} edges {max(graph.mediation_error):.1e}; the sum over layers is "
        f"{graph.over_count:.2f} times the edge (median)"
    )
    if graph.agreements:
        ranks = ", ".join(
            f"{each.mode.replace('_', ' ')} {format_interval(each.spearman)}"
            for each in graph.agreements
        )
        yield (
            f"  {graph.agreements[0].interventions} interventions, rank correlation of predicted "
            f"and measured effects: {ranks}"
        )


def format_counted(summary: GraphSummary) -> str:
    """How many prompts a comparison counts, and of how many models."""
    right = sum(not each.why for each in summary.compared)
    return (
        f"Compared on {right} of {len(summary.compared)} prompts, which both models answer rightly "
        "and whose graphs explain the same token; one pair of models."
    )


def format_ratio(ratio: MassRatio) -> str:
    """A ratio in a sentence."""
    what = f"{NAMES[ratio.component]} ({ratio.sign}; edges: {EDGES[ratio.positions]})"
    left_out = (
        f"left out, as no head carries them: {format_left_out(ratio.dense)} edges of the dense "
        f"model, {format_left_out(ratio.sparse)} of the sparse one"
    )
    if ratio.of_mean is None:
        why = "fewer than two of these prompts have edges in both models"
        return f"{what}: no ratio, as {why}; {left_out}."
    paper = "" if ratio.paper is None else f"; the paper's is {ratio.paper:g}"
    return (
        f"Of {what} the dense model needs {format_interval(ratio.of_mean)} times as many as the "
        f"sparse one ({ratio.of_mean.n} prompts{paper}; {left_out})."
    )


def format_left_out(edges: EdgeCounts) -> str:
    """Edges that no head carries, of all."""
    return f"{number(edges.unmediated)} of {number(edges.total)}"


def format_interval(interval: Interval | None) -> str:
    """An estimate with its interval, or with its n where that allows none."""
    return interval_text(interval, ".2f")


def strongest_supernode(graph: GraphResult) -> tuple[GroupIntervention, ...]:
    """The supernode with the largest change of the logit in any mode, times each factor."""
    if not graph.supernodes:
        return ()
    most = max(graph.supernodes, key=lambda one: max(abs(each.change) for each in one.outcomes))
    return tuple(one for one in graph.supernodes if one.members == most.members)
