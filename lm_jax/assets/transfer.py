"""Reading a URL, of https with certificates, logins and proxies, or of a local file.

    save("https://example.org/x.whl", Path("x.whl"), print)

A file that is only half there is kept as `<name>.part`, and the next start asks for the rest of it.
Proxies are those of the environment (`https_proxy`, `no_proxy`).
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import http
import http.client
import os
from pathlib import Path
import ssl
import time
from typing import Any
import urllib.error
import urllib.parse
import urllib.request

import certifi

from lm_jax.run import progress
from lm_jax.run.files import STORAGE_ERRNOS

TIMEOUT_S = 15.0
_TRIES = 3
_CHUNK = 1 << 18
_PORTS = {"http": 80, "https": 443}


class TransferError(Exception):
    """A URL that could not be read, with the reason; the URL is shown without its password."""


def without_login(url: str) -> str:
    """The URL without the user and the password that it may hold."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def read(url: str, *, accept: str = "*/*", certificates: str | None = None) -> tuple[str, bytes]:
    """The type of a URL's content, such as `text/html`, and the content.

    Args:
      url: address of the content, https, http or file, with a login where it needs one.
      accept: types that the server may answer with.
      certificates: file of the certificates to trust in place of those of the system.

    Raises:
      TransferError: it cannot be read.
    """
    with _errors(url), _open(url, {"Accept": accept}, certificates, TIMEOUT_S) as response:
        return response.headers.get_content_type(), response.read()


def save(
    url: str,
    target: Path,
    report: Callable[[int], None],
    *,
    certificates: str | None = None,
    timeout_s: float = TIMEOUT_S,
    tries: int = _TRIES,
) -> None:
    """Puts the content of a URL into a file, which appears only when all of it has arrived.

    Args:
      url: address of the content, https, http or file, with a login where it needs one.
      target: file to write, in a folder that exists.
      report: function of the number of bytes that have arrived, called now and then.
      certificates: file of the certificates to trust in place of those of the system.
      timeout_s: seconds to wait for an answer, or for more of it.
      tries: number of connections, each of which takes up where the one before ended.

    Raises:
      TransferError: it cannot be read.
      OSError: the file cannot be written.
    """
    part = target.with_name(f"{target.name}.part")
    for left in reversed(range(tries)):
        try:
            with _errors(url):
                _go_on(url, part, report, certificates, timeout_s)
            break
        except TransferError as error:
            if not left or _is_final(error.__cause__):
                raise
            time.sleep(1.0)
    part.replace(target)


@contextlib.contextmanager
def progress_of(name: str, size: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Yields the `report` of `save`, which shows how many megabytes of `size` bytes are there."""
    total, seen = max(1, size // 1_000_000), 0
    with progress.track(name, total, unit="MB", quiet=not shown) as advance:

        def report(done: int) -> None:
            nonlocal seen
            now = total if done >= size else min(done // 1_000_000, total - 1)
            if now > seen:
                advance(now - seen)
                seen = now

        yield report


def _go_on(
    url: str,
    part: Path,
    report: Callable[[int], None],
    certificates: str | None,
    timeout_s: float,
) -> None:
    """Appends to `part` what it lacks of the content; a server may send all of it again."""
    done = part.stat().st_size if part.is_file() else 0
    wanted = {"Range": f"bytes={done}-"} if done else {}
    try:
        response = _open(url, wanted, certificates, timeout_s)
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        # The part is all of this file or of another one, which its digest would not show before.
        response = _open(url, {}, certificates, timeout_s)
    with response:
        goes_on = response.status == http.HTTPStatus.PARTIAL_CONTENT
        done = done if goes_on else 0
        whole = done + int(response.headers.get("Content-Length", 0))
        with part.open("ab" if goes_on else "wb") as output:
            while chunk := response.read(_CHUNK):
                output.write(chunk)
                done += len(chunk)
                report(done)
    if done < whole:
        raise ConnectionError(f"the connection ended after {done} of {whole} bytes")


@contextlib.contextmanager
def _errors(url: str) -> Iterator[None]:
    """Turns what fails on the way into `TransferError`; a disk that is full stays an `OSError`."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, OSError) and error.errno in STORAGE_ERRNOS:
            raise
        reason = str(getattr(error, "reason", "") or error) or type(error).__name__
        if isinstance(error, urllib.error.HTTPError):
            reason = f"{error.code} {reason}"
        raise TransferError(f"{without_login(url)}: {reason}") from error


def _is_final(error: BaseException | None) -> bool:
    """Whether asking again is useless: the server refused, or there is no such file."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code < http.HTTPStatus.INTERNAL_SERVER_ERROR
    reason = getattr(error, "reason", error)
    return isinstance(reason, FileNotFoundError | ssl.SSLCertVerificationError)


def _open(url: str, headers: Mapping[str, str], certificates: str | None, timeout_s: float) -> Any:
    parts = urllib.parse.urlsplit(url)
    opener = urllib.request.build_opener(
        urllib.request.HTTPSHandler(context=_trusted(certificates)),
        urllib.request.HTTPBasicAuthHandler(_logins(parts)),
    )
    bare = without_login(url)
    try:
        return opener.open(urllib.request.Request(bare, headers=dict(headers)), timeout=timeout_s)
    except urllib.error.HTTPError as error:
        # It is a response, too, whose connection would stay open as long as the error is there.
        error.close()
        raise


def _logins(parts: urllib.parse.SplitResult) -> urllib.request.HTTPPasswordMgrWithPriorAuth:
    """The login of a URL, for its own host and port alone, to which a redirection may lead."""
    logins = urllib.request.HTTPPasswordMgrWithPriorAuth()
    if parts.username:
        host = parts.netloc.rpartition("@")[2]
        # Without a port it would be that of http, too, where anyone on the way reads it.
        port = "" if parts.port else f":{_PORTS[parts.scheme]}"
        name, password = (urllib.parse.unquote(x or "") for x in (parts.username, parts.password))
        root = f"{parts.scheme}://{host.rstrip(':')}{port}/"
        logins.add_password(None, root, name, password, is_authenticated=True)
    return logins


def _trusted(certificates: str | None) -> ssl.SSLContext:
    """Certificates of a file, or of the system, with Mozilla's where the system names none."""
    given = certificates or os.environ.get("REQUESTS_CA_BUNDLE")
    context = ssl.create_default_context(cafile=given or None)
    if not context.get_ca_certs():
        context.load_verify_locations(certifi.where())
    return context
