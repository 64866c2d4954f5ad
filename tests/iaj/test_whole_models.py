"""No command takes a part of a model for the model: gates and trained runs are read or refused."""

import json
from pathlib import Path
import shutil

import numpy as np
import pytest

from iaj import convert, run_readers
import lm_jax
from lm_jax.errors import BadInputError
from lm_jax.evaluate import judge
from lm_jax.weights import hub, runs
from lm_jax.weights.load import open_pretrained
from polyattn_jax.audit import audited_model
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.recipes import gates
import sparse_jax
from sparse_jax.circuits.source_model import SourceModel
from sparse_jax.studies.circuits.inputs import open_model
from sparse_jax.studies.posttrain import task
from sparse_jax.studies.posttrain.settings import PosttrainConfig
from tests.sparse_jax.circuits.small_study import save_models

MODELS = Path(__file__).parents[2] / "models"


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
    """A folder of a sparse model, about half of whose edges are closed."""
    return save_models(tmp_path_factory.mktemp("models")) / "sparse" / "model"


WAYS = {
    "load_pretrained": lm_jax.load_pretrained,
    "open_pretrained": open_pretrained,
    "convert": lambda source: convert.convert(source, Path(source).parent / "converted"),
    "judge": lambda source: judge.check_judge(f"local:{source}"),
    "posttrain": lambda source: task.open_model(PosttrainConfig(model=str(source))),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_sparse_model_is_refused_where_its_gates_would_be_lost(way, gated):
    with pytest.raises(BadInputError, match=r"a sparse model, whose gates .* sparse_jax\.load"):
        WAYS[way](gated)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama_small", "mamba_small"])
def test_an_exported_run_is_refused_by_what_reads_it(way, name):
    with pytest.raises(BadInputError, match=r"export of iaj protot.* protot_jax\.load_run"):
        WAYS[way](MODELS / name)


def test_an_audit_reads_no_run_but_one_with_softmax_that_its_reader_gives(monkeypatch):
    monkeypatch.setattr(runs, "_READERS", {})
    for name in ("llama_small", "mamba_small"):
        with pytest.raises(BadInputError, match=r"export of iaj protot.* protot_jax\.load_run"):
            audited_model.load(AuditConfig(model=str(MODELS / name)))
    run_readers.register_all()
    assert audited_model.load(AuditConfig(model=str(MODELS / "llama_small"))).model.of_run
    with pytest.raises(BadInputError, match="name one with softmax attention, such as llama_small"):
        audited_model.load(AuditConfig(model=str(MODELS / "mamba_small")))


def test_commands_that_take_sparse_models_apply_their_gates(gated):
    tokens = np.arange(12)[None] % 20
    own = sparse_jax.load(gated)
    wanted = own.forward(tokens).logits
    dense = lm_jax.forward(own.params, tokens, own.cfg).logits
    assert np.abs(wanted - dense).max() > 0.1
    valid = np.ones(tokens.shape, bool)
    for model in (
        open_model("dense", str(gated)).load("float32"),
        SourceModel.load(str(gated)).model,
    ):
        assert model.gates is not None
        np.testing.assert_allclose(model.forward(tokens, valid).logits, wanted, atol=1e-4)
    audited = audited_model.load(AuditConfig(model=str(gated))).model
    logits = gates.forward(audited.params, tokens, audited.cfg).logits
    np.testing.assert_allclose(logits, wanted, atol=1e-4)


def test_a_caller_that_applies_the_gates_gets_the_weights(gated):
    model = lm_jax.load_pretrained(gated, without_gates=True)
    assert model.sha256 == sparse_jax.load(gated).base.sha256


@pytest.mark.parametrize("known_by", ["config.json", "README.md"])
def test_a_copy_without_its_gates_is_refused(known_by, gated, tmp_path):
    folder = shutil.copytree(gated, tmp_path / "model", ignore=shutil.ignore_patterns(hub.GATES))
    if known_by == "config.json":
        (folder / "README.md").unlink()
    else:
        config = json.loads((folder / "config.json").read_text())
        del config[hub.GATES_FIELD]
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInputError, match="of a sparse model, but not its gates"):
        lm_jax.load_pretrained(folder)


def test_gates_are_downloaded_with_the_weights():
    assert "sparse.json" in hub.FILES


def test_folders_of_runs_are_known(tmp_path):
    run = tmp_path / "run"
    (run / "seed_3" / "checkpoints").mkdir(parents=True)
    assert not runs.is_run(run)
    (run / "config.json").write_text("{}")
    assert runs.is_run(run) and runs.is_run(run / "seed_3") and not runs.is_run(run / "data")
    with pytest.raises(BadInputError, match="is a run or an export of iaj protot"):
        lm_jax.load_pretrained(run)


def test_a_folder_of_an_exporter_with_a_file_of_that_name_is_no_run(gated, tmp_path):
    folder = shutil.copytree(gated, tmp_path / "model", ignore=shutil.ignore_patterns(hub.GATES))
    (folder / "export.json").write_text('{"format": "onnx", "files": []}')
    assert not runs.is_run(folder)
