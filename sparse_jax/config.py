"""The settings of a post-training run, as the frozen dataclass that a config file becomes.

A file under configs/sparse/ says what is particular to its experiment and calls `experiment`, which
adds the smoke mode.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any, Literal

from ml_collections import ConfigDict
import numpy as np

from lm_jax.errors import UsageError
from lm_jax.model.lora import LoraConfig
from lm_jax.run.config_files import in_mode
from lm_jax.text.preparation import CorpusConfig
from sparse_jax.geco import Strength


@dataclasses.dataclass(frozen=True)
class PosttrainConfig:
    """Everything that decides the result of post-training.

    Attributes:
      model: a local folder, a .gguf file, or a name of the manifest.
      corpus: the text and how it is split; `vocab_size` is the model's own and is not read.
      context: tokens that the model sees at once, always of one document.
      validation_documents: at most so many are evaluated.
      slacks: by how many nats the loss may exceed the dense model's on the same tokens; one run
        for each, in order, and together they draw the frontier.
      targets: bounds in nats per token in place of `slacks`, if there are any.
      strength: of the penalty; its target is what the runs differ in.
      adapters: rank, alpha and targets of LoRA.
      full: train all weights, and no adapters.
      bias: of the gate logits at the start.
      learn_bias: train one bias per layer and head.
      raw_gate: gate logits as Eq. 1 prints them, q.k without its scale.
      renormalise: divide the weights of open edges by their sum, an ablation of Eq. 2.
      control: also train for as many steps with every gate open: the dense model that has read the
        same text, without which what is learned of the text hides what closing edges costs.
      distill: weight of the divergence from the dense model; 0 leaves the teacher out.
      temperature: of both distributions in it.
      batch_size: windows of one update, on all devices together.
      accumulate: micro-batches of one update.
      steps: updates of a run.
      learning_rate: at the peak; a cosine to a tenth follows.
      warmup: the share of the steps in which the learning rate rises to its peak.
      weight_decay: on matrices.
      clip_norm: longest gradient; 0 for as long as it is.
      skip_sigma: leave out an update whose loss is that many standard deviations above the mean of
        the last 128; 0 leaves out none.
      dtype: of the computation and of frozen weights; trained weights and moments are float32.
      export_dtype: of the exported weights where adapters are merged into frozen ones: "base" is
        `dtype`, into which their sum is rounded once; "float32" keeps it.
      remat: keep only the residual stream of each layer for the backward pass.
      eval_every: steps between evaluations.
      save_every: steps between checkpoints, besides one at each evaluation.
      seeds: one run for each and for each bound; a seed draws adapters, order and gates.
      mesh: sizes of the axes data, fsdp, tensor; one may be -1.
      allow_fallback: where the newest checkpoint is damaged, continue from the one before it.
      texts: shown in the report with their attention before and after.
      heads: shown there, as "layer.head"; if there are none, some that few
        edges make legible (`patterns.legible`).
    """

    model: str = "smollm2"
    corpus: CorpusConfig = dataclasses.field(
        default_factory=lambda: CorpusConfig("wiki", "document", splits=(0.97, 0.03, 0.0))
    )
    context: int = 64
    validation_documents: int = 200
    slacks: tuple[float, ...] = (0.05,)
    targets: tuple[float, ...] = ()
    strength: Strength = dataclasses.field(default_factory=Strength)
    adapters: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    full: bool = False
    bias: float = 0.0
    learn_bias: bool = False
    raw_gate: bool = False
    renormalise: bool = False
    control: bool = False
    distill: float = 1.0
    temperature: float = 1.0
    batch_size: int = 16
    accumulate: int = 1
    steps: int = 1_000
    learning_rate: float = 1e-4
    warmup: float = 0.02
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    skip_sigma: float = 0.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    export_dtype: Literal["base", "float32"] = "base"
    remat: bool = False
    eval_every: int = 100
    save_every: int = 50
    seeds: tuple[int, ...] = (234,)
    mesh: tuple[int, int, int] = (-1, 1, 1)
    allow_fallback: bool = False
    texts: tuple[str, ...] = (
        "When Mary and John went to the store, John gave a drink to Mary, and Mary thanked him.",
    )
    heads: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        counts = "context validation_documents batch_size accumulate steps eval_every save_every"
        wanted = {
            **{name: (getattr(self, name) >= 1, "at least 1") for name in counts.split()},
            "targets": (_bounds(self.targets, least=1e-4), "above 0 and 0.0001 apart"),
            "slacks": (
                bool(self.targets or self.slacks) and _bounds(self.slacks, least=0.0),
                "one number or more, at least 0 and 0.0001 apart",
            ),
            "bias": (math.isfinite(self.bias), "finite"),
            "distill": (0 <= self.distill < math.inf, "at least 0"),
            "temperature": (0 < self.temperature < math.inf, "above 0"),
            "learning_rate": (0 < self.learning_rate < math.inf, "above 0"),
            "warmup": (0 <= self.warmup < 1, "at least 0 and below 1"),
            "weight_decay": (0 <= self.weight_decay < math.inf, "at least 0"),
            "clip_norm": (0 <= self.clip_norm < math.inf, "at least 0"),
            "skip_sigma": (0 <= self.skip_sigma < math.inf, "at least 0"),
            "seeds": (
                bool(self.seeds)
                and len(set(self.seeds)) == len(self.seeds)
                and all(0 <= seed < 2**32 for seed in self.seeds),
                "different numbers in 0..2^32 - 1, one or more",
            ),
            "mesh": (
                self.mesh.count(-1) <= 1 and all(size == -1 or size >= 1 for size in self.mesh),
                "three sizes of at least 1, of which one may be -1",
            ),
        }
        problems = [
            f"config.{name} = {getattr(self, name)} must be {what}"
            for name, (holds, what) in wanted.items()
            if not holds
        ]
        if self.accumulate >= 1 and self.batch_size % self.accumulate:
            problems.append(
                f"config.batch_size = {self.batch_size} must be a multiple of config.accumulate = "
                f"{self.accumulate}"
            )
        if min(self.corpus.splits[:2]) <= 0:
            problems.append(
                f"config.corpus.splits = {self.corpus.splits} must give training and validation "
                "a share above 0"
            )
        for head in self.heads:
            if not all(part.isdecimal() for part in head.split(".")) or head.count(".") != 1:
                problems.append(f"config.heads has {head!r}; write layer.head, such as 3.0")
        if problems:
            raise UsageError("; ".join(problems))


def _bounds(bounds: Sequence[float], *, least: float) -> bool:
    """Whether all are finite, not below `least`, and differ in the digits that name a folder."""
    steps = np.diff(sorted(bounds))
    return all(least <= bound < math.inf for bound in bounds) and bool(
        (steps >= 1e-4 - 1e-12).all()
    )


# Settings that closed most edges of SmolLM2-135M in hundreds of updates (docs/sparse.md). The bound
# leaves a margin to 0.05: it holds of the text trained on, which is not the text evaluated on.
SMALL_MODEL: Mapping[str, Any] = {
    "slacks": (0.04,),
    "strength": Strength(dual_rate=0.1, decay=0.9, start=0.3),
    "adapters": LoraConfig(rank=8, alpha=16.0),
    "distill": 0.0,
    "batch_size": 8,
    "steps": 400,
    "learning_rate": 1e-3,
    "eval_every": 80,
    "save_every": 40,
}

# More nats than a model of any vocabulary loses on a token unless it is worse than none.
_SMOKE_MARGIN = 15.0


def experiment(mode: str, **settings: Any) -> ConfigDict:
    """The `get_config(mode)` of one experiment.

    Args:
      mode: "" for the experiment; "smoke" for a run of seconds that only shows that it works.
      **settings: fields of `PosttrainConfig` that differ from its defaults.

    Raises:
      UsageError: for an unknown mode, or settings that `PosttrainConfig` refuses.
    """
    return in_mode(mode, PosttrainConfig(**settings), {"smoke": smoke}, of="post-training")


def smoke(config: PosttrainConfig) -> PosttrainConfig:
    """The same experiment on few words, for two steps.

    Targets stay targets, micro-batches stay as many, and the mesh keeps its shape: an axis of a
    fixed size takes whatever devices there are.
    """
    corpus = dataclasses.replace(config.corpus, max_tokens=20_000, splits=(0.8, 0.2, 0.0))
    data, fsdp, tensor = config.mesh
    if -1 not in config.mesh:
        largest = config.mesh.index(max(config.mesh))
        data, fsdp, tensor = (-1 if axis == largest else 1 for axis in range(3))
    return dataclasses.replace(
        config,
        corpus=corpus,
        context=min(config.context, 24),
        validation_documents=8,
        # No bound of a recipe holds for other text in windows as short as these.
        targets=tuple(bound + _SMOKE_MARGIN for bound in config.targets),
        batch_size=8 * config.accumulate,
        steps=2,
        eval_every=1,
        seeds=config.seeds[:1],
        mesh=(data, fsdp, tensor),
    )
