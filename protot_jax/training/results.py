"""Results of pretraining, of a study and of a search: the dataclasses of their JSON files.

`summary.json` of a pretraining run holds a `PretrainSummary`, `study.json` a `StudySummary`,
`search.json` a `SearchSummary` and `trials/<number>.json` of a search a `Trial`. They are written
by `lm_jax.run.files.write_json` and read by `lm_jax.run.results.load_result`, which refuses a
damaged file. A perplexity that is too large for a float is infinite, in JSON "inf".
"""

import dataclasses
from typing import Literal

from lm_jax.run.results import Count, Real
from lm_jax.text.preparation import SplitSize
from protot_jax.training.seeds import OverSeeds
from protot_jax.training.study_config import Split


@dataclasses.dataclass(frozen=True)
class CorpusSummary:
    """The text of a run.

    Attributes:
      documents_used: number of documents of each split, within the limits of the config.
      training_examples: number of examples of one epoch.
      skipped: number of documents that were left out, by reason.
      truncated_documents: number of documents of the training split that are cut at the context.
      unused_tokens: number of tokens of the training split that are in no example.
    """

    source: str
    splits: dict[str, SplitSize]
    documents_used: dict[str, Count]
    training_examples: Count
    skipped: dict[str, Count]
    truncated_documents: Count
    unused_tokens: Count


@dataclasses.dataclass(frozen=True)
class CheckpointPerplexity:
    """Perplexities, weighted by token, of the weights after `step` updates."""

    step: Count
    validation_perplexity: Real
    test_perplexity: Real


@dataclasses.dataclass(frozen=True)
class SeedSummary:
    """One seed of a pretraining run.

    Attributes:
      steps: optimizer updates.
      tokens_seen: training tokens, counted again in each epoch.
      best: the weights of lowest validation perplexity.
      last: the weights at the end.
    """

    seed: Count
    steps: Count
    tokens_seen: Count
    validation_tokens: Count
    test_tokens: Count
    best: CheckpointPerplexity
    last: CheckpointPerplexity


@dataclasses.dataclass(frozen=True)
class PretrainSummary:
    """A pretraining run: `summary.json`.

    Attributes:
      parameters_in_use: number of the parameters that an output depends on.
      unigram_perplexity: perplexity of the token frequencies of the training split, on validation
        text.
    """

    model: str
    parameters: Count
    parameters_in_use: Count
    forward_flops_per_example: Count
    tie_embeddings: bool
    compute_dtype: str
    weights_and_moments_dtype: str
    corpus: CorpusSummary
    unigram_perplexity: float
    seeds: tuple[SeedSummary, ...]
    device: str


@dataclasses.dataclass(frozen=True)
class PerplexityBySplit:
    """Perplexities over seeds, of the weights of lowest validation perplexity."""

    validation: OverSeeds
    test: OverSeeds


@dataclasses.dataclass(frozen=True)
class FirstRouting:
    """The first layer's routing over seeds, as in Table 15: best weights, validation text.

    Attributes:
      alpha: scale of the mixer's output.
      gini: Gini coefficient of the prototypes' shares of all writing.
      top_1: mean largest write gate.
    """

    alpha: OverSeeds
    gini: OverSeeds
    top_1: OverSeeds


@dataclasses.dataclass(frozen=True)
class StudyRow:
    """A variant of a study, at its best learning rate.

    Attributes:
      changes: what differs from the base of the study, as `field=value`.
      learning_rate: the rate of lowest validation perplexity, in the mean over seeds.
      rates_tried: number of learning rates that it was chosen from.
      tokens_seen: number of tokens seen in training, by the first seed.
      steps_per_second: steps a second of training alone, mean over seeds.
      paper: perplexity in the paper's table; null if it is in none.
      first_routing: null for a model without prototypes.
      documents: number of documents used, by split; fewer than the config asks for if there are no
        more.
    """

    variant: str
    changes: tuple[str, ...]
    learning_rate: float
    rates_tried: Count
    perplexity: PerplexityBySplit
    tokens_seen: Count
    steps_per_second: float
    paper: float | None
    first_routing: FirstRouting | None = None
    documents: dict[str, Count] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class DivergedRun:
    """A run of a study whose loss was no longer finite: `divergence.json` in its folder."""

    variant: str
    learning_rate: float
    reason: str


@dataclasses.dataclass(frozen=True)
class StudySummary:
    """The table of an ablation: `study.json`.

    Attributes:
      table: table of the paper.
      paper_split: the split that the paper's perplexities are of.
      rows: one per variant that is trained, unless all its runs diverged.
      diverged: runs that diverged; they are among the rates tried, and no row has their rate.
    """

    table: str
    paper_split: Split
    rows: tuple[StudyRow, ...]
    diverged: tuple[DivergedRun, ...] = ()


@dataclasses.dataclass(frozen=True)
class Trial:
    """One trial of a search: `trials/<number>.json`.

    Attributes:
      status: "refused" is above the limit of FLOPs and not trained.
      drawn: the fields of the pretraining config that the sampler chose.
      flops: forward, of one example.
      config_hash: hash of the trial's whole pretraining config.
      perplexity: mean over seeds of the lowest validation perplexity; null unless done.
      seed_perplexities: lowest validation perplexities, in the order of the config's seeds; null
        unless done.
      reason: the reason why it diverged or was refused; null otherwise.
    """

    trial: Count
    status: Literal["running", "done", "diverged", "refused"]
    drawn: dict[str, bool | int | float | str | None]
    flops: Count
    config_hash: str
    perplexity: float | None = None
    seed_perplexities: tuple[float, ...] | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        expected = {
            "perplexity": self.status == "done",
            "seed_perplexities": self.status == "done",
            "reason": self.status in ("diverged", "refused"),
        }
        for name, present in expected.items():
            if (getattr(self, name) is not None) != present:
                raise ValueError(
                    f"trial {self.trial} is {self.status} {'without' if present else 'with'} {name}"
                )


@dataclasses.dataclass(frozen=True)
class SearchSummary:
    """A search of hyperparameters: `search.json`.

    Attributes:
      best: the trial of lowest perplexity; null where none is done.
      flags: settings of the best trial as flags of `iaj protot pretrain`.
    """

    sampler: str
    seeds: tuple[Count, ...]
    best: Trial | None
    flags: str | None
    trials: tuple[Trial, ...]
