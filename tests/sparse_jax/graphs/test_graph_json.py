"""Graph files: what they hold of a graph, ids without collisions, and what is refused."""

import copy
import json
import types

import numpy as np
import pyarrow as pa
import pytest

from lm_jax.errors import BadInputError, CorruptError
from sparse_jax.graphs import graph_document, graph_json
from tests.sparse_jax.graphs.document_interventions import group_intervention
from tests.sparse_jax.graphs.small_graphs import TOKENS, small_graph

THRESHOLDS = {"node_threshold": 0.8, "edge_threshold": 0.95}


def written(graph, pruned, **options):
    logits = graph.nodes.filter(pa.compute.equal(graph.nodes["kind"], "logit")).num_rows
    return graph_document.document(
        graph,
        pruned,
        slug="a-prompt",
        model_name="tiny",
        tokens=[f" w{i}" for i in range(TOKENS)],
        logit_tokens=[f" next{i}" for i in range(logits)],
        **THRESHOLDS,
        **options,
    )


@pytest.fixture(scope="module")
def graph():
    return small_graph("llama")


@pytest.fixture(scope="module")
def pruned(graph):
    return graph.prune(**THRESHOLDS)


@pytest.fixture(scope="module")
def document(graph, pruned):
    return written(graph, pruned)


def test_links_are_the_kept_entries_of_the_adjacency_matrix(graph, pruned, document):
    assert len(document["links"]) == pruned.kept_RS.sum() > 10
    rows, sources = np.nonzero(pruned.kept_RS)
    weights = [link["weight"] for link in document["links"]]
    np.testing.assert_array_equal(weights, graph.adjacency[rows, sources].astype(np.float64))
    by_id = {node["node_id"]: node for node in document["nodes"]}
    for link in document["links"]:
        source, target = by_id[link["source"]], by_id[link["target"]]
        # Causal, and never into a token or an error.
        assert source["ctx_idx"] <= target["ctx_idx"]
        assert target["feature_type"] in ("cross layer transcoder", "logit")
    table = graph.nodes.to_pylist()
    features = [row for i, row in enumerate(table) if row["kind"] == "feature" and pruned.kept_S[i]]
    for row in features:
        node = by_id[f"{row['layer']}_{row['feature']}_{row['position']}"]
        assert node["activation"] == row["activation"]
        both = row["layer"] + row["feature"]
        assert node["feature"] == both * (both + 1) // 2 + row["feature"]
    logits = [node for node in document["nodes"] if node["feature_type"] == "logit"]
    assert [node["token_prob"] for node in logits] == graph.probabilities.tolist()
    assert all("(p=" in node["clerp"] for node in logits)


def test_an_error_does_not_share_the_id_of_a_feature_of_layer_0(graph):
    # All nodes: feature 1 of layer 0 is active where layer 1 has an error.
    everything = graph.prune(node_threshold=1.0, edge_threshold=1.0)
    table = graph.nodes.to_pylist()
    features = {
        (row["feature"], row["position"])
        for row in table
        if row["kind"] == "feature" and row["layer"] == 0
    }
    shared = [
        (row["layer"], row["position"])
        for row in table
        if row["kind"] == "error" and (row["layer"], row["position"]) in features
    ]
    assert shared
    document = written(graph, everything)
    ids = [node["node_id"] for node in document["nodes"]]
    elements = [node["jsNodeId"] for node in document["nodes"]]
    assert len(set(ids)) == len(ids) and len(set(elements)) == len(elements)
    # Kind and position are in every element's id, so that files of other graphs share none either.
    for node in document["nodes"]:
        element, at = node["jsNodeId"], f"-{node['ctx_idx']}"
        match graph_json.kind(node):
            case "error":
                assert element == f"{node['layer']}_error{at}"
            case "feature":
                _, feature = graph_json.feature_of(node)
                assert element == f"{node['layer']}_feature_{feature}{at}"
            case "logit" | "token":
                assert element.endswith(at)
    for layer, position in shared:
        assert {f"0_{layer}_{position}", f"0_{layer}_{position}_error"} <= set(ids)


def test_mediation_of_a_link_is_that_of_its_edge(graph, pruned):
    r, s = next(zip(*np.nonzero(pruned.kept_RS), strict=True))
    edge = int(s), int(graph.row_nodes[r])
    score_LNTS = graph.mediation(*edge)
    shares = graph_document.largest_shares(score_LNTS, heads=2, pairs=3)
    assert len(shares.heads) <= 2 and len(shares.pairs) <= 3
    for layer, head, share in shares.heads:
        assert share == pytest.approx(float(score_LNTS[layer, head].sum()), rel=1e-6)
    largest = np.sort(np.abs(score_LNTS).ravel())[::-1]
    sizes = [abs(share) for *_, share in shares.pairs]
    np.testing.assert_array_equal(sizes, largest[: len(sizes)].astype(np.float64))
    document = written(graph, pruned, mediated={edge: shares})
    (carried,) = document["mediation"]
    link = next(each for each in document["links"] if each["weight"] == graph.adjacency[r, s])
    assert (carried["source"], carried["target"]) == (link["source"], link["target"])


def test_a_file_is_read_back(document, tmp_path):
    graph_json.write(tmp_path / "graph.json", document)
    assert graph_json.read(tmp_path / "graph.json") == json.loads(json.dumps(document))


def test_a_graph_writes_itself(graph, document, tmp_path):
    graph.to_json(tmp_path / "a-prompt.json", model_name="tiny")
    read = graph_json.read(tmp_path / "a-prompt.json")
    assert read["links"] == document["links"]
    tokens = [row["feature"] for row in graph.nodes.to_pylist() if row["kind"] == "token"]
    assert read["metadata"]["prompt_tokens"] == [str(token) for token in tokens]
    decoder = types.SimpleNamespace(decode=lambda ids: f" w{ids[0]}")
    graph.to_json(tmp_path / "b.json", tokenizer=decoder, edge_threshold=0.5)
    fewer = graph_json.read(tmp_path / "b.json")
    assert fewer["metadata"]["prompt_tokens"][0] == f" w{tokens[0]}"
    assert fewer["metadata"]["slug"] == "b" and 0 < len(fewer["links"]) < len(read["links"])
    with pytest.raises(BadInputError, match="must be of letters, digits, - and _"):
        graph.to_json(tmp_path / "a b.json")
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["links"][0].update(source="9_9_9"), "'9_9_9' is no node"),
        (lambda d: d["nodes"].append(d["nodes"][0]), "two nodes have the id"),
        (lambda d: d["links"].append(d["links"][0]), "two links go from"),
        (
            lambda d: d["links"][0].update(weight=float("nan")),
            r"links\[0\]\.weight = nan is no finite",
        ),
        (lambda d: d["links"][0].update(weight=10**400), r"weight = 1000.* is no finite number"),
        (lambda d: d["links"][0].update(weight=True), "weight = True is no finite number"),
        (lambda d: d["links"][0].update(target=["x"]), r"links\[0\]\.target = \['x'\] is no text"),
        (lambda d: d["links"].append(None), r"links\[\d+\] has no source"),
        (lambda d: d["nodes"][2].update(node_id=["x"]), r"nodes\[2\]\.node_id = .* is no text"),
        (lambda d: d["nodes"][0].update(feature_type=None), "feature_type = None is no text"),
        (lambda d: d["nodes"][0].update(clerp=3), r"nodes\[0\]\.clerp = 3 is no text"),
        (lambda d: d["nodes"][0].update(jsNodeId={}), r"jsNodeId = \{\} is no text"),
        (lambda d: d["nodes"][0].update(feature="7"), "feature = '7' is no whole number or null"),
        (lambda d: d["nodes"][0].update(feature=True), "feature = True is no whole number"),
        (lambda d: d["nodes"][0].update(layer=[0]), r"layer = \[0\] is no text or whole"),
        (lambda d: d["nodes"][0].update(ctx_idx=False), "ctx_idx = False is no whole number"),
        (lambda d: d["nodes"][0].update(activation="1"), "activation = '1' is no finite number"),
        (lambda d: d["nodes"].__setitem__(0, "x"), r"nodes\[0\] has no node_id"),
        (lambda d: d["metadata"].update(prompt_tokens=None), "prompt_tokens = None is no list of"),
        (
            lambda d: d["metadata"].update(prompt_tokens=["a", 1]),
            r"= \['a', 1\] is no list of texts",
        ),
        (lambda d: d["metadata"].update(slug=1), "metadata.slug = 1 is no text"),
        (lambda d: d["metadata"].update(prompt=0), "metadata.prompt = 0 is no text"),
        (lambda d: d["qParams"].update(pinnedIds=None), "pinnedIds = None is no list of texts"),
        (
            lambda d: d["qParams"].update(supernodes=[["a", 1]]),
            r"= \[\['a', 1\]\] is no list of sup",
        ),
        (lambda d: d["nodes"][1].pop("ctx_idx"), r"nodes\[1\] has no ctx_idx"),
        (lambda d: d["nodes"][1].update(ctx_idx=99), "is at position 99 of 6"),
        (lambda d: d["metadata"].pop("scan"), "metadata has no scan"),
        (lambda d: d["metadata"].update(slug="../x"), "metadata.slug = '../x'"),
        (lambda d: d.pop("nodes"), "nodes is missing"),
        (
            lambda d: d["links"].append(
                {**d["links"][0], "source": d["links"][0]["target"], **_back(d)}
            ),
            "links form a cycle",
        ),
    ],
)
def test_a_wrong_document_is_refused(document, tmp_path, change, said):
    wrong = copy.deepcopy(document)
    change(wrong)
    with pytest.raises(BadInputError, match=said):
        graph_json.write(tmp_path / "graph.json", wrong)
    assert not list(tmp_path.iterdir())


def _back(document):
    return {"target": document["links"][0]["source"]}


def test_a_damaged_file_is_named(tmp_path):
    with pytest.raises(BadInputError, match="is not there"):
        graph_json.read(tmp_path / "graph.json")
    (tmp_path / "graph.json").write_text("{")
    with pytest.raises(CorruptError, match=r"graph\.json is damaged"):
        graph_json.read(tmp_path / "graph.json")


def _extended(document):
    ids = [document["links"][0][end] for end in ("source", "target")]
    ends = dict(zip(("source", "target"), ids, strict=True))
    effect = {"target": ids[1], **dict.fromkeys(graph_json.EFFECTS, 0.5)}
    return copy.deepcopy(document) | {
        "mediation": [ends | {"heads": [[0, 1, 0.5]], "pairs": [[0, 1, 2, 1, -0.5]]}],
        "interventions": [{"source": ids[0], "factor": -5, "effects": [effect]}],
        "group_interventions": [group_intervention(ids[:1], factor=-5)],
    }


def _group(document):
    return document["group_interventions"][0]


def test_extensions_are_written_and_read_back(document, tmp_path):
    extended = _extended(document)
    graph_json.write(tmp_path / "graph.json", extended)
    assert graph_json.read(tmp_path / "graph.json") == extended


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(interventions={}), "interventions is no list"),
        (lambda d: d["interventions"][0].pop("factor"), r"interventions\[0\] has no factor"),
        (lambda d: d["interventions"][0].update(factor=None), r"\[0\]\.factor = None is no finite"),
        (lambda d: d["interventions"][0].update(source="9"), r"\[0\]\.source = '9' is no node"),
        (lambda d: d["interventions"][0].update(effects=1), r"\[0\]\.effects is no list"),
        (
            lambda d: d["interventions"][0]["effects"][0].pop("attention_frozen"),
            r"interventions\[0\]\.effects\[0\] has no attention_frozen",
        ),
        (
            lambda d: d["interventions"][0]["effects"][0].update(free=float("inf")),
            r"effects\[0\]\.free = inf is no finite number",
        ),
        (
            lambda d: d["interventions"][0]["effects"][0].update(target=["x"]),
            r"effects\[0\]\.target = \['x'\] is no node",
        ),
        (
            lambda d: d["mediation"][0].update(source="9"),
            r"mediation\[0\]\.source = '9' is no node",
        ),
        (lambda d: d["mediation"][0].update(heads=[[0, 1]]), r"heads has \[0, 1\], not 2 indices"),
        (
            lambda d: d["mediation"][0].update(pairs=[[0, 1, -2, 1, 0.5]]),
            r"mediation\[0\]\.pairs has \[0, 1, -2, 1, 0\.5\], not 4 indices",
        ),
        (lambda d: d["bias"][0].update(bias="1"), r"bias\[0\]\.bias = '1' is no finite number"),
        (lambda d: d["bias"][0].update(node_id="9"), r"bias\[0\]\.node_id = '9' is no node"),
        (lambda d: d["nodes"][0].update(layer="x"), "has layer = 'x'"),
        (lambda d: d.update(group_interventions={}), "group_interventions is no list"),
        (lambda d: _group(d).pop("factor"), r"group_interventions\[0\] has no factor"),
        (lambda d: _group(d).update(predicted=None), r"\[0\] has predicted = None, no finite"),
        (lambda d: _group(d).update(members=[]), r"\[0\] has members = \[\], no list of ids"),
        (lambda d: _group(d).update(members=["9"]), r"\[0\] has member '9', which is no node"),
        (lambda d: _group(d).update(outcomes=1), r"\[0\] has no list outcomes"),
        (lambda d: _group(d)["outcomes"][0].update(mode="all"), "without a mode of frozen, att"),
        (lambda d: _group(d)["outcomes"][0].pop("top"), "no list top of mode attention_frozen"),
        (lambda d: _group(d)["outcomes"][1].pop("change"), "outcome of mode free with a value"),
        (
            lambda d: _group(d)["outcomes"][1]["top"][0].update(probability=float("nan")),
            "outcome of mode free with a value that is no finite number",
        ),
        (lambda d: _group(d)["outcomes"][1]["top"][0].update(token=3), "free that is no text"),
    ],
)
def test_a_wrong_extension_is_refused(document, tmp_path, change, said):
    wrong = _extended(document)
    change(wrong)
    with pytest.raises(BadInputError, match=said):
        graph_json.write(tmp_path / "graph.json", wrong)
    assert not list(tmp_path.iterdir())


def test_kinds_and_features_of_nodes(document):
    table = {
        "cross layer transcoder": "feature",
        "lorsa": "feature",
        "mlp reconstruction error": "error",
        "lorsa error": "error",
        "embedding": "token",
        "logit": "logit",
        "bias": "bias",
    }
    assert {name: graph_json.kind({"feature_type": name}) for name in table} == table
    for node in document["nodes"]:
        expected = None
        if node["feature_type"] == "cross layer transcoder":
            expected = tuple(map(int, node["node_id"].split("_")[:2]))
        assert graph_json.feature_of(node) == expected
    other = {"feature_type": "cross layer transcoder", "layer": "7"}
    # Numbered otherwise, or not at all.
    assert graph_json.feature_of({**other, "feature": 3}) is None
    assert graph_json.feature_of({**other, "feature": None}) is None
