"""Which pairs a benchmark keeps: frequency of new words, casing, similarity (appendix A.5.1).

The paper names rare tokens and casing; the frequency is on the Zipf scale (van Heuven et al. 2014),
the logarithm of a word's count in 10^9 words, here of the corpora themselves. The similarity is
that of `similarity.py`. The code of the paper applies it to synonyms alone, its text to all slices.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
import dataclasses
import itertools
import math
import re

from protot_jax.studies.robustness.sentences import Pair
from protot_jax.studies.robustness.similarity import Encoder, similarities

# Slices whose new words are meant to be words that are in use; a typo is not, "Dr." is no word, and
# neither is what becomes of a word with an "s" within it.
WORD_SLICES = ("morphology", "synonym", "synonym_pos")
REASONS = ("casing", "dissimilar", "rare")
_WORD = re.compile(r"[^\W\d_]+")
_WHOLE = re.compile(r"[\"'“‘]?[A-Z0-9][^<>@=|{}\[\]\\_#*]*[.!?][\"'”’]?")
_AT_ONCE = 64


def whole_sentence(text: str) -> bool:
    """Whether a text begins with a capital, ends with a mark, and has no markup in it."""
    return _WHOLE.fullmatch(text) is not None


def counted(texts: Iterable[str], counts: Counter[str]) -> Iterator[str]:
    """The texts, whose words in lower case are added to `counts` as they pass."""
    for text in texts:
        counts.update(word.lower() for word in _WORD.findall(text))
        yield text


@dataclasses.dataclass(frozen=True)
class Screen:
    """The checks of a pair.

    Attributes:
      counts: counts of words in lower case in the corpora.
      least_zipf: least frequency of each new word, in `WORD_SLICES`.
      encoder: None leaves the similarity out.
      least_similarity: least similarity in the slices that are `similar`.
      similar: names of slices.
    """

    counts: Counter[str]
    least_zipf: float
    encoder: Encoder | None
    least_similarity: float
    similar: Collection[str]

    def __call__(self, pairs: Sequence[Pair]) -> list[str]:
        """Why each pair is left out, of `REASONS`; empty for those that are kept."""
        reasons = [self._of_words(pair) for pair in pairs]
        # The encoder is slow, so that it reads only what has passed.
        open_ = [i for i, pair in enumerate(pairs) if pair.slice in self.similar and not reasons[i]]
        if self.encoder is not None and open_:
            both = [(pairs[i].text, pairs[i].perturbed) for i in open_]
            for i, cosine in zip(open_, similarities(self.encoder, both), strict=True):
                reasons[i] = "dissimilar" if cosine < self.least_similarity else ""
        return reasons

    def _of_words(self, pair: Pair) -> str:
        if not keeps_casing(pair.text, pair.perturbed):
            return "casing"
        if pair.slice in WORD_SLICES and self._rarest(pair) < self.least_zipf:
            return "rare"
        return ""

    def _rarest(self, pair: Pair) -> float:
        """The Zipf frequency of the rarest word that only the perturbed text has."""
        old, new = (set(map(str.lower, _WORD.findall(x))) for x in (pair.text, pair.perturbed))
        return min((zipf(word, self.counts) for word in new - old), default=math.inf)


def zipf(word: str, counts: Counter[str]) -> float:
    """log10 of a word's count in 10^9 words; minus infinity for a word without a count."""
    return math.log10(1e9 * counts[word] / counts.total()) if counts[word] else -math.inf


def keeps_casing(text: str, perturbed: str) -> bool:
    """Whether words begin with capitals where they did: all of them, or if some join, the first."""
    old, new = text.split(), perturbed.split()
    if len(old) != len(new):
        old, new = old[:1], new[:1]
    return all(a[0].isupper() == b[0].isupper() for a, b in zip(old, new, strict=True))


def fill(
    candidates: Iterator[Pair], count: int, screen: Screen, rejected: Counter[str]
) -> list[Pair]:
    """The first `count` pairs that pass, each once; counts up the reasons of the others."""
    kept: dict[Pair, None] = {}
    while len(kept) < count:
        pairs = list(itertools.islice(candidates, _AT_ONCE))
        if not pairs:
            break
        for pair, reason in zip(pairs, screen(pairs), strict=True):
            if len(kept) == count:
                break
            if reason:
                rejected[reason] += 1
            else:
                kept[pair] = None
    return list(kept)
