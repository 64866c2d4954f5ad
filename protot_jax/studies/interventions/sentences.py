"""Sentences with a target word whose probability an intervention may change.

Prototype Transformer, appendix A.3.1: the target is the last occurrence of the word in its
sentence, and its probability is that of its first sub-token given everything before it. A file of
sentences is UTF-8, with one sentence per line:

    .jsonl   {"concept": "war", "target": "war", "text": "Congress alone can declare war."}
    .tsv     concept, target and text separated by tabs, with these three words as first line

The package's `sentences.jsonl` has the four concepts of the paper, in our own sentences, and four
concepts that occur in the messages of US presidents.
"""

from collections.abc import Iterator, Sequence
import csv
import dataclasses
import hashlib
import importlib.resources
import os
from pathlib import Path
import re

import numpy as np

from lm_jax.errors import BadInputError, UsageError, nearest
from lm_jax.run.files import file_digest
from lm_jax.text import lines
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.text.tokenizer_training import UNKNOWN
from protot_jax.analysis.token_ids import open_ids

FIELDS = ("concept", "target", "text")
_SHIPPED = "sentences.jsonl"


@dataclasses.dataclass(frozen=True)
class Sentence:
    """A sentence with the word `target`; `where`, file and line, names it in an error."""

    concept: str
    target: str
    text: str
    where: str = "a sentence"


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A sentence that cannot be used, and why."""

    sentence: Sentence
    reason: str


@dataclasses.dataclass(frozen=True)
class Cases:
    """Sentences as rows of ids, padded with 0 on the right.

    Attributes:
      sentences: N of them.
      tokens_NS: int32, the start token first and no end token.
      target_NT: true at the target's tokens among those to predict, `tokens_NS[:, 1:]`.
      skipped: sentences that cannot be used.
    """

    sentences: tuple[Sentence, ...]
    tokens_NS: np.ndarray
    target_NT: np.ndarray
    skipped: tuple[Skipped, ...]


def shipped(concept: str) -> list[Sentence]:
    """The package's sentences for one concept.

    Raises:
      UsageError: the concept is unknown.
    """
    result = list(_from_jsonl(_shipped_bytes(), _SHIPPED))
    chosen = [sentence for sentence in result if sentence.concept == concept]
    if not chosen:
        known = {sentence.concept for sentence in result}
        raise UsageError(f"there are no shipped sentences for {concept!r}{nearest(concept, known)}")
    return chosen


def of_source(file: str, concept: str | None) -> list[Sentence]:
    """The sentences of a file or, where none is named, the package's; of one concept.

    Raises:
      UsageError: neither a file nor a concept is named, or an unknown one.
      BadInputError: the file cannot be used.
    """
    if file:
        return read(file, concept=concept)
    if concept is None:
        raise UsageError("no sentences are named; give --concept=NAME or --sentences=FILE")
    return shipped(concept)


def digest(file: str) -> str:
    """sha256 of a file of sentences or, where none is named, of the package's."""
    return file_digest(Path(file))["sha256"] if file else shipped_digest()


def shipped_digest() -> str:
    """sha256 of the package's sentences."""
    return hashlib.sha256(_shipped_bytes()).hexdigest()


def _shipped_bytes() -> bytes:
    return (
        importlib.resources.files("protot_jax.studies.interventions")
        .joinpath(_SHIPPED)
        .read_bytes()
    )


def read(path: str | os.PathLike[str], *, concept: str | None = None) -> list[Sentence]:
    """The sentences of a file, or those of one concept in it; blank lines are skipped.

    Raises:
      BadInputError: the file cannot be read, a line lacks one of the three fields or has an empty
        one, or there is no sentence (of the concept).
    """
    path = Path(path)
    readers = {".jsonl": _from_jsonl, ".tsv": _from_tsv}
    if path.suffix not in readers:
        raise BadInputError(f"{path} is not a .jsonl or .tsv file; write one sentence per line")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInputError(f"{path}: {error.strerror}; give a readable file") from error
    results = list(readers[path.suffix](data, path.name))
    if concept is not None:
        known = {sentence.concept for sentence in results}
        results = [sentence for sentence in results if sentence.concept == concept]
        if known and not results:
            raise BadInputError(f"{path} has no concept {concept!r}{nearest(concept, known)}")
    if not results:
        raise BadInputError(f"{path} has no sentence; write one per line")
    return results


def _from_jsonl(data: bytes, name: str) -> Iterator[Sentence]:
    for where, row in json_objects(data, name):
        if set(row) != set(FIELDS):
            raise BadInputError(f"{where}: not an object with the fields {', '.join(FIELDS)}")
        yield _sentence([row[field] for field in FIELDS], where)


def json_objects(data: bytes, name: str) -> Iterator[tuple[str, dict[str, object]]]:
    """File and line number of every line that is not blank, and the JSON object in it.

    Raises:
      BadInputError: a line is not UTF-8, not JSON, or not an object.
    """
    for _, where, row in lines.json_lines(data, name):
        if not isinstance(row, dict):
            raise BadInputError(f"{where}: not an object; write one in braces per line")
        yield where, row


def _from_tsv(data: bytes, name: str) -> Iterator[Sentence]:
    for i, (_, where, line) in enumerate(lines.lines(data, name)):
        (row,) = csv.reader([line], delimiter="\t", quoting=csv.QUOTE_NONE)
        if i == 0:
            if tuple(row) != FIELDS:
                raise BadInputError(
                    f"{where}: the first line must be {', '.join(FIELDS)}, separated by tabs"
                )
            continue
        if len(row) != len(FIELDS):
            raise BadInputError(
                f"{where}: {len(row)} columns instead of three, {', '.join(FIELDS)}; use two tabs"
            )
        yield _sentence(row, where)


def _sentence(values: Sequence[object], where: str) -> Sentence:
    texts = []
    for field, value in zip(FIELDS, values, strict=True):
        if not isinstance(value, str) or not value.strip():
            raise BadInputError(f"{where}: {field} must be a text that is not empty")
        texts.append(value)
    return Sentence(*texts, where=where)


def locate(
    sentences: Sequence[Sentence], tokenizer: Tokenizer, *, all_subtokens: bool = False
) -> Cases:
    """Encodes the sentences and locates the tokens of each target, at its last occurrence.

    A target matches as a whole word, ignoring case. A sentence is skipped if it does not contain
    its target, or if the vocabulary does not.

    Args:
      sentences: one sentence or more.
      tokenizer: tokenizer of the model.
      all_subtokens: the target is all tokens of the word, not only the first.

    Raises:
      BadInputError: no sentence can be used; the message has the reason of the first.
    """
    rows, spans, kept, skipped = [], [], [], []
    for sentence in sentences:
        result = _located(sentence, tokenizer)
        if isinstance(result, str):
            skipped.append(Skipped(sentence, result))
            continue
        ids, start, stop = result
        rows.append(ids)
        spans.append((start, stop if all_subtokens else start + 1))
        kept.append(sentence)
    if not kept:
        if not skipped:
            raise BadInputError("there is no sentence; give at least one")
        first = skipped[0]
        others = f" (and {len(skipped) - 1} more)" if skipped[1:] else ""
        raise BadInputError(
            f"{first.sentence.where}: {first.reason}{others}; give other sentences or targets"
        )
    S = max(map(len, rows))
    tokens_NS = np.zeros((len(rows), S), np.int32)
    target_NT = np.zeros((len(rows), S - 1), bool)
    for n, (ids, (start, stop)) in enumerate(zip(rows, spans, strict=True)):
        tokens_NS[n, : len(ids)] = ids
        # Column t of the predictions is for token t + 1.
        target_NT[n, start - 1 : stop - 1] = True
    return Cases(tuple(kept), tokens_NS, target_NT, tuple(skipped))


def _located(sentence: Sentence, tokenizer: Tokenizer) -> tuple[list[int], int, int] | str:
    """Ids, and start and stop of the target among them; or the reason to skip the sentence."""
    places = occurrences(sentence.text, sentence.target)
    if not places:
        return f"{sentence.target!r} does not occur in the sentence"
    ids = open_ids(tokenizer, sentence.text)
    before = open_ids(tokenizer, sentence.text[: places[-1].start()].rstrip())
    through = open_ids(tokenizer, sentence.text[: places[-1].end()])
    start, stop = len(before), len(through)
    if ids[:start] != before or ids[:stop] != through or start == stop:
        return f"{sentence.target!r} does not begin and end at the bounds of tokens"
    if not start:
        return f"{sentence.target!r} has no token before it"
    if tokenizer.backend.token_to_id(UNKNOWN) in ids[start:stop]:
        return f"{sentence.target!r} is not in the vocabulary"
    return ids, start, stop


def occurrences(text: str, target: str) -> list[re.Match[str]]:
    """Matches of the target as a whole word of the text, ignoring case."""
    word = re.escape(target.strip())
    return list(re.finditer(rf"(?<!\w){word}(?!\w)", text, re.IGNORECASE))
