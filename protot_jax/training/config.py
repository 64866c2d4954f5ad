"""Config of a pretraining run, a frozen dataclass built from a config file.

A file in configs/protot/ calls `experiment` with the fields that differ from the paper's defaults;
`experiment` adds the smoke mode.
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Annotated, Any, Literal

from ml_collections import ConfigDict

from lm_jax.console.config_files import in_mode
from lm_jax.errors import UsageError, nearest
from lm_jax.run.config import from_plain, to_plain
from lm_jax.run.settings import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ShareBelow1,
    at_least,
    different,
)
from lm_jax.text.preparation import CorpusConfig
from lm_jax.train.config import RateFields, Schedule, TrainConfig, WeightsDtype, train_config
from protot_jax.mixers.config import Prototypes
from protot_jax.mixers.models import MODELS


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainConfig(RateFields):
    """Settings of pretraining.

    Attributes:
      model: kind of model: protot, llama, mamba, ... (`protot_jax.mixers.models.MODELS`).
      hidden_size: width D of the residual stream.
      num_layers: number of blocks.
      context: tokens of an example, and the longest that LLaMA can read.
      tie_embeddings: whether the output projection is the token embedding.
      prototypes: settings of the model "protot"; other models ignore them.
      arithmetic: how the prefix mean is computed: "exact", or "released" as in the authors' code,
        for comparison.
      corpus: the text, and how it is tokenized and split.
      examples: "truncate" takes the beginning of each document, as in the paper. "pack" joins
        documents into full rows and reads each by itself: states, convolutions and attention end
        with it. "join" joins them without that. Most rows of both begin within a document.
      train_documents: number of documents of the training split, from its first; 0 for all. With
        "truncate" a document is an example.
      validation_documents: number of validation documents to evaluate; 0 for all.
      test_documents: number of test documents to evaluate; 0 for all.
      epochs: passes over the training split.
      max_steps: maximum number of updates, if the epochs have more; 0 for no maximum.
      learning_rate: peak of the learning rate, after the warm-up.
      schedule: learning rate after the warm-up: "cosine" falls to a tenth, "linear" to zero, and
        "constant" stays.
      weight_decay: weight decay of matrices; none on norms, prototypes, convolutions' biases and
        scalars.
      clip_norm: maximum norm of the gradient; 0 for no clipping, as in the paper.
      skip_sigma: number of standard deviations: an update whose loss is that many above the mean of
        the last 128 is skipped; 0 skips none.
      dropout: dropout rate after the embedding, in the MLP and on each addition to the residual
        stream.
      attention_dropout: dropout of LLaMA's attention pattern too; the other models have none.
      accumulate: number of micro-batches of one update.
      dtype: dtype of the computation.
      weights_dtype: precision to which weights, gradients and moments are rounded at every update;
        with "bfloat16" there are no finer master weights, much as for DeltaNet in the released
        code. Arrays are float32, so that no memory is saved.
      early_stop: whether to stop at the first evaluation whose perplexity rises, as in the released
        code.
      seeds: one run each; a seed determines initial parameters, data order and dropout.
    """

    model: str = "protot"
    hidden_size: int = 256
    num_layers: int = 6
    context: int = 256
    tie_embeddings: bool = True
    prototypes: Prototypes = dataclasses.field(default_factory=Prototypes)
    arithmetic: Literal["exact", "released"] = "exact"
    corpus: CorpusConfig = dataclasses.field(default_factory=CorpusConfig)
    examples: Literal["truncate", "pack", "join"] = "truncate"
    train_documents: NonNegativeInt = 0
    validation_documents: NonNegativeInt = 20_000
    test_documents: NonNegativeInt = 0
    batch_size: PositiveInt = 32
    epochs: PositiveInt = 10
    max_steps: NonNegativeInt = 0
    learning_rate: PositiveFloat = 2e-3
    warmup: ShareBelow1 = 0.02
    schedule: Schedule = "cosine"
    weight_decay: NonNegativeFloat = 0.1
    clip_norm: NonNegativeFloat = 0.0
    skip_sigma: NonNegativeFloat = 0.0
    dropout: ShareBelow1 = 0.1
    attention_dropout: bool = True
    accumulate: PositiveInt = 1
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    weights_dtype: WeightsDtype = "float32"
    early_stop: bool = True
    seeds: Annotated[tuple[int, ...], different(at_least(0))] = (234, 124, 325)

    def problems(self) -> list[str]:
        """What does not fit together."""
        problems = []
        if self.model not in MODELS:
            problems.append(f"config.model = {self.model!r}{nearest(self.model, MODELS)}")
        if (self.model, self.arithmetic, self.examples) == ("protot", "released", "pack"):
            problems.append(
                "config.examples = 'pack' resets the state between documents, and "
                "config.arithmetic = 'released' cannot; choose 'join' or 'truncate'"
            )
        return problems

    def training(self, per_epoch: int) -> TrainConfig:
        """The settings of the loop, for a training split of so many batches."""
        steps = self.epochs * per_epoch
        return train_config(self, steps=min(steps, self.max_steps) if self.max_steps else steps)


_SMOKE: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_layers": 2,
    "context": 32,
    "corpus": CorpusConfig(vocab_size=500, words=60, max_tokens=20_000),
    "validation_documents": 16,
    "test_documents": 16,
    "batch_size": 8,
    "epochs": 1,
    "max_steps": 6,
    "eval_every": 3,
    "seeds": (234,),
}


def experiment(
    mode: str, *, rates: Mapping[str, float] | None = None, **settings: Any
) -> ConfigDict:
    """Implements `get_config(mode)` of an experiment.

    Args:
      mode: the empty string for the experiment; "smoke" for a run of seconds that only shows that
        it works; the name of a baseline for that model at its learning rate.
      rates: the learning rates of the baselines.
      **settings: fields of `PretrainConfig` that differ from its defaults.

    Raises:
      UsageError: for an unknown mode, or settings that `PretrainConfig` refuses.
    """
    baselines = {
        model: functools.partial(dataclasses.replace, model=model, learning_rate=rate)
        for model, rate in (rates or {}).items()
    }
    modes = {"smoke": smoke, **baselines}
    return in_mode(mode, PretrainConfig(**settings), modes, of="pretraining")


def smoke(config: PretrainConfig) -> PretrainConfig:
    """The same experiment reduced to seconds."""
    return dataclasses.replace(config, **_SMOKE)


def with_fields(config: PretrainConfig, changes: Mapping[str, Any]) -> PretrainConfig:
    """The config with some fields changed, by dotted names such as `prototypes.alpha`.

    Raises:
      UsageError: there is no such field, or it cannot have that value.
    """
    tree = to_plain(config)
    for name, value in changes.items():
        *parents, last = name.split(".")
        section = tree
        for parent in parents:
            section = section.get(parent)
            if not isinstance(section, dict):
                raise UsageError(f"{parent} in {name!r} is no section of the settings")
        section[last] = value
    return from_plain(tree, PretrainConfig)
