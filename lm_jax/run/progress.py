"""Progress with rate and time left: a bar on a terminal, lines of text elsewhere.

    with progress.track("sweep", total=600, unit="prompts", done=len(store.done_keys())) as advance:
        for prompt in prompts:
            ...
            advance()

A log file or a pipe gets no bar and no control characters. Rate and time left count only what this
process did: the work of an earlier start is in the total, not in the rate.
"""

from collections.abc import Callable, Iterator
import contextlib
import datetime
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


@contextlib.contextmanager
def track(
    description: str,
    total: int,
    *,
    unit: str = "steps",
    done: int = 0,
    every: float = 10.0,
    quiet: bool = False,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Callable[..., None]]:
    """Yields `advance(count=1, note="")`, to be called whenever `count` more of `total` are done.

    The note of the last call is at the end of the line.

    Args:
      description: name of the work; printed verbatim, without markup.
      total: total number of units.
      unit: name of the units, in the plural.
      done: number of units that an earlier start has done.
      every: seconds between lines where there is no terminal.
      quiet: print nothing, because another process does.
      console: console to print on; standard error by default, so that results can be piped.
      clock: monotonic seconds.
    """
    console = console or Console(stderr=True, quiet=quiet)
    start = clock()
    count, last_note = done, ""

    def pace() -> str:
        elapsed = clock() - start
        rate = (count - done) / elapsed if elapsed > 0 else 0.0
        text = f"- {unit}/s, time left unknown"
        if rate:
            left = datetime.timedelta(seconds=round((total - count) / rate))
            text = f"{rate:.3g} {unit}/s, {left} left"
        return ", ".join([text, *[last_note] * bool(last_note)])

    if console.is_terminal:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[pace]}", markup=False),
        )
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(description, total=total, completed=done, pace=pace())

            def advance_bar(more: int = 1, note: str = "") -> None:
                nonlocal count, last_note
                count, last_note = count + more, note
                bar.update(task, completed=count, pace=pace())

            yield advance_bar
        return

    printed = start

    def advance_line(more: int = 1, note: str = "") -> None:
        nonlocal count, printed, last_note
        count, last_note = count + more, note
        if count >= total or clock() - printed >= every:
            printed = clock()
            line = f"{description}: {count}/{total} {unit}, {pace()}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    yield advance_line
