"""Settings of the pair: the frozen dataclass that its config file becomes."""

from collections.abc import Mapping
import dataclasses
from typing import Annotated, Any, ClassVar

from lm_jax.errors import nearest, out_of_range
from lm_jax.model.config import DecoderConfig
from lm_jax.run.settings import (
    Bound,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Settings,
    ShareBelow1,
    at_least,
    between,
)
from lm_jax.study import Distributed, Training
from lm_jax.text.preparation import READS_CORPUS
from lm_jax.train.config import Plateau, TrainConfig, train_config
from sparse_jax.circuits.generators import GENERATORS
from sparse_jax.studies.posttrain.settings import OVER_CONTROL, PosttrainConfig

# Post-training with and without parts, each with the fields that differ from `config.posttrain`.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "sparse": {},
    "teacher": {"distill": 1.0},
    "renormalise": {"renormalise": True},
    "scaled_gate": {"raw_gate": False},
    "learn_bias": {"learn_bias": True},
}


_HEAD_DIM = Bound("even, for rotary positions, or 0", lambda value: value >= 0 and value % 2 == 0)


@dataclasses.dataclass(frozen=True)
class TextConfig(Settings):
    """The text of all models of the pair.

    Attributes:
      source: source of the documents, as `lm_jax.text.corpora` names it.
      documents: the first so many documents are used; 0 uses all.
      posttrain_share: share of the documents that only post-training reads.
      validation_share: share of the documents and prompts of each part that is held out.
      tasks: circuit tasks of which prompts are mixed in, in equal parts.
      task_share: share of documents of prompts among all documents.
      prompts_per_document: prompts of one task that follow each other in a document.
      scored_prompts: number of prompts of each task on which all models are compared at the end.
      vocab_size: tokens of the byte-level tokenizer that is trained on the text.
      seed: random seed of the splits and of the prompts.
    """

    where: ClassVar[str] = "config.text."

    source: Annotated[str, READS_CORPUS] = "wiki"
    documents: NonNegativeInt = 0
    posttrain_share: Annotated[float, between(0, 1)] = 0.5
    validation_share: Annotated[float, between(0, 1)] = 0.02
    tasks: tuple[str, ...] = ("copy", "ioi", "ioi_rephrased", "greater_than", "docstring")
    task_share: ShareBelow1 = 0.35
    prompts_per_document: PositiveInt = 3
    scored_prompts: Annotated[int, at_least(2)] = 200
    vocab_size: int = 8_192
    seed: int = 0

    def problems(self) -> list[str]:
        """What is wrong with the names of tasks."""
        return [
            f"config.text.tasks has {name!r}{nearest(name, GENERATORS)}"
            for name in self.tasks
            if name not in GENERATORS
        ]


@dataclasses.dataclass(frozen=True)
class DenseConfig(Settings):
    """The dense model and its pretraining.

    The rate is constant until the held-out loss has reached a plateau, then falls to zero.

    Attributes:
      num_layers: number of blocks, those of Llama.
      num_heads: number of heads of each block.
      hidden_size: width D of the residual stream.
      mlp_size: number F of hidden units of the MLP.
      head_dim: width of a head; 0 shares the hidden size evenly.
      batch_size: windows of one update.
      learning_rate: learning rate until the plateau, after the warm-up.
      weight_decay: weight decay of matrices.
      clip_norm: largest norm of the gradient.
      warmup_steps: updates in which the rate rises.
      eval_every: updates between evaluations.
      plateau: rule for when the held-out loss no longer falls.
      most_steps: updates after which the first phase ends without a plateau.
      cooldown_steps: updates in which the rate falls linearly to zero.
      seed: random seed of the initial weights and the order.
    """

    where: ClassVar[str] = "config.dense."

    num_layers: int = 4
    num_heads: PositiveInt = 8
    hidden_size: int = 256
    mlp_size: int = 688
    head_dim: Annotated[int, _HEAD_DIM] = 0
    batch_size: PositiveInt = 32
    learning_rate: PositiveFloat = 2e-3
    weight_decay: NonNegativeFloat = 0.1
    clip_norm: PositiveFloat = 1.0
    warmup_steps: int = 100
    eval_every: int = 100
    plateau: Plateau = dataclasses.field(default_factory=lambda: Plateau(0.01, 3))
    most_steps: PositiveInt = 6_000
    cooldown_steps: PositiveInt = 600
    seed: int = 0

    def problems(self) -> list[str]:
        """What does not fit together."""
        fits = bool(self.head_dim) or (
            self.num_heads >= 1 and self.hidden_size % (2 * self.num_heads) == 0
        )
        what = "an even multiple of config.dense.num_heads, or give config.dense.head_dim"
        return out_of_range(self, {"hidden_size": (fits, what)}, prefix=self.where)

    def decoder(self, vocab_size: int, max_length: int) -> DecoderConfig:
        """The config of the decoder."""
        return DecoderConfig(
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.head_dim or self.hidden_size // self.num_heads,
            hidden_size=self.hidden_size,
            mlp_size=self.mlp_size,
            vocab_size=vocab_size,
            max_length=max_length,
        )

    def phase(self, *, cooldown: bool) -> TrainConfig:
        """Training settings of one of the two phases."""
        steps = self.cooldown_steps if cooldown else self.most_steps
        return train_config(
            self,
            steps=steps,
            warmup=0.0 if cooldown else min(self.warmup_steps / steps, 0.5),
            eval_every=min(self.eval_every, steps),
            early_stop=False,
            schedule="linear" if cooldown else "constant",
            plateau=None if cooldown else self.plateau,
        )


@dataclasses.dataclass(frozen=True)
class PairConfig(Training, Distributed):
    """All settings of the pair.

    Attributes:
      text: the text that all models of the pair are trained on.
      dense: the dense model.
      context: tokens of a window, in pretraining and post-training.
      posttrain: post-training of the dense model; its `model`, `corpus` and `context` are those of
        the pair, and are refused here.
      variants: names in `VARIANTS`; one post-training each. "sparse" comes first, and its controls
        serve all.
      ablation_seeds: seeds of the variants but the first, among those of `posttrain`.
      ablation_slacks: bounds of the loss of those variants, as `posttrain.slacks`.
      allow_fallback: whether to continue from the checkpoint before the newest one where that is
        damaged.
    """

    text: TextConfig = dataclasses.field(default_factory=TextConfig)
    dense: DenseConfig = dataclasses.field(default_factory=DenseConfig)
    context: Annotated[int, at_least(1)] = 128
    posttrain: PosttrainConfig = dataclasses.field(
        default_factory=lambda: PosttrainConfig(
            full=True,
            slacks=(0.03, 0.1),
            distill=0.0,
            batch_size=32,
            steps=3_000,
            learning_rate=1e-3,
            eval_every=100,
            save_every=100,
            seeds=(0,),
            **OVER_CONTROL,
        )
    )
    variants: tuple[str, ...] = ("sparse",)
    ablation_seeds: tuple[int, ...] = (0,)
    ablation_slacks: tuple[float, ...] = (0.1,)
    allow_fallback: bool = False

    def problems(self) -> list[str]:
        """What is wrong in the sections, or does not fit together."""
        default = PosttrainConfig()
        problems = [
            f"config.variants has {name!r}{nearest(name, VARIANTS)}"
            for name in self.variants
            if name not in VARIANTS
        ]
        wanted = {
            "variants": (
                self.variants[:1] == ("sparse",) and len(set(self.variants)) == len(self.variants),
                'different names of which the first is "sparse"',
            ),
            "ablation_seeds": (
                set(self.ablation_seeds) <= set(self.posttrain.seeds),
                f"among config.posttrain.seeds = {self.posttrain.seeds}",
            ),
            "posttrain.control": (self.posttrain.control, "true, for the pair is compared with it"),
        }
        for name in ("model", "corpus", "context"):
            value = getattr(self.posttrain, name)
            own = "context" if name == "context" else "text"
            wanted[f"posttrain.{name}"] = (
                value == getattr(default, name),
                f"left out, since the pair sets it (config.{own})",
            )
        return problems + out_of_range(self, wanted, prefix="config.")


def small(config: PairConfig) -> PairConfig:
    """The experiment with a model of a quarter of the width, three seeds, and all ablations."""
    return dataclasses.replace(
        config,
        text=dataclasses.replace(config.text, documents=40_000, task_share=0.5, vocab_size=2_048),
        dense=dataclasses.replace(
            config.dense,
            num_heads=16,
            head_dim=8,
            hidden_size=64,
            mlp_size=176,
            learning_rate=3e-3,
            plateau=Plateau(0.005, 5),
            most_steps=3_000,
            cooldown_steps=300,
        ),
        posttrain=dataclasses.replace(
            config.posttrain, steps=1_500, learning_rate=2e-3, slacks=(0.03,), seeds=(0, 1, 2)
        ),
        variants=tuple(VARIANTS),
        ablation_slacks=(0.03,),
    )


def quickstart(config: PairConfig) -> PairConfig:
    """A pair in minutes that learns to copy: mostly prompts, two layers, one seed."""
    return dataclasses.replace(
        config,
        text=dataclasses.replace(
            config.text,
            documents=1_000,
            tasks=("copy",),
            task_share=0.9,
            prompts_per_document=1,
            vocab_size=512,
            validation_share=0.04,
        ),
        dense=dataclasses.replace(
            config.dense,
            num_layers=2,
            num_heads=4,
            hidden_size=64,
            mlp_size=172,
            learning_rate=4e-3,
            most_steps=1_500,
            eval_every=250,
            cooldown_steps=100,
        ),
        context=40,
        posttrain=dataclasses.replace(
            config.posttrain, slacks=(0.03,), steps=500, eval_every=100, seeds=(0,)
        ),
        variants=("sparse",),
    )


def smoke(config: PairConfig) -> PairConfig:
    """The same steps in seconds."""
    return dataclasses.replace(
        config,
        text=dataclasses.replace(
            config.text, documents=200, vocab_size=512, validation_share=0.1, scored_prompts=8
        ),
        dense=dataclasses.replace(
            config.dense,
            num_layers=2,
            num_heads=2,
            hidden_size=16,
            mlp_size=16,
            batch_size=8,
            eval_every=2,
            most_steps=4,
            cooldown_steps=2,
        ),
        context=min(config.context, 32),
        posttrain=dataclasses.replace(
            config.posttrain,
            batch_size=8,
            steps=2,
            eval_every=1,
            validation_documents=8,
            slacks=(15.0,),
            seeds=config.posttrain.seeds[:1],
        ),
        ablation_slacks=(15.0,),
    )
