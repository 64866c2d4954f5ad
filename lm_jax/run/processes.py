"""Several processes as one program: how they join, which one writes, and how they agree.

Every process runs the same code on the same settings, over a work folder that all of them see.
Process 0 alone writes in it. The others wait where they need its files, and end with its exit code
where it fails. A command that can do this takes three flags:

    on one host     --coordinator=10.0.0.1:8476 --processes=2 --process=0
    on the other    --coordinator=10.0.0.1:8476 --processes=2 --process=1

or, under a launcher that JAX knows (Slurm, Open MPI, Kubernetes), `--coordinator=auto` alone. If a
process dies, the runtime ends the others after 30 seconds without a heartbeat, and at once if it is
process 0; the same command, on all hosts, resumes.
"""

from collections.abc import Callable, Collection, Iterator
import contextlib
from contextlib import AbstractContextManager
import logging
import os
from pathlib import Path
import sys
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

from lm_jax.errors import ElsewhereError, UsageError, UserError
from lm_jax.run import stop
from lm_jax.run.workdir import Resume, log_file, logging_to, open_workdir

_log = logging.getLogger(__name__)
AUTO = "auto"
# Seconds after which a missing or dead process ends the others.
_PATIENCE = {
    "initialization_timeout": 120,
    "heartbeat_timeout_seconds": 30,
    "shutdown_timeout_seconds": 30,
}


def join(coordinator: str, count: int | None, index: int | None) -> int:
    """Joins the other processes and returns the index of this one.

    Call it before anything asks JAX for a device.

    Args:
      coordinator: host:port of process 0, or "auto" to read all three from the launcher.
      count: number of processes; None with "auto".
      index: index of this process, from 0; None with "auto".

    Raises:
      UsageError: the three arguments do not fit together, or JAX finds no launcher.
    """
    if coordinator == AUTO:
        if (count, index) != (None, None):
            raise UsageError(
                "--coordinator=auto finds --processes and --process out by itself; leave them out"
            )
        try:
            _initialize()
        except ValueError as error:
            raise UsageError(
                f"--coordinator=auto: JAX knows no launcher here ({error}); give host:port, "
                "--processes and --process"
            ) from error
        return jax.process_index()
    host, colon, port = coordinator.rpartition(":")
    if not (host and colon and port.isdecimal()):
        raise UsageError(
            f"--coordinator={coordinator} is not host:port of process 0; write 10.0.0.1:8476"
        )
    if count is None or index is None or not 0 <= index < count:
        raise UsageError(
            f"--coordinator needs --processes, how many there are, and --process, which one this "
            f"is from 0; here they are {count} and {index}"
        )
    _initialize(coordinator_address=coordinator, num_processes=count, process_id=index)
    return index


def _initialize(**where: Any) -> None:
    # The service would take SIGTERM from `launch`, whose request all processes share instead.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(**where, **_PATIENCE)


def is_first() -> bool:
    """Whether this is the process that writes; true where there is only one."""
    return jax.process_index() == 0


def note(text: str) -> None:
    """Prints one line on standard error, once for all processes, and logs it as a warning."""
    if is_first():
        print(f"note: {text}", file=sys.stderr)
    _log.warning("%s", text)


def on_first(action: Callable[[], int | None]) -> int:
    """Runs `action` in process 0 while the others wait, and returns its number everywhere.

    None is returned as 0.

    Raises:
      ElsewhereError: in the others, if it raises; process 0 keeps its own error.
    """
    if jax.process_count() == 1:
        return action() or 0
    if not is_first():
        exit_code, number = multihost_utils.broadcast_one_to_all(np.zeros(2, np.int32)).tolist()
        if exit_code:
            raise ElsewhereError(exit_code)
        return number
    try:
        number = action() or 0
    except BaseException as error:
        exit_code = error.exit_code if isinstance(error, UserError) else 1
        multihost_utils.broadcast_one_to_all(np.array([exit_code, 0], np.int32))
        raise
    multihost_utils.broadcast_one_to_all(np.array([0, number], np.int32))
    return number


def enter_on_first(stack: contextlib.ExitStack, context: AbstractContextManager[Any]) -> None:
    """Enters a context in process 0 alone, while the others wait, and exits it with `stack`.

    Raises:
      ElsewhereError: as `on_first`.
    """

    def enter() -> None:
        stack.enter_context(context)

    on_first(enter)


def share_stop() -> bool:
    """Whether any process was asked to stop; then all are. Every process must call it."""
    if jax.process_count() == 1:
        return stop.requested()
    # A signal after this counts in the next call: all processes must decide on the same requests.
    asked = multihost_utils.process_allgather(np.array(stop.requested()))
    if not np.any(asked):
        return False
    stop.request()
    return True


def check_stop(where: str) -> None:
    """Ends a process that works alone, if it was asked to stop; called between compiled calls.

    For loops inside a unit of work (`lm_jax.run.units`), which is then measured from its beginning.
    Of several processes none may leave the others waiting: they end after the unit.

    Args:
      where: progress of the run, as `stop.check` takes it.

    Raises:
      StoppedError: it was.
    """
    if jax.process_count() == 1:
        stop.check(where)


def call_stoppable(program: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The result of one compiled call of many, computed unless a stop was requested before it.

    Raises:
      StoppedError: it was.
    """
    check_stop("between two runs of the model")
    # Otherwise calls that were dispatched would still run after the request.
    return jax.block_until_ready(program(*arguments, **options))


def gather(array: np.ndarray) -> np.ndarray:
    """The arrays of all processes, one after the other along the first axis."""
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def wait_for_all() -> None:
    """Waits until every process is here, so that what each wrote before can be read by all."""
    if jax.process_count() > 1:
        gather(np.zeros(1, np.int32))


@contextlib.contextmanager
def open_shared_workdir(
    path: str | os.PathLike[str],
    config: Any,
    *,
    resume: Resume = "auto",
    may_change: Collection[str] = (),
) -> Iterator[Path]:
    """`open_workdir` for all processes: process 0 holds the folder, the others write a log.

    Raises:
      ElsewhereError: process 0 could not open it.
      UsageError, WorkdirInUseError, StorageError, CorruptError: as `open_workdir`.
    """
    with contextlib.ExitStack() as opening:
        enter_on_first(opening, open_workdir(path, config, resume=resume, may_change=may_change))
        folder = Path(path).expanduser().absolute()
        if not is_first():
            opening.enter_context(logging_to(folder / log_file(jax.process_index())))
        yield folder
