"""Tables of a pair of models: dense, control and sparse on held-out text and on tasks."""

from typing import Any

from tools.page_blocks.sources import interval, summary, table

_TASKS = {
    "ioi": "right of IOI, %",
    "ioi_rephrased": "of IOI in other words",
    "greater_than": "of greater-than",
    "docstring": "of docstring",
    "copy": "of copy",
}


def pair(name: str) -> str:
    """Loss, share of open edges and answers of the dense, the control and the sparse model."""
    found = summary(name)
    control, variant = found["controls"][0], found["variants"][0]
    run = variant["runs"][0]
    edges, over = run["edges"], run["over_control"]
    # A control is compared with the dense model; the pages have it the other way round.
    dense = {key: -control["difference"][other] for key, other in _SIGN.items()}
    rows = [
        (
            "loss, nats per token",
            f"{found['dense_loss']:.3f}",
            f"{control['loss']['estimate']:.3f}",
            f"{run['loss']['estimate']:.3f}",
        ),
        ("minus the control's", interval(dense, "+.3f"), "", f"**{interval(over, '+.3f')}**"),
        (
            "edges open, %",
            "100",
            "100",
            f"**{interval(edges, '.3f', 100)}**, "
            f"{run['open_edges_per_head']:.0f} for each head of a window",
        ),
        *_answers(found["scores"]),
    ]
    text = found["validation_tokens"]
    return table(
        (
            f"held out: {control['loss']['n']} documents, {text:,} tokens",
            "dense",
            "control",
            "sparse",
        ),
        rows,
    )


_SIGN = {"estimate": "estimate", "low": "high", "high": "low"}


def _answers(scores: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    by_task = {(each["task"], each["model"]["role"]): each["accuracy"] for each in scores}
    return [
        (
            f"{label} (n = {by_task[task, 'dense']['n']} prompts)",
            *(interval(by_task[task, role], ".1f", 100) for role in ("dense", "control", "sparse")),
        )
        for task, label in _TASKS.items()
        if (task, "dense") in by_task
    ]
