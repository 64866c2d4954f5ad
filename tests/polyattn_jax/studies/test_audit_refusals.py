"""What an audit cannot use is one line that names the field and the remedy, and an exit code."""

import json
import shutil

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from lm_jax.run.files import read_json, write_json
from lm_jax.run.finished import mark_finished
from lm_jax.run.results import load_result
from lm_jax.study import frame
from polyattn_jax.audit import opening
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.audit.results import AuditSummary
from polyattn_jax.studies import audit


@pytest.mark.parametrize(
    ("override", "code", "words"),
    [
        ("--config.niah_m=3", 2, "--config.niah_m is not a field; did you mean 'niah_n'?"),
        (
            "--config.recipes=('relu_p4_bato',)",
            2,
            "recipe 'relu_p4_bato': no recipe or kind 'relu_p4_bato'; did you mean 'relu_p4_bauto'",
        ),
        ("--config.tolerance=0.0", 2, "config.tolerance = 0.0 must be between 0 and 1"),
        ("--config.induction_n=0", 2, "the ablation ranks heads on induction; set it to 1 or more"),
        ("--config.sweep_length=128", 2, "is not in config.niah_lengths = (64,); add it there"),
        ("--config.mesh=(3, 1, 1)", 2, "do not multiply to the 4 devices; set one of them to -1"),
        ("--config.model=no/such/folder", 3, "'no/such/folder' is no folder or .gguf file"),
        ("--config.model=smollm3", 3, "did you mean 'smollm2'"),
        ("--config.haystack=no/such.txt", 3, "neither 'essays' nor 'speeches' nor a readable"),
        ("--config.prompts=no/such.jsonl", 3, "no/such.jsonl: No such file or directory"),
    ],
)
def test_a_setting_that_cannot_be_used(run_audit, tmp_path, override, code, words):
    outcome = run_audit(tmp_path / "run", override)
    assert (outcome.code, len(outcome.err)) == (code, 1)
    assert outcome.err[0].startswith("error: ")
    assert words in outcome.err[0]
    assert not list(tmp_path.glob("run/*.parquet"))


@pytest.fixture
def copied(tiny, tmp_path):
    """A copy of the model's folder, to be spoilt."""
    return shutil.copytree(tiny, tmp_path / "model")


def write_tokenizer(folder, words):
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(folder / "tokenizer.json"))


def spoil_vocabulary(folder):
    write_tokenizer(folder, ["<unk>", *map(str, range(20_000))])


def spoil_nouns(folder):
    write_tokenizer(folder, ["<unk>", "The", "secret", "word", "is", ".", "apple", "arrow"])


def spoil_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


def spoil_family(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "llamma"}))


def spoil_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_vocabulary, "use the tokenizer that belongs to these weights"),
        (spoil_nouns, "nouns: 2 of 200 are one token in this tokenizer, 50 are needed"),
        (spoil_tokenizer, "has no tokenizer.json"),
        (spoil_family, "model_type = 'llamma' is not supported"),
        (spoil_weights, "model.safetensors"),
    ],
)
def test_a_model_that_cannot_be_used(run_audit, tmp_path, copied, spoil, words):
    spoil(copied)
    outcome = run_audit(tmp_path / "run", f"--config.model={copied}")
    assert (outcome.code, len(outcome.err)) == (3, 1)
    assert words in outcome.err[0]


def test_a_damaged_shard(run_audit, audited, tmp_path):
    folder = shutil.copytree(audited, tmp_path / "run")
    (folder / "finished.json").unlink()
    (shard,) = folder.glob("rows/*.parquet")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    outcome = run_audit(folder)
    assert (outcome.code, len(outcome.err)) == (7, 1)
    assert shard.name in outcome.err[0]
    shard.unlink()
    assert run_audit(folder).code == 0


def test_a_finished_audit_is_shown_though_its_files_are_gone(audited, tmp_path, capsys):
    folder = shutil.copytree(audited, tmp_path / "run")
    gone = {"model": str(tmp_path / "gone"), "prompts": "no/such.jsonl"}
    settings = read_json(folder / "config.json") | gone
    write_json(folder / "config.json", settings)
    mark_finished(folder, {"model": "a" * 64, "config.prompts": "b" * 64})
    shown = frame.execute(audit.STUDY, settings, folder)
    assert shown == load_result(audited / frame.SUMMARY, AuditSummary)
    said = capsys.readouterr()
    assert said.out.startswith("finished ")
    assert "model, config.prompts cannot be compared" in said.err


def test_a_folder_that_is_called_like_a_haystack_is_none(tmp_path, monkeypatch):
    (tmp_path / "essays").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "config.haystack" not in opening.inputs(AuditConfig(model="no/such", haystack="essays"))
