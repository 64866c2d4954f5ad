"""Answers of a judge, kept in a JSON-lines file under the SHA-256 of their exact prompt.

With it a report is made again without asking anew, an interrupted run resumes where it stopped, and
answers that were made elsewhere are brought in.
"""

from collections.abc import Mapping
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from absl import logging

from lm_jax.errors import BadInputError
from lm_jax.run.files import storage_error, write_bytes


class Answers:
    """A JSON-lines file of answers, found by the SHA-256 of their prompt; the last one counts.

    A line is an object with `prompt_sha256` and `answer` (the raw text), and may say by which
    `judge`. An unfinished last line, which a killed run leaves, is cut off before the first `add`.
    """

    def __init__(self, file: str | os.PathLike[str]):
        self.file = Path(file)
        self._found: dict[tuple[str, str | None], str] = {}
        data = self.file.read_bytes() if self.file.exists() else b""
        *lines, last = data.split(b"\n")
        for count, line in enumerate(lines, 1):
            if line.strip():
                self._keep(_entry(line, f"{self.file}, line {count}"))
        # What the file must hold before a line is added; None where it is whole.
        self._mended: bytes | None = None
        if last.strip():
            try:
                self._keep(_entry(last, f"{self.file}, last line"))
                self._mended = data + b"\n"
            except BadInputError as error:
                logging.warning("%s: left out, for it has no end", error)
                self._mended = data[: -len(last)]

    def find(self, text: str, *, judge: str | None = None) -> str | None:
        """The answer to this prompt, by this judge or by any."""
        return self._found.get((digest(text), judge))

    def add(self, text: str, answer: str, *, judge: str) -> None:
        """Writes an answer to the disk before it returns."""
        if self._mended is not None:
            write_bytes(self.file, self._mended)
            self._mended = None
        entry = {"prompt_sha256": digest(text), "judge": judge, "prompt": text, "answer": answer}
        append(self.file, entry)
        self._keep(entry)

    def _keep(self, entry: Mapping[str, Any]) -> None:
        for judge in (entry.get("judge"), None):
            self._found[entry["prompt_sha256"], judge] = entry["answer"]


def append(file: Path, entry: Mapping[str, Any]) -> None:
    """Adds a line and waits until the disk has it."""
    try:
        with file.open("ab") as opened:
            opened.write(f"{json.dumps(entry)}\n".encode())
            opened.flush()
            os.fsync(opened.fileno())
    except OSError as error:
        raise storage_error(file, error) from error


def digest(text: str) -> str:
    """The SHA-256 under which the answer to a prompt is stored."""
    return hashlib.sha256(text.encode()).hexdigest()


def _entry(line: bytes, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise BadInputError(f"{where}: not JSON ({error}); correct or remove it") from error
    fields = ("prompt_sha256", "answer")
    if not isinstance(entry, dict) or not all(isinstance(entry.get(f), str) for f in fields):
        raise BadInputError(f"{where}: no texts {' and '.join(fields)}; correct or remove it")
    return entry
