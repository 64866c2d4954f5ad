"""Tables of numbers, and cells that compare our value with a paper's.

A tone is a colour and a sign, so that it survives grey print; the reason is in the cell.
"""

from collections.abc import Callable, Iterable, Sequence
import math
from typing import Any, Literal, NamedTuple

from markupsafe import Markup

from lm_jax.errors import UsageError
from lm_jax.report.markup import ENVIRONMENT, check_tone, is_number, number
from lm_jax.statistics import Interval

ALIGNMENTS = ("left", "right", "center")
SIGNS = {"good": "✓", "warn": "≈", "bad": "✗", "none": ""}

_TABLE = ENVIRONMENT.from_string("""\
<figure class="table">
<figcaption>{{ caption }}
{% if n %}
<span class="n">n = {{ n }}</span>
{% endif %}
</figcaption>
<div class="scroll" tabindex="0">
<table>
<thead><tr>
{% for title, side in heads %}
<th scope="col" class="{{ side }}">{{ title }}</th>
{% endfor %}
</tr></thead>
<tbody>
{% for row in rows %}
<tr>
{% for cell, side in row %}
<td class="{{ side }} {{ cell.tone }}">
{%- if cell.sign %}<span class="sign">{{ cell.sign }}</span> {% endif %}
{{- cell.text -}}
{% if cell.note %}<small>{{ cell.note }}</small>{% endif -%}
</td>
{% endfor %}
</tr>
{% else %}
<tr><td class="empty" colspan="{{ [heads | length, 1] | max }}">no rows</td></tr>
{% endfor %}
</tbody>
</table>
</div>
</figure>
""")


class Cell(NamedTuple):
    """Content of one table cell; build it with `cell`, `rate` or `compared`."""

    text: str | Markup
    note: str = ""
    tone: str = "none"
    numeric: bool = False

    @property
    def sign(self) -> str:
        """The sign that repeats the tone without colour."""
        return SIGNS[self.tone]


class Column(NamedTuple):
    """A column of a table.

    Attributes:
      title: heading, with the unit.
      spec: format of its numbers (".1f", ".0%").
      value: function of a row that gives its value or cell; `table_of` needs it, `table` does not
        read it.
    """

    title: str
    spec: str = ""
    value: Callable[[Any], object] | None = None


def cell(
    value: object,
    *,
    note: str = "",
    tone: Literal["none", "good", "warn", "bad"] = "none",
    spec: str = "",
) -> Cell:
    """Returns a table cell of any value; numbers are formatted by `number`."""
    text = value if isinstance(value, Markup) else number(value, spec)
    return Cell(text, note, check_tone(tone), is_number(value))


def rate(interval: Interval | None, *, spec: str = ".1f", scale: float = 100.0) -> Cell:
    """Returns a cell "98.5 [95.2, 99.5]" with the n under it; rates are printed in percent.

    Without an interval the cell is a dash.
    """
    if interval is None:
        return cell(None)
    return Cell(_interval(interval, spec, scale), f"n = {number(interval.n)}", numeric=True)


def compared(
    ours: float | Interval,
    paper: float | None,
    *,
    tolerance: float,
    spec: str = ".1f",
    scale: float = 1.0,
) -> Cell:
    """Returns our value with the paper's under it, in the colour of their agreement.

    All numbers are multiplied by `scale` (100 for rates) before they are printed; `tolerance` is
    in the unit of the inputs. Good: within the tolerance. Warn: within twice the tolerance, or an
    interval that holds the paper's value. Bad: further, or not finite. Without a paper value there
    is no tone.
    """
    if not tolerance >= 0:
        raise UsageError(f"compared: tolerance={tolerance!r}; need 0 or more")
    interval = ours if isinstance(ours, Interval) else None
    value = ours.estimate if isinstance(ours, Interval) else ours
    text = _interval(interval, spec, scale) if interval else number(_times(value, scale), spec)
    count = f" · n = {number(interval.n)}" if interval else ""
    if paper is None:
        return Cell(text, f"not in the paper{count}", numeric=True)
    difference = abs(value - paper)
    # rounding of decimals must not fail 19.6 against 19.5 at 0.1
    slack = tolerance + 1e-9 * max(1.0, abs(paper))
    if difference <= slack:
        tone = "good"
    elif difference <= 2 * slack or (interval and paper in interval):
        tone = "warn"
    else:
        tone = "bad"
    allowed = number(_times(tolerance, scale), spec)
    return Cell(text, f"paper {number(_times(paper, scale), spec)} ± {allowed}{count}", tone, True)


def table(
    columns: Sequence[str | Column],
    rows: Sequence[Sequence[object]],
    *,
    caption: str,
    align: Sequence[Literal["left", "right", "center"]] | None = None,
    n: int | str | None = None,
) -> Markup:
    """Returns a table that scrolls inside its own box when it is wider than the page.

    A row holds plain values or cells. `align` is one side per column; None puts columns of numbers
    right and others left. A table without rows says so.
    """
    heads = [Column(column) if isinstance(column, str) else column for column in columns]
    for i, row in enumerate(rows):
        if len(row) != len(heads):
            raise UsageError(f"table: row {i} has {len(row)} values for {len(heads)} columns")
    if align is not None and (len(align) != len(heads) or not set(align) <= set(ALIGNMENTS)):
        raise UsageError(
            f"table: align={list(align)!r}; pass {', '.join(ALIGNMENTS)}, one for each of "
            f"{len(heads)} columns"
        )
    cells = [
        [
            value if isinstance(value, Cell) else cell(value, spec=head.spec)
            for value, head in zip(row, heads, strict=True)
        ]
        for row in rows
    ]
    sides = align or [_side([row[i] for row in cells]) for i in range(len(heads))]
    return Markup(
        _TABLE.render(
            heads=list(zip([head.title for head in heads], sides, strict=True)),
            rows=[list(zip(row, sides, strict=True)) for row in cells],
            caption=caption,
            n="" if n is None else number(n),
        )
    )


def table_of(
    rows: Iterable[object],
    columns: Sequence[Column],
    *,
    caption: str,
    n: int | str | None = None,
) -> Markup:
    """Returns a table with one line for each of `rows`: what each column's function makes of it.

    A heading and its cells stand in one `Column`, so that they cannot disagree.
    """
    if missing := [column.title for column in columns if column.value is None]:
        raise UsageError(f"table_of: the column {missing[0]!r} has no function of a row")
    cells = [[column.value(row) for column in columns if column.value] for row in rows]
    return table(columns, cells, caption=caption, n=n)


def _side(cells: Sequence[Cell]) -> str:
    filled = [one for one in cells if one.text != number(None)]
    return "right" if filled and all(one.numeric for one in filled) else "left"


def _interval(interval: Interval, spec: str, scale: float) -> str:
    if not interval.bounded:
        estimate = number(_times(interval.estimate, scale), spec)
        return f"{estimate} (n = {interval.n}: no interval)"
    ends = (interval.estimate, interval.low, interval.high)
    estimate, low, high = (number(_times(end, scale), spec) for end in ends)
    return f"{estimate} [{low}, {high}]"


def interval_text(interval: Interval | None, spec: str = "", scale: float = 1.0) -> str:
    """Returns "98.5 [95.2, 99.5]", or an estimate with its n where that allows no interval."""
    return number(None) if interval is None else _interval(interval, spec, scale)


def _times(value: float, scale: float) -> float:
    # a factor of one keeps whole numbers whole
    return value if scale == 1 or not math.isfinite(value) else value * scale
