"""Options shared by the commands that load a pretrained model from its run."""

import dataclasses
from pathlib import Path
from typing import Literal

from lm_jax.run.options import option, required
from protot_jax.saved_run import TrainedModel, load_run


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The run, the seed and the checkpoint of a pretrained model."""

    run: Path = required("work folder of a pretraining run")
    run_seed: int | None = option(None, "seed of the model, one of the run's; default the first")
    checkpoint: Literal["best", "last"] = option(
        "best", "checkpoint of lowest validation perplexity, or the last one"
    )

    @property
    def best(self) -> bool:
        """Whether the checkpoint is that of lowest validation perplexity."""
        return self.checkpoint == "best"

    def load(self) -> TrainedModel:
        """Loads the model that the options name.

        Raises:
          UsageError: a seed that the run does not have.
          BadInputError, CorruptError: as `load_run`.
        """
        return load_run(self.run, seed=self.run_seed, best=self.best)
