"""The viewer of an attribution graph works in a browser: pointer, keys, sliders, groups, saving."""

import json
import urllib.parse

import pytest

from sparse_jax.graphs import graph_json, page
from tests.browser import drive
from tools.bench.graph_documents import (
    HOSTILE,
    group_intervention,
    intervention,
    synthetic,
)

pytestmark = pytest.mark.slow

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


def attention_score(document):
    """Of the pair that the synthetic mediation names."""
    query, key = (
        next(n["node_id"] for n in document["nodes"] if n["node_id"] == f"E_{k}_{k}")
        for k in (7, 1)
    )
    return {"layer": 0, "head": 1, "query": 7, "key": 1, "score": 2.5} | {
        "pair_wise_contributors": [[query, key, 0.75]],
        "top_q_marginal_contributors": [[query, 1.5]],
        "top_k_marginal_contributors": [],
    }


def features_of(document):
    return [n["node_id"] for n in document["nodes"] if graph_json.kind(n) == "feature"]


def test_a_click_shows_a_node_with_its_edges_and_what_carries_them(tmp_path):
    document = synthetic()
    nodes = {node["node_id"]: node for node in document["nodes"]}
    carried = next(
        one
        for one in document["mediation"]
        if graph_json.kind(nodes[one["target"]]) == "feature"
        and graph_json.kind(nodes[one["source"]]) == "feature"
        and nodes[one["target"]]["clerp"]
    )
    target = nodes[carried["target"]]
    document["qk"] = [attention_score(document)]
    one = page.FeatureExamples([page.TopText(["some", " text"], [0.0, 1.5])], [" up"], [])
    result = browse(
        tmp_path,
        document,
        f"""
        const first = title();
        const place = find((text) => text.startsWith({json.dumps(target["clerp"] + ",")}));
        at("click", ...place);
        await settle();
        const clicked = [title(), fact("id"), fact("position"), $("#live").textContent];
        const words = all("#panel .texts li:first-child .word").map((w) => [w.textContent,
          w.style.getPropertyValue("--strength")]);
        const inputs = all(".edge-list")[0].querySelector("h4").textContent;
        let rows = 0;
        for (const button of all("#panel button.weight")) {{
          if (rows++ > 50) break;
          button.click();
          await settle();
          if ($("#edge").textContent.includes("L0H1")) break;
        }}
        const edge = $("#edge").textContent;
        const why = $("#edge .why").textContent;
        const table = all("#edge tbody tr")
          .map((row) => [...row.children].map((c) => c.textContent));
        $("#panel button.node").click();
        await settle();
        return {{ first, clicked, words, inputs, edge, why, table, moved: title(),
          logits: $("#panel").textContent.includes("Raises") }};""",
        features={graph_json.feature_of(target): one},
    )
    logit = max(document["nodes"], key=lambda node: node.get("token_prob", 0))
    assert result["first"] == logit["clerp"]
    assert result["clicked"][:2] == [target["clerp"], target["node_id"]]
    assert result["clicked"][2] == f"{target['ctx_idx']}, “w{target['ctx_idx']}”"
    count = sum(link["target"] == target["node_id"] for link in document["links"])
    assert f"{count + 1} inputs" in result["clicked"][3]
    assert result["inputs"] == f"Strongest inputs ({count + 1})"
    assert result["words"] == [["some", "0.000"], [" text", "1.000"]]
    heads, *_ = result["table"]
    assert heads[0] == "L0H1" and heads[2] == "50 %"
    # The pair is of key 1 and the last query.
    pair = result["table"][2]
    assert pair[0] == "L0H1: 1 “w1” → 7 “w7”" and pair[2] == "25 %"
    assert result["why"].startswith("Why L0H1 looks from 7 “w7” to 1 “w1”: score 2.50")
    assert "0.750: token “w7”, position 7 with token “w1”, position 1" in result["why"]
    assert result["moved"] != result["clicked"][0]


def test_edges_in_the_drawing_can_be_clicked(tmp_path):
    document = synthetic(features=2, links=1, layers=2, positions=2, logits=1, seed=4)
    document["links"] = [
        {
            "source": document["nodes"][-2]["node_id"],
            "target": document["nodes"][-1]["node_id"],
            "weight": 0.5,
        }
    ]
    document["mediation"], document["bias"] = [], []
    result = browse(
        tmp_path,
        document,
        """
        const a = find((text) => text.startsWith("token “w1”"));
        const b = find((text) => text.startsWith("Output"));
        at("click", ...a);
        await settle();
        at("click", (a[0] + b[0]) / 2, (a[1] + b[1]) / 2);
        await settle();
        const edge = $("#edge").textContent;
        at("click", 3, 3);
        await settle();
        return { edge, after: $("#panel").textContent };""",
    )
    assert "token “w1”, position 1" in result["edge"] and "0.500" in result["edge"]
    assert "no mediation of this edge" in result["edge"]
    assert result["after"] == "No node is selected. Choose one in the drawing."


def test_sliders_hide_the_weakest_and_say_how_many(tmp_path):
    document = synthetic()
    result = browse(
        tmp_path,
        document,
        """
        await press("Escape");
        const before = $("#shown").textContent;
        await slide("#node-threshold", 0.5);
        const nodes = $("#shown").textContent;
        await slide("#edge-threshold", 0.3);
        const both = [$("#shown").textContent, $("#node-threshold-value").textContent,
          $("#edge-threshold-value").textContent];
        await wait(400);
        return { before, nodes, both, hash: decodeURIComponent(page.location.hash) };""",
    )
    nodes = document["nodes"]
    share_E = page.edge_shares(document)

    def shown(limit):
        return {
            n["node_id"]
            for n in nodes
            if graph_json.kind(n) in ("token", "logit") or n["influence"] <= limit
        }

    def said(limit, within):
        left = shown(limit)
        ends = [(link["source"], link["target"]) for link in document["links"]]
        drawn = sum({*end} <= left and s <= within for end, s in zip(ends, share_E, strict=True))
        total, links = len(nodes), len(ends)
        first = (
            f"All {total} nodes are shown"
            if len(left) == total
            else f"{len(left)} of {total} nodes are shown, {total - len(left)} hidden"
        )
        second = (
            f"all {links} edges are drawn"
            if drawn == links
            else f"{drawn} of {links} edges are drawn, {links - drawn} hidden"
        )
        return f"{first}; {second}."

    assert result["before"] == said(1, 1)
    assert result["nodes"] == said(0.5, 1)
    assert result["both"] == [said(0.5, 0.3), "50 %", "30 %"]
    view = json.loads(result["hash"].removeprefix("#view="))
    assert (view["nodeThreshold"], view["edgeThreshold"]) == (0.5, 0.3)


def test_the_keyboard_reaches_every_part(tmp_path):
    document = synthetic()
    result = browse(
        tmp_path,
        document,
        """
        const live = () => $("#live").textContent;
        await press("Escape");
        const none = [title(), live()];
        await press("ArrowUp");
        const start = live();
        await press("ArrowRight");
        const right = live();
        await press("ArrowLeft");
        const back = live();
        await press("ArrowDown");
        const down = live();
        await press("Enter");
        const entered = [title(), live()];
        await press("p");
        const pinned = [all("#pins button.node").length, $("#pin").textContent, live()];
        for (let k = 0; k < 12; k++) await press("ArrowDown");
        const bottom = live();
        await press("ArrowDown");
        const still = live();
        await press("P");
        const two = all("#pins button.node").length;
        await press("p");
        $("#pin").focus();
        $("#pin").click();
        await settle();
        return { none, start, right, back, down, entered, pinned, bottom, still, two,
          left: all("#pins button.node").length, focus: page.document.activeElement.id };""",
    )
    assert result["none"] == [None, "Nothing selected"]
    logits = [n["clerp"] for n in document["nodes"] if graph_json.kind(n) == "logit"]
    assert result["start"].split(";")[0] in logits
    assert result["right"].split(";")[0] in logits and result["right"] != result["start"]
    assert result["back"] == result["start"]
    assert "layer 3" in result["down"] or "of layer" in result["down"]
    assert result["down"].startswith(result["entered"][0])
    assert result["entered"][1] == result["down"] + "; selected"
    assert result["pinned"][:2] == [1, "Unpin"] and "; pinned" in result["pinned"][2]
    assert "; token" in result["bottom"] and result["still"] == result["bottom"]
    assert (result["two"], result["left"], result["focus"]) == (2, 0, "pin")


def test_supernodes_are_proposed_made_edited_and_summed(tmp_path):
    document = synthetic()
    a, b, c, *_ = features_of(document)
    proposals = [["proposed", a, b]]
    text = page.build(document, proposals=proposals)
    outside = next(
        n["node_id"]
        for n in document["nodes"]
        if n["node_id"] not in (a, b)
        and sum(
            one["source"] in (a, b) and one["target"] == n["node_id"] for one in document["links"]
        )
    )
    summed = view_of(document, supernodes=[["s", a, b]], pinnedIds=[outside])
    result = drive(
        tmp_path,
        text,
        TOOLS
        + f"""
        const groups = () => all("#supernodes .group").map((g) => [g.querySelector("input").value,
          g.querySelectorAll("button.node").length]);
        $("#proposed").open = true;
        const offered = $("#proposals").textContent;
        $("#use-all").click();
        await settle();
        const used = [groups(), $("#proposed summary").textContent];
        const name = $("#supernodes input");
        name.value = "<b>mine</b>";
        await act(name, "change");
        const renamed = groups();
        await give(JSON.stringify({json.dumps(view_of(document, clickedId=c))}));
        const fresh = groups();
        $("#new-supernode input").value = "other";
        $("#new-supernode button").click();
        await settle();
        const made = groups();
        $("#supernodes .group li .remove").click();
        await settle();
        const emptied = groups();
        $("#supernodes .add").click();
        await settle();
        const added = groups();
        $("#supernodes .group-head .remove").click();
        await settle();
        const deleted = groups();
        await give(JSON.stringify({json.dumps(summed)}));
        const rows = all("#subgraph tbody tr")
          .map((row) => [...row.children].map((c) => c.textContent));
        return {{ offered, used, renamed, fresh, made, emptied, added, deleted, rows,
          boxes: all("#subgraph .box").length, bold: all("#supernodes b, #subgraph b").length,
          message: $("#message").textContent }};""",
    )
    assert result["offered"] == "proposed 2 featuresUse"
    assert result["used"] == [[["proposed", 2]], "All proposed supernodes are in use"]
    assert result["renamed"] == [["<b>mine</b>", 2]] and result["bold"] == 0
    assert result["fresh"] == [] and result["made"] == [["other", 1]]
    assert result["emptied"] == [["other", 0]] and result["added"] == [["other", 1]]
    assert result["deleted"] == [] and result["message"] == ""
    weights = [
        one["weight"]
        for one in document["links"]
        if one["source"] in (a, b) and one["target"] == outside
    ]
    (row,) = [row for row in result["rows"] if row[0] == "s"]
    assert float(row[2].replace("−", "-")) == pytest.approx(sum(weights), rel=5e-3)
    assert row[3] == str(len(weights)) and result["boxes"] == 2


def test_what_was_measured_of_a_node_and_of_a_supernode_is_shown(tmp_path):
    document = synthetic()
    a, b, c, *_ = features_of(document)
    (target,) = [n for n in document["nodes"] if n.get("is_target_logit")]
    document["interventions"] = [
        intervention(a, target["node_id"], factor=factor) for factor in (0.0, -10.0)
    ]
    document["group_interventions"] = [
        group_intervention([a, b], factor=factor) for factor in (0.0, -10.0)
    ]
    view = view_of(document, clickedId=a, supernodes=[["s", b, a]])
    result = browse(
        tmp_path,
        document,
        f"""
        const cells = (rows) => rows.map((row) => [...row.children].map((c) => c.textContent));
        const on = all("#panel details.intervention").map((one) => [one.open,
          one.querySelector("summary").textContent, cells([...one.querySelectorAll("tbody tr")])]);
        const caption = $("#supernodes caption").textContent;
        const group = cells(all("#supernodes tbody tr"));
        $("#supernodes .group li .remove").click();
        await settle();
        const edited = [all("#supernodes tbody tr").length, $("#supernodes").textContent];
        await give(JSON.stringify({json.dumps(view_of(document, clickedId=c))}));
        return {{ on, caption, group, edited, none: all("#panel details.intervention").length,
          other: title() }};""",
        view=view,
    )
    effects = [[target["clerp"]], ["1.25", "1.26", "−0.750", "0.500"]]
    assert result["on"] == [[True, "times 0", effects], [False, "times −10", effects]]
    assert result["caption"].endswith(f"change of the logit and probability of {target['clerp']}")
    wanted = [
        row
        for factor in ("0", "−10")
        for mode, change in (("attention", "−2.50"), ("nothing", "0.375"))
        for row in (
            [f"times {factor}, {mode} frozen then “most” 63 %"],
            ["−1.50", change, "13 %"],
        )
    ]
    assert result["group"] == wanted
    assert result["edited"][0] == 0
    assert "This file holds no intervention on these members." in result["edited"][1]
    # Another node was not intervened on.
    assert result["none"] == 0 and result["other"]


def test_a_view_is_saved_and_comes_back_by_address_and_by_file(tmp_path):
    document = synthetic()
    a, b, c, d, *_ = features_of(document)
    link = next(one for one in document["links"] if one["target"] == c or one["source"] == c)
    view = view_of(
        document,
        pinnedIds=[d, "bias"],
        supernodes=[["one", a, b], ["two", c]],
        clickedId=c,
        clickedLink=[link["source"], link["target"]],
        nodeThreshold=0.4,
        edgeThreshold=0.25,
    )
    steps = """
        const now = async () => [await saved("#save-view"), title() && fact("id"),
          all("#supernodes input").map((i) => i.value), $("#edge") !== null];
        const opened = await now();
        const graph = await saved("#save-graph");
        $("#reset-view").click();
        await settle();
        const reset = await now();
        await give(JSON.stringify(opened[0]));
        await wait(400);
        return { opened, graph, reset, loaded: await now(), hash: page.location.hash,
          message: $("#message").textContent };"""
    result = browse(tmp_path, document, steps, view=view)
    assert result["opened"] == [view, c, ["one", "two"], True]
    assert result["loaded"] == result["opened"] and result["message"] == ""
    assert json.loads(urllib.parse.unquote(result["hash"].removeprefix("#view="))) == view
    assert result["reset"][0]["pinnedIds"] == [] and result["reset"][2] == []
    # The document with the view in it opens elsewhere, and here.
    assert {**result["graph"], "qParams": 0} == {**document, "qParams": 0}
    parameters = {"pinnedIds": [d], "supernodes": view["supernodes"], "clickedId": c}
    assert result["graph"]["qParams"] == document["qParams"] | parameters
    again = browse(tmp_path, result["graph"], "return await saved('#save-view');")
    assert {key: again[key] for key in parameters} == parameters


WRONG = [
    ("no json", "The file mine.json was not read: it is no JSON."),
    ("[]", "it is no saved view of an attribution graph"),
    ("null", "it is no saved view of an attribution graph"),
    ({"version": 2}, "its version is 2, and this page reads 1"),
    ({"slug": "<i>x</i>"}, "it is of the graph “<i>x</i>”, this page of “a-synthetic-graph”"),
    ({"pinnedIds": ["9_9_9"]}, "this graph has no node “9_9_9”"),
    ({"supernodes": [["a"], ["a"]]}, "two supernodes have the same label"),
    ({"supernodes": [[]]}, "supernodes is no list of lists"),
    ({"clickedId": 3}, "clickedId is no id"),
    ({"clickedLink": ["a", "b"]}, "has no edge “a” to “b”"),
    ({"edgeThreshold": 1.5}, "a threshold is not within 0 and 1"),
    ({"nodeThreshold": None}, "a threshold is not within 0 and 1"),
]


def test_a_wrong_file_is_named_and_changes_nothing(tmp_path):
    document = synthetic()
    texts = [
        change if isinstance(change, str) else json.dumps(view_of(document, **change))
        for change, _ in WRONG
    ]
    result = browse(
        tmp_path,
        document,
        f"""
        $("#pin").click();
        const before = JSON.stringify(await saved("#save-view"));
        const found = [];
        for (const text of {json.dumps(texts)}) {{
          const message = await give(text);
          found.push([message, JSON.stringify(await saved("#save-view")) === before]);
        }}
        const right = await give(before);
        return {{ found, right, markup: all("#message i").length }};""",
    )
    assert len(result["found"]) == len(WRONG)
    for (message, same), (_, said) in zip(result["found"], WRONG, strict=True):
        assert said in message and same
    assert result["right"] == "" and result["markup"] == 0


def test_a_wrong_address_and_unknown_ids_are_said(tmp_path):
    document = synthetic()
    document["qParams"] |= {"pinnedIds": ["9_9_9", features_of(document)[0]]}
    steps = """return [$("#message").textContent, all("#pins button.node").length];"""
    result = browse(tmp_path, document, steps)
    assert result == [
        "Left out of qParams, because the graph has no such node: 9_9_9.",
        1,
    ]
    result = browse(tmp_path, synthetic(), steps, hash_="#view=%E0%A4%A")
    assert result == ["The view in the address was not read: it is no JSON.", 0]
    # A link inside the page is no view.
    result = browse(tmp_path, synthetic(), steps, hash_="#2-strongest-nodes-and-edges")
    assert result == ["", 0]


@pytest.mark.parametrize("width", [400, 1280])
def test_hostile_text_is_shown_within_the_screen_and_does_nothing(tmp_path, width):
    document = synthetic(text=HOSTILE, features=60, positions=24)
    ids = features_of(document)
    one = page.FeatureExamples([page.TopText([HOSTILE] * 3, [0.0, 1.0, 0.5])], [HOSTILE], [HOSTILE])
    view = view_of(document, supernodes=[[HOSTILE, *ids[:4]]], pinnedIds=ids[4:9], clickedId=ids[0])
    document["interventions"] = [intervention(ids[0], ids[1])]
    document["group_interventions"] = [group_intervention(ids[:4], text=HOSTILE)]
    result = browse(
        tmp_path,
        document,
        """
        $("#proposed").open = true;
        $("#panel button.weight").click();
        await settle();
        const root = page.document.documentElement;
        return { wide: [root.clientWidth, root.scrollWidth], label: $("#supernodes input").value,
          message: $("#message").textContent,
          below: $("#panel").offsetTop >= $("#frame").offsetTop + $("#frame").offsetHeight,
          measured: all("table.measured").length,
          marks: all("img, iframe, script:not([type])").length };""",
        features={
            graph_json.feature_of(n): one
            for n in document["nodes"]
            if graph_json.kind(n) == "feature"
        },
        view=view,
        width=width,
    )
    assert result["wide"][0] == result["wide"][1]
    assert result["label"] == HOSTILE and result["message"] == ""
    assert result["below"] == (width == 400)
    # The viewer's own script.
    assert result["marks"] == 1 and result["measured"] == 2


def test_a_large_graph_is_drawn_whole(tmp_path):
    document = synthetic(features=1850, links=50_000, layers=26, positions=16, logits=10)
    assert len(document["nodes"]) > 2000
    result = browse(
        tmp_path,
        document,
        """
        const first = $("#shown").textContent;
        // Frames come in real time, in which virtual time is over soon.
        page.requestAnimationFrame = (draw) => page.setTimeout(draw, 16);
        await slide("#edge-threshold", 1);
        await until(() => $("#edges").dataset.left === "0");
        return { first, all: $("#shown").textContent, left: $("#edges").dataset.left };""",
    )
    assert "of 50,000 edges are drawn" in result["first"]
    assert "all 50,000 edges are drawn" in result["all"] and result["left"] == "0"
