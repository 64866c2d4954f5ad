"""What places carry at which position: a heat map for each, and the largest effects."""

from collections.abc import Mapping

from lm_jax import report
from lm_jax.report import Column, Section, cell, section, table
from lm_jax.report.page import Part
from lm_jax.report.prose import Prose
from lm_jax.report.tables import interval_text
from sparse_jax.circuits.edge_graph import token_name
from sparse_jax.circuits.place_patching import OF_HEADS
from sparse_jax.studies.circuits.report_text import PLACE, place_name, prompt_count
from sparse_jax.studies.circuits.results import (
    CircuitSummary,
    DrawnPrompt,
    PlaceEffects,
    TaskResult,
)

_PROSE = Prose("sparse_jax.studies.circuits")


def places(summary: CircuitSummary, drawn: Mapping[tuple[str, str], DrawnPrompt]) -> Section:
    """Mean effects of all places by layer and position, and the largest of each.

    Args:
      summary: every number.
      drawn: one prompt by model and task, whose tokens name the positions.
    """
    maps: list[Part] = []
    rows: list[list[object]] = []
    for result in summary.results:
        tokens = drawn[result.model, result.task].tokens
        for own in result.places:
            maps.append(_map(result, own, tokens, prompt_count(summary, result.task)))
            for each in own.strongest:
                token = _position(tokens, each.position)
                effect = interval_text(each.effect)
                labels = [result.task, result.model, PLACE[own.place], place_name(each)]
                rows.append([*labels, token, cell(effect)])
    columns = ["Task", "Model", "Patched", "Where", "Position", "Effect"]
    caption = "The largest mean effects of each place, with 95\u00a0% intervals over prompts."
    return section(
        "What is carried where?",
        _PROSE("places", summary.config.direction == "noising"),
        report.grid(*maps),
        table(columns, rows, caption=caption),
        *_agreements(summary),
    )


_METHOD = {"atp": "gradient (AtP)", "atp_star": "AtP*, softmax", "graddrop": "AtP*, GradDrop"}


def _agreements(summary: CircuitSummary) -> list[Part]:
    """What estimates of these effects would have said, if there are any."""
    rows: list[list[object]] = [
        [
            *(result.task, result.model, PLACE[own.place], _METHOD[each.method], each.compared),
            *(interval_text(each.spearman, ".3f"), each.lower, each.missed),
        ]
        for result in summary.results
        for own in result.places
        for each in own.agreements
    ]
    if not rows:
        return []
    columns = ["Task", "Model", "Patched", "Estimate", "Places", "Spearman"]
    columns_of_half = [Column("Lower half", ".0%"), Column("Largest effect there", ".1%")]
    return [
        _PROSE("place_agreement"),
        table(
            [*columns, *columns_of_half],
            rows,
            caption="Rank correlation of mean absolute effects with exact patching, with "
            "95\u00a0% intervals over places. The lower half has the places whose estimate is at "
            "most the median, all those included that are ranked alike; beside it the largest "
            "exact effect there, as a share of the largest of all, which patching the others "
            "overlooks.",
        ),
    ]


def _map(result: TaskResult, own: PlaceEffects, tokens: tuple[str, ...], n: str) -> Part:
    positions = range(len(own.mean[0]))
    of = ", the largest of the heads of each layer" if own.place in OF_HEADS else ""
    return report.heat_map(
        own.mean[::-1],
        caption=f"{result.model}, {result.task}: {PLACE[own.place]}{of}. Tokens are those of the "
        "prompt that is drawn.",
        x_label="position",
        y_label="layer",
        value_label="mean effect",
        row_labels=list(range(len(own.mean)))[::-1],
        column_labels=[_position(tokens, each) for each in positions],
        scale="diverging",
        n=n,
    )


def _position(tokens: tuple[str, ...], position: int) -> str:
    return token_name(tokens, position) if position < len(tokens) else f"({position})"
