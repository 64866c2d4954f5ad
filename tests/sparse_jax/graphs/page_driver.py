"""Driving the page of an attribution graph in Chromium."""

import json
import urllib.parse

from sparse_jax.graphs import graph_json
from sparse_jax.studies.graphs import page
from tests.browser import drive

# Of the driven page: what is said of it, pressing a key in the drawing, and clicking a node there.
TOOLS = """
  const press = async (key) => {
    $("#scroller").focus();
    $("#scroller").dispatchEvent(new page.KeyboardEvent("keydown", { key, bubbles: true }));
    await settle();
  };
  const title = () => $("#panel h3")?.textContent ?? null;
  const fact = (name) => all("#panel > .facts > div")
    .find((one) => one.firstChild.textContent === name)?.lastChild.textContent;
  const at = (type, x, y) => $("#scroller").dispatchEvent(new page.PointerEvent(type,
    { clientX: x, clientY: y, bubbles: true }));
  // The middle of the points that show a tip.
  const find = (wanted) => {
    const box = $("#scroller").getBoundingClientRect();
    const points = [];
    for (let y = box.top + 4; y < box.bottom; y += 4) {
      for (let x = box.left + 4; x < box.right; x += 4) {
        at("pointermove", x, y);
        if (!$("#tip").hidden && wanted($("#tip").textContent)) points.push([x, y]);
      }
    }
    return [0, 1].map((k) => points.reduce((sum, one) => sum + one[k], 0) / points.length);
  };
  const slide = async (name, value) => {
    $(name).value = value;
    await act($(name), "input");
    await new Promise((done) => setTimeout(done, 200));
  };
  const wait = (time) => new Promise((done) => setTimeout(done, time));
  // Blobs are read at once: time is virtual, and would run on while one is fetched.
  const written = new WeakMap();
  const PageBlob = page.Blob;
  page.Blob = class extends PageBlob {
    constructor(parts, options) { super(parts, options); written.set(this, parts.join("")); }
  };
  let loaded = null;
  PageBlob.prototype.text = () => Promise.resolve(loaded);
  const give = async (text) => {
    loaded = text;
    const files = new page.DataTransfer();
    files.items.add(new page.File([text], "mine.json"));
    $("#load-view").files = files.files;
    await act($("#load-view"), "change");
    await settle();
    return $("#message").textContent;
  };
  const saved = async (button) => {
    let blob = null;
    const before = page.URL.createObjectURL;
    page.URL.createObjectURL = (one) => { blob = one; return "data:application/json,{}"; };
    $(button).click();
    page.URL.createObjectURL = before;
    return JSON.parse(written.get(blob));
  };
"""


def browse(folder, document, steps, **options):
    view = options.pop("view", None)
    if view is not None:
        options["hash_"] = "#view=" + urllib.parse.quote(json.dumps(view))
    features = options.pop("features", None)
    return drive(folder, page.build(document, features=features), TOOLS + steps, **options)


def view_of(document, **changes):
    return {
        "format": "attribution-graph-view",
        "version": 1,
        "slug": document["metadata"]["slug"],
        "pinnedIds": [],
        "supernodes": [],
        "clickedId": "",
        "clickedLink": [],
        "nodeThreshold": 0.9,
        "edgeThreshold": 1,
    } | changes


def features_of(document):
    return [n["node_id"] for n in document["nodes"] if graph_json.kind(n) == "feature"]
