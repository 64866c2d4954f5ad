"""Results of the recall suite: dataclasses of `summary.json`, columns of `rows.parquet`.

The page `report.html` shows the content of `summary.json`. A reader refuses another version; a
field that is added keeps the version, a change of meaning raises it. Accuracies are shares of
queries whose token of highest logit is the target.
"""

import dataclasses
from typing import Literal

import pyarrow as pa

from lm_jax.run.results import Count, Share
from lm_jax.statistics import Interval
from protot_jax.analysis.recall import Task
from protot_jax.studies.recall.settings import RecallConfig
from protot_jax.training.seeds import OverSeeds

SCHEMA: Literal["protot_jax.recall"] = "protot_jax.recall"
VERSION: Literal[1] = 1


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """The state and the parameters of one model.

    Attributes:
      memory: floats of a layer's memory; null for attention, which carries some for every token.
      memory_per_token: floats that each token adds; 0 for a recurrent model.
      other: further floats of a layer's state: inputs of convolutions, and masses.
      parameters: number of parameters of the whole model.
    """

    model: str
    memory: Count | None
    memory_per_token: Count
    other: Count
    parameters: Count


@dataclasses.dataclass(frozen=True)
class SeedAccuracy:
    """One trained model in one condition; the interval is a bootstrap over sequences."""

    seed: Count
    accuracy: Interval


@dataclasses.dataclass(frozen=True)
class ConditionResult:
    """One model in one condition.

    Attributes:
      learning_rate: rate, of those tried, with the best recall of other sequences of the trained
        length, over all seeds.
      pairs: number of pairs of MQAR; null for other tasks.
      over_seeds: mean accuracy over seeds.
      chance: accuracy of a guess that knows the form of a sequence (`sequences.chance`).
      longer: whether sequences are longer than those trained on.
    """

    task: Task
    model: str
    learning_rate: float
    length: Count
    pairs: Count | None
    over_seeds: OverSeeds
    by_seed: tuple[SeedAccuracy, ...]
    chance: Share
    longer: bool


@dataclasses.dataclass(frozen=True)
class DivergedTraining:
    """A training whose loss was no longer finite: `divergence.json` in its folder."""

    model: str
    task: Task
    learning_rate: float
    seed: Count
    reason: str


@dataclasses.dataclass(frozen=True)
class RecallSummary:
    """Recall of models of equal memory, by task, length and number of pairs.

    Attributes:
      results: results by task, model and condition; a model has none on a task where every
        learning rate diverged.
      diverged: a rate is not chosen if it diverged with any seed.
    """

    schema: Literal["protot_jax.recall"]
    version: Literal[1]
    config: RecallConfig
    sizes: tuple[ModelSize, ...]
    results: tuple[ConditionResult, ...]
    device: str
    diverged: tuple[DivergedTraining, ...] = ()


ROWS = pa.schema(
    [
        ("task", pa.string()),
        ("model", pa.string()),
        ("learning_rate", pa.float64()),
        ("seed", pa.int64()),
        # "test", or "choice" for those by which the learning rate is chosen.
        ("split", pa.string()),
        ("length", pa.int32()),
        # Of MQAR; null for other tasks.
        ("pairs", pa.int32()),
        # Number of the sequence, the same for all models and seeds.
        ("sequence", pa.int32()),
        # Queries that were answered, and all.
        ("right", pa.int32()),
        ("asked", pa.int32()),
    ]
)
