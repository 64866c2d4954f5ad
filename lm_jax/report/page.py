"""The page: one HTML file that needs no network, with every text escaped.

A content security policy in the file itself forbids every request. Style is inline, and script, if
a page has any, runs by its hash only: markup that slips in cannot run. Parts are `Markup` from
this package; a plain string is a paragraph.
"""

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
import functools
import hashlib
import importlib.resources
import re
from typing import Any, Literal, NamedTuple

from markupsafe import Markup

from lm_jax.errors import UsageError
from lm_jax.report.markup import ENVIRONMENT, check_tone, element, number

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
{% if script %}
<script>{{ script }}</script>
{% endif %}
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


def section(title: str, *parts: str | Markup) -> Section:
    """Returns a section of a page; a plain string becomes a paragraph."""
    return Section(title, _flow(parts))


def page(
    title: str,
    sections: Sequence[Section],
    *,
    provenance: Mapping[str, object],
    lead: Iterable[str | Markup] = (),
    script: str = "",
    style: str = "",
) -> str:
    """Returns the HTML text of a whole page.

    `lead` stands above the table of contents: the verdict, a summary. `provenance` (commit,
    versions, device, dtype, seeds, hashes) closes the page. `script` is our own JavaScript and
    `style` our own CSS, which comes after the house's; neither is data, and they may not contain
    "</" or "<!--".
    """
    for name, code in (("script", script), ("style", style)):
        if "</" in code or "<!--" in code:
            raise UsageError(
                f"page: {name} contains '</' or '<!--', which ends it early; escape it"
            )
    ids = _ids(one.title for one in sections)
    return _PAGE.render(
        title=title,
        lead=_flow(lead),
        sections=list(zip(ids, sections, strict=True)),
        provenance=key_values(provenance),
        policy=_policy(script),
        style=Markup(_style() + style),
        script=Markup(script),
    )


def verdict(
    text: str, *reasons: str | Markup, tone: Literal["none", "good", "warn", "bad"] = "none"
) -> Markup:
    """Returns a banner: the answer in one sentence, then what it rests on and the next step."""
    return Markup(_VERDICT.render(text=text, reasons=reasons, tone=check_tone(tone)))


def coverage(present: int, expected: int, *, missing: Sequence[str] = ()) -> Markup:
    """Returns the remark on which share of the rows a report rests; a gap is a warning.

    `missing` names the shards or files that are not there.
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
    shown = dict(provenance)
    restarts = shown.pop("restarts", None) or []
    for group in ("packages", "device"):
        if values := shown.get(group):
            shown[group] = [f"{key} {value}" for key, value in values.items()]
    shown["git"] = shown.get("git") or "not a tracked checkout"
    return shown | {"restarts": [str(one.get("start")) for one in restarts]}


def details(summary: str, *parts: str | Markup) -> Markup:
    """Returns parts that stay folded until the reader opens them."""
    return element("details", None, element("summary", None, summary), _flow(parts))


def grid(*parts: Markup) -> Markup:
    """Returns parts side by side where the page is wide enough, below each other elsewhere."""
    return element("div", {"class": "grid"}, *parts)


def slug(name: str) -> str:
    """Returns a name for an id or a file: lower case letters, digits and single hyphens.

    Never empty, and nothing in it can leave a folder. Names that differ in other characters only
    collide.
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:80].rstrip("-") or "untitled"


def _flow(parts: Iterable[str | Markup]) -> Markup:
    blocks = [part if isinstance(part, Markup) else element("p", None, part) for part in parts]
    return Markup("\n").join(blocks)


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


def _policy(script: str) -> str:
    rules = ["default-src 'none'", "style-src 'unsafe-inline'", "img-src data:"]
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        rules.append(f"script-src 'sha256-{digest}'")
    return "; ".join([*rules, "base-uri 'none'", "form-action 'none'"])


@functools.cache
def _style() -> str:
    return importlib.resources.files("lm_jax.report").joinpath("report.css").read_text("utf-8")
