"""Settings of `iaj polyattn distill`: the frozen dataclass that a config file becomes."""

import dataclasses
from typing import Annotated

from lm_jax.model.lora import LoraConfig
from lm_jax.run.config import LATER
from lm_jax.run.settings import (
    READ_AT_ONCE,
    READS_FILE,
    READS_MODEL,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed,
    ShareBelow1,
    at_least,
    between,
)
from lm_jax.study import Training
from lm_jax.text.preparation import CorpusConfig
from lm_jax.text.splits import missing_splits
from lm_jax.train.config import StepFields, TrainConfig, train_config
from polyattn_jax.recipes.row_maps import parse_recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillConfig(StepFields, Training):
    """Everything that decides the result of a training of replaced heads.

    Attributes:
      model: a Hugging Face folder, a GGUF file, a name of iaj fetch --list, or a run of iaj protot
        with softmax attention.
      recipe: what replaces softmax; the one of `hybrid`, where that is given.
      hybrid: a file of `check --hybrid` that says which heads have a recipe, and its bias; empty
        replaces all heads by `recipe`.
      corpus: the text and its splits, which may be samples of a pretrained model with the same
        tokenizer (samples:MODEL); its `vocab_size` is ignored in favour of the model's.
      context: tokens of a window, always of one document; biases are calibrated at this length.
      validation_documents: the most documents to measure on, before and after; 2 or more, which
        intervals over documents take.
      adapters: rank, alpha and targets of the adapters on queries and keys; for a feature map with
        matrices of its own (Hedgehog) the second stage alone reads them, and no targets.
      budget: share of the softmax mass allowed below minus the calibrated bias.
      batch_size: windows of one update, on all devices together.
      eval_every: steps between evaluations.
      seed: random seed of adapters, order of the text and bootstrap.
      resamples: number of resamples of the bootstrap.
      logit_steps: updates of the second stage, which trains the whole hybrid on the distribution of
        the next token that the model gives; 0 leaves it out.
      logit_learning_rate: peak learning rate of the second stage.
      logit_targets: weights of attention, of q, k, v and o, that the second stage adapts besides
        those of the first, with the rank and the alpha of `adapters`; o in all heads of a layer.
    """

    model: Annotated[str, READS_MODEL] = "smollm2"
    recipe: str = "relu:p=2,b=auto"
    hybrid: Annotated[str, READS_FILE] = ""
    corpus: CorpusConfig = dataclasses.field(
        default_factory=lambda: CorpusConfig(
            "wiki", "document", splits=(0.97, 0.03, 0.0), max_tokens=300_000
        )
    )
    context: Annotated[PositiveInt, READ_AT_ONCE] = 128
    validation_documents: Annotated[int, at_least(2)] = 30
    adapters: LoraConfig = dataclasses.field(
        default_factory=lambda: LoraConfig(rank=8, alpha=16.0, targets=("q", "k"))
    )
    budget: Annotated[float, between(0, 1)] = 0.05
    batch_size: PositiveInt = 4
    steps: PositiveInt = 150
    learning_rate: PositiveFloat = 1e-3
    warmup: ShareBelow1 = 0.05
    eval_every: PositiveInt = 50
    save_every: PositiveInt = 25
    seed: Seed = 0
    resamples: Annotated[int, at_least(100)] = 1000
    logit_steps: NonNegativeInt = dataclasses.field(default=0, metadata=LATER)
    logit_learning_rate: PositiveFloat = dataclasses.field(default=3e-4, metadata=LATER)
    logit_targets: tuple[str, ...] = dataclasses.field(default=("q", "k", "v", "o"), metadata=LATER)

    def problems(self) -> list[str]:
        """What does not fit together."""
        parse_recipe(self.recipe)
        problems, targets = missing_splits(self.corpus.splits), self.adapters.targets
        if not set(targets) <= {"q", "k"}:
            problems.append(
                f"config.adapters.targets = {targets} may name q and k only, which a recipe reads"
            )
        if not self.logit_targets or not set(self.logit_targets) <= set("qkvo"):
            problems.append(
                f"config.logit_targets = {self.logit_targets} must name some of q, k, v and o, the "
                "weights of attention"
            )
        return problems

    @property
    def train(self) -> TrainConfig:
        """The settings of the loop."""
        return train_config(self, weight_decay=0.0, early_stop=False)

    @property
    def train_logits(self) -> TrainConfig:
        """The settings of the loop of the second stage, which has `logit_steps` of 1 or more."""
        return dataclasses.replace(
            self.train, steps=self.logit_steps, learning_rate=self.logit_learning_rate
        )

    def adapters_of_logits(self, *, maps: bool) -> LoraConfig:
        """All adapters that the second stage trains; `maps` tells that the first trained none."""
        first = () if maps else self.adapters.targets
        targets = dict.fromkeys((*first, *self.logit_targets))
        return dataclasses.replace(self.adapters, targets=tuple(targets))


def smoke(config: DistillConfig) -> DistillConfig:
    """The same experiment on little text, for two steps."""
    corpus = dataclasses.replace(config.corpus, max_tokens=20_000, splits=(0.8, 0.2, 0.0))
    return dataclasses.replace(
        config,
        corpus=corpus,
        context=min(config.context, 24),
        validation_documents=8,
        batch_size=8,
        steps=2,
        eval_every=1,
        resamples=100,
        logit_steps=min(config.logit_steps, 2),
    )
