"""The concept report as one offline HTML file: an explorer of prototypes, and what they add up to.

    write(folder / "concepts.html", render(result))

After the paper's Figs. 3 to 6 and 10 to 14 (words coloured by gate, half-life badge), Fig. 3 right
(write, read and memory over a text) and Figs. 15 to 18 (score cards). The page shows a
`results.ConceptReport`, which it holds whole, and measures nothing. `page.js` builds the explorer,
`prototype.js` and `curves.js` what is open in it; `sections.py` makes the rest.
"""

from collections.abc import Mapping
import dataclasses
import importlib.resources

from markupsafe import Markup

from lm_jax import report
from lm_jax.report import Section, section
from lm_jax.report.markup import ENVIRONMENT, json_script, number
from lm_jax.run.files import to_jsonable
from protot_jax.concepts import report_sections
from protot_jax.concepts.results import ConceptReport

_SCRIPTS = ("page.js", "prototype.js", "curves.js")

TERMS = {
    "prototype": "A channel through which tokens of a layer inform later ones. Every token writes "
    "to prototypes and reads from them; there is no other way from token to token but a short "
    "convolution.",
    "write gate, read gate": "How much of a token goes into a prototype, and how much of the "
    "prototype goes into a token; between 0 and 1.",
    "memory": "The discounted mean of a prototype's write gate over the tokens before this one: "
    "how much recent writing a read finds.",
    "half-life": "After how many tokens the weight of something written has halved: "
    "−ln 2 / ln decay.",
    "L1 ratio": "A token's largest gate divided by its mean gate (Eq. 3). High where one prototype "
    "takes nearly all of the token.",
    "peak over mean": "A prototype's largest gate over all tokens, divided by its mean gate. High "
    "for a prototype that answers to little.",
    "Gini, entropy": "How unequally a token's gates are spread over the prototypes of a layer. "
    "Gini 0 and the highest entropy mean evenly, Gini near 1 and entropy 0 mean one prototype.",
    "mutual information, MI": "How much the gate says about which token it is, in nats: gate in 10 "
    "quantile bins, corrected after Miller and Madow. By chance: the same with the tokens "
    "shuffled, which is not 0 where tokens are rare; only what is above it is information.",
    "leads": "A prototype leads at a token if its gate is the largest of its layer.",
    "active, dead": "Active is a gate of 0.01 or more; dead is a prototype that is never active.",
    "repetition": "1 − unique / all of the tokens that a prototype writes most. High where the "
    "same few come again and again.",
    "lag": "By how many tokens reading follows writing where the two go together most; −1 means "
    "that reading comes one token before.",
    "disentanglement, coverage, themes": "A judge's scores from 1 to 10: how far the main theme "
    "stands alone, how many of ten texts hold it, and how many unrelated themes there are.",
}


def render(result: ConceptReport, *, provenance: Mapping[str, object] | None = None) -> str:
    """The HTML text of the page.

    Args:
      result: of one model.
      provenance: commit, versions and the like; the model and the settings are always told.
    """
    asked = {"model": result.model, "settings": result.settings}
    lines = {name: dataclasses.asdict(of) for name, of in asked.items()} | dict(provenance or {})
    parts = [
        explorer(result),
        report_sections.half_lives(result),
        report_sections.reading_first(result),
        report_sections.layers(result),
        report_sections.labels(result),
        section("Terms", report.key_values(TERMS)),
    ]
    return report.page(
        "What the prototypes of a language model hold",
        parts,
        provenance=lines,
        lead=_lead(result),
        script=_script(),
        style=_asset("page.css"),
    )


def explorer(result: ConceptReport) -> Section:
    """The interactive part, with the data in it."""
    template = ENVIRONMENT.from_string(_asset("explorer.html.j2"))
    return section(
        "Explore the prototypes",
        "Choose a prototype in the map or the list. Its texts are coloured by how much each word "
        "writes to it; point at a word, or move to it with the keyboard, for its values. The "
        "address of the page names the open prototype and can be passed on.",
        Markup(template.render(data=json_script(to_jsonable(result)))),
    )


def _lead(result: ConceptReport) -> list[str | Markup]:
    model, settings = result.model, result.settings
    dead = sum(one.write.dead for one in result.layers)
    return [
        f"A Prototype Transformer of {number(model.layers)} layers with "
        f"{number(model.prototypes)} prototypes each and {number(model.parameters)} "
        f"parameters, trained on {model.corpus} (seed {model.seed}, step "
        f"{number(model.step)}). It was read over the beginnings of {number(settings.texts)} "
        f"{settings.split} documents, up to {number(settings.length)} tokens of each and "
        f"{number(settings.tokens)} in all, at a perplexity of {number(model.perplexity)}. "
        + (f"{number(dead)} prototypes are dead." if dead else "No prototype is dead.")
    ]


def _script() -> str:
    code = "".join(_asset(name) for name in _SCRIPTS)
    return f'(() => {{\n"use strict";\n{code}}})();'


def _asset(name: str) -> str:
    return importlib.resources.files("protot_jax.concepts").joinpath(name).read_text("utf-8")
