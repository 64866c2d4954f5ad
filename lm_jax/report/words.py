"""Running text with tokens coloured by their values.

One hue of growing strength for values of one sign, two hues that meet at zero otherwise. Strength
is opacity over the page colour, so that the same marks read on light and on dark pages.
"""

from collections.abc import Sequence

from markupsafe import Markup
import numpy as np
from numpy.typing import ArrayLike

from lm_jax.errors import UsageError
from lm_jax.report.markup import ENVIRONMENT, clean, number
from lm_jax.report.scales import colour_scale, showable

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


def words(
    tokens: Sequence[str],
    values: ArrayLike,
    *,
    caption: str,
    scale: str | None = None,
    value_range: tuple[float, float] | None = None,
    titles: Sequence[str] | None = None,
    unit: str = "token",
) -> Markup:
    """Returns running text with a colour behind each token; the pointer shows token and value.

    Line ends inside a token are shown as ↵ and kept. Values that are not finite leave it grey.
    `unit` names what `tokens` are beside their number, in the singular: "word" for whole words.
    """
    values = np.asarray(values, dtype=float)
    if values.shape != (len(tokens),) or (titles is not None and len(titles) != len(tokens)):
        raise UsageError(
            f"words: {len(tokens)} tokens, values {values.shape}; pass one value (and title) each"
        )
    low, high, diverging = colour_scale("words", values, scale, value_range)
    spans = []
    for i, (token, value) in enumerate(zip(tokens, values, strict=True)):
        style, strength = _hue(value, low, high, diverging)
        title = titles[i] if titles else f"{token!r}: {number(float(value))}"
        spans.append((clean(token).replace("\n", "↵\n"), style, f"{strength:.2f}", title))
    key = _KEY.render(
        low=number(low),
        high=number(high),
        kind="two-hues" if diverging else "one-hue",
        missing=not showable(values).all(),
    )
    count = f"{number(len(tokens))} {unit}{'s' * (len(tokens) != 1)}"
    return Markup(_WORDS.render(words=spans, key=Markup(key), caption=caption, n=count))


def _hue(value: float, low: float, high: float, diverging: bool) -> tuple[str, float]:
    """Returns the class of the hue and its strength in 0..1; what lies beyond is at the end."""
    if not showable(value):
        return "missing", 0.0
    if diverging:
        return "cold" if value < 0 else "hot", min(1.0, abs(value) / high)
    return "hot", float(np.clip((value - low) / (high - low), 0.0, 1.0))
