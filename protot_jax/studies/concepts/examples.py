"""The texts of a concept report, decoded and split into words."""

from collections.abc import Sequence
import dataclasses

import numpy as np
from tokenizers.decoders import DecodeStream

from lm_jax.text.tokenizer import Tokenizer
from protot_jax.studies.concepts.collect import Texts
from protot_jax.studies.concepts.ranking import TopToken
from protot_jax.studies.concepts.results import Text
from protot_jax.studies.concepts.unit_results import SpelledToken


@dataclasses.dataclass(frozen=True)
class Words:
    """A text in tokens and in words.

    The concatenation of `words` is the text; a word begins with the space before it. `word_of` is
    the index of the word that each token belongs to.
    """

    tokens: tuple[str, ...]
    words: tuple[str, ...]
    word_of: tuple[int, ...]

    def means(self, gate_T: np.ndarray) -> list[float]:
        """The mean over each word of a value per token."""
        sums = np.bincount(self.word_of, weights=gate_T)
        return (sums / np.bincount(self.word_of)).tolist()


def words(tokenizer: Tokenizer, ids: Sequence[int]) -> Words:
    """Decodes a text token by token; a token that begins with white space begins a word."""
    stream = DecodeStream(skip_special_tokens=False)
    results: list[str] = []
    word_of = []
    for token in ids:
        # None where the token ends inside a character, which the next one then completes.
        piece = stream.step(tokenizer.backend, int(token)) or ""
        if not results or piece[:1].isspace():
            results.append(piece)
        else:
            results[-1] += piece
        word_of.append(len(results) - 1)
    tokens = tuple(spelled(tokenizer, token) for token in ids)
    return Words(tokens, tuple(results), tuple(word_of))


def spelled(tokenizer: Tokenizer, token: int) -> str:
    """The text of a single token, or its spelling in the vocabulary where it has no text."""
    return tokenizer.decode([token]).strip() or tokenizer.token(token)


def spelled_tokens(tokenizer: Tokenizer, best: Sequence[TopToken]) -> tuple[SpelledToken, ...]:
    """Tokens of a ranking with their texts."""
    return tuple(
        SpelledToken(token=spelled(tokenizer, one.id), **dataclasses.asdict(one)) for one in best
    )


class ReportTexts:
    """The `texts` of a report, each once, in the order in which `index` first asked for them."""

    def __init__(self, tokenizer: Tokenizer, texts: Texts) -> None:
        self._tokenizer, self._texts = tokenizer, texts
        self._index: dict[int, int] = {}
        self._words: list[Words] = []
        # Of each entry, the number of its text.
        self.rows: list[int] = []
        self.entries: list[Text] = []

    def index(self, text: int) -> int:
        """The index in `entries` of an analysed text, which is added if it is new."""
        if text not in self._index:
            texts = self._texts
            split = words(self._tokenizer, texts.token_NT[text][texts.token_mask_NT[text]])
            self._index[text] = len(self.entries)
            self._words.append(split)
            self.rows.append(text)
            self.entries.append(
                Text(
                    document=int(texts.document_N[text]),
                    tokens=split.tokens,
                    words=split.words,
                    word_of=split.word_of,
                    perplexity=texts.perplexity(text),
                )
            )
        return self._index[text]

    def marked(
        self, gates: Sequence[tuple[int, Sequence[float] | np.ndarray]]
    ) -> list[tuple[tuple[str, ...], list[float]]]:
        """The words of some texts with the mean write gate of each word, as input of a judge.

        Args:
          gates: pairs of a text's index in `entries` and the write gate of each of its tokens.
        """
        pairs = ((self._words[text], np.asarray(write)) for text, write in gates)
        return [(split.words, split.means(write_T)) for split, write_T in pairs]
