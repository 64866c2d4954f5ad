"""Standard output: what it can encode, and whether anybody reads it, as in `... --help | head`."""

import os
import select
import sys


def printable(text: str) -> str:
    """The text, with a question mark for each character that standard output cannot encode."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def reader_is_gone() -> bool:
    """Whether standard output is such a pipe; what is left to print is then dropped.

    To be asked when a `BrokenPipeError` was raised, which may also be of another pipe or socket.
    """
    stdout = sys.stdout.fileno()
    poll = select.poll()
    poll.register(stdout, 0)
    # Both are reported without being asked for: the first of a pipe on Linux, the other on macOS.
    gone = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    if gone:
        # Or the interpreter tries to write the rest when it ends, and complains.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)
    return gone
