"""A chart as a figure of the page: drawing, caption and the table of its numbers.

The page holds Vega, Vega-Lite and vega-embed once (`scripts`), and each figure its specification.
Vega compiles the expressions of a chart by `Function`, which would need 'unsafe-eval' in the policy
of the page; vega-embed brings an interpreter for them, which `charts.js` asks for by `ast`, so that
nothing but these scripts runs, by their hashes.
"""

from collections.abc import Mapping, Sequence
import functools
import importlib.resources
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from lm_jax.report import theme
from lm_jax.report.markup import ENVIRONMENT, is_number, json_script, number, slug

if TYPE_CHECKING:
    import altair as alt

# Only a page with a chart contains it: text from elsewhere is escaped.
MARK = '<figure class="plot chart"'
_FIGURE = ENVIRONMENT.from_string("""\
<figure class="plot chart" data-name="{{ name }}">
<div class="drawing" style="min-height: {{ height }}px"></div>
<script type="application/json">{{ spec }}</script>
<figcaption>{{ caption }}
{% if n %}
<span class="n">n = {{ n }}</span>
{% endif %}
{% if remark %}
<span class="omitted">{{ remark }}</span>
{% endif %}
<noscript>A script draws this figure; without it, read its numbers in the table.</noscript>
</figcaption>
<details class="numbers">
<summary>Numbers of this figure</summary>
{% if references %}
<p>Lines: {% for name, value in references %}{{ name }} at {{ value }}{{ "; " if not loop.last }}\
{% endfor %}.</p>
{% endif %}
<div class="scroll" tabindex="0">
<table>
<thead><tr>{% for head in heads %}<th scope="col">{{ head }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
</div>
</details>
</figure>
""")


def figure(chart: "alt.LayerChart") -> Markup:
    """Returns a chart of `charts` as a figure, which its page draws (`scripts`)."""
    # Altair checks each part as it is made, and the tests of charts check whole ones.
    spec = chart.to_dict(validate=False)
    metadata, data = spec.pop("usermeta"), spec["data"]["values"]
    # The reader's colour scheme and the page determine colours and width, the page prints caption
    # and notes, and no address is left.
    for name in ("config", "$schema", "title"):
        spec.pop(name)
    autosize = {"type": "fit-x", "contains": "padding"}
    wide = metadata["matrix"]
    heads, rows = (
        _matrix(metadata["columns"], data, wide) if wide else _table(metadata["columns"], data)
    )
    return Markup(
        _FIGURE.render(
            name=slug(spec["description"])[:40].strip("-"),
            # room for the axis, so that what follows does not jump
            height=round(spec["height"]) + 50,
            spec=json_script(spec | {"width": "container", "autosize": autosize}),
            caption=spec["description"],
            heads=heads,
            rows=rows,
            **{name: metadata[name] for name in ("n", "remark", "references")},
        )
    )


def scripts() -> tuple[str, str]:
    """Returns the libraries that draw charts, and our script that calls them."""
    own = importlib.resources.files("lm_jax.report").joinpath("charts.js").read_text("utf-8")
    return _libraries(), f'(() => {{\n"use strict";\n{own}}})();'


def themes() -> Markup:
    """Returns the configs of charts on light and dark pages, as the content of a script element."""
    palettes = {"light": theme.LIGHT, "dark": theme.DARK}
    return json_script({name: theme.vega_config(palette) for name, palette in palettes.items()})


@functools.cache
def _libraries() -> str:
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def _table(
    columns: Mapping[str, str], data: Sequence[Mapping[str, Any]]
) -> tuple[list[str], list[list[str]]]:
    rows = [[_cell(row.get(field)) for field in columns] for row in data]
    return list(columns.values()), rows


def _matrix(
    columns: Mapping[str, str], data: Sequence[Mapping[str, Any]], wide: int
) -> tuple[list[str], list[list[str]]]:
    """Rows of `wide` cells, as in the chart."""
    (up, up_title), (across, across_title), (value, _), *_ = columns.items()
    lines = [data[start : start + wide] for start in range(0, len(data), wide)]
    heads = [f"{up_title} ↓ {across_title} →", *(_cell(cell[across]) for cell in data[:wide])]
    return heads, [[_cell(line[0][up]), *(_cell(cell[value]) for cell in line)] for line in lines]


def _cell(value: object) -> str:
    """A number with four significant digits, or all of a whole one; the chart holds the others."""
    if not is_number(value) or isinstance(value, int):
        return number(value)
    # from 10,000 on, digits before the point are plainer than an exponent
    return number(value, ",.0f" if 9999.5 <= abs(value) < 1e15 else ",.4g")
