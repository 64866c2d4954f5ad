"""A cache of a judge's answers: a JSON-lines file, keyed by the SHA-256 of the exact prompt.

With it a report is rebuilt without running the judge again, an interrupted run resumes where it
stopped, and answers from elsewhere can be used. So that scores can be computed from the file alone,
a line says of which unit of which model it is, as long as the caller does (`about`):

    with about(unit="L2 P5", model="protot 2f0c..."):
        judge.label(texts)
"""

import codecs
from collections.abc import Iterator, Mapping
import contextlib
import contextvars
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from absl import logging

from lm_jax.errors import BadInputError
from lm_jax.run.files import load_json, storage_error, write_bytes

# What the answers that are asked for now are about.
_ABOUT: contextvars.ContextVar[Mapping[str, str] | None] = contextvars.ContextVar(
    "about", default=None
)
# Fields of a line that older files lack.
OPTIONAL = ("judge", "unit", "model")


@contextlib.contextmanager
def about(*, unit: str, model: str) -> Iterator[None]:
    """Makes lines that are written within it name this unit and this model.

    Args:
      unit: what the prompt is about, such as "L2 P5".
      model: kind of the model and the digest of its weights.
    """
    token = _ABOUT.set({"unit": unit, "model": model})
    try:
        yield
    finally:
        _ABOUT.reset(token)


class Answers:
    """A JSON-lines file of answers by the SHA-256 of their prompt; the last of several counts.

    A line is an object with `prompt_sha256` and `answer` (the raw text). New ones also have the
    `judge`, the `prompt` and, within `about`, the `unit` and the `model`; older ones may lack them.
    An incomplete last line, which a killed run leaves, is removed before the first `add`.
    """

    def __init__(self, file: str | os.PathLike[str]):
        self.file = Path(file)
        self._answers: dict[tuple[str, str | None], str] = {}
        self._entries: dict[str, Mapping[str, str]] = {}
        data = self.file.read_bytes() if self.file.exists() else b""
        # A file edited on Windows begins with a byte order mark.
        *lines, last = data.removeprefix(codecs.BOM_UTF8).split(b"\n")
        for count, line in enumerate(lines, 1):
            if line.strip():
                self._keep(_entry(line, f"{self.file}, line {count}"))
        # The repaired content to write before a line is added; None where the file is complete.
        self._repaired: bytes | None = None
        if last.strip():
            try:
                self._keep(_entry(last, f"{self.file}, last line"))
                self._repaired = data + b"\n"
            except BadInputError as error:
                logging.warning("%s: ignored because the line is incomplete", error)
                self._repaired = data[: -len(last)]

    def find(self, text: str, *, judge: str | None = None) -> str | None:
        """The answer to a prompt, by one judge or, if None, by any; None where there is none."""
        return self._answers.get((digest(text), judge))

    def judge_of(self, text: str) -> str | None:
        """The judge that the last answer to a prompt names; None where it names none."""
        return self._entries.get(digest(text), {}).get("judge")

    def entries(self) -> list[Mapping[str, str]]:
        """The last line of each prompt, as the file has it."""
        return list(self._entries.values())

    def add(self, text: str, answer: str, *, judge: str) -> None:
        """Writes an answer to the disk before it returns."""
        if self._repaired is not None:
            write_bytes(self.file, self._repaired)
            self._repaired = None
        entry = {"prompt_sha256": digest(text), "judge": judge, "prompt": text, "answer": answer}
        append(self.file, entry)
        self._keep(entry)

    def _keep(self, entry: Mapping[str, Any]) -> None:
        for judge in (entry.get("judge"), None):
            self._answers[entry["prompt_sha256"], judge] = entry["answer"]
        self._entries[entry["prompt_sha256"]] = entry


def append(file: Path, entry: Mapping[str, Any]) -> None:
    """Appends a JSON line, with what it is `about`, and syncs the file to disk."""
    entry = {**entry, **(_ABOUT.get() or {})}
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
        entry = load_json(line)
    except ValueError as error:
        raise BadInputError(f"{where}: not JSON ({error}); correct or remove the line") from error
    fields = ("prompt_sha256", "answer")
    if not isinstance(entry, dict) or not all(isinstance(entry.get(f), str) for f in fields):
        raise BadInputError(
            f"{where}: {' and '.join(fields)} must be strings; correct or remove the line"
        )
    if wrong := [f for f in OPTIONAL if not isinstance(entry.get(f, ""), str)]:
        raise BadInputError(
            f"{where}: {wrong[0]} must be a string where it is there; correct or remove the line"
        )
    return entry
