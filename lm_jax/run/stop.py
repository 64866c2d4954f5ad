"""A request to stop, which a loop obeys at the next point where its state is saved.

The first SIGINT, SIGTERM or SIGUSR1, by which a cluster announces its time limit, only sets it
(`signals_as_requests`); a second SIGINT kills the process at once, even inside compiled code.
"""

from collections.abc import Iterator
import contextlib
import os
import signal
import threading
import types

from lm_jax.errors import StoppedError

_stop = threading.Event()


def requested() -> bool:
    """Whether a signal to stop was received; a loop checks it after every step it can save."""
    return _stop.is_set()


def request() -> None:
    """Asks this process to stop, as a signal would."""
    _stop.set()


def check(where: str) -> None:
    """Raises `StoppedError` if a stop was requested; call it once the state is saved.

    `where` is the progress of the run, as in "after step 120".
    """
    if requested():
        raise StoppedError(f"stopped on request {where}; run the same command again to resume")


@contextlib.contextmanager
def signals_as_requests() -> Iterator[None]:
    """Handles the three signals as requests to stop; only the main thread may set handlers."""
    _stop.clear()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, _on_stop) for number in handled}
    try:
        yield
    finally:
        # A request ends with its command.
        _stop.clear()
        for number, handler in before.items():
            signal.signal(number, handler)


def _on_stop(number: int, frame: types.FrameType | None) -> None:
    del frame
    # The others stay requests (supervisors send them more than once); SIGINT becomes the kernel's
    # own, and before the notice says so.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not _stop.is_set():
        os.write(2, b"stopping at the next safe point; Ctrl-C again quits at once\n")
    _stop.set()
