"""Colour as value: a heat map of a matrix, and a text whose words are coloured.

One hue of growing strength for values of one sign, two hues that meet at zero otherwise. Strength
is opacity over the page colour, so that the same marks read on light and on dark pages.
"""

from collections.abc import Sequence
import dataclasses
import itertools

from markupsafe import Markup
import numpy as np
from numpy.typing import ArrayLike

from lm_jax.errors import UsageError, nearest
from lm_jax.report import canvas as surface
from lm_jax.report import marks
from lm_jax.report.markup import ENVIRONMENT, clean, number
from lm_jax.report.scales import extent, showable

SCALES = ("sequential", "diverging")
# height of a tick label at the size that narrow screens use (report.css)
_LINE = 17
_TALLEST, _SHORTEST = 30.0, 9.0
# beyond this strength a cell needs the light text
_STRONG = 0.55

_KEY = ENVIRONMENT.from_string("""\
<span class="key">{{ low }}<span class="ramp {{ kind }}"></span>{{ high }}</span>
{% if missing %}
<span class="key"><span class="ramp missing"></span>no value</span>
{% endif %}
""")
_WORDS = ENVIRONMENT.from_string("""\
<figure class="words">
<p>
{%- for text, style, strength, title in words -%}
<span class="word {{ style }}" style="--strength:{{ strength }}" title="{{ title }}">{{ text }}\
</span>
{%- endfor -%}
</p>
<div class="legend">{{ key }}</div>
<figcaption>{{ caption }} <span class="n">n = {{ n }}</span></figcaption>
</figure>
""")


@dataclasses.dataclass(frozen=True)
class _Ramp:
    low: float
    high: float
    diverging: bool

    def __call__(self, value: float) -> tuple[str, float]:
        """Returns the class of the hue and its strength in 0..1; what lies beyond is at the end."""
        if not showable(value):
            return "missing", 0.0
        if self.diverging:
            return "cold" if value < 0 else "hot", min(1.0, abs(value) / self.high)
        return "hot", float(np.clip((value - self.low) / (self.high - self.low), 0.0, 1.0))

    def key(self, *, missing: bool) -> Markup:
        low, high = number(self.low), number(self.high)
        kind = "two-hues" if self.diverging else "one-hue"
        return Markup(_KEY.render(low=low, high=high, kind=kind, missing=missing))


def heat_map(
    matrix: ArrayLike,
    *,
    caption: str,
    x_label: str,
    y_label: str,
    row_labels: Sequence[object] | None = None,
    column_labels: Sequence[object] | None = None,
    scale: str | None = None,
    value_range: tuple[float, float] | None = None,
    titles: Sequence[Sequence[str]] | None = None,
    show_values: bool = False,
    spec: str = "",
    n: int | str | None = None,
) -> Markup:
    """Returns a matrix as cells, first row on top; labels default to indices from 0.

    `scale` is "sequential" or "diverging"; None is diverging where signs differ. Values that are
    not finite are grey, never coloured. `titles` replaces the text under the pointer.
    """
    matrix = np.asarray(matrix, dtype=float)
    if matrix.ndim != 2:
        raise UsageError(f"heat_map: matrix has shape {matrix.shape}; pass rows by columns")
    rows = _labels("row_labels", row_labels, matrix.shape[0])
    columns = _labels("column_labels", column_labels, matrix.shape[1])
    if titles is not None and [len(row) for row in titles] != [len(columns)] * len(rows):
        raise UsageError(f"heat_map: titles must have the shape of the matrix, {matrix.shape}")
    ramp = _ramp("heat_map", matrix, scale, value_range)
    left = max([0.0, *map(marks.text_width, rows)]) + 10
    wide = (surface.WIDTH - left - 4) / max(len(columns), 1)
    tall = min(_TALLEST, max(_SHORTEST, wide))
    cells, values = [], []
    for i, j in np.ndindex(matrix.shape):
        (style, strength), text = ramp(matrix[i, j]), number(float(matrix[i, j]), spec)
        x, y = left + j * wide, 4 + i * tall
        title = titles[i][j] if titles else f"{y_label} {rows[i]}, {x_label} {columns[j]}: {text}"
        opacity = {} if style == "missing" else {"fill-opacity": strength}
        cells.append(marks.box(x, y, x + wide, y + tall, f"cell {style}", title, **opacity))
        if style == "missing":
            cells.append(marks.line(x, y + tall, x + wide, y, "axis"))
        tone = "value strong" if strength > _STRONG else "value"
        middle = x + wide / 2, y + tall / 2
        values.append(marks.label(*middle, text, anchor="middle", middle=True, style=tone))
    base = 4 + tall * len(rows)
    axes = [
        marks.label(left - 6, 4 + (i + 0.5) * tall, rows[i], anchor="end", middle=True)
        for i in range(0, len(rows), _stride(_LINE / tall))
    ]
    widest = max([0.0, *map(marks.text_width, columns)])
    axes += [
        marks.label(left + (j + 0.5) * wide, base + 18, columns[j], anchor="middle")
        for j in range(0, len(columns), _stride((widest + 4) / wide))
    ]
    return surface.figure(
        *cells,
        *(values if show_values else []),
        *axes,
        caption=caption,
        x_label=x_label,
        y_label=y_label,
        n=n,
        legend=ramp.key(missing=not showable(matrix).all()),
        omitted=surface.omission(int((~showable(matrix)).sum()), log=False),
        downwards=True,
        height=base + surface.BOTTOM,
    )


def words(
    tokens: Sequence[str],
    values: ArrayLike,
    *,
    caption: str,
    scale: str | None = None,
    value_range: tuple[float, float] | None = None,
    titles: Sequence[str] | None = None,
) -> Markup:
    """Returns running text with a colour behind each token; the pointer shows token and value.

    Line ends inside a token are shown as ↵ and kept. Values that are not finite leave it grey.
    """
    values = np.asarray(values, dtype=float)
    if values.shape != (len(tokens),) or (titles is not None and len(titles) != len(tokens)):
        raise UsageError(
            f"words: {len(tokens)} tokens, values {values.shape}; pass one value (and title) each"
        )
    ramp = _ramp("words", values, scale, value_range)
    spans = []
    for i, (token, value) in enumerate(zip(tokens, values, strict=True)):
        style, strength = ramp(value)
        title = titles[i] if titles else f"{token!r}: {number(float(value))}"
        spans.append((clean(token).replace("\n", "↵\n"), style, f"{strength:.2f}", title))
    key = ramp.key(missing=not showable(values).all())
    count = f"{number(len(tokens))} token{'s' * (len(tokens) != 1)}"
    return Markup(_WORDS.render(words=spans, key=key, caption=caption, n=count))


def _ramp(
    where: str, values: np.ndarray, scale: str | None, given: tuple[float, float] | None
) -> _Ramp:
    if scale not in (None, *SCALES):
        raise UsageError(f"{where}: scale={scale!r}{nearest(str(scale), SCALES)}")
    low, high = extent([values], given=given, pad=0.0)
    if scale == "diverging" or (scale is None and low < 0 < high):
        end = max(abs(low), abs(high))
        return _Ramp(-end, end, True)
    return _Ramp(low, high, False)


def _labels(field: str, given: Sequence[object] | None, count: int) -> list[str]:
    names = list(range(count) if given is None else given)
    if len(names) != count:
        raise UsageError(f"heat_map: {field} has {len(names)} names for {count}; pass one each")
    return [marks.shortened(str(name), 0.3 * surface.WIDTH) for name in names]


def _stride(least: float) -> int:
    steps = (m * 10**e for e in itertools.count() for m in (1, 2, 5))
    return next(step for step in steps if step >= least)
