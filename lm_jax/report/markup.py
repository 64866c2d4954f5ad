"""Escaped building blocks: one jinja2 environment, one element writer, one number format.

Whatever a report prints passes `clean` and is then escaped, so that hostile prompts, tokens and
file names stay text, and the parts are valid as HTML and as XML.
"""

from collections.abc import Mapping
import json
import math
import numbers
import re
from typing import TypeGuard

import jinja2
from markupsafe import Markup, escape

from lm_jax.errors import UsageError

# characters that XML 1.0 cannot hold, plus the lone surrogates that UTF-8 cannot
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
# What could end a script element, in the only place where JSON can hold it.
_SCRIPT_ESCAPES = str.maketrans({mark: f"\\u{ord(mark):04x}" for mark in "<>&"})
TONES = ("none", "good", "warn", "bad")


def clean(value: object) -> str:
    """Returns `value` as text; markup is passed through, control characters become pictures."""
    if isinstance(value, Markup):
        return value
    return _UNPRINTABLE.sub(_picture, str(value))


ENVIRONMENT = jinja2.Environment(
    autoescape=True,
    finalize=clean,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def element(tag: str, attributes: Mapping[str, object] | None = None, *children: object) -> Markup:
    """Returns one element; attributes of value None are left out, floats are rounded to 0.01.

    Tag and attribute names come from our own code and are not escaped; all values and children are.
    """
    present = ((name, value) for name, value in (attributes or {}).items() if value is not None)
    opened = "".join(f' {name}="{escape(clean(_rounded(value)))}"' for name, value in present)
    inner = "".join(escape(clean(child)) for child in children)
    return Markup(f"<{tag}{opened}>{inner}</{tag}>" if inner else f"<{tag}{opened}/>")


def number(value: object, spec: str = "") -> str:
    """Returns a number as people read it: 41,666, 0.780, 1.2 × 10⁻⁵, −∞, NaN; None is a dash.

    `spec` is a format specification such as ".1f" for finite numbers; without one, whole numbers
    are grouped by thousands and others keep three significant digits. Other values become text.
    """
    if value is None:
        return "–"
    if not is_number(value):
        return clean(value)
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    if spec:
        text = format(value, spec)
        # what is rounded to zero has no sign of its own
        rounded = text if any(digit in text for digit in "123456789") else format(abs(value), spec)
        return rounded.replace("-", "−")
    if isinstance(value, numbers.Integral):
        return f"{value:,}".replace("-", "−")
    if value == 0:
        return "0"
    # the rounded mantissa decides: 9999.6 is 1.00 × 10⁴, not 10000
    mantissa, exponent = f"{value:.2e}".split("e")
    power = int(exponent)
    if -4 < power < 4:
        return f"{value:,.{max(0, 2 - power)}f}".replace("-", "−")
    return f"{mantissa} × {power_of_ten(power)}".replace("-", "−")


def slug(name: str) -> str:
    """Returns a name for an id or a file: lower case letters, digits and single hyphens.

    Never empty, and nothing in it can leave a folder. Names that differ in other characters only
    collide.
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:80].rstrip("-") or "untitled"


def json_script(data: object) -> Markup:
    """Returns data as JSON for a script element of type application/json.

    Nothing in it can end the element, for inside its strings `<`, `>` and `&` are escaped; all is
    ASCII, so that a lone surrogate of a broken text cannot make the page unwritable.
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return Markup(text.translate(_SCRIPT_ESCAPES))


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a real number (numpy scalars too) and not a truth value."""
    # numpy's bool is no Real, Python's is
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def power_of_ten(exponent: int) -> str:
    """Returns 10 with a superscript exponent, in Unicode."""
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def check_tone(tone: str) -> str:
    """Returns `tone` or raises `UsageError`."""
    if tone not in TONES:
        raise UsageError(f"report: tone={tone!r}; use one of {', '.join(TONES)}")
    return tone


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else "\ufffd"


def _rounded(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, float):
        return value
    return f"{value:.2f}".rstrip("0").rstrip(".")
