"""The command: its graph is that of `attribute`, it resumes, and refuses before it writes."""

import numpy as np
import pytest

from lm_jax.run.results import load_result
from sparse_jax import transcoders
from sparse_jax.graphs import attribute, graph_json, study
from sparse_jax.graphs.results import GraphSummary
from sparse_jax.source_model import SourceModel
from tests.sparse_jax.graphs.small_command import PROMPTS, run, save_all


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_all(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def alone(models, tmp_path_factory):
    """Two prompts of the dense model, one with a target."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert run(*of_dense(models), *(f"--prompt={each}" for each in PROMPTS), workdir(folder)) == 0
    return folder, load_result(folder / study.SUMMARY, GraphSummary)


def of_dense(models):
    return [f"--model={models / 'dense'}", f"--transcoder={models / 'dense_clt'}"]


def workdir(folder):
    return f"--workdir={folder}"


def test_the_graph_of_the_command_is_that_of_attribute(models, alone):
    folder, summary = alone
    source = SourceModel.load(str(models / "dense"))
    transcoder, _ = transcoders.load(models / "dense_clt")
    for text, result in zip(PROMPTS, summary.graphs, strict=True):
        graph = attribute(source.model, transcoder, source.tokenizer.encode(text))
        pruned = graph.prune()
        document = graph_json.read(folder / result.file)
        rows, sources = np.nonzero(pruned.kept_RS & (graph.adjacency != 0))
        weights = [link["weight"] for link in document["links"]]
        np.testing.assert_array_equal(weights, graph.adjacency[rows, sources].astype(np.float64))
        assert result.sizes.kept_edges == len(weights) > 20
        assert result.scores == graph.scores(pruned)
        assert result.row_error == tuple(graph.certificate())
        assert [each.id for each in result.logits] == [
            row["feature"] for row in graph.nodes.to_pylist() if row["kind"] == "logit"
        ]
