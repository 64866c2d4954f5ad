"""Tables for a terminal or a pipe: plain text with aligned columns."""

from collections.abc import Iterable, Sequence
import io

from rich.console import Console
from rich.table import Table
from rich.text import Text


def format_table(
    columns: Sequence[str] | None,
    rows: Iterable[Sequence[str]],
    *,
    left: Sequence[int] = (0,),
) -> str:
    """A table as lines of text, every cell whole on its line.

    Args:
      columns: heads of the columns; None for a table without heads.
      rows: one string per column; markup in them is printed as it is.
      left: the columns, counted from 0, that are aligned on the left; the others hold numbers.
    """
    rows = list(rows)
    heads = [""] * max(map(len, rows), default=0) if columns is None else columns
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=columns is not None)
    for i, head in enumerate(heads):
        table.add_column(Text(head), justify="left" if i in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    file = io.StringIO()
    # Wider than any table: what does not fit a terminal is broken there, and whole in a file.
    Console(file=file, color_system=None, width=10_000).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())
