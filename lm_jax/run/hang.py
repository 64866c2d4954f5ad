"""A limit on the time without progress, at which a process prints its stacks and ends.

A process that hangs in a collective or a system call still sends heartbeats, so the others wait for
it without end. `faulthandler` keeps the time in a thread that needs no lock of the interpreter, and
so ends a process that is stuck in compiled code as well. Each process has its own limit: those that
wait for a stopped one end too, with exit code 1, and a supervisor starts all of them again.
"""

from collections.abc import Iterator
import contextlib
import faulthandler

_seconds = 0


@contextlib.contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Context in which this many seconds may pass before and between calls of `progress`.

    0 is no limit.
    """
    global _seconds
    before, _seconds = _seconds, seconds
    try:
        progress()
        yield
    finally:
        if seconds:
            faulthandler.cancel_dump_traceback_later()
        _seconds = before


def progress() -> None:
    """Starts the time anew; does nothing where there is no limit."""
    if _seconds:
        faulthandler.dump_traceback_later(_seconds, exit=True)
