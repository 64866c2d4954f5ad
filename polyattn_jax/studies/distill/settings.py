"""Settings of `iaj polyattn distill`: the frozen dataclass that a config file becomes."""

import dataclasses

from lm_jax.errors import UsageError, out_of_range
from lm_jax.model.lora import LoraConfig
from lm_jax.study import Training
from lm_jax.text.preparation import CorpusConfig
from polyattn_jax.recipes.row_maps import parse_recipe


@dataclasses.dataclass(frozen=True)
class DistillConfig(Training):
    """Everything that decides the result of a training of replaced heads.

    Attributes:
      model: a Hugging Face folder, a GGUF file, or a name of the manifest.
      recipe: what replaces softmax; the one of `hybrid`, where that is given.
      hybrid: a file of `check --hybrid` that says which heads have a recipe, and its bias; empty
        replaces all heads by `recipe`.
      corpus: the text and its splits; its `vocab_size` is ignored in favour of the model's.
      context: tokens of a window, always of one document; b_auto is calibrated at this length.
      validation_documents: the most documents to measure on, before and after; 2 or more, which
        intervals over documents take.
      adapters: rank, alpha and targets of the adapters on queries and keys; not read for a feature
        map with matrices of its own (Hedgehog).
      budget: share of the softmax mass allowed below minus the calibrated bias.
      batch_size: windows of one update, on all devices together.
      steps: number of updates of a run.
      learning_rate: learning rate at the peak; a cosine to a tenth follows.
      warmup: share of the steps in which the learning rate rises to its peak.
      clip_norm: largest norm of the gradient; 0 does not clip.
      eval_every: steps between evaluations.
      save_every: steps between checkpoints; each evaluation saves one too.
      seed: random seed of adapters, order of the text and bootstrap.
      resamples: number of resamples of the bootstrap.
      mesh: sizes of the axes data, fsdp, tensor; one may be -1.
      allow_fallback: continue from the checkpoint before the newest where that is damaged.
    """

    model: str = "smollm2"
    recipe: str = "relu:p=2,b=auto"
    hybrid: str = ""
    corpus: CorpusConfig = dataclasses.field(
        default_factory=lambda: CorpusConfig(
            "wiki", "document", splits=(0.97, 0.03, 0.0), max_tokens=300_000
        )
    )
    context: int = 128
    validation_documents: int = 30
    adapters: LoraConfig = dataclasses.field(
        default_factory=lambda: LoraConfig(rank=8, alpha=16.0, targets=("q", "k"))
    )
    budget: float = 0.05
    batch_size: int = 4
    steps: int = 150
    learning_rate: float = 1e-3
    warmup: float = 0.05
    clip_norm: float = 1.0
    eval_every: int = 50
    save_every: int = 25
    seed: int = 0
    resamples: int = 1000
    mesh: tuple[int, int, int] = (-1, 1, 1)
    allow_fallback: bool = False

    def __post_init__(self) -> None:
        parse_recipe(self.recipe)
        counts = "context batch_size steps eval_every save_every"
        wanted = {
            **{name: (getattr(self, name) >= 1, "at least 1") for name in counts.split()},
            "validation_documents": (self.validation_documents >= 2, "at least 2"),
            "budget": (0 < self.budget < 1, "between 0 and 1"),
            "learning_rate": (self.learning_rate > 0, "above 0"),
            "warmup": (0 <= self.warmup < 1, "at least 0 and below 1"),
            "clip_norm": (self.clip_norm >= 0, "at least 0"),
            "seed": (0 <= self.seed < 2**32, "from 0 to 2^32 - 1"),
            "resamples": (self.resamples >= 100, "at least 100"),
        }
        problems = out_of_range(self, wanted, prefix="config.")
        targets = self.adapters.targets
        if not set(targets) <= {"q", "k"}:
            problems.append(
                f"config.adapters.targets = {targets} may name q and k only, which a recipe reads"
            )
        if min(self.corpus.splits[:2]) <= 0:
            problems.append(
                f"config.corpus.splits = {self.corpus.splits} must give training and validation "
                "a share above 0"
            )
        if problems:
            raise UsageError("; ".join(problems))


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
    )
