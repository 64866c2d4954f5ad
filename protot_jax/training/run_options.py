"""The run, the seed and the checkpoint of a pretrained model: settings shared by commands."""

from collections.abc import Sequence
import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from lm_jax.assets import published
from lm_jax.errors import UsageError
from lm_jax.run.settings import READS_RUN, CommandOptions, Flag, Settings
from protot_jax.training.saved_run import TrainedModel, load_run, split_seed

_MISSING = "--run is missing; name the work folder of a pretraining run"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """Base of the settings of a study of one pretrained model.

    Attributes:
      run: work folder of a pretraining run, or a name of iaj fetch --list.
      run_seed: seed of the model, one of the run's; default the first.
      checkpoint: checkpoint of lowest validation perplexity, or the last one.
    """

    run: Annotated[str, Flag(required=True), READS_RUN] = ""
    run_seed: Annotated[int | None, Flag()] = None
    checkpoint: Annotated[Literal["best", "last"], Flag()] = "best"

    @property
    def run_folder(self) -> Path:
        """The folder of the run, also of a published one that was named.

        Raises:
          UsageError: no run is named.
          BadInputError: a published model is named that is not on this machine.
        """
        if not self.run:
            raise UsageError(_MISSING)
        return published.resolve(self.run)

    @property
    def best(self) -> bool:
        """Whether the checkpoint is that of lowest validation perplexity."""
        return self.checkpoint == "best"

    def load(self) -> TrainedModel:
        """Loads the model that the settings name.

        Raises:
          UsageError: no run is named, or a seed that the run does not have.
          BadInputError, CorruptError: as `load_run`.
        """
        return load_run(self.run_folder, seed=self.run_seed, best=self.best)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions(RunSettings, CommandOptions):
    """The same as flags of a command without a config file."""


def folder_beside(run: str, *names: str) -> Path:
    """The default folder of what is measured of a run: in its folder, or in runs/NAME.

    The latter is for a published model that is named, whose folder may be one of the installation.
    """
    is_name = run in published.entries() and not Path(run).exists()
    folder = Path("runs") / run if is_name else Path(run)
    return split_seed(folder)[0].joinpath(*names)


def load_each(
    named: Sequence[str], *, seed: int | None = None, best: bool = True
) -> list[tuple[Path, TrainedModel]]:
    """Loads the models of a `--run` that is given once for each, with the folders of their runs.

    Args:
      named: work folders, folders of one seed of a run, exported models, or names of published
        ones.
      seed: seed of the models whose folder says none; None for the first of their run.
      best: the checkpoint of lowest validation perplexity; false for the last one.

    Raises:
      UsageError: none is named, a model is named twice, by its export too, or a run lacks the seed.
      BadInputError, CorruptError: as `load_run`.
    """
    if not named:
        raise UsageError(_MISSING)
    loaded: dict[str, tuple[Path, TrainedModel]] = {}
    for name in named:
        folder, own = split_seed(published.resolve(name))
        model = load_run(folder, seed=seed if own is None else own, best=best)
        if first := loaded.get(model.checkpoint_sha256):
            raise UsageError(f"--run={name} is the same model as {first[0]}; name each model once")
        loaded[model.checkpoint_sha256] = folder, model
    return list(loaded.values())
