"""Progress prints rate and time left of this process's own work, without bars in a pipe."""

import io

from rich.console import Console

from lm_jax.run import progress


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def _lines(terminal, steps, **options):
    stream, clock = io.StringIO(), Clock()
    console = Console(file=stream, force_terminal=terminal, width=120)
    with progress.track("a [/bold] b", console=console, clock=clock, **options) as advance:
        for count, seconds in steps:
            clock.now += seconds
            advance(count)
    return stream.getvalue()


def test_a_pipe_gets_a_line_every_ten_seconds_and_at_the_end():
    text = _lines(False, [(1, 4)] * 10, total=110, done=100, unit="prompts")
    assert text.splitlines() == [
        "a [/bold] b: 103/110 prompts, 0.25 prompts/s, 0:00:28 left",
        "a [/bold] b: 106/110 prompts, 0.25 prompts/s, 0:00:16 left",
        "a [/bold] b: 109/110 prompts, 0.25 prompts/s, 0:00:04 left",
        "a [/bold] b: 110/110 prompts, 0.25 prompts/s, 0:00:00 left",
    ]


def test_a_terminal_gets_a_bar_with_the_same_numbers():
    text = _lines(True, [(25, 50)], total=100, unit="rows")
    assert "a [/bold] b" in text
    assert "25/100" in text
    assert "0.5 rows/s, 0:02:30 left" in text
