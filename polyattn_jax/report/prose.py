"""Long texts of the report: paragraphs, table captions and the glossary, from `prose.html.j2`."""

import functools
import importlib.resources
import re
from typing import Any

from markupsafe import Markup

from lm_jax.report.markup import ENVIRONMENT


def prose(name: str, **values: object) -> Markup:
    """One text of the template, with its values escaped.

    Raises:
      AttributeError: the template has no such text.
      TypeError: a value is not one of the text's.
      jinja2.UndefinedError: a value is missing.
    """
    text = getattr(_texts(), name)(**values)
    return Markup(re.sub(r"\s*\n\s*", " ", text).strip())


@functools.cache
def _texts() -> Any:
    file = importlib.resources.files("polyattn_jax.report").joinpath("prose.html.j2")
    return ENVIRONMENT.from_string(file.read_text("utf-8")).module
