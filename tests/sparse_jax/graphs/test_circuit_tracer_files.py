"""Files of graphs and features, read by the classes of circuit-tracer's own server."""

import importlib.util
import json
from pathlib import Path

import pytest

from sparse_jax.graphs import features, graph_document, graph_json
from sparse_jax.graphs.features import FeatureData, Text
from tests.sparse_jax.graphs.small_graphs import TOKENS, small_graph

pytestmark = pytest.mark.torch


def classes(name):
    """A module of circuit-tracer, which is found and not imported, since it asks for packages."""
    found = importlib.util.find_spec("circuit_tracer")
    assert found is not None, "pip install --no-deps -r requirements/circuit_tracer.txt"
    file = Path(found.submodule_search_locations[0]) / "frontend" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"circuit_tracer_{name}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("model", [("llama", None, None), ("gpt2", 0.3, 1)])
def test_a_graph_is_read_as_it_was_written(model, tmp_path):
    graph = small_graph(*model)
    pruned = graph.prune()
    logits = len(graph.probabilities)
    document = graph_document.document(
        *(graph, pruned),
        slug="a-prompt",
        model_name="tiny",
        tokens=[f" w{i}" for i in range(TOKENS)],
        logit_tokens=[f" next{i}" for i in range(logits)],
        node_threshold=0.8,
        edge_threshold=0.95,
    )
    graph_json.write(tmp_path / "graph.json", document)
    text = (tmp_path / "graph.json").read_text("utf-8")
    read = classes("graph_models").Model.model_validate_json(text)
    assert [node.node_id for node in read.nodes] == [n["node_id"] for n in document["nodes"]]
    assert len(read.links) == len(document["links"]) == pruned.kept_RS.sum()
    for node, own in zip(read.nodes, document["nodes"], strict=True):
        assert (node.layer, node.ctx_idx, node.influence) == (
            *(own["layer"], own["ctx_idx"], own.get("influence")),
        )
    links = classes("graph_models").Link
    assert sum(links(**link).weight for link in read.links) == sum(
        link["weight"] for link in document["links"]
    )
    assert read.metadata.prompt_tokens == [f" w{i}" for i in range(TOKENS)]


def test_a_feature_is_read_as_it_was_written():
    texts = (Text((" a", " b"), (0.0, 1.5)),)
    data = FeatureData(texts, (" up",), (" down",), 0.5, 0.0, 1.5, (0.0, 1.5), (1, 2))
    document = features.document((1, 7), data, scan="tiny")
    read = classes("feature_models").Model.model_validate_json(json.dumps(document))
    assert read.top_logits == [" up"] and read.activation_frequency == 0.5
    assert read.examples_quantiles[0].examples[0].tokens == [" a", " b"]
