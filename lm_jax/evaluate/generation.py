"""Measures of generated text: BLEU and ROUGE-L against the reference, distinct n-grams, repetition.

1. BLEU [1] by sacrebleu, whose signature names tokeniser, smoothing and version [2]; shares of 1.
   A sentence of no matching 4-gram has BLEU 0 unless it is smoothed, so both are given.
2. ROUGE-L [5]: the longest common subsequence of words, as an F-measure.
3. distinct-n [3]: unique n-grams over all n-grams of many texts together.
4. Repetition [4]: 1 less unique over all n-grams within one text.

n-grams are of words, split at blanks, so that models with other tokenizers are comparable.

[1] Papineni et al., 2002.  [2] Post, 2018.  [3] Li et al., 2016.  [4] Welleck et al., 2020.
[5] Lin, ROUGE, 2004, section 3.1.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import itertools
import math
import re

from lm_jax.errors import UsageError

ORDERS = (1, 2, 3)
# Longer n-grams of one text are rarely equal by chance.
REPETITION = 4
# Letters and digits of any script; an underscore is neither.
_ALPHANUMERIC = re.compile(r"[^\W_]+")


@dataclasses.dataclass(frozen=True)
class Bleu:
    """BLEU of texts against one reference each, from 0 to 1.

    Attributes:
      sentences: smoothed BLEU of each text, over the orders that its length has.
      unsmoothed: BLEU of each text without smoothing, over four orders.
      corpus: BLEU of all texts together.
      signature: signature of `sentences`.
      unsmoothed_signature: signature of `unsmoothed`.
    """

    sentences: tuple[float, ...]
    unsmoothed: tuple[float, ...]
    corpus: float
    signature: str
    unsmoothed_signature: str


def bleu(texts: Sequence[str], references: Sequence[str]) -> Bleu:
    """BLEU of each text, and of all together, against its reference.

    Raises:
      UsageError: their numbers differ, or there is none.
    """
    from sacrebleu.metrics.bleu import BLEU

    _check_pairs("bleu", texts, references)
    smoothed = BLEU(effective_order=True)
    unsmoothed = BLEU(effective_order=False, smooth_method="none")
    pairs = list(zip(texts, references, strict=True))
    sentences = tuple(smoothed.sentence_score(text, [one]).score / 100 for text, one in pairs)
    whole = tuple(unsmoothed.corpus_score([text], [[one]]).score / 100 for text, one in pairs)
    corpus = BLEU().corpus_score(list(texts), [list(references)]).score / 100
    return Bleu(
        sentences,
        whole,
        corpus,
        str(smoothed.get_signature()),
        str(unsmoothed.get_signature()),
    )


def rouge_l(texts: Sequence[str], references: Sequence[str]) -> tuple[float, ...]:
    """ROUGE-L of each text against its reference, from 0 to 1.

    Of a text of m words and a reference of n whose longest common subsequence has l,

        P = l / m,  R = l / n,  F = (1 + beta^2) P R / (R + beta^2 P) = 2 l / (m + n)

    with beta = 1, which is symmetric. Words are the runs of letters and digits of the lower-cased
    text, not stemmed; a text without words has 0, against another one too.

    Raises:
      UsageError: the numbers of texts and references differ, or there is none.
    """
    _check_pairs("rouge_l", texts, references)
    return tuple(_rouge_l(text, one) for text, one in zip(texts, references, strict=True))


def _rouge_l(text: str, reference: str) -> float:
    first, second = (_ALPHANUMERIC.findall(one.lower()) for one in (text, reference))
    common = _common_subsequence(first, second)
    return 2 * common / (len(first) + len(second)) if common else 0.0


def _common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """The length of the longest common subsequence."""
    # row[j]: that of the words of `first` so far and the first j of `second`.
    row = [0] * (len(second) + 1)
    for word in first:
        above = row
        row = [0]
        for j, other in enumerate(second):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
    return row[-1]


def distinct(texts: Iterable[str], n: int) -> float:
    """Unique n-grams of all texts together, over all their n-grams; NaN without any."""
    grams = list(itertools.chain.from_iterable(ngrams(text, n) for text in texts))
    return len(set(grams)) / len(grams) if grams else math.nan


def repetition(text: str, n: int = REPETITION) -> float:
    """The share of a text's n-grams that it had already; NaN for a text too short to have one."""
    grams = ngrams(text, n)
    return 1 - len(set(grams)) / len(grams) if grams else math.nan


def ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    """The n-grams of the words of a text, in order."""
    words = text.split()
    return list(zip(*(words[i:] for i in range(n)), strict=False))


def _check_pairs(what: str, texts: Sequence[str], references: Sequence[str]) -> None:
    if len(texts) != len(references) or not texts:
        raise UsageError(
            f"{what}: {len(texts)} texts and {len(references)} references; give one for each text"
        )
