"""Package indexes and downloads, against a web server of this machine and folders."""

import base64
import errno
import json
import os
from pathlib import Path
import subprocess
import sys
import urllib.parse

import pytest

from lm_jax.assets import package_index, transfer
from lm_jax.errors import UsageError
from tests.file_server import serve

PREFIX, OF_MACHINE = sys.prefix, package_index._OF_MACHINE
WHEEL = "tiny_part-1.0-py3-none-any.whl"
DATA = bytes(range(256)) * 4000


@pytest.fixture
def site(monkeypatch):
    monkeypatch.setattr(transfer.time, "sleep", lambda seconds: None)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serve() as site:
        yield site


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """A home folder, and no setting of pip."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "XDG_CONFIG"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "xdg"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    monkeypatch.setattr(package_index, "_OF_MACHINE", tmp_path / "etc/pip.conf")
    return tmp_path


def page(*links: str, base: str = "") -> tuple[str, bytes]:
    text = "".join(f'<a href="{link}" data-x="1">a wheel</a><br>' for link in links)
    return "text/html", f"<!DOCTYPE html><html><head>{base}</head>{text}</html>".encode()


def only(*indexes: str, links: tuple[str, ...] = ()) -> package_index.Places:
    return package_index.Places(indexes, links, None)


def find(where: package_index.Places) -> str:
    return package_index.find("Tiny.part", WHEEL, where)


def test_an_index_in_html_and_one_in_json(site):
    site.files["/html/tiny-part/"] = page("other-1.0.whl", f"../../files/{WHEEL}#sha256=00")
    url = f"{site.url}/files/{WHEEL}"
    assert find(only(f"{site.url}/html")) == url
    content = json.dumps({"files": [{"filename": WHEEL, "url": f"/files/{WHEEL}"}]}).encode()
    site.files["/json/tiny-part/"] = (package_index._JSON, content)
    assert find(only(f"{site.url}/json/")) == url
    site.files["/base/tiny-part/"] = page(WHEEL, base=f'<base href="{site.url}/files/">')
    assert find(only(f"{site.url}/base")) == url


def test_the_first_place_that_has_it_and_why_the_others_have_not(site, tmp_path):
    (tmp_path / "links").mkdir()
    site.files["/bad/tiny-part/"] = (package_index._JSON, b"{}")
    site.files["/empty/tiny-part/"] = page()
    where = only(
        *(f"{site.url}/{x}" for x in ("none", "bad", "empty")), links=(f"{tmp_path}/links",)
    )
    with pytest.raises(transfer.TransferError, match=f"^{WHEEL} is in no place") as caught:
        find(where)
    folder, none, bad, empty = caught.value.__notes__
    assert folder == f"{(tmp_path / 'links').as_uri()}: no {WHEEL}"
    assert none == f"{site.url}/none/tiny-part/: 404 Not Found"
    assert "bad/tiny-part/: not a page of a package index" in bad
    assert empty == f"{site.url}/empty/tiny-part/: no {WHEEL}"
    site.files["/empty/tiny-part/"] = page(WHEEL)
    assert find(where) == f"{site.url}/empty/tiny-part/{WHEEL}"
    (tmp_path / "links" / WHEEL).write_bytes(DATA)
    assert find(where) == (tmp_path / "links" / WHEEL).as_uri()


def test_indexes_in_folders_are_read_as_pages_or_as_folders(tmp_path):
    (tmp_path / "simple" / "tiny-part").mkdir(parents=True)
    index = tmp_path / "simple" / "tiny-part"
    (index / "index.html").write_bytes(page(f"../../files/{WHEEL}")[1])
    wanted = (tmp_path / "files" / WHEEL).as_uri()
    assert (
        find(only(str(tmp_path / "simple"))) == find(only((tmp_path / "simple").as_uri())) == wanted
    )
    (index / "index.html").unlink()
    (index / WHEEL).write_bytes(DATA)
    assert find(only((tmp_path / "simple").as_uri())) == (index / WHEEL).as_uri()


def test_a_login_goes_to_its_host_and_into_no_message(site, tmp_path):
    site.login = f"Basic {base64.b64encode(b'me:p@ss').decode()}"
    site.files["/simple/tiny-part/"] = page(f"/files/{WHEEL}")
    site.files[f"/files/{WHEEL}"] = ("application/zip", DATA)
    with_login = site.url.replace("//", "//me:p%40ss@")
    url = find(only(f"{with_login}/simple"))
    transfer.save(url, tmp_path / WHEEL, lambda done: None)
    assert (tmp_path / WHEEL).read_bytes() == DATA
    site.files["/simple/tiny-part/"] = page("https://elsewhere.example/x/" + WHEEL)
    assert find(only(f"{with_login}/simple")) == f"https://elsewhere.example/x/{WHEEL}"
    with pytest.raises(transfer.TransferError) as caught:
        package_index.find("other", WHEEL, only(f"{with_login}/simple"))
    assert "ss@" not in str(caught.value.__notes__)
    with pytest.raises(transfer.TransferError) as caught:
        find(only(f"{site.url}/simple"))
    assert "401" in caught.value.__notes__[0]


def test_a_login_goes_to_no_other_port_or_scheme(site):
    with_login, port = site.url.replace("//", "//me:pass@"), site.url.rpartition(":")[2]
    for other in (f"https://127.0.0.1:{port}", "http://127.0.0.1:1"):
        site.files["/simple/tiny-part/"] = page(f"{other}/{WHEEL}")
        assert find(only(f"{with_login}/simple")) == f"{other}/{WHEEL}"
    for place in ("https://me:pass@host/simple", "https://me:pass@host:443/simple"):
        logins = transfer._logins(urllib.parse.urlsplit(place))
        assert logins.is_authenticated("https://host/files/x")
        # What a redirection may lead to.
        for url in ("http://host/files/x", "https://host:8443/x", "https://elsewhere/files/x"):
            assert not logins.is_authenticated(url)
            assert logins.find_user_password(None, url) == (None, None)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_that_breaks_off_is_taken_up(site, tmp_path, ranges):
    site.files["/x"] = ("application/zip", DATA)
    site.ranges, site.break_off = ranges, [300_000, 400_000]
    seen = []
    transfer.save(f"{site.url}/x", tmp_path / "x", seen.append)
    assert (tmp_path / "x").read_bytes() == DATA
    assert seen[-1] == len(DATA)
    begun = [300_000, 700_000] if ranges else [300_000, 400_000]
    assert site.asked == [("/x", None), *(("/x", f"bytes={n}-") for n in begun)]
    assert [file.name for file in tmp_path.iterdir()] == ["x"]


def test_one_that_was_killed_goes_on_at_the_next_start(site, tmp_path):
    site.files["/x"] = ("application/zip", DATA)
    site.break_off = [1000] * 3
    with pytest.raises(transfer.TransferError, match="ended after 3000 of 1024000 bytes"):
        transfer.save(f"{site.url}/x", tmp_path / "x", lambda done: None)
    assert not (tmp_path / "x").exists()
    assert (tmp_path / "x.part").stat().st_size == 3000
    transfer.save(f"{site.url}/x", tmp_path / "x", lambda done: None)
    assert site.asked[-1] == ("/x", "bytes=3000-")
    assert (tmp_path / "x").read_bytes() == DATA


def test_a_part_longer_than_the_file_is_begun_anew(site, tmp_path):
    site.files["/x"] = ("application/zip", DATA)
    (tmp_path / "x.part").write_bytes(DATA + DATA)
    transfer.save(f"{site.url}/x", tmp_path / "x", lambda done: None)
    assert (tmp_path / "x").read_bytes() == DATA


def test_what_a_server_refuses_is_asked_once(site, tmp_path):
    with pytest.raises(transfer.TransferError, match="404 Not Found"):
        transfer.save(f"{site.url}/x", tmp_path / "x", lambda done: None)
    assert len(site.asked) == 1


def test_a_host_that_is_not_there_is_asked_again(tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(transfer.time, "sleep", waits.append)
    with serve() as site:
        pass
    with pytest.raises(transfer.TransferError, match="refused"):
        transfer.save(f"{site.url}/x", tmp_path / "x", lambda done: None)
    assert len(waits) == 2


def test_a_full_disk_is_not_blamed_on_the_network(site, tmp_path):
    def fail(done: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    site.files["/x"] = ("application/zip", DATA)
    with pytest.raises(OSError, match="No space left"):
        transfer.save(f"{site.url}/x", tmp_path / "x", fail)
    assert len(site.asked) == 1


def test_without_settings_it_is_the_index_of_pypi(pip):
    assert package_index.places(None) == only("https://pypi.org/simple")


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_settings_of_pip_in_their_order(pip, monkeypatch):
    write(pip / "xdg/pip/pip.conf", "[global]\nindex-url = https://a\nfind-links = /one\n  /two\n")
    write(pip / ".config/pip/pip.conf", "[global]\nindex_url = https://b\ncert = /c.pem\n")
    assert package_index.places(None) == package_index.Places(
        ("https://b",), ("/one", "/two"), "/c.pem"
    )
    write(pip / "environment/pip.conf", "[download]\nextra-index-url = https://c https://d\n")
    assert package_index.places(None).indexes == ("https://b", "https://c", "https://d")
    write(pip / "own.conf", "[global]\nextra-index-url = https://e\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(pip / "own.conf"))
    # A section of the command is stronger than the general one, and the user's file is left out.
    assert package_index.places(None).indexes == ("https://a", "https://c", "https://d")
    monkeypatch.setenv("PIP_INDEX_URL", "https://f")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert package_index.places(None) == only("https://f", "https://c", "https://d")
    assert package_index.places("https://g") == only("https://g")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert package_index.places(None) == only()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_NO_INDEX")
    assert package_index.places(None) == only("https://f")


# pip's own settings, the deciding one of each name, printed by pip.
_OF_PIP = """
import json
from pip._internal.configuration import Configuration
configuration = Configuration(isolated=False)
configuration.load()
print(json.dumps({key: x for _, file in configuration.items() for key, x in file.items()}))
"""


@pytest.mark.parametrize("named", [None, "own.conf", "missing.conf", os.devnull])
def test_pip_reads_the_same_settings(pip, monkeypatch, named):
    write(pip / "xdg/pip/pip.conf", "[global]\nindex-url = https://a\nfind-links = /one\n")
    write(pip / ".pip/pip.conf", "[global]\nindex-url = https://old\nproxy = x\n")
    write(pip / ".config/pip/pip.conf", "[global]\nindex_url = https://b\n")
    write(pip / "own.conf", "[global]\nextra-index-url = https://e\n")
    # pip in a process of its own reads these two where they are.
    monkeypatch.setattr(sys, "prefix", PREFIX)
    monkeypatch.setattr(package_index, "_OF_MACHINE", OF_MACHINE)
    if named is not None:
        monkeypatch.setenv("PIP_CONFIG_FILE", os.path.join(pip, named))
    done = subprocess.run([sys.executable, "-c", _OF_PIP], capture_output=True, check=True)
    wanted = json.loads(done.stdout)
    ours = package_index._Settings()
    for name in ("index-url", "extra-index-url", "find-links", "proxy", "cert"):
        assert ours.get(name) == wanted.get(f"global.{name}", "")


def test_a_broken_configuration_of_pip_is_named(pip):
    write(pip / ".config/pip/pip.conf", "index-url = https://a\n")
    with pytest.raises(UsageError, match=r"pip\.conf: pip's configuration cannot be read"):
        package_index.places(None)
