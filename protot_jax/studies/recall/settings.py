"""Settings of the recall suite: the frozen dataclass that its config file becomes."""

from collections.abc import Iterator
import dataclasses
from typing import Annotated

from lm_jax.errors import UsageError
from lm_jax.model.config import DecoderConfig
from lm_jax.model.mixers import Mixer
from lm_jax.run.settings import (
    SEED,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    above,
    at_least,
    different,
    names,
)
from lm_jax.study import Training
from lm_jax.train.config import TrainConfig, train_config
from protot_jax.analysis.equal_memory import matched_model
from protot_jax.analysis.recall import TASKS, Condition, Task, is_possible
from protot_jax.mixers.models import MODELS


@dataclasses.dataclass(frozen=True)
class RecallConfig(Training):
    """Settings of the recall suite.

    Attributes:
      tasks: tasks mqar, induction, needle; every model is trained on each apart.
      models: kinds of model to compare, such as protot or llama
        (`protot_jax.mixers.models.MODELS`).
      memory: floats of the memory of a layer of every recurrent model
        (`protot_jax.analysis.equal_memory`); 4,096 is that of the paper's ProtoT, 32 prototypes of
        128.
      hidden_size: width of the residual stream of every model.
      num_layers: number of blocks of every model.
      vocab_size: number of ids, padding included.
      train_length: length of the sequences that are trained on.
      lengths: lengths that are measured; longer ones than `train_length` ask for more than was
        trained.
      pairs: numbers of pairs of MQAR, each trained on and measured where a sequence has room for
        it.
      sequences: number of sequences that are measured in every condition.
      batch_size: sequences of one update.
      steps: updates of a training.
      learning_rates: peaks to try, of which that with the best recall of other sequences of the
        trained length is reported; 2 % of the steps warm up, then a cosine to a tenth.
      weight_decay: weight decay of matrices.
      clip_norm: largest norm of the gradient.
      seeds: random seeds of weights and training sequences; the measured ones are the same for all.
    """

    tasks: Annotated[tuple[str, ...], names(TASKS)] = TASKS
    models: Annotated[tuple[str, ...], names(MODELS)] = (
        *("protot", "llama", "mamba_ffn", "deltanet"),
        *("gated_deltanet", "gated_slots", "raven"),
    )
    memory: PositiveInt = 4096
    hidden_size: PositiveInt = 128
    num_layers: PositiveInt = 2
    vocab_size: Annotated[int, at_least(4)] = 1024
    train_length: PositiveInt = 256
    lengths: Annotated[tuple[int, ...], different(at_least(1))] = (128, 256, 512, 1024)
    pairs: Annotated[tuple[int, ...], different(at_least(1))] = (4, 8, 16, 32, 64)
    sequences: Annotated[int, at_least(2)] = 200
    batch_size: PositiveInt = 64
    steps: PositiveInt = 5000
    learning_rates: Annotated[tuple[float, ...], different(above(0))] = (1e-3, 4e-3)
    weight_decay: NonNegativeFloat = 0.1
    clip_norm: PositiveFloat = 1.0
    seeds: Annotated[tuple[int, ...], different(SEED)] = (0, 1, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        for task in self.task_names:
            if not self.trained(task):
                raise UsageError(
                    f"config.train_length = {self.train_length} or config.vocab_size = "
                    f"{self.vocab_size} has no room for the task {task}; raise it, or choose fewer "
                    "config.pairs"
                )
        for name in self.models:
            self.model(name)

    @property
    def task_names(self) -> tuple[Task, ...]:
        """The tasks in the order of `TASKS`."""
        return tuple(task for task in TASKS if task in self.tasks)

    def trained(self, task: Task) -> tuple[Condition, ...]:
        """The conditions that a model is trained on."""
        return tuple(self._at(task, self.train_length))

    def measured(self, task: Task) -> tuple[Condition, ...]:
        """The conditions that a model is measured in."""
        return tuple(each for length in sorted(self.lengths) for each in self._at(task, length))

    def _at(self, task: Task, length: int) -> Iterator[Condition]:
        for pairs in sorted(self.pairs) if task == "mqar" else [None]:
            condition = Condition(task, length, pairs)
            if is_possible(condition, self.vocab_size):
                yield condition

    def model(self, name: str) -> tuple[DecoderConfig, Mixer]:
        """A model with the memory of this suite."""
        return matched_model(
            name,
            self.memory,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            vocab_size=self.vocab_size,
            context=max(*self.lengths, self.train_length),
            tie_embeddings=False,
        )

    def training(self, learning_rate: float) -> TrainConfig:
        """The training settings of one run."""
        return train_config(self, learning_rate=learning_rate, early_stop=False)


def quickstart(config: RecallConfig) -> RecallConfig:
    """Three models on short sequences of MQAR, which all learn, with a quarter of the memory."""
    return dataclasses.replace(
        config,
        tasks=("mqar",),
        models=("protot", "llama", "gated_deltanet"),
        memory=1024,
        hidden_size=64,
        vocab_size=20,
        train_length=12,
        lengths=(12, 24),
        pairs=(2, 3),
        batch_size=64,
        steps=1000,
        learning_rates=(4e-3,),
        seeds=(0,),
    )


def small(config: RecallConfig) -> RecallConfig:
    """Every task and model at the size of `quickstart`, measured up to four times its length.

    Induction has no room for the longest.
    """
    tasks, models = config.tasks, config.models
    return dataclasses.replace(quickstart(config), tasks=tasks, models=models, lengths=(12, 24, 48))


def smoke(config: RecallConfig) -> RecallConfig:
    """Every task and three models at a size that takes seconds."""
    return dataclasses.replace(
        config,
        models=("protot", "llama", "gated_deltanet"),
        memory=64,
        hidden_size=16,
        num_layers=1,
        vocab_size=24,
        train_length=16,
        lengths=(16, 24),
        pairs=(2, 4),
        sequences=5,
        batch_size=8,
        steps=2,
        learning_rates=(4e-3,),
        seeds=(0,),
    )
