"""Options of one start of a training command, which change no number of the run."""

from collections.abc import Iterator
import contextlib
import contextvars
import dataclasses
from pathlib import Path

from lm_jax.run.options import option
from lm_jax.train import trackers


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Flags of every training command.

    Raises:
      UsageError: the package of the tracker is missing.
    """

    hang_limit: int = option(
        0,
        "seconds without a finished step after which a process prints its stacks and ends; more "
        "than compiling, an evaluation, a save and the steps between two logs take; 0 for no limit",
        least=0,
    )
    local_checkpoints: Path | None = option(
        None,
        "folder on a disk, or in memory, of each node, for checkpoints besides those in --workdir",
    )
    local_every: int = option(100, "steps between checkpoints in --local_checkpoints", least=1)
    track: trackers.Track = option("none", "program that shows the run besides TensorBoard")

    def __post_init__(self) -> None:
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
