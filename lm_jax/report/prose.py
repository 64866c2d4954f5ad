"""Paragraphs and captions of a report, written as Jinja macros in a template beside its code."""

import functools
import importlib.resources
import re
from typing import Any

from markupsafe import Markup

from lm_jax.report.markup import ENVIRONMENT, number

TEMPLATE = "report.html.j2"


class Prose:
    """The texts of a report: the macros in a template of a package, by default `report.html.j2`.

    A macro may format numbers by `number` (`lm_jax.report.markup`). The template is read at the
    first text.
    """

    def __init__(self, package: str, template: str = TEMPLATE) -> None:
        self._file = (package, template)

    def __call__(self, macro: str, *values: object, **named: object) -> Markup:
        """One text on one line, with its values escaped.

        Raises:
          AttributeError: the template has no such macro.
          TypeError: a value is not one of the macro's.
          jinja2.UndefinedError: a value is missing.
        """
        text = getattr(_macros(*self._file), macro)(*values, **named)
        # Line ends are for those who edit the template.
        return Markup(re.sub(r"\s*\n\s*", " ", text).strip())


@functools.cache
def _macros(package: str, template: str) -> Any:
    file = importlib.resources.files(package).joinpath(template)
    return ENVIRONMENT.from_string(file.read_text("utf-8"), globals={"number": number}).module
