"""Options of one start of a training command, which change no number of the run."""

from collections.abc import Iterator
import contextlib
import contextvars
import dataclasses
from pathlib import Path
from typing import Annotated

from lm_jax.run.settings import CommandOptions, at_least
from lm_jax.train import trackers


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions(CommandOptions):
    """Flags of every training command.

    Attributes:
      hang_limit: seconds without a finished step after which a process prints its stacks and ends;
        more than compiling, an evaluation, a save and the steps between two logs take; 0 for no
        limit.
      local_checkpoints: folder on a disk, or in memory, of each node, for checkpoints besides those
        in --workdir.
      local_every: steps between checkpoints in --local_checkpoints.
      track: program that shows the run besides TensorBoard.

    Raises:
      UsageError: the package of the tracker is missing.
    """

    hang_limit: Annotated[int, at_least(0)] = 0
    local_checkpoints: Path | None = None
    local_every: Annotated[int, at_least(1)] = 100
    track: trackers.Track = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        trackers.check(self.track)


DEFAULTS = LaunchOptions()
_options = contextvars.ContextVar("launch", default=DEFAULTS)


@contextlib.contextmanager
def launched_with(options: LaunchOptions) -> Iterator[None]:
    """Context in which every training loop has these options."""
    token = _options.set(options)
    try:
        yield
    finally:
        _options.reset(token)


def options() -> LaunchOptions:
    """The options of this start."""
    return _options.get()
