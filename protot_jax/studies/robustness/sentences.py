"""Sentences to perturb, and the pairs that are made of them.

Sentences are those of a user's file, or are sampled from texts with the word limits of appendix
A.5.1. A line of a file is {"text": "..."}, or {"text": "...", "perturbed": "...", "slice": "..."}
for a pair that was perturbed elsewhere; the name of its slice may be left out. The benchmark's
files also have a "source" and a "split" of the original, and a "frame" where both texts are built.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import itertools
import json
from pathlib import Path
import re
import zlib

import numpy as np

from lm_jax.errors import BadInputError
from lm_jax.run.files import write_text
from lm_jax.text.preparation import CorpusConfig, split_documents
from protot_jax.studies.interventions.sentences import json_objects
from protot_jax.studies.robustness import meaning
from protot_jax.studies.robustness.perturb import Perturbation

GIVEN = "given"
# Sentences of a corpus are read up to this many for each that is wanted.
_POOL = 200
_END = re.compile(r"(?<=[.!?])\s+(?=[\"'“‘A-Z])|\n+")


@dataclasses.dataclass(frozen=True)
class Limits:
    """Which sentences of a kind of text are sampled: by number of words, and by place."""

    shortest: int
    longest: int
    first_only: bool = False


# As the paper reads WikiText-2, DailyDialog and AG News.
KINDS = {"text": Limits(5, 20), "dialogue": Limits(3, 15), "news": Limits(5, 20, first_only=True)}


@dataclasses.dataclass(frozen=True)
class Pair:
    """A sentence with its perturbed form; pairs of one sentence have one text.

    Attributes:
      frame: the built sentence whose blanks were filled; empty for a text that was not built so.
      source, split: corpus of the text and split of its document; empty where unknown.
    """

    slice: str
    text: str
    perturbed: str
    frame: str = ""
    source: str = ""
    split: str = ""

    def row(self) -> dict[str, str]:
        """A line of a file of pairs, without the fields that are empty."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value}


@dataclasses.dataclass(frozen=True)
class Given:
    """What a user's file has: sentences to perturb, and pairs."""

    sentences: tuple[str, ...]
    pairs: tuple[Pair, ...]


def read(path: Path) -> Given:
    """The sentences and pairs of a .jsonl file; blank lines are skipped.

    Raises:
      BadInputError: the file cannot be read, a line is not an object with the fields, or there is
        none.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInputError(f"{path}: {error.strerror}; give a readable file") from error
    sentences, pairs = [], []
    for where, row in json_objects(data, path.name):
        if unknown := set(row) - {field.name for field in dataclasses.fields(Pair)}:
            raise BadInputError(
                f"{where}: the field {min(unknown)!r} is unknown; use text, perturbed and slice"
            )
        values = {field: _text(row.get(field), field, where) for field in {"text"} | set(row)}
        if "perturbed" in values:
            pairs.append(Pair(**{"slice": GIVEN} | values))
        elif "slice" in values:
            raise BadInputError(f"{where}: a slice without a perturbed text; add it, or leave both")
        else:
            sentences.append(values["text"])
    if not sentences and not pairs:
        raise BadInputError(f'{path} has no sentence; write {{"text": "..."}} on each line')
    return Given(tuple(dict.fromkeys(sentences)), tuple(dict.fromkeys(pairs)))


def write(path: Path, pairs: Iterable[Pair]) -> None:
    """Writes a file of pairs, which `read` reads.

    Raises:
      StorageError: the file cannot be written.
    """
    lines = [json.dumps(pair.row(), ensure_ascii=False) for pair in pairs]
    write_text(path, "".join(f"{line}\n" for line in lines))


def _text(value: object, field: str, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadInputError(f"{where}: {field} must be a text that is not empty")
    return value.strip()


def sample(
    texts: Iterable[str], count: int, seed: int, limits: Limits = KINDS["text"]
) -> tuple[str, ...]:
    """Up to `count` random sentences of texts, each once, from the first 200 `count`."""
    pool: dict[str, None] = {}
    for sentence in split_sentences(texts, limits):
        pool[sentence] = None
        if len(pool) == _POOL * count:
            break
    known = list(pool)
    order = np.random.default_rng(seed).permutation(len(known))
    return tuple(known[i] for i in order[:count])


def sample_validation(corpus: CorpusConfig, count: int, seed: int) -> tuple[str, ...]:
    """Random sentences of the validation split of a corpus, of 5 to 20 words (`sample`).

    Raises:
      BadInputError: the corpus cannot be read, or has no such sentence.
    """
    found = sample(split_documents(corpus, "validation"), count, seed)
    if not found:
        limits = KINDS["text"]
        raise BadInputError(
            f"the validation text of {corpus.source} has no sentence of {limits.shortest} to "
            f"{limits.longest} words; give a file by --sentences"
        )
    return found


def split_sentences(texts: Iterable[str], limits: Limits = KINDS["text"]) -> Iterator[str]:
    """The sentences in texts that keep to the limits.

    A sentence ends at a mark that a capital follows, or at the end of a line.
    """
    for text in texts:
        for sentence in _END.split(text.strip())[: 1 if limits.first_only else None]:
            words = sentence.split()
            if limits.shortest <= len(words) <= limits.longest:
                yield " ".join(words)


def perturbed(
    sentences: Sequence[str],
    perturbations: Mapping[str, Perturbation],
    *,
    count: int,
    seed: int,
) -> list[Pair]:
    """Up to `count` pairs of each perturbation, one of a sentence, in the order of the sentences.

    A sentence in which a perturbation has no place is left out of that slice.
    """
    return [
        pair
        for name, perturbation in perturbations.items()
        for pair in itertools.islice(candidates(sentences, name, perturbation, seed=seed), count)
    ]


def candidates(
    sentences: Iterable[str], name: str, perturbation: Perturbation, *, seed: int
) -> Iterator[Pair]:
    """The pairs of one slice, of every sentence in which the perturbation has a place.

    What is drawn for a sentence depends on the seed, the slice and the sentence alone.
    """
    for sentence in sentences:
        key = [seed, zlib.crc32(name.encode()), zlib.crc32(sentence.encode())]
        new = perturbation(sentence, np.random.default_rng(key))
        if new is not None:
            yield Pair(name, sentence, new)


def flipped(count: int, seed: int) -> list[Pair]:
    """Up to `count` pairs of each slice of `meaning`."""
    return [
        Pair(name, flip.text, flip.perturbed, flip.frame)
        for name in meaning.SLICES
        for flip in meaning.flips(name, count, seed)
    ]


def edit_distance(a: str, b: str) -> int:
    """The least number of characters to insert, remove or replace (Levenshtein 1966)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]
