"""Published models: their pins, where they are looked for, and copies of them."""

from pathlib import Path
import shutil

import pytest

from lm_jax.assets import published
from lm_jax.errors import BadInputError, CorruptError, UsageError
from protot_jax.training.run_options import RunOptions
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
