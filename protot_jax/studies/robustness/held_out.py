"""Which sentences stand in a model's training text, so that they say nothing of new text.

A sentence of a benchmark is held out if its document is in no training split (`heldout_corpus`),
and if it stands in no training document word for word (`found`), as stock phrases do. Sentences of
fewer than five words, which dialogue has, are not looked for in training documents.
"""

from collections.abc import Iterable, Sequence
import dataclasses

from lm_jax.errors import BadInputError
from lm_jax.run import stop
from lm_jax.text import corpora
from lm_jax.text.preparation import CorpusConfig, split_documents

# Shorter ones stand in any long text and are not looked for: they are kept, even where a training
# document has them.
LEAST_WORDS = 5
# Words by which a document is searched, fewer than any sentence has that is looked for.
_KEY = 4
# Every config that trains on these reads their documents whole; others are cut as by default.
_WHOLE = ("wiki", "wikitext2")


@dataclasses.dataclass(frozen=True)
class Trained:
    """The sentences that stand in a model's training text.

    Attributes:
      texts: the sentences that stand there; none where it is not known.
      unknown: why it is not known; empty if it is.
    """

    texts: frozenset[str]
    unknown: str = ""


def heldout_corpus(source: str, field: str) -> CorpusConfig:
    """How the training commands split a source into documents and splits."""
    unit: corpora.Unit = "document" if source in _WHOLE else "paragraph"
    return CorpusConfig(source=source, unit=unit, field=field)


def found(sentences: Iterable[str], texts: Iterable[str]) -> set[str]:
    """The sentences of at least `LEAST_WORDS` words that stand in one of the texts.

    Words are what white space parts, and a sentence stands in a text if its words follow one
    another there; marks at its ends count as part of its words.
    """
    wanted: dict[tuple[str, ...], list[tuple[list[str], str]]] = {}
    for sentence in sentences:
        words = sentence.split()
        if len(words) >= LEAST_WORDS:
            wanted.setdefault(tuple(words[:_KEY]), []).append((words, sentence))
    result: set[str] = set()
    for text in texts:
        stop.check("while searching training text")
        words = text.split()
        for start, key in enumerate(zip(*(words[i:] for i in range(_KEY)), strict=False)):
            for own, sentence in wanted.get(key, ()):
                if words[start : start + len(own)] == own:
                    result.add(sentence)
    return result


def trained_on(sentences: Sequence[str], corpus: CorpusConfig) -> Trained:
    """The sentences that stand in the training split of a model's corpus."""
    try:
        return Trained(frozenset(found(sentences, split_documents(corpus, "train"))))
    except BadInputError as error:
        return Trained(frozenset(), str(error))
