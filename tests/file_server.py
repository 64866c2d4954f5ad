"""A web server of this machine for tests: files by their path, ranges, logins, breaking off."""

from collections.abc import Iterator
import contextlib
import dataclasses
import http.server
import threading


@dataclasses.dataclass
class Site:
    """What the server answers with, and what it was asked.

    Attributes:
      url: address of the server, without a slash at the end.
      files: type and content, by the path with its query.
      login: value of the header Authorization to ask for, None for no login.
      break_off: numbers of bytes after which the next answers end, one for each answer.
      ranges: whether a part of a file can be asked for.
      asked: requests so far: path and the header Range.
    """

    url: str = ""
    files: dict[str, tuple[str, bytes]] = dataclasses.field(default_factory=dict)
    login: str | None = None
    break_off: list[int] = dataclasses.field(default_factory=list)
    ranges: bool = True
    asked: list[tuple[str, str | None]] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def serve() -> Iterator[Site]:
    """A server in a thread, on a free port."""
    site = Site()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers["Range"]
            site.asked.append((self.path, wanted))
            if site.login is not None and self.headers["Authorization"] != site.login:
                return self.send_error(401)
            if self.path not in site.files:
                return self.send_error(404)
            kind, content = site.files[self.path]
            begin = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and site.ranges else 0
            if begin and begin >= len(content):
                return self.send_error(416)
            self.send_response(206 if begin else 200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content) - begin))
            self.end_headers()
            end = begin + site.break_off.pop(0) if site.break_off else len(content)
            self.wfile.write(content[begin:end])
            return None

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        site.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield site
        finally:
            server.shutdown()
            thread.join()
