"""Perturbations that keep a sentence's meaning: typos, synonyms, spelling and so on.

Prototype Transformer, appendix A.5.1. A slice proposes replacements of parts of a sentence, at most
one at each place, and some of them are made:

    typo         one inner letter of a word of more than three becomes a neighbour on the keyboard
    typo_any     the same with any other letter, as in the released code
    synonym      a word becomes a synonym of WordNet in its dominant sense, whose length
                 differs by less than four; one, two or three words with 50, 30 and 20 %
    spelling     American to British or back
    morphology   a noun becomes its plural or its singular
    contraction  "do not" becomes "don't" or back
    punctuation  the last mark is removed, or a full stop added where there is none, or a comma
                 is removed
    abbreviation "Doctor Smith" becomes "Dr. Smith"

    morphology_any a noun of a short list gets an "s" wherever its letters occur: "car" becomes
                   "cars", but "carpet" becomes "carspet" too
    synonym_pos    a word that has one part of speech in WordNet becomes a synonym in the first
                   sense that has one of like length; no function words or names

All but synonyms change one place. Words are whole words, but in `morphology_any`, where the
released code also replaces parts of words. Capitals are kept.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import re
from typing import NamedTuple

import numpy as np

from protot_jax.studies.robustness import lists

# A change of the generators changes what a finished folder would hold, and so this number.
VERSION = 3
SYNONYM_COUNTS = (0.5, 0.3, 0.2)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
_WORD = re.compile(r"(?<![\w'’-])[A-Za-z]+(?![\w'’-])")


class Replacement(NamedTuple):
    """Characters `start` to `stop` of a text become `new`."""

    start: int
    stop: int
    new: str


# One replacement for each place of a text where the slice has one.
Proposals = Callable[[str, np.random.Generator], Sequence[Replacement]]


class Perturbation(NamedTuple):
    """A slice: what it proposes, and the probabilities of making 1, 2, ... of the replacements."""

    propose: Proposals
    counts: tuple[float, ...] = (1.0,)

    def __call__(self, text: str, rng: np.random.Generator) -> str | None:
        """A perturbed text, or None if the slice has no place in it for as many changes as drawn.

        Deterministic for a generator of given state.
        """
        proposed = self.propose(text, rng)
        count = 1 + int(rng.choice(len(self.counts), p=self.counts))
        if len(proposed) < count:
            return None
        chosen = rng.choice(len(proposed), count, replace=False)
        return apply(text, [proposed[i] for i in chosen])


def apply(text: str, replacements: Sequence[Replacement]) -> str:
    """The text with replacements that do not overlap."""
    for start, stop, new in sorted(replacements, reverse=True):
        text = text[:start] + new + text[stop:]
    return text


def inputs(wordnet: lists.WordNet | None) -> dict[str, str]:
    """What decides the pairs of given sentences: WordNet, and the version of the generators."""
    data = {} if wordnet is None else {"wordnet": wordnet.sha256}
    return data | {"perturbations": f"version_{VERSION}"}


def slices(wordnet: lists.WordNet | None = None) -> dict[str, Perturbation]:
    """All perturbations by name.

    Args:
      wordnet: source of synonyms; None leaves that slice out.

    Raises:
      BadInputError: the inflections are not in the cache.
    """
    synonyms = {} if wordnet is None else of_wordnet(wordnet)
    return without_data() | synonyms | of_inflections()


def without_data() -> dict[str, Perturbation]:
    """The perturbations that need no data besides the package's own lists."""
    keyboard = lists.keyboard()
    others = {letter: LETTERS.replace(letter, "") for letter in LETTERS}
    return {
        "typo": Perturbation(lambda text, rng: list(_typos(text, keyboard, rng))),
        "typo_any": Perturbation(lambda text, rng: list(_typos(text, others, rng))),
        "spelling": Perturbation(_by_word(lists.spelling())),
        "contraction": Perturbation(_by_pattern(lists.contractions(), followed=True)),
        "morphology_any": Perturbation(_anywhere(lists.substring_nouns())),
        "punctuation": Perturbation(lambda text, rng: list(_punctuation(text))),
        "abbreviation": Perturbation(_by_pattern(lists.abbreviations())),
    }


def of_wordnet(wordnet: lists.WordNet) -> dict[str, Perturbation]:
    """The slices of synonyms."""
    ignored = lists.function_words()

    def of_dominant_sense(word: str) -> list[str]:
        return _of_like_length(word, wordnet(word))

    def of_one_part(word: str) -> list[str]:
        senses = wordnet.senses(word)
        if len({one.part for one in senses}) != 1:
            return []
        found = (_of_like_length(word, sense.synonyms) for sense in senses)
        return next(filter(None, found), [])

    def proposals(synonyms: Callable[[str], list[str]]) -> Proposals:
        def propose(text: str, rng: np.random.Generator) -> list[Replacement]:
            result = []
            for match in _WORD.finditer(text):
                word = match[0]
                # Words with a capital may be names.
                if word in ignored or not word.islower():
                    continue
                if near := synonyms(word):
                    result.append(Replacement(*match.span(), near[rng.integers(len(near))]))
            return result

        return propose

    return {
        "synonym": Perturbation(proposals(of_dominant_sense), SYNONYM_COUNTS),
        "synonym_pos": Perturbation(proposals(of_one_part), SYNONYM_COUNTS),
    }


def _of_like_length(word: str, synonyms: Sequence[str]) -> list[str]:
    return [new for new in synonyms if abs(len(new) - len(word)) < 4]


def of_inflections() -> dict[str, Perturbation]:
    """The morphology slice.

    Raises:
      BadInputError: the inflections are not in the cache.
    """
    ignored = lists.function_words()
    forms = {word: form for word, form in lists.plurals().items() if word not in ignored}
    return {"morphology": Perturbation(_by_word(forms))}


def _typos(
    text: str, letters: Mapping[str, str], rng: np.random.Generator
) -> Iterator[Replacement]:
    for match in _WORD.finditer(text):
        if len(match[0]) > 3:
            at = match.start() + int(rng.integers(1, len(match[0]) - 1))
            others = letters[text[at].lower()]
            new = others[rng.integers(len(others))]
            yield Replacement(at, at + 1, new.upper() if text[at].isupper() else new)


def _by_word(forms: Mapping[str, str]) -> Proposals:
    def propose(text: str, rng: np.random.Generator) -> list[Replacement]:
        del rng
        return [
            Replacement(*match.span(), _cased(match[0], forms[match[0].lower()]))
            for match in _WORD.finditer(text)
            if match[0].lower() in forms
        ]

    return propose


def _anywhere(nouns: Sequence[str]) -> Proposals:
    """An "s" after each occurrence of the letters of a noun, within words as well."""
    # Longest first, so that one place has one proposal.
    pattern = re.compile("|".join(sorted(map(re.escape, nouns), key=lambda noun: -len(noun))))

    def propose(text: str, rng: np.random.Generator) -> list[Replacement]:
        del rng
        return [Replacement(match.end(), match.end(), "s") for match in pattern.finditer(text)]

    return propose


def _by_pattern(pairs: Sequence[tuple[str, str]], *, followed: bool = False) -> Proposals:
    """Replacements of phrases; where `followed`, only before another word.

    "It is." at the end of a sentence has no contraction.
    """
    patterns = []
    # Longest first, so that a phrase in another one is not replaced alone.
    for long, short in sorted(pairs, key=lambda pair: -len(pair[0])):
        name = r"(?P<name>[A-Z][\w'’-]*)"
        body = re.escape(long).replace("'", "['’]").replace(r"\*", name).replace(r"\ ", r"\s+")
        end = r"(?=\s+\w)" if followed else r"(?![\w'’-])"
        # A phrase that begins in lower case may begin a sentence.
        first = f"[{body[0]}{body[0].upper()}]" if body[0].islower() else body[0]
        patterns.append((re.compile(rf"(?<![\w'’-]){first}{body[1:]}{end}"), short))

    def propose(text: str, rng: np.random.Generator) -> list[Replacement]:
        del rng
        result: list[Replacement] = []
        for pattern, short in patterns:
            for match in pattern.finditer(text):
                start, stop = match.span()
                if any(start < other.stop and other.start < stop for other in result):
                    continue
                new = _cased(match[0], short.replace("*", match.groupdict().get("name") or "*"))
                if text[stop : stop + 1] == ".":
                    new = new.removesuffix(".")
                result.append(Replacement(start, stop, new))
        return sorted(result)

    return propose


def _punctuation(text: str) -> Iterator[Replacement]:
    end = len(text.rstrip())
    if not end:
        return
    if text[end - 1] in ".!?":
        yield Replacement(end - 1, end, "")
    elif text[end - 1].isalnum():
        yield Replacement(end, end, ".")
    for match in re.finditer(r",(?=\s)", text):
        yield Replacement(*match.span(), "")


def _cased(old: str, new: str) -> str:
    """`new` with a capital where `old` begins with one."""
    if len(old) > 1 and old.isupper() and new.isalpha():
        return new.upper()
    return new[0].upper() + new[1:] if old[0].isupper() else new
