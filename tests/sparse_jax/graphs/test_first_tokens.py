"""First tokens that a transcoder was not trained on have no features; what is written is an error.

circuit-tracer leaves out the features of one (`zero_positions`).
"""

import dataclasses
import types

import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.model.sites import keep
from lm_jax.run.files import read_json, write_json
from sparse_jax.graphs import attribute, interventions
from sparse_jax.studies.graphs import inputs, report_text
from sparse_jax.studies.graphs.settings import GraphConfig
from sparse_jax.transcoders import files
from sparse_jax.transcoders.files import Origin
from tests.sparse_jax.graphs.small_graphs import (
    small_graph,
    small_model,
    small_tokens,
    small_transcoder,
)


@pytest.fixture(scope="module")
def graph():
    transcoder = dataclasses.replace(small_transcoder(), skip_start=1)
    return attribute(small_model("llama"), transcoder, small_tokens())


def test_first_tokens_have_no_features_and_rows_still_sum_to_the_forward_pass(graph):
    whole = small_graph("llama").nodes.to_pylist()
    own = graph.nodes.to_pylist()
    features = [row for row in whole if row["kind"] == "feature"]
    assert any(row["position"] == 0 for row in features)
    assert [row for row in own if row["kind"] == "feature"] == [
        row for row in features if row["position"] > 0
    ]
    assert graph.certificate().max() <= 1e-5
    replacement, bias_LD = graph.replacement, graph.transcoder.decoder_bias_LD
    np.testing.assert_array_equal(
        replacement.error_LTD[:, 0], replacement.output_LTD[:, 0] - bias_LD
    )


@pytest.mark.parametrize("mode", ["attention_frozen", "free"])
def test_runs_of_interventions_begin_with_the_model_itself(graph, mode):
    """Features of first tokens that responded would be written beside the errors that hold them."""
    model, tokens = small_model("llama"), jnp.asarray(small_tokens(), jnp.int32)[None]
    node = int(np.flatnonzero(graph.kinds == "feature")[0])
    (run,) = interventions.run_scaled(model, graph, [np.array([node])], np.array([2.0]), mode=mode)
    wanted = model.forward(tokens, jnp.ones_like(tokens, bool), record={"mlp.in": keep})
    size = np.abs(wanted.hidden).max()
    np.testing.assert_allclose(run.hidden_BD[0], wanted.hidden[0, -1], atol=1e-4 * size)
    assert np.abs(run.hidden_BD[1] - run.hidden_BD[0]).max() > 1e-3 * size


def test_the_file_of_a_transcoder_says_which_tokens_were_left_out(tmp_path):
    files.save(
        tmp_path / "clt", dataclasses.replace(small_transcoder(), skip_start=1), Origin("tiny")
    )
    assert files.load(tmp_path / "clt")[0].skip_start == 1
    # Of an earlier version.
    note = read_json(tmp_path / "clt" / files.NOTE)
    assert note.pop("skip_start") == 1
    write_json(tmp_path / "clt" / files.NOTE, note)
    assert files.load(tmp_path / "clt")[0].skip_start == 0


@pytest.mark.parametrize(("asked", "given"), [(-1, 1), (0, 0), (2, 2)])
def test_graphs_follow_the_file_or_the_option(tmp_path, monkeypatch, asked, given):
    folder = tmp_path / "clt"
    files.save(folder, dataclasses.replace(small_transcoder(), skip_start=1), Origin("tiny"))
    source = types.SimpleNamespace(sha256="0" * 64, model=small_model("llama"))
    monkeypatch.setattr(inputs.SourceModel, "load", lambda name: source)
    none = dataclasses.replace(GraphConfig().corpus, source="")
    options = {"unknown_origin": True, "skip_start": asked, "corpus": none}
    config = GraphConfig(model="m", transcoder=str(folder), **options)
    loaded = inputs._load("model", "m", str(folder), config, [])
    assert loaded.features.skip_start == loaded.facts.skip_start == given


@pytest.mark.parametrize(
    ("first", "skip_start", "advised"), [((400.0, 900.0), 0, True), ((400.0, 900.0), 1, False),
    ((30.0, 60.0), 0, False)]
)  # fmt: skip
def test_ten_times_as_many_active_features_at_first_tokens_are_named(first, skip_start, advised):
    facts = types.SimpleNamespace(
        transcoder="mine", active=(20.0, 40.0), active_first=first, skip_start=skip_start
    )
    line = report_text._active_line(facts)
    assert line.startswith("mine: 20 to 40 features are active at a token, by layer, and ")
    assert ("--config.skip_start=1" in line) == advised
