"""Time of what a reader does on the page of an attribution graph, in headless Chromium.

    python -m tools.time_viewer                                  2,000 nodes and 50,000 edges
    python -m tools.time_viewer --graph=FILE.json --repeats=10   a graph that was written before

The graph is random. Each action is sent to the page as a browser sends it, and its time runs until
the second frame after it, when its drawing is on the screen; that of an idle page is measured in
turns with it. Edges come in over several frames after an action: the longest of those frames is
printed too, and the time until the last edge. Chromium draws without a GPU here.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
import statistics
import sys
import tempfile
from typing import Any

from lm_jax.run.files import read_json
from sparse_jax.studies.graphs import page
from tools.bench import front
from tools.bench.graph_documents import synthetic
from tools.bench.timing import ratio
from tools.pictures.browser import drive

NODES, LINKS = 2_000, 50_000
_SECONDS = 400
# An action and the text that the table has for it. Each has the turn `k` as its argument.
ACTIONS = {
    "idle": "",
    "point at a place": """$("#scroller").dispatchEvent(new page.PointerEvent("pointermove",
      { clientX: box.left + (37 * k) % box.width, clientY: box.top + (53 * k) % box.height,
        bubbles: true }))""",
    "click on a node": """$("#scroller").dispatchEvent(new page.PointerEvent("click",
      { clientX: places[k][0], clientY: places[k][1], bubbles: true }))""",
    "press an arrow key": """$("#scroller").dispatchEvent(new page.KeyboardEvent("keydown",
      { key: k % 2 ? "ArrowRight" : "ArrowUp", bubbles: true }))""",
    "move the slider of nodes": 'slide("#node-threshold", 0.9)',
    "move the slider of edges": 'slide("#edge-threshold", 0.999)',
}
_STEPS = """
  const frame = () => new Promise((done) => page.requestAnimationFrame(done));
  const slide = (name, value) => {
    $(name).value = value;
    $(name).dispatchEvent(new page.Event("input", { bubbles: true }));
  };
  const left = () => Number($("#edges").dataset.left);
  const showAll = async () => {
    for (const name of ["#node-threshold", "#edge-threshold"]) slide(name, 1);
    await frame();
    await frame();
    await until(() => left() === 0);
  };
  const box = $("#scroller").getBoundingClientRect();
  $("#scroller").focus();
  await showAll();
  const actions = { %(actions)s };
  const places = [];
  for (let y = box.top + 3; y < box.bottom && places.length < %(repeats)d; y += 3) {
    for (let x = box.left + 3; x < box.right && places.length < %(repeats)d; x += 3) {
      $("#scroller").dispatchEvent(new page.PointerEvent("pointermove",
        { clientX: x, clientY: y, bubbles: true }));
      if (!$("#tip").hidden) { places.push([x, y]); x += 60; }
    }
  }
  const result = {};
  for (const name of Object.keys(actions)) {
    result[name] = { script: [], frames: [], longest: [], edges: [] };
  }
  for (let k = 0; k < %(repeats)d; k++) {
    for (const [name, action] of Object.entries(actions)) {
      await showAll();
      await frame();
      const start = page.performance.now();
      action(k);
      const script = page.performance.now();
      await frame();
      await frame();
      let last = page.performance.now();
      result[name].script.push(script - start);
      result[name].frames.push(last - start);
      let longest = 0;
      do {
        await frame();
        const now = page.performance.now();
        longest = Math.max(longest, now - last);
        last = now;
      } while (left() > 0);
      result[name].longest.push(longest);
      result[name].edges.push(last - start);
    }
  }
  return result;
"""


def bench(document: dict[str, Any], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds by action, each over the turns.

    `script` is the action's own, `frames` until the second frame, `longest` the longest frame while
    edges come in, and `edges` until the last edge is drawn.

    Raises:
      BrowserError: there is no browser, or the page failed.
    """
    actions = ", ".join(f"{name!r}: (k) => {{ {code} }}" for name, code in ACTIONS.items())
    steps = _STEPS % {"actions": actions, "repeats": repeats}
    with tempfile.TemporaryDirectory() as folder:
        return drive(Path(folder), page.build(document), steps, seconds=_SECONDS, virtual=False)


def run(arguments: argparse.Namespace, record: front.Record) -> bool:
    """Measures every action on one page."""
    if arguments.graph:
        document = read_json(arguments.graph)
    else:
        document = synthetic(
            features=arguments.nodes, links=arguments.links, layers=8, positions=24
        )
    result = bench(document, arguments.repeats)
    print(f"{len(document['nodes'])} nodes, {len(document['links'])} edges; milliseconds")
    heads = f"{'script':>8}{'two frames':>12}{'over idle':>11}{'longest':>9}{'all edges':>11}"
    print(f"{'':26}{heads}")
    for name, times in result.items():
        over = ratio(times["frames"], result["idle"]["frames"]).median
        print(
            f"{name:26}{statistics.median(times['script']):8.1f}"
            f"{statistics.median(times['frames']):12.1f}{over:11.2f}"
            f"{max(times['longest']):9.1f}{statistics.median(times['edges']):11.1f}"
        )
    return record.keep("milliseconds", result)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = front.parser("time_viewer", __doc__, repeats=5)
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--links", type=int, default=LINKS)
    parser.add_argument("--graph", type=Path, help="file of a graph in place of a random one")
    return front.run(run, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
