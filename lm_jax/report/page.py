"""The page: one HTML file that needs no network, with every text escaped.

A content security policy in the file itself forbids every request. Style is inline, and script, if
a page has any, runs by its hash only: markup that slips in cannot run, and nothing is evaluated.
Parts are `Markup` and charts from this package; a plain string is a paragraph. The libraries that
draw charts are in the page once, and not in one without charts.
"""

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import functools
import hashlib
import importlib.resources
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from markupsafe import Markup

from lm_jax.errors import UsageError
from lm_jax.report import figure, theme
from lm_jax.report.markup import ENVIRONMENT, check_tone, element, number, slug

if TYPE_CHECKING:
    import altair as alt

# A paragraph, markup, or a chart, which becomes a figure.
Part: TypeAlias = "str | Markup | alt.LayerChart"

_PAGE = ENVIRONMENT.from_string("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{{ policy }}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="color-scheme" content="light dark">
<title>{{ title }}</title>
<style>
{{ style }}</style>
</head>
<body>
<header>
<h1>{{ title }}</h1>
{{ lead }}
{% if sections | length > 2 %}
<nav aria-label="Contents"><ol>
{% for id, section in sections %}
<li><a href="#{{ id }}">{{ section.title }}</a></li>
{% endfor %}
</ol></nav>
{% endif %}
{% if themes %}
<p class="charts-hint" hidden="hidden">In a chart, point at a mark for its numbers. Drag to move \
the axes, turn the wheel with Ctrl or pinch to zoom, double-click to go back. The menu at its \
corner saves it as SVG or PNG.</p>
{% endif %}
</header>
<main>
{% for id, section in sections %}
<section id="{{ id }}">
<h2>{{ section.title }}</h2>
{{ section.body }}
</section>
{% endfor %}
</main>
<footer>
<h2>Provenance</h2>
{{ provenance }}
</footer>
{% if themes %}
<script type="application/json" id="chart-themes">{{ themes }}</script>
{% endif %}
{% for script in scripts %}
<script>{{ script }}</script>
{% endfor %}
</body>
</html>
""")
_VERDICT = ENVIRONMENT.from_string("""\
<div class="verdict {{ tone }}" role="note">
<strong>{{ text }}</strong>
{% for reason in reasons %}
<p>{{ reason }}</p>
{% endfor %}
</div>
""")
_KEY_VALUES = ENVIRONMENT.from_string("""\
<dl class="facts">
{% for key, value in items %}
<div><dt>{{ key }}</dt><dd>{{ value }}</dd></div>
{% else %}
<div><dd>nothing recorded</dd></div>
{% endfor %}
</dl>
""")


class Section(NamedTuple):
    """A titled run of parts; build it with `section`."""

    title: str
    body: Markup


class Report(NamedTuple):
    """What a study has to say, for its page and for the terminal.

    Attributes:
      title: heading of the page.
      sections: function that makes the sections of the page, in order, None for one that there is
        nothing to say in; the terminal does without them.
      lead: parts above them: the answer.
      lines: the text of the terminal.
      facts: facts of the models and settings that close the page, after the provenance.
      script: the page's own JavaScript.
      style: the page's own CSS.
      exit_code: what the command returns, for a study whose answer a script asks for.
    """

    title: str
    sections: Callable[[], Sequence[Section | None]]
    lead: Sequence[Part]
    lines: Sequence[str]
    facts: Mapping[str, object] = {}
    script: str = ""
    style: str = ""
    exit_code: int = 0


def section(title: str, *parts: Part) -> Section:
    """Returns a section of a page; a plain string becomes a paragraph."""
    return Section(title, _flow(parts))


def page(
    title: str,
    sections: Sequence[Section | None],
    *,
    provenance: Mapping[str, object],
    lead: Iterable[Part] = (),
    script: str = "",
    style: str = "",
) -> str:
    """Returns the HTML text of a whole page.

    `lead` is above the table of contents: the verdict, a summary. A section of None is left out.
    `provenance` (commit, versions, device, dtype, seeds, hashes) closes the page. `script` is our
    own JavaScript and `style` our own CSS, which comes after the package's; neither is data, and
    they may not contain "</" or "<!--".
    """
    for name, code in (("script", script), ("style", style)):
        if "</" in code or "<!--" in code:
            raise UsageError(
                f"page: {name} contains '</' or '<!--', which ends it early; escape it"
            )
    opening, shown = _flow(lead), [one for one in sections if one is not None]
    charted = any(figure.MARK in part for part in (opening, *(one.body for one in shown)))
    scripts = [Markup(one) for one in (*(figure.scripts() if charted else ()), script) if one]
    ids = _ids(one.title for one in shown)
    return _PAGE.render(
        title=title,
        lead=opening,
        sections=list(zip(ids, shown, strict=True)),
        provenance=key_values(provenance),
        policy=_policy(scripts),
        style=Markup(theme.css() + _asset("lm_jax.report", "report.css") + style),
        themes=figure.themes() if charted else "",
        scripts=scripts,
    )


def script(package: str, *names: str) -> str:
    """Returns the code of a page: files of a package in order, after `elements.js` of this one."""
    files = [("lm_jax.report", "elements.js"), *((package, name) for name in names)]
    code = "".join(_asset(*file) for file in files)
    return f'(() => {{\n"use strict";\n{code}}})();'


def verdict(
    text: str, *reasons: str | Markup, tone: Literal["none", "good", "warn", "bad"] = "none"
) -> Markup:
    """Returns a banner: the answer in one sentence, then its reasons and the next step."""
    return Markup(_VERDICT.render(text=text, reasons=reasons, tone=check_tone(tone)))


def coverage(present: int, expected: int, *, missing: Sequence[str] = ()) -> Markup:
    """Returns the remark on the share of rows that a report rests on; a gap is a warning.

    `missing` names the missing shards or files.
    """
    if not 0 <= present <= expected:
        raise UsageError(f"coverage: present={present}, expected={expected}; need 0 <= present")
    text = f"{number(present)} of {number(expected)} rows"
    if present == expected and not missing:
        return element("p", {"class": "coverage"}, f"Rests on all {number(expected)} rows.")
    gaps = [f"Missing: {', '.join(missing)}."] if missing else []
    return verdict(f"Incomplete: rests on {text}.", *gaps, tone="warn")


def key_values(items: Mapping[str, object]) -> Markup:
    """Returns names with values; nested mappings are flattened to dotted names."""
    return Markup(_KEY_VALUES.render(items=_flat(items)))


def facts(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The provenance of a run (`record_provenance`) with each of its lists on one line."""
    values = dict(provenance)
    restarts = values.pop("restarts", None) or []
    for group in ("packages", "device"):
        if entries := values.get(group):
            values[group] = [f"{key} {value}" for key, value in entries.items()]
    values["git"] = values.get("git") or "not a tracked checkout"
    return values | {"restarts": [str(one.get("start")) for one in restarts]}


def details(summary: str, *parts: Part) -> Markup:
    """Returns parts that are folded until the reader opens them."""
    return element("details", None, element("summary", None, summary), _flow(parts))


def grid(*parts: Part) -> Markup:
    """Returns parts side by side where the page is wide enough, below each other elsewhere."""
    return element("div", {"class": "grid"}, _flow(parts))


def _flow(parts: Iterable[Part]) -> Markup:
    return Markup("\n").join(map(_block, parts))


def _block(part: Part) -> Markup:
    if isinstance(part, Markup):
        return part
    return element("p", None, part) if isinstance(part, str) else figure.figure(part)


def _flat(items: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in items.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{name}.")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield name, ", ".join(map(str, value)) or "none"
        else:
            yield name, "none" if value is None else value


def _ids(titles: Iterable[str]) -> list[str]:
    # the number keeps ids apart when titles agree or have no Latin letter
    return [f"{i}-{slug(title)}" for i, title in enumerate(titles, 1)]


def _policy(scripts: Sequence[str]) -> str:
    rules = ["default-src 'none'", "style-src 'unsafe-inline'", "img-src data:"]
    if scripts:
        hashes = (hashlib.sha256(script.encode()).digest() for script in scripts)
        allowed = " ".join(f"'sha256-{base64.b64encode(one).decode()}'" for one in hashes)
        rules.append(f"script-src {allowed}")
    return "; ".join([*rules, "base-uri 'none'", "form-action 'none'"])


@functools.cache
def _asset(package: str, name: str) -> str:
    return importlib.resources.files(package).joinpath(name).read_text("utf-8")
