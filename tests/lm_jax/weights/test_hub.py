"""Models by hub id: out of a cache made here; downloads asked for are played by a function."""

import errno
import json
import os
from pathlib import Path
import shutil
import subprocess
import sys

import huggingface_hub
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects
import pytest

import lm_jax
from lm_jax.checkpoint.folder import MANIFEST
from lm_jax.console import cli
from lm_jax.errors import BadInputError, StorageError
from lm_jax.run import downloads
from lm_jax.weights import hub, load
from tests.lm_jax.weights.golden_copies import CONFIG, SECOND, WEIGHTS, equal, refused, shard
from tools import make_goldens

MAIN, OLD = "1" * 40, "a2" * 20
REMEDY = "--download (download=True) fetches it"


def put(cache, folder, commit, reference=None, repository="org/name"):
    """Adds a folder to a hub's cache as a snapshot, each file a link to a blob."""
    place = cache / f"models--{repository.replace('/', '--')}"
    snapshot, blobs = place / "snapshots" / commit, place / "blobs"
    for each in (snapshot, blobs, place / "refs"):
        each.mkdir(parents=True, exist_ok=True)
    for file in Path(folder).iterdir():
        shutil.copy(file, blobs / f"{commit}-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/{commit}-{file.name}")
    if reference is not None:
        (place / "refs" / reference).write_text(commit)
    return snapshot


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache in a new HF_HOME, in place of the user's."""
    folder = tmp_path / "home" / "hub"
    folder.mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture
def network(monkeypatch):
    """The arguments of every download; `network.answer()` plays it, and none is expected."""

    class Network(list):
        def answer(self):
            raise AssertionError("the network was used")

    calls, real = Network(), huggingface_hub.snapshot_download

    def snapshot_download(repository, *, local_files_only, **options):
        if not local_files_only:
            calls.append({"repository": repository, **options})
            calls.answer()
        return real(repository, local_files_only=True, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_a_cached_model_is_loaded_by_its_id(cache, network, copy):
    folder = copy()
    put(cache, folder, MAIN, "main")
    put(cache, make_goldens.GOLDEN / "llama_gqa", OLD, "v1.0")
    direct = lm_jax.load_pretrained(folder)
    assert direct.revision is None
    for name in ("org/name", "org/name@main", f"org/name@{MAIN}"):
        model = lm_jax.load_pretrained(name)
        equal(model, direct)
        assert (model.revision, model.sha256) == (MAIN, direct.sha256)
    assert lm_jax.load_pretrained("org/name@v1.0").revision == OLD
    # The snapshot itself, given as a folder, is known to be one.
    snapshot = cache / "models--org--name" / "snapshots" / OLD
    assert load.open_pretrained(snapshot).revision == OLD
    # What is there is not fetched again, nor is a later commit: it may only lack a file.
    network.answer = lambda: None
    assert lm_jax.load_pretrained("org/name", download=True).revision == MAIN
    assert [asked["revision"] for asked in network] == [MAIN]


def test_gates_that_another_program_did_not_fetch_are_missed(cache, network, copy):
    """transformers fetches no sparse.json; a dense model with these weights is another one."""
    folder = copy()
    raw = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(raw | {hub.GATES_FIELD: hub.GATES}))
    snapshot = put(cache, folder, MAIN, "main")
    refused("org/name", "the weights of a sparse model, but not its gates", "--download")
    network.answer = lambda: (snapshot / hub.GATES).write_text("{}")
    with pytest.raises(BadInputError, match="is a sparse model, whose gates are in"):
        lm_jax.load_pretrained("org/name", download=True)


@pytest.mark.parametrize(
    "name",
    [
        "org/name",
        "org/name@v2",
        "org/other",
        f"org/name@{OLD}",
        "org/name@../main",
        "a--b/c",
        "x@y",
    ],
)
def test_a_model_that_is_nowhere(cache, network, copy, monkeypatch, tmp_path, name):
    if name != "org/name":
        put(cache, copy(), MAIN, "main")
    monkeypatch.chdir(tmp_path)
    message = refused(name, "no folder or .gguf file", "ORG/NAME[@REVISION]", str(cache), "smollm2")
    assert (REMEDY in message) == (name not in ("org/name@../main", "x@y"))


def test_folders_and_manifest_names_come_first(cache, network, copy, monkeypatch, tmp_path):
    put(cache, make_goldens.GOLDEN / "llama_gqa", MAIN, "main")
    (tmp_path / "org").mkdir()
    copy().rename(tmp_path / "org" / "name")
    assert lm_jax.load_pretrained("org/name").revision == MAIN
    monkeypatch.chdir(tmp_path)
    assert lm_jax.load_pretrained("org/name").revision is None


def test_only_what_was_asked_for_is_downloaded(cache, network, copy):
    folder = copy()
    network.answer = lambda: put(cache, folder, OLD, "v2")
    refused("org/name@v2", REMEDY)
    assert not network
    model = lm_jax.load_pretrained("org/name@v2", download=True)
    assert model.revision == OLD
    equal(model, lm_jax.load_pretrained(folder))
    (asked,) = network
    assert (asked["repository"], asked["revision"]) == ("org/name", "v2")
    tokenizer = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    wanted = [CONFIG, WEIGHTS, "model.safetensors.index.json", SECOND, *tokenizer]
    others = [
        "pytorch_model.bin",
        "model.pt",
        "modeling_x.py",
        "consolidated.safetensors",
        "a.gguf",
    ]
    chosen = filter_repo_objects(wanted + others, allow_patterns=asked["allow_patterns"])
    assert list(chosen) == wanted
    assert not downloads.are_allowed()


@pytest.mark.parametrize("damage", [CONFIG, WEIGHTS, "blob", "shard"])
def test_part_of_a_model_does_not_count_as_cached(cache, network, copy, damage):
    folder = copy()
    if damage == "shard":
        shard(folder)
    snapshot = put(cache, folder, MAIN, "main")
    lost = {"blob": WEIGHTS, "shard": SECOND}.get(damage, damage)
    (snapshot / lost).resolve().unlink() if damage == "blob" else (snapshot / lost).unlink()
    refused("org/name", "whole in the hub's cache", REMEDY)
    network.answer = lambda: shutil.copy(folder / lost, (snapshot / lost).resolve())
    equal(lm_jax.load_pretrained("org/name", download=True), lm_jax.load_pretrained(folder))


def http_error(kind):
    import httpx2

    request = httpx2.Request("GET", "https://hub")
    return kind("404 Client Error.", response=httpx2.Response(404, request=request))


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (lambda: http_error(errors.RepositoryNotFoundError), BadInputError, "your access to it"),
        (lambda: http_error(errors.RevisionNotFoundError), BadInputError, "the revision"),
        (lambda: errors.LocalEntryNotFoundError("no\nroute."), BadInputError, "(no route); check"),
        (lambda: errors.HTTPError("proxy"), BadInputError, "check the network"),
        (lambda: OSError(errno.ENOSPC, "disk full"), StorageError, "set HF_HOME"),
    ],
)
def test_a_download_that_fails(cache, network, error, kind, words):
    def answer():
        raise error()

    network.answer = answer
    with pytest.raises(kind) as caught:
        lm_jax.load_pretrained("org/name", download=True)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_repository_of_pickles_alone(cache, network, copy):
    folder = copy()
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    network.answer = lambda: put(cache, folder, MAIN, "main")
    with pytest.raises(BadInputError, match="pickled weights are never fetched"):
        lm_jax.load_pretrained("org/name", download=True)


def test_code_of_a_repository_is_not_run(cache, network, copy):
    folder = copy()
    raw = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(raw | {"auto_map": {"AutoConfig": "x.Y"}}))
    put(cache, folder, MAIN, "main")
    refused("org/name", "auto_map")


def test_every_command_can_be_asked_to_download(tmp_path):
    seen = []

    def main(arguments):
        seen.append(downloads.are_allowed())

    for flags in ([], ["--download"], []):
        assert cli.run(main, ["command", *flags], workdir_required=False) == 0
    assert seen == [False, True, False]


def test_the_commit_is_part_of_the_provenance(tmp_path, copy):
    put(tmp_path / "home" / "hub", copy(), MAIN, "main")
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-m", "iaj", "convert", "org/name", str(tmp_path / "out"), "--download"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    data = manifest["notes"]["provenance"]["data"]
    assert data["weights revision"] == MAIN
    assert data["weights"] == lm_jax.load_pretrained(tmp_path / "model").sha256
