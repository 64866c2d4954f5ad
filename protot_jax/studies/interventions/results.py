"""Results of an intervention: the dataclasses of its JSON files, the columns of its parquet file.

The summary of one concept is an `InterventionReport` (`intervention.json` in earlier versions), and
that of several a `Comparison` of them (`comparison.json`); `schema` tells them apart. A reader
refuses another version; a field that is added keeps the version, a change of meaning raises it.

A change is relative and in percent, 100 (p' / p - 1) for a probability and likewise for a
perplexity. A mean change is that of the geometric mean, 100 (exp(mean of log(p' / p)) - 1), and its
interval that of the mean logarithm, transformed alike. An interval is of 95 %.
"""

import dataclasses
from typing import Annotated, Literal

import pyarrow as pa

from lm_jax.run.results import Between, Count, Share
from protot_jax.studies.interventions.gates import Ranked
from protot_jax.studies.interventions.matching import Match

NAME = "protot_jax.interventions"
COMPARISON_NAME = "protot_jax.interventions.comparison"
VERSION = 3
Mode = Literal["reinitialise", "mask_write", "mask_read", "zero_write", "zero_read"]


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean of n values with its interval; the ends are null for fewer than two values."""

    mean: float | None
    low: float | None
    high: float | None
    n: Count


@dataclasses.dataclass(frozen=True)
class Effect(Interval):
    """A mean over sentences; n counts their texts, which are the independent units.

    The ends are null for fewer than five texts.
    """

    sentences: Count


@dataclasses.dataclass(frozen=True)
class OtherPrototype:
    """The effect of the same intervention on another prototype."""

    layer: Count
    prototype: Count
    effect: float


@dataclasses.dataclass(frozen=True)
class Control:
    """Rank of the chosen prototype's effect among those of all others.

    Attributes:
      chosen: effect of the chosen one, over `settings.control_draws` draws as for the others.
      percentile: rank among the others in percent, ties counted half; 0 is the greatest drop.
      as_low: how many of the others have an equal or lower effect.
      p: two-sided, twice the share of prototypes, the chosen one included, that are as extreme on
        its side.
      n: number of others.
      mean: geometric mean of the others.
      low: 2.5 % quantile of the others.
      high: 97.5 % quantile of the others.
      effects: effects by layer and prototype, the chosen one included.
      strongest: the others with the greatest drops.
    """

    chosen: float
    percentile: Annotated[float, Between(0, 100)]
    as_low: Count
    p: Share
    n: Count
    mean: float
    low: float
    high: float
    effects: tuple[tuple[float, ...], ...]
    strongest: tuple[OtherPrototype, ...]


@dataclasses.dataclass(frozen=True)
class ModeResult:
    """One intervention.

    Attributes:
      effect: mean change over kept sentences, each the mean of its draws; Student's interval over
        their texts.
      sentences: effects in the order of `sentences`; Student's interval over draws.
      sentence_perplexity: change of the perplexity of the sentences themselves, over kept ones.
      text_perplexity: change of the perplexity of validation text; bootstrap over its n rows.
      control: null without kept sentences or without other prototypes.
    """

    mode: Mode
    effect: Effect
    sentences: tuple[Interval, ...]
    sentence_perplexity: Effect
    text_perplexity: Interval | None
    control: Control | None


@dataclasses.dataclass(frozen=True)
class SentenceResult:
    """A sentence with its target under the trained model.

    Attributes:
      earlier: number of earlier occurrences of the target in the sentence.
      target_tokens: number of tokens whose probability is measured.
      kept: whether the baseline is at least `settings.least_probability`.
    """

    concept: str
    target: str
    text: str
    where: str
    earlier: Count
    target_tokens: Count
    baseline: Share
    perplexity: float
    kept: bool


@dataclasses.dataclass(frozen=True)
class TextPerplexity:
    """The trained model on validation text."""

    perplexity: float
    tokens: Count


@dataclasses.dataclass(frozen=True)
class SeedResult:
    """Everything measured on one model.

    Attributes:
      match: match of this prototype with that of the first model; null for the first.
      place: rank of this prototype among all by the words, from 1.
      ranking: the first prototypes by the words.
      specific: whether `zero_write` has an interval without 0 and a p of at most 0.05; null,
        undecided, where there is no interval, no other prototype, or fewer than ten texts.
    """

    run: str
    seed: Count
    step: Count
    match: Match | None
    place: int | None
    ranking: tuple[Ranked, ...]
    layer: Count
    prototype: Count
    sentences: tuple[SentenceResult, ...]
    kept: Count
    excluded: Count
    text: TextPerplexity | None
    modes: tuple[ModeResult, ...]
    specific: bool | None


@dataclasses.dataclass(frozen=True)
class Model:
    """The model of the named run, which is the first of `seeds`."""

    corpus: str
    layers: Count
    prototypes: Count
    hidden_size: Count
    vocab_size: Count
    shared_routing: bool


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the intervention.

    Attributes:
      concept: null where the sentences are not those of one concept.
      together: the concepts that were tested at once, this one included; empty for a single one.
      occurrences: how often each word occurs in the validation text that was read.
      found: whether the prototype was chosen by the words, and not named by the user.
    """

    concept: str | None
    together: tuple[str, ...]
    words: tuple[str, ...]
    occurrences: dict[str, Count]
    found: bool
    shipped_sentences: bool
    all_subtokens: bool
    least_probability: float
    draws: Count
    control_draws: Count
    reinit_seed: Count
    gate_tokens: Count


@dataclasses.dataclass(frozen=True)
class SkippedSentence:
    """A sentence without its target, or whose target is not in the vocabulary."""

    where: str
    target: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Replication:
    """Whether the prototype and its effect are found again in the other models.

    Attributes:
      models: number of other models.
      p_holm: p of each model's match, corrected for their number.
      matched: number with p_holm of at most 0.05.
      repeated: number of these in which the effect of `zero_write` is specific too, and of the sign
        that it has in the first model.
      mean, lowest, highest: geometric mean effect of `zero_write` in percent over all models, the
        first included, with the least and the greatest; null where no model has a kept sentence.
    """

    models: Count
    p_holm: tuple[float, ...]
    matched: Count
    repeated: Count
    mean: float | None
    lowest: float | None
    highest: float | None


@dataclasses.dataclass(frozen=True)
class InterventionReport:
    """Intervention on one prototype of a Prototype Transformer.

    Attributes:
      seeds: the model of the named run, then other seeds and runs.
      replication: null without other models.
    """

    schema: Literal["protot_jax.interventions"]
    version: Literal[3]
    model: Model
    settings: Settings
    seeds: tuple[SeedResult, ...]
    skipped: tuple[SkippedSentence, ...]
    replication: Replication | None = None


@dataclasses.dataclass(frozen=True)
class ComparedConcept:
    """One of several concepts that were tested at once.

    Attributes:
      effect: effect of `zero_write`.
      p: among controls; null without a test.
      least_p: the least p that a prototype of so many can have; null without a test.
      p_holm: p corrected for all concepts.
      specific: the verdict by the corrected p.
    """

    concept: str
    layer: Count
    prototype: Count
    effect: Effect
    p: float | None
    least_p: float | None
    p_holm: float | None
    specific: bool | None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Interventions for several concepts."""

    schema: Literal["protot_jax.interventions.comparison"]
    version: Literal[3]
    concepts: tuple[ComparedConcept, ...]


Summary = InterventionReport | Comparison

ROWS = pa.schema(
    [
        # Name of the run (`saved_run.run_names`), and the seed that was trained.
        ("run", pa.string()),
        ("seed", pa.int64()),
        ("concept", pa.string()),
        ("target", pa.string()),
        # Index into the seed's `sentences`.
        ("sentence", pa.int32()),
        ("layer", pa.int16()),
        ("prototype", pa.int16()),
        # Whether it is the chosen prototype, and not a control.
        ("chosen", pa.bool_()),
        ("mode", pa.string()),
        # -1 for interventions without random draws.
        ("draw", pa.int32()),
        # Whether the baseline is high enough to count.
        ("kept", pa.bool_()),
        ("baseline", pa.float64()),
        ("probability", pa.float64()),
        # In percent, as is perplexity_change.
        ("change", pa.float64()),
        ("perplexity", pa.float64()),
        ("perplexity_change", pa.float64()),
    ]
)
