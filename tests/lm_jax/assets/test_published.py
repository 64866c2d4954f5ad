"""Published models: their pins, where they are looked for, and copies of them."""

import dataclasses
from functools import partial
from pathlib import Path
import shutil
import threading
import zipfile

import pytest

import lm_jax
from lm_jax.assets import published
from lm_jax.errors import BadInputError, CorruptError, UsageError
from lm_jax.evaluate.judge import check_judge
from lm_jax.run.files import file_digest
from protot_jax.studies.concepts import units
from protot_jax.studies.glue.settings import GlueConfig
from protot_jax.studies.judging import judges
from protot_jax.training.run_options import RunOptions, load_each
from protot_jax.training.saved_run import load_run
import sparse_jax
from sparse_jax import transcoders
from sparse_jax.circuits.source_model import SourceModel, open_identity
from sparse_jax.gates.model import read_note
from sparse_jax.studies.circuits.inputs import open_model
from sparse_jax.studies.pair.folders import model_folders
from tests.file_server import serve
from tools import pin_models

ROOT = Path(__file__).parents[3]


def test_the_manifest_has_every_file_as_it_is():
    assert (ROOT / "lm_jax/assets" / published.MANIFEST).read_text("utf-8") == pin_models.manifest()
    assert {each.home for each in published.entries().values()} >= {
        f"models/{folder.name}" for folder in (ROOT / "models").iterdir() if folder.is_dir()
    }


def test_a_checkout_is_used_in_place():
    for name, entry in published.entries().items():
        assert published.folder(name) == ROOT / entry.home
    assert (
        published.verify("pair_small")
        == published.fetch("pair_small")
        == ROOT / "models/pair_small"
    )
    assert published.resolve("pair_192") == RunOptions(run="pair_192").run_folder
    assert published.resolve("pair_192") == ROOT / "models/pair_192"
    assert published.resolve("no/such") == Path("no/such")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The package as a wheel without any model, and an empty cache."""
    package = tmp_path / "site" / "lm_jax" / "assets"
    package.mkdir(parents=True)
    published.entries()
    monkeypatch.setattr(published, "__file__", str(package / "published.py"))
    monkeypatch.setenv("INTERPRETABLE_ATTENTION_CACHE", str(tmp_path / "cache"))
    return package


def test_a_folder_of_that_name_comes_before_the_model(installed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("pair_192").mkdir()
    assert published.resolve("pair_192") == Path("pair_192")


def test_without_it_the_error_says_where_to_get_it(installed, tmp_path):
    assert published.find("pair_small") is None
    with pytest.raises(BadInputError, match="iaj fetch pair_small --from CHECKOUT"):
        published.fetch("pair_small")
    with pytest.raises(BadInputError, match="neither a checkout with models/pair_small"):
        published.fetch("pair_small", source=tmp_path)
    with pytest.raises(UsageError, match="did you mean 'pair_small'"):
        published.fetch("pair_smal")


@pytest.mark.parametrize("source", ["", "models", "models/pair_small"])
def test_a_copy_comes_from_a_checkout_or_a_folder(installed, source):
    folder = published.fetch("pair_small", source=ROOT / source)
    assert folder.parent.name == "cache"
    assert published.fetch("pair_small") == published.verify("pair_small") == folder
    copied = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    assert copied == set(published.entry("pair_small").files)


def test_a_changed_file_is_not_taken(installed, tmp_path):
    source = shutil.copytree(ROOT / "models" / "pair_small", tmp_path / "source")
    summary = source / "summary.json"
    summary.write_bytes(summary.read_bytes()[::-1])
    with pytest.raises(BadInputError, match=r"summary\.json: sha256 differs"):
        published.fetch("pair_small", source=source)
    assert published.find("pair_small") is None
    folder = published.fetch("pair_small", source=ROOT)
    shutil.copyfile(summary, folder / "summary.json")
    with pytest.raises(CorruptError, match="sha256 differs"):
        published.verify("pair_small")


def test_two_at_once_make_one_copy(installed, monkeypatch):
    fill, filled = published._fill, []
    second = threading.Thread(target=published.fetch, args=("pair_small",), kwargs={"source": ROOT})

    def slowly(*arguments):
        filled.append(1)
        if len(filled) == 1:
            second.start()
            second.join(timeout=0.5)
        fill(*arguments)

    monkeypatch.setattr(published, "_fill", slowly)
    published.fetch("pair_small", source=ROOT)
    second.join()
    assert filled == [1]


def test_a_copy_that_lost_a_file_is_made_anew(installed):
    folder = published.fetch("pair_small", source=ROOT)
    (folder / "summary.json").unlink()
    assert published.find("pair_small") is None
    assert published.fetch("pair_small", source=ROOT) == folder
    assert published.verify("pair_small") == folder


def test_models_inside_the_package_come_first(installed):
    inside = installed / "models" / "pair_small"
    shutil.copytree(ROOT / "models" / "pair_small", inside)
    assert published.folder("pair_small") == inside


@pytest.fixture
def archive(tmp_path):
    return pin_models.archive("pair_small", tmp_path / "release")


def test_an_archive_has_the_same_bytes_each_time(archive, tmp_path):
    again = pin_models.archive("pair_small", tmp_path / "again")
    assert again.read_bytes() == archive.read_bytes()
    assert sorted(zipfile.ZipFile(archive).namelist()) == sorted(
        published.entry("pair_small").files
    )


def test_an_archive_is_unpacked_and_verified(installed, archive):
    folder = published.fetch("pair_small_sparse", source=archive)
    assert folder == published.fetch("pair_small") / "sparse/seed_0/target_3.5738/model"
    assert published.verify("pair_small_sparse") == folder


def test_an_archive_is_downloaded_from_an_address_or_the_release(installed, archive, monkeypatch):
    with serve() as site:
        site.files["/pair_small.zip"] = ("application/zip", archive.read_bytes())
        url = f"{site.url}/pair_small.zip"
        folder = published.fetch("pair_small", source=url, progress=False)
        assert published.verify("pair_small") == folder
        shutil.rmtree(folder)
        release = published.Release(url, file_digest(archive)["sha256"])
        entry = dataclasses.replace(published.entry("pair_small"), release=release)
        monkeypatch.setitem(published.entries(), "pair_small", entry)
        with pytest.raises(BadInputError, match=r"run: iaj fetch pair_small$"):
            published.folder("pair_small")
        assert published.fetch("pair_small", progress=False) == folder
        shutil.rmtree(folder)
        site.files["/pair_small.zip"] = ("application/zip", archive.read_bytes()[:-1] + b"x")
        with pytest.raises(BadInputError, match="sha256 differs from the manifest"):
            published.fetch("pair_small", progress=False)
        with pytest.raises(BadInputError, match=r"404 Not Found; try again, or name a checkout"):
            published.fetch("pair_small", source=f"{site.url}/none.zip", progress=False)
    assert not [file for file in folder.parent.iterdir() if file.name.startswith("pair_small")]


def test_other_archives_are_refused(installed, archive, tmp_path):
    other = tmp_path / "other.zip"
    with zipfile.ZipFile(archive) as whole, zipfile.ZipFile(other, "w") as output:
        for name in whole.namelist():
            output.writestr(name, b"{}" if name == "summary.json" else whole.read(name))
    with pytest.raises(BadInputError, match=r"summary\.json: sha256 differs"):
        published.fetch("pair_small", source=other)
    with zipfile.ZipFile(other, "w") as output:
        output.writestr("../evil", b"evil")
    with pytest.raises(BadInputError, match="not a whole zip file of pair_small"):
        published.fetch("pair_small", source=other)
    other.write_bytes(archive.read_bytes()[:-30])
    with pytest.raises(BadInputError, match="not a whole zip file of pair_small"):
        published.fetch("pair_small", source=other)
    assert published.find("pair_small") is None


def test_the_release_is_read_from_the_manifest(monkeypatch):
    monkeypatch.setitem(pin_models.RELEASES, "pair_small", ("https://example.org/x.zip", "00"))
    text = pin_models.manifest().encode()
    published.entries.cache_clear()
    monkeypatch.setattr(published.resources, "files", lambda _: _Text(text))
    try:
        release = published.entry("pair_small").release
    finally:
        published.entries.cache_clear()
    assert release == published.Release("https://example.org/x.zip", "00")


class _Text:
    def __init__(self, text):
        self.text = text

    def joinpath(self, name):
        return self

    def read_text(self, encoding):
        return self.text.decode(encoding)


def test_parts_are_folders_of_their_entries():
    for name, entry in published.entries().items():
        for part, about in entry.parts.items():
            assert part.startswith(f"{name}_")
            assert published.folder(part) == ROOT / entry.home / about.folder
            assert any(file.startswith(f"{about.folder}/") for file in entry.files)
    assert (
        published.resolve("pair_192_sparse_transcoder")
        == ROOT / "models/pair_192/transcoders/sparse"
    )
    labels = published.resolve_file("protot_whole_labels")
    assert labels == ROOT / "docs/data/concept_answers_whole.jsonl"


def judge_inputs_of(name):
    assert judges.inputs(f"tokens:{name}")


def runs_of_glue(name):
    config = GlueConfig(tasks=("films",), runs=(name,))
    return load_run(config.named_runs()[name.rpartition("/")[2]])


# What reads a model, run, pair or transcoder, each with a name, and one with a typo in it.
READERS = {
    "load_pretrained": (lm_jax.load_pretrained, "pair_192_dense", "pair_192_dens"),
    "sparse_jax.load": (sparse_jax.load, "pair_192_sparse", "pair_192_spars"),
    "transcoders": (transcoders.load, "pair_192_sparse_transcoder", "pair_192_sparse_transcodr"),
    "source of a graph": (SourceModel.load, "pair_192_sparse", "pair_192_spars"),
    "note of a sparse model": (read_note, "pair_small_sparse", "pair_small_spars"),
    "identity of it": (open_identity, "pair_192_control", "pair_192_contrl"),
    "model of circuits": (partial(open_model, "sparse"), "pair_192_sparse", "pair_192_spars"),
    "pair": (lambda name: model_folders(published.resolve(name)), "pair_192", "pair_19"),
    "load_run": (load_run, "protot_small", "protot_smal"),
    "runs": (lambda name: load_each([name]), "llama_small", "llama_smal"),
    "runs of GLUE": (runs_of_glue, "mamba_small", "mamba_smal"),
    "units of another model": (
        lambda name: units.load([f"heads:{name}"], load_run("llama_small")),
        "llama_small",
        "llama_smal",
    ),
    "judge of continuations": (judge_inputs_of, "protot_small", ""),
    "answers of a judge": (
        lambda name: check_judge(f"cached:{name}"),
        "protot_whole_labels",
        "protot_whole_label",
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_names_are_taken_where_folders_are(reader, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    read, name, typo = READERS[reader]
    read(name)
    if typo:
        with pytest.raises((BadInputError, UsageError), match=f"did you mean '{name}'"):
            read(typo)


def test_a_pair_is_no_model():
    for read in (lm_jax.load_pretrained, SourceModel.load, sparse_jax.load):
        with pytest.raises(BadInputError, match="name one of them: pair_192_dense, "):
            read("pair_192")
