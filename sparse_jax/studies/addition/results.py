"""Results of the addition study: the dataclasses of its JSON files.

    summary.json              AdditionSummary    all seeds
    seed_<n>/summary.json     SeedSummary        one seed
    seed_<n>/graphs.json      DrawnSum           a list: the drawn sums in both models

An edge leads from one position of the row to itself or to another that it sees, in one layer: an
earlier one, or with bidirectional attention any other. "Attends" means an open edge. Shares are
over held-out sums and have Wilson intervals, means have bootstrap intervals over sums; both are at
95 %.
"""

import dataclasses
from pathlib import Path
from typing import Literal

from lm_jax.run.results import Count, Share
from lm_jax.statistics import Interval
from sparse_jax.studies.addition.settings import AdditionConfig
from sparse_jax.studies.posttrain.results import Spread

DENSE, SPARSE = "dense", "sparse"
GRAPHS = "graphs.json"
Place = Literal["ones", "tens", "hundreds"]


def seed_folder(folder: Path, seed: int) -> Path:
    """Folder of one seed."""
    return folder / f"seed_{seed}"


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """Share of sums whose five digits are all right.

    Attributes:
      by_carries: accuracy by the number of carries in the sum, "0", "1" or "2".
    """

    all: Interval
    by_carries: dict[str, Interval]


@dataclasses.dataclass(frozen=True)
class EdgeCounts:
    """Mean number of open edges of a sum.

    Attributes:
      heavy: open edges with an attention weight of at least 0.01.
      possible: visible edges of all layers.
    """

    all: Interval
    by_layer: tuple[Interval, ...]
    heavy: Interval
    possible: Count


@dataclasses.dataclass(frozen=True)
class OperandAttention:
    """How often a digit of the answer attends to the two digits to be added.

    Attributes:
      both: attends to both of them.
      both_by_chance: what as many edges to random visible positions would give.
      each: attends to one of them, over both.
      reached: has a path of open edges to both, through any layers and positions.
      edges: mean number of open edges of the position in this layer.
      weight: share of its attention weight on the two.
    """

    place: Place
    layer: Count
    both: Interval
    both_by_chance: Share
    each: Interval
    each_by_chance: Share
    reached: Interval
    edges: float
    weight: float


@dataclasses.dataclass(frozen=True)
class CarryAttention:
    """How often a digit of the answer attends to a position from which a carry can be known.

    Attributes:
      carry: whether these are the sums with a carry into the place, or those without.
      by_chance: what as many edges to random visible positions would give.
    """

    place: Place
    layer: Count
    carry: bool
    attends: Interval
    by_chance: Share


@dataclasses.dataclass(frozen=True)
class LayerAblation:
    """Share of exact sums with all edges of one layer closed."""

    layer: Count
    exact: Interval


@dataclasses.dataclass(frozen=True)
class ModelResult:
    """Measurements of one model.

    Attributes:
      without: one ablation for each layer.
      carry: one entry for each layer, position and carry; empty for the dense model, whose edges
        are all open.
      training_seconds: seconds that all updates took.
    """

    accuracy: Accuracy
    edges: EdgeCounts
    operands: tuple[OperandAttention, ...]
    without: tuple[LayerAblation, ...]
    carry: tuple[CarryAttention, ...]
    steps: Count
    training_seconds: float


@dataclasses.dataclass(frozen=True)
class ModelResults:
    """Measurements of both models of one seed."""

    dense: ModelResult
    sparse: ModelResult

    def items(self) -> tuple[tuple[str, ModelResult], ...]:
        """Name and result of each model."""
        return (DENSE, self.dense), (SPARSE, self.sparse)


@dataclasses.dataclass(frozen=True)
class SumCounts:
    """Number of sums in each split.

    Attributes:
      held_out_by_carries: held-out sums with no, one and two carries.
    """

    trained: Count
    held_out: Count
    held_out_by_carries: tuple[Count, Count, Count]


@dataclasses.dataclass(frozen=True)
class DrawnSum:
    """Attention of one model on one sum that is drawn.

    Attributes:
      problem: number of the sum.
      open: open edges, by layer, query and key.
      weights: attention weights, by the same.
      answer: answered ids.
    """

    model: Literal["dense", "sparse"]
    problem: Count
    open: tuple[tuple[tuple[bool, ...], ...], ...]
    weights: tuple[tuple[tuple[Share, ...], ...], ...]
    answer: tuple[Count, ...]


@dataclasses.dataclass(frozen=True)
class SeedSummary:
    """Both models of one seed.

    Attributes:
      parameters: number of parameters of one model.
    """

    seed: Count
    config: AdditionConfig
    parameters: Count
    sums: SumCounts
    models: ModelResults


@dataclasses.dataclass(frozen=True)
class ModelSpread:
    """One model over seeds.

    Attributes:
      exact: share of exact sums.
      edges: open edges of a sum.
    """

    exact: Spread
    edges: Spread


@dataclasses.dataclass(frozen=True)
class ModelSpreads:
    """Both models over seeds."""

    dense: ModelSpread
    sparse: ModelSpread


@dataclasses.dataclass(frozen=True)
class AdditionSummary:
    """Two-digit addition by a dense and a sparse model."""

    config: AdditionConfig
    seeds: tuple[SeedSummary, ...]
    between_seeds: ModelSpreads
    device: str
