"""Config of fine-tuning on sentence tasks, a frozen dataclass built from a config file.

Defaults are the protocol of the Prototype Transformer's paper (appendix A.4) and, where that is
silent, of its released code: weight decay 0.01, dropout 0.1 before the head and none in the model,
patience of two evaluations at a gain of 0.001.
"""

from collections.abc import Mapping
import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from lm_jax.assets import published
from lm_jax.errors import UsageError
from lm_jax.run.settings import (
    SHARE_BELOW_1,
    Bound,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Reads,
    ShareBelow1,
    at_least,
    choice,
    different,
)
from lm_jax.study import Training
from lm_jax.train.config import MAY_CHANGE, BatchFields
from protot_jax.studies.glue.embedded import ASSETS
from protot_jax.studies.glue.objective import PoolingName
from protot_jax.studies.glue.tasks import EMBEDDED, OFFICIAL, find
from protot_jax.training.saved_run import study_variant

PAPER_RATES = (2.5e-5, 3.5e-5, 5.5e-5, 1e-4, 2e-4, 3e-4, 4e-4, 5e-4, 7e-4, 8.5e-4, 1e-3)


_NAMES = Bound("different names, at least one", lambda names: 0 < len(names) == len(set(names)))
_RATES = Bound(
    "different rates above 0",
    # As the names of folders spell them.
    lambda rates: 0 < len(rates) == len({f"{rate:g}" for rate in rates}) and min(rates) > 0,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlueConfig(BatchFields, Training):
    """Settings of fine-tuning.

    Attributes:
      runs: work folders of pretraining runs, each as FOLDER or NAME=FOLDER; a folder may be a name
        of iaj fetch --list.
      run_seed: seed of the pretrained models; -1 for the first of each run.
      checkpoint: weights to fine-tune, the "best" by validation perplexity or the "last".
      tasks: tasks to fine-tune on, official ones of GLUE or embedded ones
        (`protot_jax.studies.glue.tasks.TASKS`).
      folder: folder of the official GLUE files (CoLA, SST-2 and so on below it); unused by embedded
        tasks.
      examples: the most examples of each split, evenly spaced; 0 for all.
      learning_rates: peaks to choose from, each after a warm-up and before a linear decay to zero.
      warmups: shares of the steps in which the rate rises, to choose from.
      search_tasks: the tasks whose mean main metric on the selection split chooses rate and warm-up
        of a model for all tasks; those of `tasks` among them, or all if none is.
      seeds: one fine-tuning each of the chosen rate; the first one searches. A seed determines the
        head, the order of examples and the dropout.
      epochs: the most passes over the training split.
      max_steps: the most updates, if the epochs have more; 0 for no maximum.
      min_gain: least gain of the main metric over the best evaluation so far that counts as one.
      patience: training ends at so many evaluations in a row without such a gain.
      max_length: the most ids of a text or pair. A model with attention has at most its context,
        with a warning; a recurrent one reads rows that are longer than those of its pretraining.
      pooling: "mean" over the text, its "last" token, or "released": the mean over max_length
        positions with those of padding.
      weight_decay: weight decay of matrices, as in pretraining.
      head_dropout: dropout before the classifier; the model has none.
      dtype: dtype of the computation; weights and moments are float32.
      resamples: bootstrap samples of an interval.
    """

    runs: tuple[str, ...] = ()
    run_seed: int = -1
    checkpoint: Literal["best", "last"] = "best"
    tasks: Annotated[tuple[str, ...], _NAMES, Reads("name", ASSETS)] = tuple(EMBEDDED)
    folder: str = ""
    examples: NonNegativeInt = 0
    learning_rates: Annotated[tuple[float, ...], _RATES] = PAPER_RATES
    warmups: Annotated[tuple[float, ...], different(SHARE_BELOW_1)] = (0.06, 0.1)
    search_tasks: tuple[str, ...] = ("sst2", "mnli")
    seeds: Annotated[tuple[int, ...], different(at_least(0))] = (234, 124, 325)
    batch_size: PositiveInt = 16
    epochs: PositiveInt = 3
    max_steps: NonNegativeInt = 0
    min_gain: NonNegativeFloat = 1e-3
    patience: PositiveInt = 2
    max_length: PositiveInt = 512
    pooling: Annotated[PoolingName, choice(get_args(PoolingName))] = "mean"
    weight_decay: NonNegativeFloat = 0.01
    head_dropout: ShareBelow1 = 0.1
    dtype: Literal["float32", "bfloat16"] = "float32"
    resamples: Annotated[int, at_least(100)] = 1000

    def problems(self) -> list[str]:
        for name in (*self.tasks, *self.search_tasks):
            find(name)
        official = [name for name in self.tasks if name in OFFICIAL]
        if self.folder or not official:
            return []
        return [
            f"config.folder is missing, and {official[0]} is read from official files; name the "
            f"folder that has those of {OFFICIAL[official[0]].title} below it"
        ]

    def named_runs(self) -> dict[str, Path]:
        """The folders of the pretraining runs by name.

        Raises:
          UsageError: there is none, or two have one name.
        """
        if not self.runs:
            raise UsageError(
                "config.runs is empty; name work folders of iaj protot pretrain, "
                "--config.runs=\"('runs/speeches',)\""
            )
        named: dict[str, Path] = {}
        for text in self.runs:
            head, equals, rest = text.partition("=")
            folder = published.resolve(rest if equals else text)
            name = head if equals else study_variant(folder) or folder.resolve().name
            if name in named:
                raise UsageError(f"config.runs: two are called {name!r}; write NAME=FOLDER")
            if not name or "/" in name:
                raise UsageError(f"config.runs: {text!r} is not FOLDER or NAME=FOLDER")
            named[name] = folder
        return named

    @property
    def of_fine_tuning(self) -> dict[str, Any]:
        """What a fine-tuning depends on besides its model, text, rate, warm-up and seed."""
        every = dataclasses.asdict(self)
        return {name: value for name, value in every.items() if name not in _OF_OTHER_PARTS}

    def searching_tasks(self) -> tuple[str, ...]:
        """The tasks that choose rate and warm-up."""
        return tuple(name for name in self.tasks if name in self.search_tasks) or self.tasks


_OF_OTHER_PARTS = (
    *("runs", "run_seed", "checkpoint", "tasks", "folder", "examples", "learning_rates", "warmups"),
    *("search_tasks", "seeds", "resamples", *MAY_CHANGE),
)


def official(config: GlueConfig) -> GlueConfig:
    """The nine tasks of GLUE and the paper's grid."""
    # A placeholder, as the folder is the user's.
    return GlueConfig(runs=config.runs, tasks=tuple(OFFICIAL), folder="GLUE")


_SMOKE: Mapping[str, Any] = {
    "examples": 24,
    "learning_rates": (1e-3,),
    "warmups": (0.1,),
    "seeds": (234,),
    "batch_size": 4,
    "epochs": 1,
    "max_steps": 4,
    "eval_every": 2,
    "max_length": 32,
    "resamples": 100,
}


def smoke(config: GlueConfig) -> GlueConfig:
    """The same experiment reduced to seconds."""
    return dataclasses.replace(config, **_SMOKE)
