"""Config of a pretraining run, a frozen dataclass built from a config file.

A file in configs/protot/ calls `experiment` with the fields that differ from the paper's defaults;
`experiment` adds the smoke mode.
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any, Literal

from ml_collections import ConfigDict

from lm_jax.console.config_files import in_mode
from lm_jax.errors import UsageError, nearest
from lm_jax.run.config import from_plain, to_plain
from lm_jax.text.preparation import CorpusConfig
from lm_jax.text.splits import SPLITS
from lm_jax.train.config import Schedule, WeightsDtype
from protot_jax.mixers.config import Prototypes
from protot_jax.mixers.models import MODELS


@dataclasses.dataclass(frozen=True)
class PretrainConfig:
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
      batch_size: examples of one update, on all devices together.
      epochs: passes over the training split.
      max_steps: maximum number of updates, if the epochs have more; 0 for no maximum.
      learning_rate: peak of the learning rate, after the warm-up.
      warmup: the fraction of the steps in which the rate rises.
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
      eval_every: steps between evaluations; 0 for an epoch.
      early_stop: whether to stop at the first evaluation whose perplexity rises, as in the released
        code.
      seeds: one run each; a seed determines initial parameters, data order and dropout.
      mesh: sizes of the axes data, fsdp, tensor; one may be -1.
      allow_fallback: whether to continue from the checkpoint before the newest one where that is
        damaged.
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
    train_documents: int = 0
    validation_documents: int = 20_000
    test_documents: int = 0
    batch_size: int = 32
    epochs: int = 10
    max_steps: int = 0
    learning_rate: float = 2e-3
    warmup: float = 0.02
    schedule: Schedule = "cosine"
    weight_decay: float = 0.1
    clip_norm: float = 0.0
    skip_sigma: float = 0.0
    dropout: float = 0.1
    attention_dropout: bool = True
    accumulate: int = 1
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    weights_dtype: WeightsDtype = "float32"
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
        if (self.model, self.arithmetic, self.examples) == ("protot", "released", "pack"):
            problems.append(
                "config.examples = 'pack' resets the state between documents, and "
                "config.arithmetic = 'released' cannot; choose 'join' or 'truncate'"
            )
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
