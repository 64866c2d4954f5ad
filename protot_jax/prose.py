"""Paragraphs and captions of a report, written as Jinja macros in a template beside its code."""

import importlib.resources
import re

from markupsafe import Markup

from lm_jax.report.markup import ENVIRONMENT, number

TEMPLATE = "report.html.j2"


class Prose:
    """Renders the macros of the file `report.html.j2` of a package, each by its name.

    A macro may format numbers by `number` (`lm_jax.report.markup`). Its arguments are escaped.
    """

    def __init__(self, package: str) -> None:
        text = importlib.resources.files(package).joinpath(TEMPLATE).read_text("utf-8")
        # Line ends are for those who edit the template, and captions are one line.
        one_line = re.sub(r"\s+", " ", text)
        self._macros = ENVIRONMENT.from_string(one_line, globals={"number": number}).module

    def __call__(self, macro: str, **values: object) -> Markup:
        """The text of one macro as markup."""
        return Markup(getattr(self._macros, macro)(**values).strip())
