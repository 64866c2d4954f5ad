"""The Hugging Face hub for tests, on this machine: what `huggingface_hub` asks of it for an upload.

Repositories are made, files are announced (preupload), large ones sent by git LFS, and a commit
takes small ones in it and large ones by their sha256. Nothing is there for who has no token.
"""

import base64
from collections.abc import Iterator
import contextlib
import dataclasses
import hashlib
import http.server
import json
from pathlib import Path
import re
import threading
from typing import Any


@dataclasses.dataclass
class Hub:
    """What has arrived.

    Attributes:
      url: address of the server.
      token: token that may write.
      private: whether each repository is private.
      commits: content of the files of each commit, by repository and path.
      objects: content of large files, by sha256.
      asked: paths of requests.
    """

    url: str = ""
    token: str = "hf_of_a_test"
    private: dict[str, bool] = dataclasses.field(default_factory=dict)
    commits: list[tuple[str, dict[str, bytes]]] = dataclasses.field(default_factory=list)
    objects: dict[str, bytes] = dataclasses.field(default_factory=dict)
    asked: list[str] = dataclasses.field(default_factory=list)

    def snapshot(self, folder: Path) -> Path:
        """Writes the files of the last commit into a folder."""
        for name, content in self.commits[-1][1].items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return folder


@contextlib.contextmanager
def serve() -> Iterator[Hub]:
    """A hub in a thread, on a free port."""
    hub = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            data, path = self.content(), self.path.partition("?")[0]
            hub.asked.append(path)
            if self.headers["Authorization"] != f"Bearer {hub.token}":
                return self.answer({"error": "Invalid username or password."}, 401)
            if path == "/api/repos/create":
                return self.create(json.loads(data))
            if path == "/api/validate-yaml":
                return self.answer({"errors": [], "warnings": []})
            if path.endswith("/preupload/main"):
                return self.answer({"files": [_mode(file) for file in json.loads(data)["files"]]})
            if path.endswith(".git/info/lfs/objects/batch"):
                return self.answer(
                    {"objects": [self.action(x) for x in json.loads(data)["objects"]]}
                )
            if path == "/verify":
                return self.answer({}, 200 if json.loads(data)["oid"] in hub.objects else 404)
            if found := re.fullmatch(r"/api/models/([\w-]+/[\w-]+)/commit/main", path):
                return self.commit(found[1], data)
            return self.answer({"error": "not found"}, 404)

        def do_PUT(self) -> None:
            data = self.content()
            assert hashlib.sha256(data).hexdigest() == self.path.rpartition("/")[2]
            hub.objects[self.path.rpartition("/")[2]] = data
            self.answer({})

        def content(self) -> bytes:
            if self.headers["Transfer-Encoding"] != "chunked":
                return self.rfile.read(int(self.headers["Content-Length"] or 0))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def create(self, wanted: dict[str, Any]) -> None:
            name = f"{wanted['organization']}/{wanted['name']}"
            code = 409 if name in hub.private else 200
            private = wanted.get("private", wanted.get("visibility") == "private")
            hub.private.setdefault(name, bool(private))
            self.answer({"url": f"{hub.url}/{name}", "error": "it exists"}, code)

        def action(self, wanted: dict[str, Any]) -> dict[str, Any]:
            if wanted["oid"] in hub.objects:
                return wanted
            upload = {"href": f"{hub.url}/objects/{wanted['oid']}"}
            return wanted | {"actions": {"upload": upload, "verify": {"href": f"{hub.url}/verify"}}}

        def commit(self, name: str, data: bytes) -> None:
            files = {}
            for line in map(json.loads, data.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                if line["key"] == "lfsFile":
                    files[value["path"]] = hub.objects[value["oid"]]
            hub.commits.append((name, files))
            self.answer({"commitUrl": f"{hub.url}/{name}/commit/c0ffee", "commitOid": "c0ffee"})

        def answer(self, content: Any, code: int = 200) -> None:
            body = json.dumps(content).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        hub.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def _mode(file: dict[str, Any]) -> dict[str, Any]:
    mode = "lfs" if file["path"].endswith((".safetensors", ".array_record")) else "regular"
    return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}
