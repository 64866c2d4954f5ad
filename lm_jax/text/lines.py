"""Text that a user wrote: whole files, lines, and lines of JSON, read alike by every command.

A file is UTF-8, with or without a byte order mark. A line ends with a line feed, a carriage return
and a line feed, or a carriage return alone, as in Python's text mode, and with nothing else. U+2028
and U+0085, say, may stand unescaped in a string of JSON, where `str.splitlines` would cut. Blank
lines are skipped, and counted in the numbers of the others. A file in UTF-16 or of invalid UTF-8 is
refused.
"""

import codecs
from collections.abc import Iterator, Mapping
import os
from pathlib import Path
import re
from typing import Any, NamedTuple

from lm_jax.errors import BadInputError
from lm_jax.run.files import load_json

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# Lines that a message names.
_TOLD = 5
_END = re.compile(rb"\r\n|\r|\n")


class Line(NamedTuple):
    """A line that is not blank: its number from 1, its place `file:number`, and its text."""

    number: int
    where: str
    text: str


class JsonLine(NamedTuple):
    """A line of JSON: number and place as of `Line`, and the value that it holds."""

    number: int
    where: str
    value: Any


def read_data(path: str | os.PathLike[str], kind: str) -> bytes:
    """The bytes of a file.

    Args:
      path: path of the file.
      kind: what it should be, such as ".jsonl file", for the message.

    Raises:
      BadInputError: it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BadInputError(f"{path}: {error.strerror}; give a readable {kind}") from error


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file, each line ended by `\\n`.

    Raises:
      BadInputError: it cannot be read, or is not UTF-8.
    """
    return decode(read_data(path, "text file"), path)


def decode(data: bytes, where: object) -> str:
    """The text of the bytes of a file, without a byte order mark, each line ended by `\\n`.

    Raises:
      BadInputError: they are not UTF-8; the message begins with `where`.
    """
    if is_utf16(data):
        raise BadInputError(f"{where}: UTF-16, not UTF-8; save it as UTF-8")
    try:
        return plain(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadInputError(
            f"{where}: not UTF-8 at byte {error.start}; save it as UTF-8"
        ) from error


def plain(text: str) -> str:
    """The text with `\\n` at the end of each line."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def is_utf16(data: bytes) -> bool:
    """Whether the bytes are UTF-16 by their mark or, without one, by every other byte's being 0."""
    zeros = data.count(0)
    return data.startswith(_UTF16) or (zeros > 0 and 2 * zeros + 1 >= len(data))


def split(data: bytes) -> list[bytes]:
    """The lines of bytes without their ends; no line follows the last end."""
    *result, last = _END.split(data)
    return [*result, last] if last else result


def read_lines(path: str | os.PathLike[str], kind: str = "text file") -> Iterator[Line]:
    """The lines of a file that are not blank.

    Raises:
      BadInputError: it cannot be read, or a line is not UTF-8; naming the line.
    """
    return lines(read_data(path, kind), path)


def lines(data: bytes, name: object) -> Iterator[Line]:
    """The lines of the bytes of a file that are not blank.

    Raises:
      BadInputError: they are not UTF-8; naming `name` and the line.
    """
    if is_utf16(data):
        raise BadInputError(f"{name}: UTF-16, not UTF-8; save it as UTF-8")
    for number, line in enumerate(split(data.removeprefix(codecs.BOM_UTF8)), 1):
        where = f"{name}:{number}"
        text = decode(line, where)
        if text.strip():
            yield Line(number, where, text)


def read_json_lines(path: str | os.PathLike[str]) -> Iterator[JsonLine]:
    """The values of a file of JSON lines; see `json_lines` for what it raises."""
    return json_lines(read_data(path, ".jsonl file"), path)


def json_lines(data: bytes, name: object, **options: Any) -> Iterator[JsonLine]:
    """The values of the lines of JSON in the bytes of a file; blank lines are skipped.

    Args:
      data: bytes of the file.
      name: the file's name, for messages.
      **options: options of `json.loads`.

    Raises:
      BadInputError: a line is not UTF-8 or not JSON; naming `name` and the line.
    """
    for line in lines(data, name):
        try:
            value = load_json(line.text, **options)
        except ValueError as error:
            raise BadInputError(
                f"{line.where}: not JSON ({error}); write one object per line"
            ) from error
        yield JsonLine(line.number, line.where, value)


def decoded(data: bytes) -> str | bytes:
    """The text, or the bytes themselves where they are no UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data


def refused(path: str | os.PathLike[str], reasons: Mapping[int, str]) -> BadInputError:
    """The error of the lines of a file that cannot be used, which names the first of them.

    Args:
      path: path of the file.
      reasons: why each line is refused and what to do, by its number; one or more.
    """
    told = [f"line {number}: {reason}" for number, reason in reasons.items()]
    if len(told) == 1:
        ((number, reason),) = reasons.items()
        return BadInputError(f"{path}:{number}: {reason}")
    left = f"; and {len(told) - _TOLD} more" if len(told) > _TOLD else ""
    return BadInputError(f"{path}: {len(told)} lines are refused; {'; '.join(told[:_TOLD])}{left}")
