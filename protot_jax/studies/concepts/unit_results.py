"""Results of units of other models on the texts of a concept report: a part of its `summary.json`.

`results.py` has the whole.
"""

import dataclasses
from typing import Literal

from lm_jax.evaluate.judge import Label
from lm_jax.run.results import Count, Share
from lm_jax.statistics import Interval


@dataclasses.dataclass(frozen=True)
class SpelledToken:
    """A token with the mean and the sum of a write gate over its occurrences."""

    token: str
    id: Count
    mean: float
    sum: float
    count: Count


@dataclasses.dataclass(frozen=True)
class UnitLayer:
    """Statistics of the units of one layer: Eq. 3 to 6, in the place of write gates.

    Attributes:
      units: how many.
      l1_ratio, gini, entropy: means over the tokens at which a unit is active, Eq. 3 to 5, with
        95 % bootstrap intervals over texts.
      mutual_information: Eq. 6, mean over the units.
      mutual_information_by_chance: the same with the tokens shuffled.
      dead: how many are 0 at every token.
    """

    layer: Count
    units: Count
    l1_ratio: Interval
    gini: Interval
    entropy: Interval
    mutual_information: float
    mutual_information_by_chance: float
    dead: Count


@dataclasses.dataclass(frozen=True)
class UnitText:
    """A text that a unit answers to: an index into `texts`, and the activation at each token."""

    text: Count
    mean: float
    activation: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Unit:
    """A head or a feature, read as a prototype is.

    Attributes:
      active: share of tokens at which it is above 0.
      repetition: 1 - unique / all of the tokens at which it is strongest.
      label: null without a judge, or if its answer cannot be read.
    """

    layer: Count
    unit: Count
    mean: float
    max: float
    active: Share
    mutual_information: float
    mutual_information_by_chance: float
    repetition: float
    top_tokens: tuple[SpelledToken, ...]
    top_texts: tuple[UnitText, ...]
    label: Label | None


@dataclasses.dataclass(frozen=True)
class Autoencoder:
    """The sparse autoencoder of a comparison.

    Attributes:
      features: how many.
      active: the most of a token.
      steps: updates.
      tokens: number of tokens of the training split that it was trained on.
      unexplained: share of the variance of the residual stream at the analysed tokens.
    """

    features: Count
    active: Count
    steps: Count
    tokens: Count
    unexplained: float


@dataclasses.dataclass(frozen=True)
class UnitComparison:
    """Units of another model on the same texts.

    Attributes:
      kind: heads by the norm of their values, or features of the residual stream.
      run: name and seed of the model (`saved_run.run_names`).
      model: kind of the model.
      perplexity: perplexity of the analysed texts.
      autoencoder: null for heads.
    """

    kind: Literal["heads", "sae"]
    run: str
    model: str
    step: Count
    sha256: str
    perplexity: float
    layers: tuple[UnitLayer, ...]
    units: tuple[Unit, ...]
    autoencoder: Autoencoder | None
