"""The concept report as one offline HTML file: an explorer of prototypes, figures and tables.

    write(folder / "concepts.html", render(result))

After the paper's Figs. 3 to 6 and 10 to 14 (words coloured by gate, half-life badge), Fig. 3 right
(write, read and memory over a text) and Figs. 15 to 18 (score cards). The page shows a
`results.ConceptReport`, which it holds whole, and measures nothing. `page.js` builds the explorer,
`prototype.js`, `ablation.js` and `curves.js` the open prototype, `report_sections.py` and
`units_section.py` the figures and tables; the prose is in `report.html.j2`.
"""

from collections.abc import Mapping
import dataclasses
import importlib.resources

from markupsafe import Markup

from lm_jax import report
from lm_jax.report import Section, section
from lm_jax.report.markup import ENVIRONMENT, json_script
from lm_jax.report.prose import Prose
from lm_jax.run.files import to_jsonable
from protot_jax.studies.concepts import report_sections, units_section
from protot_jax.studies.concepts.results import ConceptReport

_PROSE = Prose("protot_jax.studies.concepts")
_SCRIPTS = ("page.js", "prototype.js", "ablation.js", "curves.js")


def render(result: ConceptReport, *, provenance: Mapping[str, object] | None = None) -> str:
    """The HTML text of the page.

    Args:
      result: of one model.
      provenance: commit, versions and the like, added to the model and the settings.
    """
    lines: dict[str, object] = {
        "model": dataclasses.asdict(result.model),
        "settings": dataclasses.asdict(result.settings),
    }
    parts = [
        explorer(result),
        report_sections.half_lives(result),
        report_sections.reading_first(result),
        report_sections.layers(result),
        units_section.compared_units(result),
        report_sections.labels(result),
        section("Terms", _PROSE("terms")),
    ]
    return report.page(
        "What the prototypes of a language model hold",
        [one for one in parts if one is not None],
        provenance=lines | dict(provenance or {}),
        lead=[_lead(result)],
        script=report.script("protot_jax.studies.concepts", *_SCRIPTS),
        style=_asset("page.css"),
    )


def explorer(result: ConceptReport) -> Section:
    """The interactive part, with the data in it."""
    template = ENVIRONMENT.from_string(_asset("explorer.html.j2"))
    return section(
        "Explore the prototypes",
        _PROSE("explorer", left_out=result.settings.ablated > 0),
        Markup(template.render(data=json_script(to_jsonable(result)))),
    )


def _lead(result: ConceptReport) -> Markup:
    dead = sum(one.write.dead for one in result.layers)
    return _PROSE("lead", model=result.model, settings=result.settings, dead=dead)


def _asset(name: str) -> str:
    return (
        importlib.resources.files("protot_jax.studies.concepts").joinpath(name).read_text("utf-8")
    )
