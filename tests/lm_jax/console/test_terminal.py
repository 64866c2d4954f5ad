"""Tables for a terminal: aligned, whole on their lines, and free of control characters."""

from lm_jax.console.terminal import format_table


def test_columns_are_aligned_and_numbers_stand_on_the_right():
    rows = [("llama", "1,024", "yes"), ("protot", "9", "no")]
    assert format_table(("model", "tokens", "tied"), rows, left=(0, 2)) == "\n".join(
        ["model   tokens  tied", "llama    1,024  yes", "protot       9  no"]
    )


def test_a_long_cell_stays_on_its_line():
    cell = "--config.learning_rate=0.0001 " * 20
    (line,) = format_table(None, [("1", cell)], left=(0, 1)).splitlines()
    assert line == f"1  {cell}".rstrip()
