"""Runs of one library as the models of another: read, and a transcoder and a graph of one."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iaj import __main__ as main
from iaj import commands, run_readers
import lm_jax
from lm_jax.errors import BadInputError
from lm_jax.study import frame
from lm_jax.text.preparation import CorpusConfig
from lm_jax.weights import runs
from polyattn_jax.audit.audited_model import load, model_identity
from polyattn_jax.audit.config import AuditConfig
import protot_jax
from protot_jax.studies.attribution import prompt_tokens
from sparse_jax import graphs, transcoders
from sparse_jax.circuits.source_model import SourceModel
from sparse_jax.studies.transcoders import STUDY
from sparse_jax.studies.transcoders.run import TRANSCODER
from sparse_jax.studies.transcoders.settings import TranscoderTraining
from tests.protot_jax.small_runs import run, text

__all__ = ["run", "text"]


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(runs, "_READERS", {})
    run_readers.register_all()


def test_a_run_is_read_by_its_library_and_other_folders_are_not(run, registered, tmp_path):
    own = protot_jax.load_run(run)
    read = runs.read_run(str(run))
    assert read is not None and read.mixer == own.mixer and read.sha256 == own.sha256
    jax.tree.map(np.testing.assert_array_equal, read.params, own.params)
    second = runs.read_run(run / "seed_2")
    assert second is not None and second.sha256 != own.sha256
    wanted = protot_jax.load_run(run, seed=2)
    jax.tree.map(np.testing.assert_array_equal, second.params, wanted.params)
    assert runs.read_run(tmp_path) is None and runs.read_run(run / "data") is None


def test_runs_are_no_models_where_no_library_is_registered(run, monkeypatch):
    monkeypatch.setattr(runs, "_READERS", {})
    assert runs.read_run(run) is None


def test_commands_of_the_other_libraries_can_read_runs(monkeypatch):
    monkeypatch.setattr(runs, "_READERS", {})
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(commands, "run", lambda module: 0)
    main._run(("protot", "concepts"), [])
    assert not runs._READERS
    for words in (("sparse", "transcoder"), ("polyattn", "check")):
        monkeypatch.setattr(runs, "_READERS", {})
        main._run(words, [])
        assert list(runs._READERS) == ["protot_jax"]


def test_a_run_with_softmax_is_audited_like_a_pretrained_model(registered):
    config = AuditConfig(model="llama_small", dtype="float32")
    audited = load(config)
    assert audited.model.identity == model_identity("llama_small")
    assert audited.model.identity == protot_jax.load_run("llama_small").identity
    own = protot_jax.load_run("llama_small")
    tokens_BT = jnp.asarray([[5, 6, 7, 8]])
    wanted = lm_jax.forward(own.params, tokens_BT, own.cfg, mixer=own.mixer).logits
    got = lm_jax.forward(audited.model.params, tokens_BT, audited.model.cfg).logits
    np.testing.assert_array_equal(got, wanted)
    with pytest.raises(BadInputError, match="name one with softmax attention, such as llama_small"):
        load(AuditConfig(model="protot_small"))


@pytest.mark.long
def test_a_transcoder_of_a_run_and_its_graph_mediated_by_prototypes(
    run, text, registered, tmp_path
):
    config = TranscoderTraining(
        model=str(run),
        corpus=CorpusConfig(str(text), "document", splits=(0.7, 0.3, 0.0)),
        context=16,
        features=16,
        batch_size=8,
        steps=2,
        eval_every=2,
        scale_batches=1,
        validation_documents=8,
        mesh=(-1, 1, 1),
    )
    source = SourceModel.load(config.model)
    own = protot_jax.load_run(run)
    assert source.model.mixer == own.mixer and source.sha256 == own.sha256
    summary = frame.execute(STUDY, config, tmp_path)
    assert summary.model_sha256 == own.sha256
    transcoder, origin = transcoders.load(tmp_path / TRANSCODER)
    assert origin.model_sha256 == own.identity.text
    # Two steps make few features; with these biases every token has some.
    bias_LF = np.full((2, 16), 0.5, np.float32)
    transcoder = transcoder.replace(params=transcoder.params | {"encoder_bias": bias_LF})
    tokens = prompt_tokens(own.tokenizer, "the house of a river")
    graph = graphs.attribute(own, transcoder, tokens)
    assert graph.certificate().max() <= 1e-5
    kinds = graph.nodes["kind"].to_pylist()
    share_LNTS = graph.mediation(kinds.index("token") + 1, kinds.index("logit"))
    T = len(tokens)
    assert share_LNTS.shape == (2, 3, T, T)
    earlier = np.tril(np.ones((T, T), bool), -1)
    assert share_LNTS.any() and not share_LNTS[..., ~earlier].any()
