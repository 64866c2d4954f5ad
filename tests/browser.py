"""Reading pages: their own markup, and how they work in headless Chromium."""

import html.parser
from pathlib import Path
import re
import shutil
from typing import Any

import pytest

from tools.pictures import browser


class PageReader(html.parser.HTMLParser):
    """What a page is made of.

    Attributes:
      tags: elements in order, each with its attributes.
      scripts: attributes and code of each script.
      text: text that is shown, without scripts and styles.
    """

    _EMPTY = frozenset({"meta", "br", "img", "input", "hr", "col", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self._EMPTY:
            self._open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "script":
            attrs, code = self.scripts[-1]
            self.scripts[-1] = attrs, code + data
        elif inside != "style":
            self.text += data

    @property
    def is_closed(self) -> bool:
        """Whether every element has its end."""
        return not self._open

    def values(self, *names: str) -> list[str | None]:
        """The values of attributes of these names, in order."""
        return [attrs[name] for _, attrs in self.tags for name in names if name in attrs]


def without_scripts(text: str) -> str:
    """A page without the scripts that run, among them the libraries of charts."""
    return re.sub("<script>.*?</script>", "", text, flags=re.DOTALL)


needs_browser = pytest.mark.skipif(
    not any(map(shutil.which, browser.BROWSERS)),
    reason=f"none of {', '.join(browser.BROWSERS)} is installed",
)


def drive(folder: Path, text: str, steps: str, **options: Any) -> Any:
    """`tools.pictures.browser.drive`; the test is skipped without a browser."""
    if not any(map(shutil.which, browser.BROWSERS)):
        pytest.skip(needs_browser.kwargs["reason"])
    return browser.drive(folder, text, steps, **options)
