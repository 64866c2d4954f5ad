"""The section of a page on the training of one run: edges, strength, losses and divergence."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from lm_jax import report
from lm_jax.report import Section, Series, section
from lm_jax.report.markup import number
from lm_jax.report.page import Part
from sparse_jax.studies.posttrain.beginning import allowances
from sparse_jax.studies.posttrain.report_text import control_text
from sparse_jax.studies.posttrain.results import PosttrainSummary, RunResult, TextPatterns
from sparse_jax.studies.posttrain.settings import PosttrainConfig

# A longer curve is drawn through means of neighbouring steps.
_MOST_POINTS = 400


@dataclasses.dataclass(frozen=True)
class Run:
    """Numbers, tables and patterns of one run, from its folder.

    Attributes:
      moving: bound of each update, if it is not a fixed number; else ().
      kinds: table of open edges by kind (`kinds.edge_kinds`); None of runs of before.
    """

    result: RunResult
    steps: Mapping[str, Sequence[float]]
    evaluations: Sequence[Mapping[str, Any]]
    edges: Mapping[str, Sequence[int]]
    patterns: tuple[TextPatterns, ...]
    moving: tuple[float, ...] = ()
    kinds: Mapping[str, Sequence[Any]] | None = None

    def evaluated(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric of the evaluations."""
        rows = [row for row in self.evaluations if row["name"] == name]
        return [row["step"] for row in rows], [row["value"] for row in rows]


def training(config: PosttrainConfig, run: Run, summary: PosttrainSummary) -> Section:
    """Edges, strength, losses and divergence by step, as in Fig. 11."""
    steps = run.steps
    step, edges, strength, loss = (
        _thin(steps[name]) for name in ("step", "edges", "strength", "loss")
    )
    at, held_out = run.evaluated("validation/loss")
    _, open_edges = run.evaluated("validation/edges")
    target, dense = run.result.target, summary.dense_loss

    def curves(series: Sequence[Series], caption: str, y_label: str, **options: Any) -> Part:
        count = f"{number(len(steps['step']))} steps"
        return report.curves(
            series, caption=caption, x_label="step", y_label=y_label, n=count, **options
        )

    losses = [Series("training", step, loss), Series("held out", at, held_out)]
    h_lines = [(target, "bound"), (dense, "dense")]
    caption = "Loss, with its bound and the dense model's."
    over: list[Part] = []
    relaxed: list[Series] = []
    if config.relaxed:
        bound = [target + each for each in allowances(config)]
        relaxed.append(Series("bound in training", step, _thin(bound)))
    if config.constraint == "divergence":
        h_lines = [(dense, "dense")]
        caption = "Loss, with the dense model's."
        divergences = [
            Series("training", step, _thin(steps["divergence"])),
            Series("held out", *run.evaluated("validation/divergence")),
            *relaxed,
        ]
        over.append(
            curves(
                divergences,
                "Divergence from the dense model, with its bound.",
                "nats per token",
                h_lines=[(target, "bound")],
            )
        )
    else:
        losses += relaxed
    if run.moving:
        moving = _thin(run.moving)
        losses.append(Series("bound in training", step, moving))
        over.append(
            curves(
                [Series("training", step, loss - moving)],
                "Training loss minus its bound at the same update.",
                "nats per token",
                h_lines=[(0.0, "bound")],
            )
        )
        h_lines[0] = (target, "bound held out")
        caption = (
            "Loss, with its bounds, which are those of the control plus the slack, and the dense "
            "model's."
        )
    edges_by_step = [
        Series("expected, in training", step, 100 * edges),
        Series("held out, logit > 0", at, 100 * np.asarray(open_edges)),
    ]
    strengths = [Series("strength", step, strength)]
    return section(
        f"Training under the bound {target:.4f}",
        *control_text(run.result, steps["strength"], config.strength),
        report.grid(
            curves(edges_by_step, "Open edges.", "open edges, %", log_y=True),
            curves(losses, caption, "nats per token", h_lines=h_lines),
            curves(strengths, "Strength of the penalty.", "strength, nats", log_y=True),
            *over,
        ),
    )


def _thin(values: Sequence[float]) -> np.ndarray:
    """Means of neighbouring values of a long curve."""
    width = -(-len(values) // _MOST_POINTS)
    return np.array([np.mean(values[i : i + width]) for i in range(0, len(values), width)])
