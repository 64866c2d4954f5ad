"""Graph files: what they hold of a graph, ids without collisions, and what is refused."""

import copy
import functools
import json
import operator
import types

import numpy as np
import pyarrow as pa
import pytest

from lm_jax.errors import BadInputError, CorruptError
from sparse_jax.graphs import graph_document, graph_json
from tests.sparse_jax.graphs.document_interventions import group_intervention, group_score
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


def test_fields_that_circuit_tracer_asks_for_are_there(document):
    """Its classes read files in `test_circuit_tracer_files`, where they are installed."""
    assert {"slug", "scan", "transcoder_list", "prompt_tokens", "prompt"} <= set(
        document["metadata"]
    )
    fields = {"pinnedIds", "supernodes", "linkType", "clickedId", "sg_pos"}
    assert fields <= set(document["qParams"])
    required = {"node_id", "feature", "layer", "ctx_idx", "feature_type", "jsNodeId"}
    assert all(required <= set(node) for node in document["nodes"])


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
    decoder = types.SimpleNamespace(piece=lambda i: f" w{i}")
    graph.to_json(tmp_path / "b.json", tokenizer=decoder, edge_threshold=0.5)
    fewer = graph_json.read(tmp_path / "b.json")
    assert fewer["metadata"]["prompt_tokens"][0] == f" w{tokens[0]}"
    assert fewer["metadata"]["slug"] == "b" and 0 < len(fewer["links"]) < len(read["links"])
    with pytest.raises(BadInputError, match="must be of letters, digits, - and _"):
        graph.to_json(tmp_path / "a b.json")
    assert len(list(tmp_path.iterdir())) == 2


# What is done with the value at a path.
GONE, MORE = "gone", "one more at the end"


def changed(document, path, value, how=""):
    """A copy with another value at a path of keys and indices, or none, or one more in a list."""
    wrong = copy.deepcopy(document)
    *outer, last = path
    inner = functools.reduce(operator.getitem, outer, wrong)
    if how == GONE:
        del inner[last]
    elif how == MORE:
        inner[last].append(value)
    else:
        inner[last] = value
    return wrong


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("links", 0, "source"), "9_9_9", "'9_9_9' is no node"),
        (("links", 0, "weight"), float("nan"), r"links\[0\]\.weight = nan is no finite"),
        (("links", 0, "weight"), 10**400, r"weight = 1000.* is no finite number"),
        (("links", 0, "weight"), True, "weight = True is no finite number"),
        (("links", 0, "target"), ["x"], r"links\[0\]\.target = \['x'\] is no text"),
        (("nodes", 2, "node_id"), ["x"], r"nodes\[2\]\.node_id = .* is no text"),
        (("nodes", 0, "feature_type"), None, "feature_type = None is no text"),
        (("nodes", 0, "clerp"), 3, r"nodes\[0\]\.clerp = 3 is no text"),
        (("nodes", 0, "jsNodeId"), {}, r"jsNodeId = \{\} is no text"),
        (("nodes", 0, "feature"), "7", "feature = '7' is no whole number or null"),
        (("nodes", 0, "feature"), True, "feature = True is no whole number"),
        (("nodes", 0, "layer"), [0], r"layer = \[0\] is no text or whole"),
        (("nodes", 0, "ctx_idx"), False, "ctx_idx = False is no whole number"),
        (("nodes", 0, "activation"), "1", "activation = '1' is no finite number"),
        (("nodes", 0), "x", r"nodes\[0\] has no node_id"),
        (("nodes", 1, "ctx_idx"), 99, "is at position 99 of 6"),
        (("metadata", "prompt_tokens"), None, "prompt_tokens = None is no list of"),
        (("metadata", "prompt_tokens"), ["a", 1], r"= \['a', 1\] is no list of texts"),
        (("metadata", "slug"), 1, "metadata.slug = 1 is no text"),
        (("metadata", "slug"), "../x", "metadata.slug = '../x'"),
        (("metadata", "prompt"), 0, "metadata.prompt = 0 is no text"),
        (("qParams", "pinnedIds"), None, "pinnedIds = None is no list of texts"),
        (("qParams", "supernodes"), [["a", 1]], r"= \[\['a', 1\]\] is no list of sup"),
    ],
)
def test_a_wrong_value_is_refused(document, tmp_path, path, value, said):
    with pytest.raises(BadInputError, match=said):
        graph_json.write(tmp_path / "graph.json", changed(document, path, value))
    assert not list(tmp_path.iterdir())


def test_a_document_that_lacks_a_part_or_has_one_twice_is_refused(document):
    first = document["links"][0]
    back = first | {"source": first["target"], "target": first["source"]}
    for path, value, how, said in (
        (("nodes",), document["nodes"][0], MORE, "two nodes have the id"),
        (("links",), first, MORE, "two links go from"),
        (("links",), None, MORE, r"links\[\d+\] has no source"),
        (("links",), back, MORE, "links form a cycle"),
        (("nodes", 1, "ctx_idx"), None, GONE, r"nodes\[1\] has no ctx_idx"),
        (("metadata", "scan"), None, GONE, "metadata has no scan"),
        (("nodes",), None, GONE, "nodes is missing"),
    ):
        with pytest.raises(BadInputError, match=said):
            graph_json.check(changed(document, path, value, how), "it")


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
        "group_scores": [group_score(ids)],
    }


def test_extensions_are_written_and_read_back(document, tmp_path):
    extended = _extended(document)
    graph_json.write(tmp_path / "graph.json", extended)
    assert graph_json.read(tmp_path / "graph.json") == extended


# Paths of the first of each.
INTERVENTION, EFFECT = ("interventions", 0), ("interventions", 0, "effects", 0)
MEDIATION, BIAS = ("mediation", 0), ("bias", 0)
GROUP, OUTCOMES = ("group_interventions", 0), ("group_interventions", 0, "outcomes")


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("interventions",), {}, "interventions is no list"),
        ((*INTERVENTION, "factor"), GONE, r"interventions\[0\] has no factor"),
        ((*INTERVENTION, "factor"), None, r"\[0\]\.factor = None is no finite"),
        ((*INTERVENTION, "source"), "9", r"\[0\]\.source = '9' is no node"),
        ((*INTERVENTION, "effects"), 1, r"\[0\]\.effects is no list"),
        ((*EFFECT, "attention_frozen"), GONE, r"ions\[0\]\.effects\[0\] has no attention_frozen"),
        ((*EFFECT, "free"), float("inf"), r"effects\[0\]\.free = inf is no finite number"),
        ((*EFFECT, "target"), ["x"], r"effects\[0\]\.target = \['x'\] is no node"),
        ((*MEDIATION, "source"), "9", r"mediation\[0\]\.source = '9' is no node"),
        ((*MEDIATION, "heads"), [[0, 1]], r"heads has \[0, 1\], not 2 indices"),
        (
            (*MEDIATION, "pairs"),
            [[0, 1, -2, 1, 0.5]],
            r"mediation\[0\]\.pairs has \[0, 1, -2, 1, 0\.5\], not 4 indices",
        ),
        ((*BIAS, "bias"), "1", r"bias\[0\]\.bias = '1' is no finite number"),
        ((*BIAS, "node_id"), "9", r"bias\[0\]\.node_id = '9' is no node"),
        (("nodes", 0, "layer"), "x", "has layer = 'x'"),
        (("group_interventions",), {}, "group_interventions is no list"),
        ((*GROUP, "factor"), GONE, r"group_interventions\[0\] has no factor"),
        ((*GROUP, "predicted"), None, r"\[0\] has predicted = None, no finite"),
        ((*GROUP, "members"), [], r"\[0\] has members = \[\], no list of ids"),
        ((*GROUP, "members"), ["9"], r"\[0\] has member '9', which is no node"),
        (OUTCOMES, 1, r"\[0\] has no list outcomes"),
        ((*OUTCOMES, 0, "mode"), "all", "without a mode of frozen, att"),
        ((*OUTCOMES, 0, "top"), GONE, "no list top of mode attention_frozen"),
        ((*OUTCOMES, 1, "change"), GONE, "outcome of mode free with a value"),
        (
            (*OUTCOMES, 1, "top", 0, "probability"),
            float("nan"),
            "outcome of mode free with a value that is no finite number",
        ),
        ((*OUTCOMES, 1, "top", 0, "token"), 3, "free that is no text"),
        (("group_scores",), {}, "group_scores is no list"),
        (("group_scores", 0, "off"), GONE, r"group_scores\[0\] has no off"),
        (("group_scores", 0, "members"), ["9"], r"group_scores\[0\] has member '9', which is no n"),
        (("group_scores", 0, "removed"), 2.5, r"group_scores\[0\]\.removed = 2\.5 is no number"),
        (("group_scores", 0, "within"), "x", r"group_scores\[0\]\.within = 'x' is no finite"),
    ],
)
def test_a_wrong_extension_is_refused(document, tmp_path, path, value, said):
    wrong = changed(_extended(document), path, value, GONE if value == GONE else "")
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
