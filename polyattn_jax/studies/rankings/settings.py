"""Settings of `iaj polyattn rankings`: the frozen dataclass that a config file becomes."""

import dataclasses
from typing import Annotated, Literal

from lm_jax.model.lora import LoraConfig
from lm_jax.run.settings import (
    READ_AT_ONCE,
    READS_MODEL,
    Bound,
    PositiveFloat,
    PositiveInt,
    ShareBelow1,
    at_least,
)
from lm_jax.study import Training
from lm_jax.text.preparation import CorpusConfig
from lm_jax.text.splits import missing_splits
from lm_jax.train.config import StepFields
from polyattn_jax.audit import ranking
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.recipes.row_maps import parse_recipe
from polyattn_jax.studies.check.tasks import Task, parse_task
from polyattn_jax.studies.distill.settings import DistillConfig

# By statistic, in the order of the tables; a random order is drawn besides.
STATISTICS = tuple(name for name in ranking.STATISTICS if name != "random")
SHARES = Bound(
    "percentages above 0 and below 100, ascending, each once",
    lambda values: (
        bool(values)
        and all(0 < share < 100 for share in values)
        and list(values) == sorted(set(values))
    ),
)
SEEDS = Bound(
    "one or more seeds, each once",
    lambda values: bool(values) and len(set(values)) == len(values) and min(values) >= 0,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankingsConfig(StepFields, Training):
    """Everything that decides which ranking predicts what trained hybrids lose.

    Attributes:
      model: a Hugging Face folder, a GGUF file, a name of iaj fetch --list, or a run of iaj protot
        with softmax attention.
      recipe: what replaces softmax.
      by: what is replaced together: each head, all heads that read one key head, or a layer.
      statistics: statistics that rank the groups (`audit.ranking`).
      replaced: percent of the groups that a set replaces, the budgets.
      draws: number of random sets of each size.
      corpus: the text and its splits, which may be samples of a pretrained model with the same
        tokenizer (samples:MODEL); its `vocab_size` is ignored in favour of the model's.
      context: tokens of a window of text; biases are calibrated at this length.
      ranking_texts: number of windows of the training split that rank the groups.
      validation_documents: the most held-out documents whose loss is measured.
      task: task whose answers rank and are measured, as `check --task` takes it, without choices.
      task_n: number of prompts; a third of them, 24 at most, rank.
      task_length: number of tokens of a prompt.
      adapters: rank, alpha and targets of the adapters of the first stage.
      batch_size: windows of one update, on all devices together.
      steps: updates of the first stage, which is trained once for all sets of a seed.
      logit_steps: updates of the second stage, of every set.
      logit_learning_rate: peak learning rate of the second stage.
      logit_targets: weights that the second stage adapts besides those of the first.
      eval_every: steps between evaluations.
      seeds: random seeds; each trains both stages and draws sets.
    """

    model: Annotated[str, READS_MODEL] = "smollm2"
    recipe: str = "hedgehog"
    by: Literal["head", "kv_head", "layer"] = "layer"
    statistics: tuple[str, ...] = STATISTICS
    replaced: Annotated[tuple[float, ...], SHARES] = (30.0, 50.0, 70.0)
    draws: Annotated[int, at_least(3)] = 8
    corpus: CorpusConfig = dataclasses.field(
        default_factory=lambda: CorpusConfig(
            "wiki", "document", splits=(0.97, 0.03, 0.0), max_tokens=300_000
        )
    )
    context: Annotated[PositiveInt, READ_AT_ONCE] = 128
    ranking_texts: Annotated[int, at_least(2)] = 16
    validation_documents: Annotated[int, at_least(2)] = 24
    task: str = "needle"
    task_n: Annotated[int, at_least(3)] = 60
    task_length: PositiveInt = 128
    adapters: LoraConfig = dataclasses.field(
        default_factory=lambda: LoraConfig(rank=8, alpha=16.0, targets=("q", "k"))
    )
    batch_size: PositiveInt = 4
    steps: PositiveInt = 100
    learning_rate: PositiveFloat = 1e-3
    warmup: ShareBelow1 = 0.05
    logit_steps: PositiveInt = 40
    logit_learning_rate: PositiveFloat = 3e-4
    logit_targets: tuple[str, ...] = ("q", "k", "v", "o")
    eval_every: PositiveInt = 1_000
    save_every: PositiveInt = 50
    seeds: Annotated[tuple[int, ...], SEEDS] = (0, 1)

    def problems(self) -> list[str]:
        """What does not fit together."""
        recipe = parse_recipe(self.recipe)
        problems = missing_splits(self.corpus.splits)
        for name in self.statistics:
            if name not in STATISTICS:
                problems.append(
                    f"config.statistics names {name!r}; it is one of {', '.join(STATISTICS)}"
                )
            else:
                ranking.check_statistic(name, recipe)
        if not self.statistics or len(set(self.statistics)) < len(self.statistics):
            problems.append("config.statistics must name one or more statistics, each once")
        if parse_task(self.task).kind == "choices":
            problems.append(
                f"config.task = {self.task} has no prompts with answers; name another task"
            )
        return problems

    @property
    def asked(self) -> Task:
        """The task."""
        return parse_task(self.task)

    def distill(self, seed: int) -> DistillConfig:
        """The same as a training of heads with one seed."""
        names = (
            *("model", "recipe", "corpus", "context", "validation_documents", "adapters"),
            *("batch_size", "steps", "learning_rate", "warmup", "logit_steps", "eval_every"),
            *("logit_learning_rate", "logit_targets", "save_every", "mesh", "allow_fallback"),
            "clip_norm",
        )
        return DistillConfig(**{name: getattr(self, name) for name in names}, seed=seed)

    @property
    def audit(self) -> AuditConfig:
        """The same as an audit of one recipe, of which rankings and answers are a part."""
        spec = parse_recipe(self.recipe).spec
        return AuditConfig(
            model=self.model,
            recipes=(spec,),
            ablation_recipe=spec,
            niah_lengths=(self.task_length,),
            sweep_length=self.task_length,
            induction_n=0,
            mqar_n=0,
            batch_size=self.batch_size,
            seed=self.seeds[0],
        )


def smoke(config: RankingsConfig) -> RankingsConfig:
    """The same experiment on little text, with two updates a stage and one seed."""
    return dataclasses.replace(
        config,
        corpus=dataclasses.replace(config.corpus, max_tokens=20_000, splits=(0.8, 0.2, 0.0)),
        context=min(config.context, 32),
        ranking_texts=2,
        validation_documents=4,
        task_n=6,
        task_length=64,
        draws=3,
        replaced=(50.0,),
        steps=2,
        logit_steps=2,
        seeds=config.seeds[:1],
    )
