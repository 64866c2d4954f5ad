"""Groups of the viewer, what was measured of them, and views: by address, by file, wrong ones."""

import json
import urllib.parse

import pytest

from sparse_jax.studies.graphs import page
from tests.browser import drive
from tests.sparse_jax.graphs.document_interventions import group_intervention, intervention
from tests.sparse_jax.graphs.page_driver import TOOLS, browse, features_of, view_of
from tools.bench.graph_documents import synthetic

pytestmark = pytest.mark.slow


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
