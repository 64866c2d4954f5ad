"""Pages in headless Chromium: what a script sees of them, with virtual or real time."""

import json
from pathlib import Path
import re
import shutil
import subprocess
import tempfile
import time
from typing import Any
import urllib.parse

from lm_jax.errors import UserError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# What precedes the result on the console.
_MARK = "the steps returned "
_RESULT = re.compile(re.escape(_MARK) + r"([^\s\"]*)\"")
# Seconds of the wall's clock for virtual time, on a machine that has other work.
_PATIENCE = 400.0
_SHELL = """<!DOCTYPE html><meta charset="utf-8"><body>
<iframe src="page.html%(hash)s" style="width:%(width)dpx;height:900px;border:0"></iframe>
<script>
document.querySelector("iframe").addEventListener("load", async (event) => {
  const page = event.target.contentWindow;
  const $ = (selector) => page.document.querySelector(selector);
  const all = (selector) => [...page.document.querySelectorAll(selector)];
  const settle = () => new Promise((done) => setTimeout(done, 50));
  const until = async (holds) => {
    for (let i = 0; i < 15 * %(seconds)d && !holds(); i++) await settle();
  };
  const act = async (element, type) => {
    element.dispatchEvent(new page.Event(type, { bubbles: true }));
    await settle();
  };
  let result;
  try {
    await settle();
    result = await (async () => { %(steps)s })();
  } catch (error) {
    result = { error: String(error) };
  }
  console.log(%(mark)s + encodeURIComponent(JSON.stringify(result)));
});
</script>"""

_FRAME = """<!DOCTYPE html><meta charset="utf-8"><body style="margin:0">
<iframe src="%s" scrolling="no" style="width:%dpx;height:%dpx;border:0;display:block"></iframe>"""


class BrowserError(UserError):
    """No browser, a script error, a breach of a page's policy, or steps that did not end."""


def chromium() -> str:
    """The path of a browser.

    Raises:
      BrowserError: there is none.
    """
    result = next(filter(None, map(shutil.which, BROWSERS)), None)
    if result is None:
        raise BrowserError(f"none of {', '.join(BROWSERS)} is installed: install chromium")
    return result


def drive(
    folder: Path,
    text: str,
    steps: str,
    *,
    hash_: str = "",
    width: int = 1280,
    seconds: int = 20,
    virtual: bool = True,
) -> Any:
    """Opens a page in a frame of that width, and returns what the JavaScript `steps` return.

    Args:
      folder: the folder to write the page to.
      steps: the body of an async function of `page` (the frame's window), `$` and `all` (its
        querySelector and querySelectorAll), `settle`, `until` and `act`.
      hash_: the fragment of the page's address, with its `#`.
      seconds: time for the steps, of the page's clock.
      virtual: the page's clock stands still while the page computes, so that the result does not
        depend on the machine. Without it the clock is the wall's and frames can be timed.

    Raises:
      BrowserError: see there.
    """
    (folder / "page.html").write_text(text, "utf-8")
    parts = {"hash": hash_, "width": width, "seconds": seconds, "steps": steps}
    shell = _SHELL % (parts | {"mark": json.dumps(_MARK)})
    (folder / "drive.html").write_text(shell, "utf-8")
    arguments = [
        *(chromium(), "--headless", "--no-sandbox", "--disable-gpu"),
        # A page of a file may then look into another one.
        "--allow-file-access-from-files",
        "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=1400,1000",
    ]
    if virtual:
        arguments += [f"--virtual-time-budget={1000 * seconds}", "--dump-dom"]
    console = folder / "console.txt"
    with console.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            [*arguments, f"file://{folder / 'drive.html'}"], stdout=subprocess.DEVNULL, stderr=out
        )
        try:
            result = _result(process, console, _PATIENCE if virtual else float(seconds))
        finally:
            process.kill()
            process.wait()
    if isinstance(result, dict) and "error" in result:
        raise BrowserError(f"the steps failed: {result['error']}")
    return result


def picture(
    page: Path, file: Path, *, anchor: str = "", width: int, height: int, scale: float = 1.0
) -> None:
    """A PNG of a page's window, of `scale` times its width and height in pixels.

    Raises:
      BrowserError: there is no browser, or it made no picture.
    """
    with tempfile.TemporaryDirectory() as folder:
        # In a frame, for a picture of the page itself starts at its top, whatever the anchor.
        shell = Path(folder, "picture.html")
        shell.write_text(_FRAME % (f"{page.absolute().as_uri()}{anchor}", width, height), "utf-8")
        ended = subprocess.run(
            [
                *(chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                f"--user-data-dir={folder}/profile",
                f"--window-size={width},{height}",
                f"--force-device-scale-factor={scale}",
                "--virtual-time-budget=15000",
                f"--screenshot={file.absolute()}",
                shell.as_uri(),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE,
        )
    if ended.returncode or not file.is_file():
        raise BrowserError(f"{page}: no picture ({ended.stderr.strip()[-300:]})")


def _result(process: subprocess.Popen[bytes], console: Path, seconds: float) -> Any:
    end = time.monotonic() + seconds
    while True:
        ended = process.poll() is not None or time.monotonic() > end
        # The last line may not be whole yet.
        lines = [
            line
            for line in console.read_text("utf-8", "replace").splitlines(keepends=True)
            if "CONSOLE" in line and line.endswith("\n")
        ]
        result = next((match for line in lines if (match := _RESULT.search(line))), None)
        # Uncaught errors and breaches of the policy are on the console too.
        problems = [line.strip() for line in lines if not _RESULT.search(line)]
        if problems and (result or ended):
            raise BrowserError(f"the page wrote on the console: {'; '.join(problems)}")
        if result:
            return json.loads(urllib.parse.unquote(result[1]))
        if ended:
            raise BrowserError(f"the steps did not end: {console.read_text('utf-8')[-500:]!r}")
        time.sleep(0.05)
