"""Prompts of a user, one JSON object a line: `{"id": ..., "prompt": ..., "answer": ...}`.

A prompt is plain text: `<|endoftext|>` inside it is spelled out, never the token of that name. Only
the tokenizer's own start token comes before it, where it has one. The answer is taken as it is
written and follows the prompt directly, so after "The capital of France is" it is " Paris", with
its space. It is right if greedy decoding writes all of its tokens; all but the last of them are
part of the prompt's tokens (`needles`). Every fault is found with its line, those that need no
tokenizer before a model is loaded (`read_jsonl`).
"""

from collections.abc import Sequence
import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from lm_jax.errors import BadInputError
from lm_jax.text import lines
from polyattn_jax.suites import prompts as prompts_lib
from polyattn_jax.suites.prompts import Prompt, Suite, Tokenizer

_FIELDS = ("id", "prompt", "answer")


class JsonLines(NamedTuple):
    """A file of prompts: its objects by line number, and the digest of its bytes."""

    rows: dict[int, dict[str, Any]]
    sha256: str


def read_jsonl(path: str | Path, fields: Sequence[str] = _FIELDS) -> JsonLines:
    """Reads a file of prompts and checks all that needs no tokenizer; blank lines are skipped.

    Args:
      path: path of the file.
      fields: those that every object must have, each a text; `id` is among them.

    Raises:
      BadInputError: for a file that cannot be read or holds no prompt, JSON that is malformed, a
        field that is missing, unknown, empty or not text, a lone surrogate, an id used twice.
    """
    path = Path(path)
    data = lines.read_data(path, ".jsonl file")
    rows: dict[int, dict[str, Any]] = {}
    line_of: dict[str, int] = {}
    for number, where, tree in lines.json_lines(data, path, parse_constant=_refuse_constant):
        row = _checked(tree, where, fields)
        if row["id"] in line_of:
            raise BadInputError(
                f"{where}: id {row['id']!r} was used on line {line_of[row['id']]}: rename one"
            )
        line_of[row["id"]] = number
        rows[number] = row
    if not rows:
        what = f"{fields[1]}s"
        raise BadInputError(f"{path}: no {what}: write one JSON object per line")
    return JsonLines(rows, hashlib.sha256(data).hexdigest())


def load_jsonl(path: str | Path, tokenizer: Tokenizer, *, max_length: int | None = None) -> Suite:
    """Returns the prompts of a UTF-8 JSON-lines file as an audited suite.

    `answer_position` is where the answer's tokens occur in a row, if they do so exactly once.
    Further facts of a prompt may be given as an object in the field `meta`.

    Raises:
      BadInputError: as `read_jsonl`, and for a prompt longer than `max_length` or an answer that
        fuses with its prompt.
    """
    path, file = Path(path), read_jsonl(path)
    start = len(prompts_lib.start_tokens(tokenizer))
    prompts = [
        _prompt(row, f"{path}:{number}", tokenizer, start, max_length)
        for number, row in file.rows.items()
    ]
    return prompts_lib.make_suite(
        path.stem,
        prompts,
        vocabulary=tokenizer,
        plant="none",
        max_length=max_length,
        facts={
            "source": path.name,
            "source_sha256": file.sha256,
            "special_tokens": "strings of special tokens inside a prompt are plain text",
        },
    )


def _checked(row: Any, where: str, fields: Sequence[str]) -> dict[str, Any]:
    """The value of a line, which is an object with the known fields, all of them well formed."""
    if not isinstance(row, dict):
        raise BadInputError(f"{where}: not a JSON object: write {{{', '.join(fields)}}}")
    for field in fields:
        if field not in row:
            raise BadInputError(f"{where}: field {field!r} is missing: add it")
        value = row[field]
        if not isinstance(value, str) or not value.strip():
            raise BadInputError(f"{where}: field {field!r} must be a text that is not empty")
    if unknown := sorted(set(row) - {*fields, "meta"}):
        raise BadInputError(f"{where}: unknown field {unknown[0]!r}: put it inside 'meta'")
    if not isinstance(row.get("meta", {}), dict):
        raise BadInputError(f"{where}: field 'meta' must be an object")
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        raise BadInputError(f"{where}: its brackets are nested too deeply: flatten it") from error
    except UnicodeEncodeError as error:
        raise BadInputError(
            f"{where}: a lone surrogate, which is not text: remove the half of \\ud800-\\udfff"
        ) from error
    return row


def _refuse_constant(constant: str):
    raise ValueError(f"{constant} is no JSON number")


def _prompt(
    row: dict[str, Any], where: str, tokenizer: Tokenizer, start: int, max_length: int | None
) -> Prompt:
    text, answer = row["prompt"], row["answer"]
    tokens = prompts_lib.encode(tokenizer, text)
    full = prompts_lib.encode(tokenizer, text + answer)
    if len(tokens) == start:
        raise BadInputError(f"{where}: prompt gives no token: write text the tokenizer knows")
    if full[: len(tokens)] != tokens or len(full) == len(tokens):
        raise BadInputError(
            f"{where}: answer {answer!r} fuses with the prompt's end when tokenised: end the "
            "prompt without a space and start the answer with one"
        )
    if max_length is not None and len(full) - 1 > max_length:
        raise BadInputError(
            f"{where}: prompt {row['id']!r} has {len(full) - 1} tokens, the limit is "
            f"{max_length}: shorten it or choose a model with a longer context"
        )
    return prompts_lib.answered(
        row["id"], tokens, full[len(tokens) :], text, {**row.get("meta", {}), "answer": answer}
    )
