"""Standard output that nobody reads any more, as in `iaj ... --help | head`."""

import os
import select
import sys


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
