"""Reading pages: their own markup, and how they work in headless Chromium."""

import html
import json
from pathlib import Path
import re
import shutil
import subprocess
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def without_scripts(text: str) -> str:
    """A page without the scripts that run, among them the libraries of charts."""
    return re.sub("<script>.*?</script>", "", text, flags=re.DOTALL)


def chromium() -> str:
    """The path of a browser; without one the test is skipped."""
    result = next(filter(None, map(shutil.which, BROWSERS)), None)
    if result is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    return result


def drive(
    folder: Path,
    text: str,
    steps: str,
    *,
    hash_: str = "",
    width: int = 1280,
    seconds: int = 20,
) -> Any:
    """Opens a page in a frame of that width, and returns what the JavaScript `steps` return.

    `steps` is the body of a function of `page` (the frame's window) and `$` (its querySelector).
    They have so many seconds of the page's clock, which stands still while the page computes.
    """
    (folder / "page.html").write_text(text, "utf-8")
    (folder / "drive.html").write_text(
        f"""<!DOCTYPE html><meta charset="utf-8"><body><pre id="out"></pre>
<iframe src="page.html{hash_}" style="width:{width}px;height:900px;border:0"></iframe>
<script>
document.querySelector("iframe").addEventListener("load", async (event) => {{
  const page = event.target.contentWindow;
  const $ = (selector) => page.document.querySelector(selector);
  const all = (selector) => [...page.document.querySelectorAll(selector)];
  const settle = () => new Promise((done) => setTimeout(done, 50));
  const until = async (holds) => {{
    for (let i = 0; i < {15 * seconds} && !holds(); i++) await settle();
  }};
  const act = async (element, type) => {{
    element.dispatchEvent(new page.Event(type, {{ bubbles: true }}));
    await settle();
  }};
  let found;
  try {{
    await settle();
    found = await (async () => {{ {steps} }})();
  }} catch (error) {{
    found = {{ error: String(error) }};
  }}
  document.getElementById("out").textContent = JSON.stringify(found);
}});
</script>""",
        "utf-8",
    )
    ran = subprocess.run(
        [
            chromium(),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            # A page of a file may then look into another one.
            "--allow-file-access-from-files",
            "--enable-logging=stderr",
            f"--virtual-time-budget={1000 * seconds}",
            f"--user-data-dir={folder / 'profile'}",
            "--window-size=1400,1000",
            "--dump-dom",
            f"file://{folder / 'drive.html'}",
        ],
        capture_output=True,
        text=True,
        # Of the clock on the wall, on a machine that has other work.
        timeout=400,
        check=True,
    )
    # Uncaught errors and breaches of the policy are told on the console.
    console = [line for line in ran.stderr.splitlines() if "CONSOLE" in line]
    assert console == []
    out = re.search(r'<pre id="out">(.*?)</pre>', ran.stdout, re.DOTALL)
    assert out is not None, ran.stdout[:2000]
    result = json.loads(html.unescape(out[1]))
    assert not (isinstance(result, dict) and "error" in result), result
    return result
