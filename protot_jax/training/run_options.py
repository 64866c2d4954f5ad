"""Options shared by the commands that load a pretrained model from its run."""

from collections.abc import Sequence
import dataclasses
from pathlib import Path
from typing import Literal

from lm_jax.errors import UsageError
from lm_jax.run.settings import CommandOptions
from protot_jax.training.saved_run import TrainedModel, load_run, split_seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions(CommandOptions):
    """The run, the seed and the checkpoint of a pretrained model.

    Attributes:
      run: work folder of a pretraining run.
      run_seed: seed of the model, one of the run's; default the first.
      checkpoint: checkpoint of lowest validation perplexity, or the last one.
    """

    run: Path
    run_seed: int | None = None
    checkpoint: Literal["best", "last"] = "best"

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


def load_each(
    named: Sequence[str], *, seed: int | None = None, best: bool = True
) -> list[tuple[Path, TrainedModel]]:
    """Loads the models of a `--run` that is given once for each, with the folders of their runs.

    Args:
      named: work folders, folders of one seed of a run, or exported models.
      seed: seed of the models whose folder says none; None for the first of their run.
      best: the checkpoint of lowest validation perplexity; false for the last one.

    Raises:
      UsageError: none is named, a model is named twice, by its export too, or a run lacks the seed.
      BadInputError, CorruptError: as `load_run`.
    """
    if not named:
        raise UsageError("--run is missing; name the work folder of a pretraining run")
    loaded: dict[str, tuple[Path, TrainedModel]] = {}
    for name in named:
        folder, own = split_seed(Path(name))
        model = load_run(folder, seed=seed if own is None else own, best=best)
        if first := loaded.get(model.checkpoint_sha256):
            raise UsageError(f"--run={name} is the same model as {first[0]}; name each model once")
        loaded[model.checkpoint_sha256] = folder, model
    return list(loaded.values())
