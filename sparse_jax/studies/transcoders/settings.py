"""Settings of a transcoder's training: the frozen dataclass that a config file becomes."""

import dataclasses
from typing import Annotated, Literal

from lm_jax.errors import out_of_range
from lm_jax.run.settings import (
    READ_AT_ONCE,
    READS_MODEL,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ShareBelow1,
    above,
    between,
)
from lm_jax.study import Distributed, Training
from lm_jax.text.preparation import CorpusConfig
from lm_jax.train.config import StepFields, TrainConfig, train_config
from sparse_jax.transcoders.objective import Penalties
from sparse_jax.transcoders.transcoder import Trained, TranscoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranscoderTraining(StepFields, Training, Distributed):
    """All settings of a transcoder and its training.

    Attributes:
      model: folder of a dense or sparse model, or a name of iaj fetch --list.
      corpus: the text and its splits; its `vocab_size` is ignored in favour of the model's.
      context: tokens of a window, always of one document.
      validation_documents: the most documents to evaluate on.
      features: number F of features of each layer.
      kind: activation function of the features: "jumprelu", "batchtopk" or "relu".
      bandwidth: width of the window around a threshold in which JumpReLU gives it a gradient.
      threshold: initial threshold of each feature.
      window: a feature writes into its own layer and the next `window - 1`; 0 for all later ones, 1
        for a per-layer transcoder.
      penalties: coefficients of the terms of the loss.
      firing_rate: share of tokens at which a feature is active before the first update; sets the
        encoder's biases. The paper's is 10,000 / F.
      scale_batches: batches that the scales and those biases are measured on.
      skip_start: first tokens of a row that are left out.
      outlier: tokens are left out whose input has at least so many times the mean norm.
      batch_size: windows of one update, on all devices together.
      accumulate: micro-batches of one update.
      dtype: dtype of the model's forward pass; the transcoder is float32.
      stop_l0: training ends at the first evaluation with at most so many active features per token
        and layer, in the mean over layers (the paper's "optimal L0"); 0 trains all steps.
      eval_every: steps between evaluations.
      scores_every: steps between evaluations with scores of attribution graphs; the last has them
        too. 0 scores the last alone.
      prompts: texts to score graphs on, all cut to the shortest, at most `score_tokens`, from the
        left; none for the first windows of held-out text.
      score_prompts: the most windows to score graphs on.
      score_tokens: length of these prompts, in tokens.
      score_features: features with a row in these graphs, those of most influence.
      control: train a per-layer transcoder of as many parameters too, on the same batches.
      seed: random seed of the initial weights and the order.
      mesh: sizes of the axes data, fsdp, tensor; one may be -1. Features are split over tensor.
    """

    model: Annotated[str, READS_MODEL] = ""
    corpus: CorpusConfig = dataclasses.field(
        default_factory=lambda: CorpusConfig("wiki", "document", splits=(0.97, 0.03, 0.0))
    )
    context: Annotated[PositiveInt, READ_AT_ONCE] = 64
    validation_documents: PositiveInt = 200
    features: PositiveInt = 2_048
    kind: Trained = "jumprelu"
    window: NonNegativeInt = 0
    bandwidth: PositiveFloat = 1.0
    threshold: PositiveFloat = 0.03
    penalties: Penalties = dataclasses.field(default_factory=Penalties)
    firing_rate: Annotated[float, between(0, 1)] = 0.05
    scale_batches: PositiveInt = 10
    skip_start: int = 1
    outlier: Annotated[float, above(1)] = 20.0
    batch_size: PositiveInt = 16
    accumulate: PositiveInt = 1
    steps: PositiveInt = 2_000
    learning_rate: PositiveFloat = 1e-3
    warmup: ShareBelow1 = 0.05
    dtype: Literal["float32", "bfloat16"] = "float32"
    stop_l0: NonNegativeFloat = 0.0
    eval_every: NonNegativeInt = 200
    scores_every: NonNegativeInt = 400
    prompts: tuple[str, ...] = ()
    score_prompts: PositiveInt = 8
    score_tokens: int = 16
    score_features: PositiveInt = 512
    control: bool = False
    save_every: PositiveInt = 200
    seed: int = 0

    def problems(self) -> list[str]:
        """What does not fit together."""
        wanted = {
            "skip_start": (0 <= self.skip_start < self.context, "at least 0 and below context"),
            "stop_l0": (
                not (self.stop_l0 and self.kind == "batchtopk"),
                "0 for batchtopk, which `penalties.active` sets",
            ),
            "control": (
                not (self.control and self.window == 1),
                "False for a per-layer transcoder, which it would be",
            ),
            "score_tokens": (
                2 <= self.score_tokens <= self.context,
                f"at least 2 and at most context = {self.context}",
            ),
        }
        return out_of_range(self, wanted, prefix="config.")

    @property
    def train(self) -> TrainConfig:
        """The settings of the loop."""
        return train_config(self, weight_decay=0.0, early_stop=False)

    def sizes(self, num_layers: int, hidden_size: int) -> TranscoderConfig:
        """The transcoder of a model of these sizes."""
        return TranscoderConfig(
            num_layers,
            hidden_size,
            self.features,
            kind=self.kind,
            window=self.window or None,
            bandwidth=self.bandwidth,
            threshold=self.threshold,
        )


def quickstart(config: TranscoderTraining) -> TranscoderTraining:
    """A transcoder of a small model in a minute: few features, of which a fixed number is kept."""
    return dataclasses.replace(
        config,
        context=40,
        validation_documents=100,
        features=256,
        kind="batchtopk",
        penalties=dataclasses.replace(config.penalties, active=8, active_start=64),
        batch_size=32,
        steps=1_000,
        learning_rate=3e-3,
        eval_every=500,
        save_every=500,
    )


def smoke(config: TranscoderTraining) -> TranscoderTraining:
    """The same training in seconds."""
    return dataclasses.replace(
        config,
        corpus=dataclasses.replace(config.corpus, max_tokens=20_000, splits=(0.8, 0.2, 0.0)),
        context=min(config.context, 24),
        validation_documents=8,
        features=min(config.features, 32),
        batch_size=8 * config.accumulate,
        scale_batches=1,
        steps=4,
        eval_every=2,
        scores_every=2,
        score_prompts=2,
        score_tokens=min(config.score_tokens, 8),
        mesh=(-1, 1, 1),
    )
