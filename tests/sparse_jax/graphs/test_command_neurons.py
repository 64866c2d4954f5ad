"""The command with neurons for features."""

import numpy as np
import pytest

import lm_jax
from lm_jax.run.files import read_json
from lm_jax.run.results import load_result
from sparse_jax.graphs import graph_json, neurons, study
from sparse_jax.graphs.features import SKIPPED_START
from sparse_jax.graphs.results import GraphSummary
from sparse_jax.source_model import SourceModel
from tests.sparse_jax.graphs.small_command import PROMPTS, at, run, small

pytestmark = pytest.mark.usefixtures("few_are_alike")


def test_a_graph_of_neurons_needs_no_transcoder_and_says_so(models, tmp_path, capsys):
    folder, kept = tmp_path / "run", 30
    asked = [f"--model={models / 'dense'}", "--neurons", f"--prompt={PROMPTS[1]}", *small(models)]
    assert run(*asked, f"--config.max_features={kept}", at(folder)) == 0
    out = capsys.readouterr().out
    assert "features are neurons of the models' MLPs; this is no transcoder" in out
    assert "  errors of mediation by layer: " in out
    source = SourceModel.load(str(models / "dense"))
    graph = neurons.graph(source.model, source.tokenizer.encode(PROMPTS[1]), max_features=kept)
    pruned = graph.prune()
    summary = load_result(folder / study.SUMMARY, GraphSummary)
    (result,), (facts,) = summary.graphs, summary.models
    assert (facts.kind, facts.transcoder) == (neurons.KIND, "")
    assert facts.features == source.model.cfg.mlp_size and result.sizes.features == kept
    (line,) = (each for each in out.splitlines() if each.startswith("  errors of rows by layer"))
    assert line.split(": ")[1].replace(", logits", "").split() == [
        f"{error:.1e}" for error in result.row_error
    ]
    document = graph_json.read(folder / result.file)
    metadata = document["metadata"]
    assert metadata["generation_settings"] == {
        "max_n_logits": 10,
        "desired_logit_prob": 0.95,
        "max_feature_nodes": kept,
    }
    assert "transcoder_list" not in metadata and "create_time_ms" not in metadata["info"]
    assert metadata["info"]["description"].endswith("of type mlp neuron")
    assert metadata["info"]["generator"]["version"]
    rows, columns = np.nonzero(pruned.kept_RS & (graph.adjacency != 0))
    weights = [link["weight"] for link in document["links"]]
    np.testing.assert_array_equal(weights, graph.adjacency[rows, columns].astype(np.float64))
    types = {node["feature_type"] for node in document["nodes"]}
    assert neurons.NEURON in types and "cross layer transcoder" not in types
    assert "not of a transcoder: nothing was trained" in (folder / study.REPORT).read_text("utf-8")
    # Texts are those on which the hidden unit of the model itself is largest.
    file = max((folder / study.FEATURES).rglob("*.json"), key=lambda f: f.stat().st_size)
    stored = read_json(file)
    example = stored["examples_quantiles"][0]["examples"][0]
    ids = source.tokenizer.encode(" ".join(example["tokens"]))
    assert len(ids) == len(example["tokens"])
    row_BT = np.array(ids)[None]
    hidden = source.model.forward(
        row_BT, np.ones_like(row_BT, bool), record={"mlp.post": lm_jax.keep}
    ).records["mlp.post"]
    act_T = np.asarray(hidden)[stored["layer"], 0, :, stored["feature"]]
    largest = int(np.argmax(example["tokens_acts_list"]))
    assert largest == example["train_token_ind"] >= SKIPPED_START
    np.testing.assert_allclose(example["tokens_acts_list"][largest], act_T[largest], rtol=1e-4)
