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


def test_a_note_is_at_the_end_of_the_line():
    for terminal in (False, True):
        stream, clock = io.StringIO(), Clock()
        console = Console(file=stream, force_terminal=terminal, width=120)
        with progress.track("train", total=20, console=console, clock=clock) as advance:
            clock.now += 10
            advance(10, "loss 3.20")
            clock.now += 10
            advance(10, "loss 3.10")
        assert "1 steps/s, 0:00:00 left, loss 3.10" in stream.getvalue()


def test_a_note_is_printed_before_anything_was_done():
    """The first unit may take minutes: its note says what they are spent on."""
    stream = io.StringIO()
    with progress.track("a", 2, every=0.0, console=Console(file=stream)) as advance:
        advance(0, note="now the first")
    assert stream.getvalue() == "a: 0/2 steps, - steps/s, time left unknown, now the first\n"


def test_a_terminal_gets_a_bar_with_the_same_numbers():
    text = _lines(True, [(25, 50)], total=100, unit="rows")
    assert "a [/bold] b" in text
    assert "25/100" in text
    assert "0.5 rows/s, 0:02:30 left" in text


def test_no_rate_is_claimed_before_anything_was_done():
    text = _lines(False, [(0, 11)], total=10)
    assert text == "a [/bold] b: 0/10 steps, - steps/s, time left unknown\n"
