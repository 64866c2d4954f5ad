"""Reading pages: their own markup, and how they work in headless Chromium."""

from pathlib import Path
import re
import shutil
from typing import Any

import pytest

from tools import browser


def without_scripts(text: str) -> str:
    """A page without the scripts that run, among them the libraries of charts."""
    return re.sub("<script>.*?</script>", "", text, flags=re.DOTALL)


needs_browser = pytest.mark.skipif(
    not any(map(shutil.which, browser.BROWSERS)),
    reason=f"none of {', '.join(browser.BROWSERS)} is installed",
)


def drive(folder: Path, text: str, steps: str, **options: Any) -> Any:
    """`tools.browser.drive`; the test is skipped without a browser."""
    if not any(map(shutil.which, browser.BROWSERS)):
        pytest.skip(needs_browser.kwargs["reason"])
    return browser.drive(folder, text, steps, **options)
