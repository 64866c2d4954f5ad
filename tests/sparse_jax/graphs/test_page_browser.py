"""The viewer of an attribution graph works in a browser: pointer, keys, sliders, groups, saving."""

import json

import pytest

from lm_jax.report import theme
from sparse_jax.graphs import graph_json
from sparse_jax.studies.graphs import page
from tests.sparse_jax.graphs.document_interventions import group_intervention, intervention
from tests.sparse_jax.graphs.page_driver import browse, features_of, view_of
from tools.bench.graph_documents import HOSTILE, synthetic

pytestmark = pytest.mark.slow


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
    one = page.FeatureExamples([page.Text(["some", " text"], [0.0, 1.5])], [" up"], [])
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


@pytest.mark.parametrize("activation", [0.5, -0.5])
def test_a_node_has_the_texts_and_logits_of_its_sign(tmp_path, activation):
    document = synthetic()
    (node, *_) = (n for n in document["nodes"] if graph_json.kind(n) == "feature")
    node["activation"] = activation
    texts = [page.Text(["a", "b"], [0.5, -9.0])], [page.Text(["c", "d"], [9.0, -1.0])]
    one = page.FeatureExamples(texts[0], ["up"], ["down"], texts[1])
    result = browse(
        tmp_path,
        document,
        """
        return { logits: all("#panel h4 ~ p.small").map((p) => p.textContent)
            .filter((text) => text.includes("logits")),
          words: all("#panel .texts .word").map((w) => [w.textContent,
            w.style.getPropertyValue("--strength")]) };""",
        features={graph_json.feature_of(node): one},
        view=view_of(document, clickedId=node["node_id"]),
    )
    first, second = ("up", "down") if activation > 0 else ("down", "up")
    assert result["logits"] == [
        f"Raises the logits of: “{first}”",
        f"Lowers the logits of: “{second}”",
    ]
    strongest = (
        [["a", "1.000"], ["b", "0.000"]] if activation > 0 else [["c", "0.000"], ["d", "1.000"]]
    )
    assert result["words"] == strongest


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


@pytest.mark.parametrize("width", [400, 1280])
def test_hostile_text_is_shown_within_the_screen_and_does_nothing(tmp_path, width):
    document = synthetic(text=HOSTILE, features=60, positions=24)
    ids = features_of(document)
    one = page.FeatureExamples([page.Text([HOSTILE] * 3, [0.0, 1.0, 0.5])], [HOSTILE], [HOSTILE])
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


def test_edges_of_negative_weight_are_dashed_as_in_the_legend(tmp_path):
    looks = browse(
        tmp_path,
        synthetic(),
        """
        const looks = new Set();
        const shape = page.CanvasRenderingContext2D.prototype;
        const stroke = shape.stroke;
        shape.stroke = function () {
          if (this.canvas.id === "edges") {
            looks.add(JSON.stringify([this.strokeStyle, this.getLineDash()]));
          }
          stroke.call(this);
        };
        page.requestAnimationFrame = (draw) => page.setTimeout(draw, 16);
        await slide("#edge-threshold", 1);
        await until(() => looks.size && $("#edges").dataset.left === "0");
        return [...looks].sort().map((look) => JSON.parse(look));""",
    )
    hot, cold = ("#" + bytes(map(int, theme.LIGHT[name].split())).hex() for name in ("hot", "cold"))
    assert looks == [[hot, []], [cold, [5, 3]]]


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
