"""The command with neurons for features."""

import numpy as np
import pytest

import lm_jax
from lm_jax.run.files import read_json
from lm_jax.run.results import load_result
from lm_jax.study import frame
from sparse_jax.circuits.source_model import SourceModel
from sparse_jax.graphs import graph_json, neurons
from sparse_jax.graphs.features import SKIPPED_START
from sparse_jax.studies.graphs.results import FEATURES, GraphSummary
from tests.browser import PageReader
from tests.sparse_jax.graphs.small_command import BARE, PROMPTS, at, run, small

pytestmark = pytest.mark.usefixtures("few_are_alike")


def test_a_graph_of_neurons_needs_no_transcoder_and_says_so(models, tmp_path, capsys):
    folder, kept = tmp_path / "run", 30
    asked = [
        f"--model={models / 'dense'}",
        "--neurons",
        f"--prompt={PROMPTS[1]}",
        *small(models),
        *BARE,
    ]
    assert run(*asked, f"--config.max_features={kept}", at(folder)) == 0
    out = capsys.readouterr().out
    assert "features are neurons of the models' MLPs; this is no transcoder" in out
    assert "  errors of mediation by layer: " in out
    source = SourceModel.load(str(models / "dense"))
    graph = neurons.graph(source.model, source.tokenizer.encode(PROMPTS[1]), max_features=kept)
    pruned = graph.prune()
    summary = load_result(folder / frame.SUMMARY, GraphSummary)
    (result,), (facts,) = summary.graphs, summary.models
    assert (facts.kind, facts.transcoder) == (neurons.KIND, "")
    assert facts.features == source.model.cfg.mlp_size and result.sizes.features == kept
    document = graph_json.read(folder / result.file)
    metadata = document["metadata"]
    assert metadata["generation_settings"]["max_feature_nodes"] == kept
    assert metadata["transcoder_list"] == [] and metadata["info"]["generator"]["version"]
    assert metadata["info"]["description"].endswith("of type mlp neuron")
    rows, columns = np.nonzero(pruned.kept_RS & (graph.adjacency != 0))
    weights = [link["weight"] for link in document["links"]]
    np.testing.assert_array_equal(weights, graph.adjacency[rows, columns].astype(np.float64))
    types = {node["feature_type"] for node in document["nodes"]}
    assert neurons.NEURON in types and "cross layer transcoder" not in types
    check_report(folder, result)
    stored = [read_json(file) for file in (folder / FEATURES).rglob("*.json")]
    check_texts(max(stored, key=lambda each: len(each["examples_quantiles"])), source)
    # Every unit of a gated MLP is active on every token, with either sign.
    assert {each["activation_frequency"] for each in stored} == {1.0}
    assert any(each["act_min"] < 0 < each["act_max"] for each in stored)
    assert summary.features[0].silent == 0
    # A node below 0 has texts with such activations.
    nodes = [node for node in document["nodes"] if graph_json.feature_of(node)]
    below = {graph_json.feature_of(node) for node in nodes if node["activation"] < 0}
    assert below
    for each in stored:
        if (each["layer"], each["feature"]) in below:
            names = [group["quantile_name"] for group in each["examples_quantiles"]]
            assert names[1:] == ["Bottom activations"] * (each["act_min"] < 0)


def check_report(folder, result):
    """The page of a single graph is its viewer, whole and without links."""
    text = (folder / frame.REPORT).read_text("utf-8")
    assert "not of a transcoder: nothing was trained" in text
    viewer = (folder / result.file).with_suffix(".html").read_text("utf-8")
    main = text.partition("<main>")[2].partition("</main>")[0]
    assert "Explore the graph</h2>" in main and main in viewer
    page = PageReader(text)
    assert page.is_closed and {link[:1] for link in page.values("href", "src")} <= {"#"}


def check_texts(stored, source):
    """Texts are those on which the hidden unit of the model itself is largest and lowest."""
    highest, lowest = (group["examples"] for group in stored["examples_quantiles"])
    assert max(highest[0]["tokens_acts_list"]) == stored["act_max"]
    assert min(lowest[0]["tokens_acts_list"]) == stored["act_min"] < 0
    for example, place in ((highest[0], np.argmax), (lowest[0], np.argmin)):
        ids = source.tokenizer.encode(" ".join(example["tokens"]))
        assert len(ids) == len(example["tokens"])
        row_BT = np.array(ids)[None]
        hidden = source.model.forward(
            row_BT, np.ones_like(row_BT, bool), record={"mlp.post": lm_jax.keep}
        ).records["mlp.post"]
        act_T = np.asarray(hidden)[stored["layer"], 0, :, stored["feature"]]
        at = int(place(example["tokens_acts_list"]))
        assert at == example["train_token_ind"] >= SKIPPED_START
        np.testing.assert_allclose(example["tokens_acts_list"][at], act_T[at], rtol=1e-4)
