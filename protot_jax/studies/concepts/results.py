"""Results of a concept report: the dataclasses of `summary.json`, from which the page is rendered.

The page shows this file and computes no further numbers. A reader refuses another
version; a field that is added keeps the version, a change of meaning raises it.

Lists by token have one entry per token of their text, lists by word one per word. The marks at the
ends of a document (`<bos>`, `<eos>`, `<eot>`) are read by the model, but are in no text and no
statistic here.
"""

import dataclasses
from typing import Literal

from lm_jax.evaluate.judge import Label
from lm_jax.run.results import Count, Share, finite
from protot_jax.studies.concepts.ablation_results import Ablation, Carried
from protot_jax.studies.concepts.ranking import RankBy
from protot_jax.studies.concepts.unit_results import SpelledToken, UnitComparison

NAME = "protot_jax.concepts"
VERSION = 2


@dataclasses.dataclass(frozen=True)
class Statistic:
    """A statistic with its 95 % interval and its two-sided p, both of the same hypothesis.

    Null where it cannot be computed.

    Attributes:
      prototypes: sample size.
      texts: sample size.
    """

    value: float | None
    low: float | None
    high: float | None
    p: float | None
    prototypes: Count
    texts: Count

    @classmethod
    def none(cls, prototypes: int, texts: int) -> "Statistic":
        """A statistic that cannot be computed."""
        return cls(None, None, None, None, prototypes, texts)

    @classmethod
    def of(
        cls, value: float, low: float, high: float, p: float, prototypes: int, texts: int
    ) -> "Statistic":
        """The statistic whose numbers may be NaN."""
        return cls(finite(value), finite(low), finite(high), finite(p), prototypes, texts)


@dataclasses.dataclass(frozen=True)
class PrototypeGate:
    """Statistics of one gate of a prototype over all analysed tokens.

    Attributes:
      peak_over_mean: largest over mean across tokens, unlike Eq. 3, which is across prototypes;
        null where the gate is always 0.
      mutual_information: information of token and gate in quantile bins, in nats, Miller-Madow.
      mutual_information_by_chance: the same with the tokens shuffled.
      top_1: share of tokens where this prototype has the largest gate.
      active: share of tokens where its gate is >= 0.01.
    """

    mean: float
    max: float
    peak_over_mean: float | None
    mutual_information: float | None
    mutual_information_by_chance: float | None
    top_1: float
    active: float


@dataclasses.dataclass(frozen=True)
class LayerIntervals:
    """Ends of 95 % bootstrap intervals over texts."""

    l1_ratio: tuple[float, float]
    gini: tuple[float, float]
    entropy: tuple[float, float]
    top_1: tuple[float, float]
    margin: tuple[float, float]
    active: tuple[float, float]
    usage_gini: tuple[float, float]
    max_share: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class LayerGate:
    """Statistics of the write or read gates of a layer.

    Attributes:
      l1_ratio: mean over tokens of Eq. 3.
      gini: mean over tokens of Eq. 4.
      entropy: mean over tokens of Eq. 5, in nats.
      top_1: mean over tokens of the largest gate.
      margin: mean over tokens of the difference of the largest and the second gate.
      active: mean number of prototypes with a gate >= 0.01.
      usage_gini: Gini of the prototypes' shares of the writing, as in Table 15.
      max_share: largest share of the writing.
      mutual_information: mean over prototypes.
      mutual_information_by_chance: mean over prototypes.
      dead: how many prototypes never have a gate >= 0.01.
    """

    l1_ratio: float
    gini: float
    entropy: float
    top_1: float
    margin: float
    active: float
    usage_gini: float
    max_share: float
    intervals: LayerIntervals
    mutual_information: float | None
    mutual_information_by_chance: float | None
    dead: Count


@dataclasses.dataclass(frozen=True)
class Layer:
    """Statistics of the write and read gates of a layer."""

    layer: Count
    write: LayerGate
    read: LayerGate


@dataclasses.dataclass(frozen=True)
class TopText:
    """A text that a prototype writes, with the prototype's gates by token.

    A word has the mean of its tokens.

    Attributes:
      text: an index into `texts`.
      mean: mean of the write gate.
      sum: sum of the write gate.
      memory: the discounted mean of the prototype's write gate before a token, (1 - beta)
        sum_{j<i} beta^(i-1-j) write_j: how much recent writing a read at that token finds.
      ablated: change of each token's log probability in nats where the prototype is not read;
        null where nothing was predicted, empty where it was not measured.
    """

    text: Count
    mean: float
    sum: float
    write: tuple[Share, ...]
    read: tuple[Share, ...]
    memory: tuple[Share, ...]
    ablated: tuple[float | None, ...] = ()


@dataclasses.dataclass(frozen=True)
class Prototype:
    """One prototype: its decay, gate statistics, lag, top tokens and texts, and label.

    Attributes:
      half_life: half-life in tokens; null where the decay has rounded to 1.
      repetition: 1 - unique / all of the tokens it writes most.
      lag: lag at which the cross-correlation peaks; below 0 if reading precedes writing. Null in a
        first layer with shared routing, and where a gate does not vary.
      cross_correlation: correlation of read with write at lags -5..5.
      label: null without a judge, or if its answer cannot be read.
      ablation: null where it was not measured.
    """

    layer: Count
    prototype: Count
    decay: float
    half_life: float | None
    write: PrototypeGate
    read: PrototypeGate
    repetition: float | None
    lag: int | None
    cross_correlation: tuple[float | None, ...]
    top_tokens: tuple[SpelledToken, ...]
    top_texts: tuple[TopText, ...]
    label: Label | None
    ablation: Ablation | None = None


@dataclasses.dataclass(frozen=True)
class Text:
    """A text of the report, in tokens and in words.

    Attributes:
      document: number of its document in the split.
      words: words whose concatenation is the text.
      word_of: index of each token's word.
      carried: null where it was not computed.
    """

    document: Count
    tokens: tuple[str, ...]
    words: tuple[str, ...]
    word_of: tuple[Count, ...]
    perplexity: float
    carried: Carried | None = None


@dataclasses.dataclass(frozen=True)
class Locality:
    """The relation of half-life and repetition.

    Attributes:
      spearman: rank correlation of half-life and repetition within layers.
      cohens_d: effect within layers, of the shortest against the longest quarter of half-lives.
      overall_spearman: rank correlation over all prototypes of all layers, as in Table 21.
      overall_cohens_d: effect over the same.
      quartiles: mean repetition by quartile of half-life, short first.
      edges: half-lives between the quartiles, in tokens; each is in the lower one.
    """

    spearman: Statistic
    cohens_d: Statistic
    overall_spearman: float | None
    overall_cohens_d: float | None
    quartiles: tuple[float | None, ...]
    edges: tuple[float | None, ...] = ()


@dataclasses.dataclass(frozen=True)
class Lag:
    """Cross-correlation of read with write gates, and the tests that reading comes first.

    Attributes:
      mean: cross-correlation at each lag, averaged over prototypes.
      lead: mean correlation at lag -1 less that at lag 0; bootstrap over texts.
      own_lead: the same less its mean over the read gates of the layer's other prototypes; from
        permutations of the read gates within layers.
      peaks_one_before: share of prototypes whose peak is at lag -1.
    """

    lags: tuple[int, ...]
    mean: tuple[float | None, ...]
    lead: Statistic
    own_lead: Statistic
    peaks_one_before: float | None


@dataclasses.dataclass(frozen=True)
class Model:
    """The analysed model.

    Attributes:
      perplexity: perplexity of the analysed texts.
      heads: heads of the mixer; with several, nothing that prototypes carry is computed.
    """

    seed: Count
    step: Count
    layers: Count
    prototypes: Count
    hidden_size: Count
    context: Count
    vocab_size: Count
    parameters: Count
    shared_routing: bool
    corpus: str
    perplexity: float
    heads: Count = 1


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the analysis, and the amount of text."""

    split: str
    texts: Count
    length: Count
    top: Count
    rank_by: RankBy
    resamples: Count
    seed: Count
    tokens: Count
    judge: str


@dataclasses.dataclass(frozen=True)
class RandomTexts:
    """A judge's label of texts that were drawn at random.

    Attributes:
      texts: indices into the report's `texts`.
    """

    texts: tuple[Count, ...]
    label: Label | None


@dataclasses.dataclass(frozen=True)
class ConceptReport:
    """Concept report of a Prototype Transformer.

    Attributes:
      baseline: labels of random texts by the same judge; null without a judge.
      comparisons: other units on the same texts.
    """

    schema: Literal["protot_jax.concepts"]
    version: Literal[2]
    model: Model
    settings: Settings
    texts: tuple[Text, ...]
    layers: tuple[Layer, ...]
    prototypes: tuple[Prototype, ...]
    half_life_repetition: Locality
    lag: Lag
    baseline: tuple[RandomTexts, ...] | None
    comparisons: tuple[UnitComparison, ...] = ()
