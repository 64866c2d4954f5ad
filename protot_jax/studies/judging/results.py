"""Results of generation and judging: the dataclasses of `summary.json`, which the page shows.

A reader refuses another version; a field that is added keeps the version, a change of meaning
raises it. Intervals are of 95 %. Those of means and strengths resample prompts; those of shares are
Wilson's; those of `Rating.elo` are over orders of the games and say nothing of other prompts.
"""

import dataclasses
from typing import Literal

from lm_jax.evaluate.verdicts import Consistency, Control
from lm_jax.run.results import Count, Share
from lm_jax.statistics import Interval
from protot_jax.studies.judging.continuations import Decoding

SCHEMA: Literal["protot_jax.judging"] = "protot_jax.judging"
VERSION: Literal[1] = 1


@dataclasses.dataclass(frozen=True)
class Settings:
    """What was asked of the models.

    Attributes:
      source: origin of the prompts.
      prompts: how many.
      prompts_sha256: digest of prompts and references.
      skipped: documents that are too short.
      new_tokens: the most that a model generates.
      sampler: settings of "sampled"; "greedy" has no penalties.
      seed: seed of the sampler and the bootstrap.
      resamples: samples of the bootstrap.
      same_data: whether all runs were prepared from the same documents and tokenizer.
    """

    source: str
    prompts: Count
    prompts_sha256: str
    skipped: Count
    new_tokens: Count
    sampler: dict[str, float]
    seed: Count
    resamples: Count
    same_data: bool


@dataclasses.dataclass(frozen=True)
class Model:
    """A trained model.

    Attributes:
      name: name of the run (`saved_run.run_names`) with its seed.
      run: folder of the run.
      kind: the mixer, as the config of the run names it.
    """

    name: str
    run: str
    kind: str
    seed: Count
    step: Count
    sha256: str
    parameters: Count


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measures of one model's continuations, or of the references.

    Attributes:
      model: name of the model; "reference" for the true continuations.
      decoding: null for the references.
      bleu: mean of smoothed sentence BLEU; null for the references, like the other BLEUs.
      bleu_unsmoothed: mean of BLEU over four orders.
      bleu_corpus: BLEU of all texts together.
      repetition: mean share of 4-grams that a text had already; null without any.
      distinct: unique 1-, 2- and 3-grams over all; null without any.
      words: mean number of words.
      ended: share of texts that the model ended; null for the references.
      rouge_l: mean of ROUGE-L; null for the references, and in files of earlier versions.
    """

    model: str
    decoding: Decoding | None
    bleu: Interval | None
    bleu_unsmoothed: Interval | None
    bleu_corpus: float | None
    repetition: Interval | None
    distinct: tuple[Share | None, ...]
    words: Interval
    ended: Interval | None
    rouge_l: Interval | None = None


@dataclasses.dataclass(frozen=True)
class Answer:
    """One model's continuation of a sample prompt; both BLEUs, smoothed and not, and ROUGE-L."""

    model: str
    text: str
    bleu: float
    bleu_unsmoothed: float
    rouge_l: float | None = None


@dataclasses.dataclass(frozen=True)
class Sample:
    """The prompt at which the (smoothed) BLEU of a model is highest, with every continuation."""

    model: str
    decoding: Decoding
    number: Count
    prompt: str
    reference: str
    answers: tuple[Answer, ...]


@dataclasses.dataclass(frozen=True)
class Duel:
    """Verdicts between two models: each counted, and prompts on which both orders agree."""

    left: str
    right: str
    won: Count
    tied: Count
    lost: Count
    agreed_won: Count
    agreed_lost: Count


@dataclasses.dataclass(frozen=True)
class Rating:
    """Ratings of a model in points: 400 are odds of 10 to 1, and the mean of all models is 1000.

    Attributes:
      strength: Bradley-Terry, every verdict counted, as the paper does.
      agreed: the same, a win only where both orders agree.
      elo: online Elo with K = 4, mean and interval over orders of the games.
      length_controlled: Bradley-Terry at equal length.
    """

    model: str
    strength: Interval
    agreed: Interval
    elo: Interval
    length_controlled: float


@dataclasses.dataclass(frozen=True)
class Judged:
    """A judge's verdicts on the models under one decoding.

    Attributes:
      ratings: null where the judge may not rate, or there is nothing to rate.
      ridge: ridge that shrank the strengths; above 0 where some model won, or lost, everything.
      length_weight: log-odds that one standard unit of length adds; null without ratings.
      no_ratings: why there are none, else empty.
    """

    decoding: Decoding
    consistency: Consistency
    duels: tuple[Duel, ...]
    ratings: tuple[Rating, ...] | None
    ridge: float
    length_weight: float | None
    no_ratings: str


@dataclasses.dataclass(frozen=True)
class JudgeResult:
    """One judge: its controls, whether it may rate, and its verdicts.

    Attributes:
      unreadable: answers that name no verdict.
      position: share of verdicts on a text against itself that name the first; null without any.
    """

    name: str
    unreadable: Count
    controls: tuple[Control, ...]
    rates: bool
    position: Interval | None
    decodings: tuple[Judged, ...]


@dataclasses.dataclass(frozen=True)
class JudgingSummary:
    """Everything that the page shows.

    Attributes:
      bleu_signature: signature of the smoothed BLEU; the other is `bleu_unsmoothed_signature`.
    """

    schema: Literal["protot_jax.judging"]
    version: Literal[1]
    settings: Settings
    models: tuple[Model, ...]
    bleu_signature: str
    bleu_unsmoothed_signature: str
    measured: tuple[Measured, ...]
    samples: tuple[Sample, ...]
    judges: tuple[JudgeResult, ...]
