"""The page of a graph holds its document unchanged, asks for nothing, and runs no foreign text."""

import html
import importlib.resources
import json
import re

import numpy as np
import pytest

from lm_jax.errors import BadInputError
from sparse_jax.graphs import graph_document, graph_json
from sparse_jax.studies.graphs import page
from tests.browser import PageReader, without_scripts
from tests.sparse_jax.graphs.document_interventions import (
    group_intervention,
    group_score,
    intervention,
)
from tests.sparse_jax.graphs.small_graphs import TOKENS, small_graph
from tools.bench.graph_documents import HOSTILE, synthetic


def embedded(text):
    (data,) = [code for attrs, code in PageReader(text).scripts if attrs.get("id") == "graph-data"]
    return data


def examples(document, text=""):
    keys = {graph_json.feature_of(node) for node in document["nodes"]} - {None}
    one = page.FeatureExamples(
        [page.Text([f"a{text}", "b\n"], [0.5, np.float32(2.0)])], [f"up{text}"], ["down"]
    )
    return dict.fromkeys(sorted(keys), one)


@pytest.mark.parametrize("text", ["", HOSTILE, "\ud800"])
def test_the_page_holds_the_document_as_it_is(text):
    document = synthetic(text=text)
    written = page.build(document, features=examples(document, text))
    data = embedded(written)
    written.encode()
    assert json.loads(data)["document"] == document
    assert not set("<>&") & set(data)
    texts = json.loads(data)["examples"]
    key = graph_json.feature_of(document["nodes"][0])
    assert texts[f"{key[0]}_{key[1]}"]["texts"] == [
        {"tokens": [f"a{text}", "b\n"], "activations": [0.5, 2.0]}
    ]


def test_foreign_text_is_never_markup():
    ordinary, hostile = synthetic(), synthetic(text=HOSTILE)
    hostile["metadata"]["scan"] = hostile["metadata"]["title_prefix"] = HOSTILE
    for document, text in ((ordinary, ""), (hostile, HOSTILE)):
        ids = [node["node_id"] for node in document["nodes"][:2]]
        document["group_interventions"] = [group_intervention(ids, text=text)]
    readers = [
        PageReader(page.build(document, features=examples(document), provenance={"by": HOSTILE}))
        for document in (ordinary, hostile)
    ]
    assert [tag for tag, _ in readers[1].tags] == [tag for tag, _ in readers[0].tags]
    assert not [a for _, attrs in readers[1].tags for a in attrs if a.startswith("on")]
    assert len([attrs for attrs, _ in readers[1].scripts if not attrs]) == 1
    assert f"tokens of {HOSTILE} cause" in readers[1].text


def test_the_page_asks_for_nothing_outside_itself():
    text = page.build(synthetic())
    reader = PageReader(text)
    (policy,) = [a["content"] for _, a in reader.tags if "http-equiv" in a]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert re.fullmatch(r"'sha256-[\w+/=]+'", rules["script-src"])
    links = reader.values("href", "src", "action")
    assert links and all(link.startswith("#") for link in links)
    own = without_scripts(text)
    assert not re.findall(r"https?://", own) and "url(" not in own and "@import" not in own
    folder = importlib.resources.files("sparse_jax.studies.graphs")
    code = "".join(folder.joinpath(name).read_text("utf-8") for name in page._SCRIPTS)
    for way in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "fetch("):
        assert way not in code
    # The one address is the name of SVG, which is not asked for.
    assert re.findall(r"https?://[^\"\s]+", code) == ["http://www.w3.org/2000/svg"]


def test_the_page_depends_on_nothing_but_its_arguments():
    document = synthetic()
    features = examples(document)
    backwards = dict(reversed(features.items()))
    assert page.build(document, features=features) == page.build(document, features=backwards)


def test_edges_are_ranked_as_pruning_ranks_them():
    graph = small_graph("llama")
    everything = graph.prune(node_threshold=1.0, edge_threshold=1.0)
    document = graph_document.document(
        graph,
        everything,
        slug="all",
        model_name="tiny",
        tokens=[f" w{i}" for i in range(TOKENS)],
        logit_tokens=[str(i) for i in range(len(graph.probabilities))],
        node_threshold=1.0,
        edge_threshold=1.0,
    )
    rows, sources = np.nonzero(everything.kept_RS & (graph.adjacency != 0))
    score_E = everything.score_RS[rows, sources]
    share_E = page.edge_shares(document)
    order_E = np.argsort(share_E, kind="stable")
    # Strongest first, and as much of the whole as those before it have together.
    expected_E = np.cumsum(score_E[order_E]) / score_E.sum()
    bound = 4 * len(score_E) * np.finfo(float).eps
    np.testing.assert_allclose(share_E[order_E], expected_E, rtol=0, atol=bound)
    assert (np.diff(score_E[order_E]) <= bound * score_E.max()).all()
    kept = graph.prune(node_threshold=1.0, edge_threshold=0.7).kept_RS[rows, sources]
    # Pruning keeps the edge that reaches the threshold too, and drops nodes without edges after.
    within = int((share_E <= 0.7).sum())
    assert set(np.flatnonzero(kept)) <= set(order_E[: within + 1])


def test_shares_of_a_graph_by_hand():
    # Logits A (p = .75) and B (.25); A = 3 f + 1 t, B = -2 t, f = 5 t.
    document = synthetic(features=1, layers=1, positions=1, logits=2, links=0)
    feature, _, token, a, b = document["nodes"]
    a["token_prob"], b["token_prob"] = 0.75, 0.25
    ends = [(feature, a, 3.0), (token, a, 1.0), (token, b, -2.0), (token, feature, 5.0)]
    document["links"] = [
        {"source": s["node_id"], "target": t["node_id"], "weight": w} for s, t, w in ends
    ]
    # Scores .75 * .75, .75 * .25, .25 and, through f, .75 * .75: equal ones in the file's order.
    scores = np.array([0.5625, 0.1875, 0.25, 0.5625])
    order = [0, 3, 2, 1]
    expected = np.empty(4)
    expected[order] = np.cumsum(scores[order]) / scores.sum()
    np.testing.assert_allclose(page.edge_shares(document), expected, rtol=4 * np.finfo(float).eps)
    # Without probabilities, logits count alike.
    for node in (a, b):
        del node["token_prob"]
    scores = np.array([0.75, 0.25, 1.0, 0.75])
    order = [2, 0, 3, 1]
    expected[order] = np.cumsum(scores[order]) / scores.sum()
    np.testing.assert_allclose(page.edge_shares(document), expected, rtol=4 * np.finfo(float).eps)
    document["links"] = []
    assert page.edge_shares(document).shape == (0,)
    assert "joined by 0 edges" in PageReader(page.build(document)).text


def test_what_was_pruned_and_the_scores_are_said():
    document = synthetic()
    text = " ".join(PageReader(page.build(document)).text.split())
    assert "the nodes that have 80 % of the influence on the logits were kept" in text
    assert "those that carry 95 % of it" in text
    document["metadata"]["scores"] = {
        "unpruned": {"replacement": 0.71234, "completeness_with_inputs": 0.9},
        "pruned": {"replacement": 0.5, "completeness_with_inputs": 0.6},
    }
    del document["metadata"]["node_threshold"], document["metadata"]["pruning_settings"]
    text = " ".join(PageReader(page.build(document)).text.split())
    assert "The file does not say how it was pruned" in text
    assert re.search(r"replacement\s*0\.712\s*0\.500", text)


def test_a_long_prompt_is_cut_in_the_title_alone():
    document = synthetic(positions=60)
    text = page.build(document)
    title = re.search("<h1>(.*?)</h1>", text)[1]
    assert len(title) < 130 and title.endswith("w58 w59”") and "“…" in title
    assert document["metadata"]["prompt"].strip() in text.split("<footer>")[1]


def cells(text, title):
    """Texts of the cells of the table of a section, which needs no script."""
    table = without_scripts(text).partition(f"{title}</h2>")[2].partition("</table>")[0]
    return [html.unescape(each) for each in re.findall(r"<td[^>]*>([^<]*)", table)]


def test_the_strongest_edge_and_node_are_in_tables():
    document = synthetic()
    text = without_scripts(page.build(document))
    first = document["links"][int(np.argmin(page.edge_shares(document)))]
    weight = page.report.table(["w"], [[first["weight"]]], caption="")
    assert re.search(r">([−\d.×⁻⁰-⁹ ]+)</td>", weight)[1] in text
    best = min(node["influence"] for node in document["nodes"] if "influence" in node)
    assert f"{100 * best:.1f}" in text
    assert "Interventions</h2>" not in text


def test_what_was_measured_is_in_tables():
    document = synthetic()
    link, ids = document["links"][0], [node["node_id"] for node in document["nodes"][:2]]
    document["interventions"] = [intervention(link["source"], link["target"])]
    document["group_interventions"] = [group_intervention(ids), group_intervention(ids[:1])]
    document["group_scores"] = [group_score(ids)]
    bias = {**document["nodes"][0], "node_id": "bias", "feature_type": "bias", "clerp": "Biases"}
    document["qk_only_nodes"] = [bias]
    document["qk"] = [
        {"layer": 2, "head": 1, "query": 7, "key": 0, "score": 3.5}
        | {"pair_wise_contributors": [["E_7_7", "bias", -0.25]]}
        | {"top_q_marginal_contributors": [], "top_k_marginal_contributors": []}
    ]
    text = page.build(document, proposals=[["both", *reversed(ids)]])
    (*_, factor, _, predicted, frozen, attention, free) = cells(text, "Interventions")
    effects = [factor, predicted, frozen, attention, free]
    assert effects == ["−5.00", "1.25", "1.26", "−0.750", "0.500"]
    groups = cells(text, "Interventions on supernodes")
    first = ["both", "2", "−5.00", "attention", "−1.50", "−2.50", "12.5", "“most” 62.5 %"]
    assert groups[:8] == first and groups[8:13] == ["both", "2", "−5.00", "nothing", "−1.50"]
    # A group that is no proposal of this page is named by its members.
    assert groups[16] == ids[0] and len(groups) == 32
    as_one = cells(text, "Do supernodes act as one?")
    assert as_one == ["both", "2", "2", "0.75", "–", "12.5"]
    scores = ["L2H1", "7", "0", "3.50", "token “w7” (7)", "Biases", "−0.250"]
    assert cells(text, "Attention scores") == scores


def test_a_wrong_document_makes_no_page():
    document = synthetic()
    document["links"][0]["source"] = "9_9_9"
    with pytest.raises(BadInputError, match="'9_9_9' is no node"):
        page.build(document)


def test_given_proposals_take_the_place_of_the_clusters():
    document = synthetic()
    ids = [node["node_id"] for node in document["nodes"][:2]]
    data = json.loads(embedded(page.build(document, proposals=[["mine", *ids]])))
    assert data["proposals"] == [["mine", *ids]]
