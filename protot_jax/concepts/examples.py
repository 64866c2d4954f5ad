"""The texts that a report shows, in the words that a person reads."""

from collections.abc import Sequence
import dataclasses

import numpy as np
from tokenizers.decoders import DecodeStream

from lm_jax.text.tokenizer import Tokenizer
from protot_jax.concepts.collect import Texts
from protot_jax.concepts.results import Text


@dataclasses.dataclass(frozen=True)
class Words:
    """A text in tokens and in words.

    `words` joined by nothing give the text; a word begins with the space before it. `word_of` says
    which word each token is of.
    """

    tokens: tuple[str, ...]
    words: tuple[str, ...]
    word_of: tuple[int, ...]

    def means(self, gate_T: np.ndarray) -> list[float]:
        """The mean over each word of a value per token."""
        sums = np.bincount(self.word_of, weights=gate_T)
        return (sums / np.bincount(self.word_of)).tolist()


def words(tokenizer: Tokenizer, ids: Sequence[int]) -> Words:
    """Decodes a text piece by piece; a piece that begins with white space begins a word."""
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
    """A token by itself: its text, or its spelling in the vocabulary where it has none."""
    return tokenizer.decode([token]).strip() or tokenizer.token(token)


class Shown:
    """Texts of the report, each once, in the order in which they were asked for.

    `entries` are the `texts` of the report.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Texts) -> None:
        self._tokenizer, self._texts = tokenizer, texts
        self._places: dict[int, int] = {}
        self._words: list[Words] = []
        self.entries: list[Text] = []

    def place(self, text: int) -> int:
        """The index in `entries` of the text of this number."""
        if text not in self._places:
            texts = self._texts
            split = words(self._tokenizer, texts.token_NT[text][texts.token_mask_NT[text]])
            self._places[text] = len(self.entries)
            self._words.append(split)
            self.entries.append(
                Text(
                    document=int(texts.document_N[text]),
                    tokens=split.tokens,
                    words=split.words,
                    word_of=split.word_of,
                    perplexity=texts.perplexity(text),
                )
            )
        return self._places[text]

    def marked(
        self, shown: Sequence[tuple[int, Sequence[float] | np.ndarray]]
    ) -> list[tuple[tuple[str, ...], list[float]]]:
        """What a judge sees of some texts: their words, with the mean write gate of each.

        Args:
          shown: of each an index in `entries`, and the write gate of each of its tokens.
        """
        pairs = ((self._words[text], np.asarray(write)) for text, write in shown)
        return [(split.words, split.means(write_T)) for split, write_T in pairs]
