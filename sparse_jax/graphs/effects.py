"""Effects of interventions on the rows of a graph, predicted and measured (`interventions`)."""

from collections.abc import Mapping
import dataclasses
from typing import Any, Literal, get_args

import numpy as np

from lm_jax.errors import UsageError
from lm_jax.statistics import Interval
from sparse_jax.circuits.agreement import rank_correlation

Mode = Literal["frozen", "attention_frozen", "free"]
MODES = get_args(Mode)


@dataclasses.dataclass(frozen=True, eq=False)
class Effects:
    """Effects of I interventions on the R rows of a graph.

    Attributes:
      sources: node that each intervention multiplies `[I]`.
      factors: factor of each intervention `[I]`.
      targets: node of each row `[R]`.
      is_logit: whether it is a logit `[R]`, demeaned; else it is a pre-activation.
      predicted: effects predicted by the graph's columns `[I, R]`.
      measured: effects measured, by mode, `[I, R]`.
    """

    sources: np.ndarray
    factors: np.ndarray
    targets: np.ndarray
    is_logit: np.ndarray
    predicted: np.ndarray
    measured: Mapping[Mode, np.ndarray]

    def on(self, rows: np.ndarray) -> "Effects":
        """The effects on some of the rows, chosen by a mask or by indices."""
        return dataclasses.replace(
            self,
            targets=self.targets[rows],
            is_logit=self.is_logit[rows],
            predicted=self.predicted[:, rows],
            measured={mode: shift_IR[:, rows] for mode, shift_IR in self.measured.items()},
        )

    def spearman(self, mode: Mode) -> Interval | None:
        """Spearman correlation of predicted and measured effects over all interventions and rows.

        With its 95 % bootstrap interval over sources, each with all its factors, whose predictions
        are proportional; None where one side is constant, or of a single source.
        """
        predicted, measured = self.predicted.ravel(), self.measured[mode].ravel()
        sources = np.repeat(self.sources, len(self.targets))
        return rank_correlation(predicted, measured, clusters=sources)

    def largest_error(self) -> tuple[float, float]:
        """Largest difference of predicted and measured with all frozen: features, then logits."""
        error_IR = np.abs(self.measured["frozen"] - self.predicted)
        features, logits = error_IR[:, ~self.is_logit], error_IR[:, self.is_logit]
        return float(features.max(initial=0.0)), float(logits.max(initial=0.0))


def as_json(effects: Effects, ids: Mapping[int, str], count: int = 20) -> list[dict[str, Any]]:
    """The interventions of a graph file: of each source that it has, the largest effects.

    Args:
      effects: effects of interventions on one graph.
      ids: ids of the file's nodes, by index in the graph.
      count: targets per intervention, those with the largest effect in any mode.

    Raises:
      UsageError: a mode was not measured, without which no file is complete.
    """
    missing = [mode for mode in MODES if mode not in effects.measured]
    if missing:
        raise UsageError(f"interventions: {missing[0]} was not measured; measure all modes")
    at_R = np.array([r for r, node in enumerate(effects.targets) if int(node) in ids], np.int64)
    entries = []
    for i, (source, factor) in enumerate(zip(effects.sources, effects.factors, strict=True)):
        if int(source) not in ids:
            continue
        columns = {"predicted": effects.predicted[i, at_R]}
        columns |= {mode: shift_IR[i, at_R] for mode, shift_IR in effects.measured.items()}
        size_R = np.abs(np.stack(list(columns.values()))).max(0)
        largest = np.argsort(-size_R, kind="stable")[:count]
        listed = [
            {"target": ids[int(effects.targets[at_R[r]])]}
            | {name: float(column[r]) for name, column in columns.items()}
            for r in largest
            if size_R[r]
        ]
        entries.append({"source": ids[int(source)], "factor": float(factor), "effects": listed})
    return entries
