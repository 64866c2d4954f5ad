"""The settings of a pretraining run, as the frozen dataclass that a config file becomes.

A file under configs/protot/ says what is particular to its experiment and calls `experiment`, which
adds the paper's defaults and the smoke mode.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any, Literal

from ml_collections import ConfigDict

from lm_jax.errors import UsageError, nearest
from lm_jax.run.config import from_plain, to_plain
from lm_jax.run.config_files import in_mode
from lm_jax.text.preparation import SPLITS, CorpusConfig
from protot_jax.mixer import Prototypes
from protot_jax.models import MODELS


@dataclasses.dataclass(frozen=True)
class PretrainConfig:
    """Everything that decides the result of pretraining.

    Attributes:
      model: a name of `models.MODELS`.
      hidden_size, num_layers, context, tie_embeddings: the shape of every model.
      prototypes: of the model "protot"; the others ignore it.
      arithmetic: of its prefix mean; "released" is that of the authors' code, to compare with.
      corpus: the text and how it is cut, tokenized and split.
      examples: "truncate" takes the beginning of each document, as the paper. "pack" joins
        documents into full rows: nothing is reset between them, so that states, convolutions and
        attention run on from one document into the next, and most rows begin within one.
      train_documents: the first of the training split, trained on in every epoch; 0 for all. With
        "truncate" a document is an example.
      validation_documents, test_documents: as many are evaluated; 0 for all.
      batch_size: examples of one update, on all devices together.
      epochs: passes over the training split.
      max_steps: updates after which training ends, if its epochs have more; 0 for no such limit.
      learning_rate: at the peak; 2 % of the steps warm up, then a cosine to a tenth.
      weight_decay: on matrices; none on norms, prototypes, convolutions' biases and scalars.
      clip_norm: longest gradient; 0 for as long as it is, as the paper.
      skip_sigma: leave out an update whose loss is that many standard deviations above the mean of
        the last 128; 0 leaves out none.
      dropout: after the embedding, in the MLP and on each addition to the residual stream.
      attention_dropout: also of LLaMA's attention pattern; the other models have none.
      accumulate: micro-batches of one update.
      dtype: of the computation; weights and moments are float32.
      eval_every: steps between evaluations; 0 means an epoch.
      early_stop: end at the first evaluation whose perplexity rises, as the released code.
      seeds: one run after another; each draws parameters, order and dropout.
      mesh: sizes of the axes data, fsdp, tensor; one may be -1.
      allow_fallback: where the newest checkpoint is damaged, continue from the one before it.
    """

    model: str = "protot"
    hidden_size: int = 256
    num_layers: int = 6
    context: int = 256
    tie_embeddings: bool = True
    prototypes: Prototypes = dataclasses.field(default_factory=Prototypes)
    arithmetic: Literal["exact", "released"] = "exact"
    corpus: CorpusConfig = dataclasses.field(default_factory=CorpusConfig)
    examples: Literal["truncate", "pack"] = "truncate"
    train_documents: int = 0
    validation_documents: int = 20_000
    test_documents: int = 0
    batch_size: int = 32
    epochs: int = 10
    max_steps: int = 0
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    clip_norm: float = 0.0
    skip_sigma: float = 0.0
    dropout: float = 0.1
    attention_dropout: bool = True
    accumulate: int = 1
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    eval_every: int = 0
    early_stop: bool = True
    seeds: tuple[int, ...] = (234, 124, 325)
    mesh: tuple[int, int, int] = (-1, 1, 1)
    allow_fallback: bool = False

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise UsageError(f"config.model = {self.model!r}{nearest(self.model, MODELS)}")
        least = {
            "batch_size": 1,
            "epochs": 1,
            "max_steps": 0,
            "skip_sigma": 0,
        } | {f"{split}_documents": 0 for split in SPLITS}
        problems = [
            f"config.{name} = {getattr(self, name)} must be at least {bound}"
            for name, bound in least.items()
            if getattr(self, name) < bound
        ]
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            problems.append(f"config.seeds = {self.seeds} must be different numbers from 0 on")
        if problems:
            raise UsageError("; ".join(problems))


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


def experiment(mode: str, **settings: Any) -> ConfigDict:
    """The `get_config(mode)` of one experiment.

    Args:
      mode: "" for the experiment; "smoke" for a run of seconds that only shows that it works.
      **settings: fields of `PretrainConfig` that differ from its defaults.

    Raises:
      UsageError: for an unknown mode, or settings that `PretrainConfig` refuses.
    """
    return in_mode(mode, PretrainConfig(**settings), {"smoke": smoke}, of="pretraining")


def smoke(config: PretrainConfig) -> PretrainConfig:
    """The same experiment so small that it takes seconds."""
    return dataclasses.replace(config, **_SMOKE)


def with_fields(config: PretrainConfig, changes: Mapping[str, Any]) -> PretrainConfig:
    """The settings with some fields changed, by their dotted names, as `prototypes.alpha`.

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
