"""`iaj push`: cards, refusals, and uploads by `huggingface_hub` to a hub of this machine."""

import os
from pathlib import Path
import shutil
import subprocess
import sys

import pytest
import yaml

from iaj import push
from lm_jax.assets import published
from lm_jax.errors import CorruptError
from lm_jax.weights import card as cards
from protot_jax.training.saved_run import load_run
import sparse_jax
from sparse_jax import transcoders
from tests.hub_server import serve

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hub():
    with serve() as hub:
        yield hub


def upload(hub, *words: str, token: str | None = None) -> subprocess.CompletedProcess:
    """Runs the command in a process of its own, whose hub is that of the test."""
    environment = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": hub.token if token is None else token,
        # The hub's other way to send large files has a server of its own.
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    environment.pop("HF_HUB_OFFLINE")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "iaj", "push", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def one_line(capsys) -> str:
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def dry(capsys, *words: str) -> tuple[dict, str, list[str]]:
    """Front matter, body and files that a dry run prints."""
    assert push.main([*words, "--dry_run"]) == 0
    _, front, rest = capsys.readouterr().out.split("---\n", 2)
    card, _, files = rest.partition("\nREADME.md\n")
    return yaml.safe_load(front), card, files.splitlines()[:-1]


def test_an_export_arrives_whole_and_is_the_same_model(hub, tmp_path):
    done = upload(hub, "protot_small", "org/small", "--private")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{hub.url}/org/small/commit/c0ffee: 14 files, ")
    assert hub.private == {"org/small": True}
    name, files = hub.commits[0]
    assert name == "org/small"
    assert set(files) == set(published.entry("protot_small").files)
    folder = hub.snapshot(tmp_path / "snapshot")
    card = (folder / cards.CARD).read_text("utf-8")
    assert card.startswith("---\nlicense: apache-2.0\n")
    assert "| test perplexity, best weights | 88.74 (one run) |" in card
    assert 'snapshot_download("org/small")' in card
    # The card differs from that of the manifest; everything else is compared with it.
    model, own = load_run(folder), load_run("protot_small")
    assert model.identity == own.identity
    (folder / "summary.json").write_text("{}")
    with pytest.raises(CorruptError, match=r"summary\.json"):
        load_run(folder)


@pytest.mark.long
def test_a_sparse_model_and_a_transcoder_are_read_from_what_arrives(hub, tmp_path):
    assert upload(hub, "pair_192_sparse", "org/sparse").returncode == 0
    model = sparse_jax.load(hub.snapshot(tmp_path / "sparse"))
    assert model.identity == sparse_jax.load("pair_192_sparse").identity
    # A copy that lost its gates is known by its card.
    assert cards.is_of_sparse(tmp_path / "sparse")
    assert upload(hub, "pair_192_sparse_transcoder", "org/transcoder").returncode == 0
    folder = hub.snapshot(tmp_path / "transcoder")
    assert transcoders.files.identity(folder) == transcoders.files.identity(
        "pair_192_sparse_transcoder"
    )
    assert hub.private == {"org/sparse": False, "org/transcoder": False}


@pytest.mark.long
def test_a_second_upload_is_a_second_commit(hub):
    for _ in range(2):
        done = upload(hub, "pair_192_dense", "org/dense", "--licence=mit")
        assert done.returncode == 0, done.stderr
    assert [name for name, _ in hub.commits] == ["org/dense"] * 2
    assert hub.commits[0][1][cards.CARD].startswith(
        b"---\nlicense: mit\nlibrary_name: transformers"
    )


def test_a_hub_that_refuses_or_is_gone_is_one_line(hub):
    done = upload(hub, "pair_192_dense", "org/dense", token="hf_other")
    assert done.returncode == 3
    assert done.stderr.startswith("error: org/dense was not uploaded (")
    assert done.stderr.endswith("that your token may write there\n")
    assert done.stderr.count("\n") == 1
    assert "hf_other" not in done.stderr
    assert hub.commits == []


def test_a_dry_run_prints_the_card_and_the_files_and_asks_nobody(hub, capsys):
    base = "--base_model=HuggingFaceTB/SmolLM2-135M"
    front, card, files = dry(capsys, "pair_192_sparse", "org/x", "--licence=mit", base)
    assert front == {
        "license": "mit",
        "library_name": "interpretable-attention-jax",
        "base_model": "HuggingFaceTB/SmolLM2-135M",
        "tags": ["jax", "interpretability", "sparse-attention"],
    }
    assert "| open edges | 0.47% (95 % interval 0.45% to 0.48%, 200 documents) |" in card
    assert "`iaj reproduce circuits/pair_192`" in card
    assert "dense, parameters 528,960" in card
    assert sorted(files) == [
        *("config.json", "model.safetensors", "sparse.json"),
        *("tokenizer.json", "tokenizer_config.json"),
    ]
    front, card, _ = dry(capsys, "pair_192_dense", "org/x")
    assert front["pipeline_tag"] == "text-generation"
    assert "| cooldown, loss | 3.277 |" in card
    assert "seconds" not in card
    front, card, files = dry(capsys, "protot_whole", "org/x")
    assert front["tags"] == ["jax", "interpretability", "protot"]
    assert "under CC BY-SA 4.0." in card
    assert "export.json" in files
    assert hub.asked == []


def test_a_card_that_was_pushed_before_keeps_one_front_matter(tmp_path, capsys):
    source = published.folder("pair_192_dense")
    folder = shutil.copytree(source, tmp_path / "dense")
    (folder / cards.CARD).write_text("---\nlicense: mit\n---\n# My model\n\nText.\n")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    front, card, files = dry(capsys, str(folder), "org/x", "--licence=apache-2.0")
    assert front["license"] == "apache-2.0"
    assert card.startswith("# My model\n\nText.\n")
    assert "pytorch_model.bin" not in files


def test_a_training_is_pushed_when_it_has_finished(tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(published.folder("pair_192_sparse"), run / "model")
    assert push.main([str(run), "org/x", "--licence=mit", "--dry_run"]) == 3
    assert f"{run} has not finished" in one_line(capsys)
    (run / "result.json").write_text("{}")
    assert push.main([str(run), "org/x", "--licence=mit", "--dry_run"]) == 0


def test_damage_is_found_before_anything_is_sent(tmp_path, capsys):
    small = shutil.copytree(published.folder("protot_small"), tmp_path / "small")
    with (small / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    assert push.main([str(small), "org/x", "--licence=mit"]) == 7
    assert "model.safetensors does not match its sha256" in one_line(capsys)
    sparse = shutil.copytree(published.folder("pair_192_sparse"), tmp_path / "sparse")
    shutil.copy(published.folder("pair_192_control") / "model.safetensors", sparse)
    assert push.main([str(sparse), "org/x", "--licence=mit"]) == 7
    assert "the model is not the one that sparse.json was written for" in one_line(capsys)


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["pair_192_dense", "name"], 2, "write ORG/NAME"),
        (["pair_192_dense", "org/name@main"], 2, "write ORG/NAME"),
        (["pair_192_dense", "org/name", "--base_model=name"], 2, "--base_model = 'name'"),
        (["models/pair_192/dense/model", "org/name"], 2, "--licence is missing"),
        (["docs", "org/name", "--licence=mit"], 3, "holds no safetensors"),
        (["pair_192_spars", "org/name", "--licence=mit"], 3, "did you mean 'pair_192_sparse'?"),
        (["pair_192", "org/name"], 3, "name one of them: pair_192_dense"),
    ],
)
def test_what_cannot_be_pushed(words, code, part, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert push.main([*words, "--dry_run"]) == code
    assert part in one_line(capsys)
