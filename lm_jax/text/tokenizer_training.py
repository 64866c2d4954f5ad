"""BPE tokenizer training: over normalised words, or over bytes.

`train_tokenizer` is as for the 16k vocabulary of the Prototype Transformer: byte-pair encoding
(Sennrich et al. 2016) over normalised words, by `tokenizers`:

    1. Unicode NFD, lower case, accents stripped.
    2. Split at white space and between words and punctuation.
    3. Merges inside a word, whose last piece carries the suffix `</w>`; a merge must occur
       three times. Learned from the first 10,000 documents.
    4. `<bos> text <eos>` around every text. `prepare.py` ends a document with `<eot>` after that.

Case, accents and the kind of white space are lost, so decoding gives back the normalised text, not
the original. The text is not truncated here: how much of a document is read is a setting of the
reader.

`train_byte_tokenizer` is byte-level BPE (Radford et al. 2019), which loses nothing: any text is
decoded as it was.
"""

from collections.abc import Iterable, Sequence
import itertools
import json
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from lm_jax.errors import BadInputError, UsageError
from lm_jax.text.tokenizer import Tokenizer

# In the order of their ids, 0 to 4.
PAD, UNKNOWN, BOS, EOS, END_OF_TEXT = SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>", "<eot>")
_SUFFIX = "</w>"
# Contractions, words, numbers, and other characters, each with a space before it, and white space.
_BYTE_SPLIT = (
    r"'(?:s|t|re|ve|m|ll|d)| ?\p{{L}}+| ?\p{{N}}{{1,{digits}}}"
    r"| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
)


def train_tokenizer(
    texts: Iterable[str],
    *,
    vocab_size: int = 16_000,
    min_frequency: int = 3,
    documents: int = 10_000,
) -> Tokenizer:
    """Learns a vocabulary from the first `documents` texts.

    Args:
      texts: an iterable, read no further than needed.
      vocab_size: the most tokens to have, the five special ones and the alphabet included. A small
        corpus gives fewer: `Tokenizer.vocab_size` is their number.
      min_frequency: how often two pieces must be neighbours to be merged.
      documents: how many texts to learn from.

    Raises:
      BadInputError: for no texts at all, or an alphabet that does not fit into `vocab_size`.
    """
    texts = list(itertools.islice(texts, documents))
    if not texts:
        raise BadInputError("no texts to train a tokenizer on; give a corpus with documents in it")
    # The package numbers the letters at word ends as a hash map happens to give them, and the
    # numbers break ties between merges. So they are found first, and then given in order.
    letters = _learn(texts, (), 0, min_frequency)
    ends = sorted(token for token in letters["vocab"] if token.endswith(_SUFFIX))
    if (least := len(letters["vocab"])) > vocab_size:
        raise BadInputError(
            f"vocab_size = {vocab_size} is less than the {least} tokens that the alphabet of the "
            "texts and the special tokens take; raise it"
        )
    learned = _learn(texts, ends, vocab_size, min_frequency)
    backend = _pipeline(learned["vocab"], [tuple(pair) for pair in learned["merges"]])
    backend.add_special_tokens(list(SPECIAL))
    bos, eos = (backend.token_to_id(token) for token in (BOS, EOS))
    backend.post_processor = processors.TemplateProcessing(
        single=[BOS, "$A", EOS],
        pair=[BOS, "$A", EOS, BOS, "$B:1", EOS],
        special_tokens=[(BOS, bos), (EOS, eos)],
    )
    return Tokenizer(backend, bos_id=bos, eos_id=eos)


def train_byte_tokenizer(
    texts: Iterable[str],
    *,
    vocab_size: int,
    digits: int = 2,
    min_frequency: int = 3,
    documents: int | None = None,
) -> Tokenizer:
    """Learns a byte-level BPE vocabulary; `<bos>` begins every text, `<eot>` is the end of text.

    Text is split as GPT-2 splits it, but for numbers, which are cut from the left into groups of at
    most `digits` digits: with two, the year 1732 is "17", "32", as tasks on years need it.

    Args:
      texts: an iterable, read no further than needed.
      vocab_size: the most tokens to have, the two special ones and the 256 bytes included.
      digits: the most digits in a token.
      min_frequency: how often two pieces must be neighbours to be merged.
      documents: how many texts to learn from; None reads all.

    Raises:
      UsageError: `digits` is below 1, or `vocab_size` has no room for the bytes.
      BadInputError: for no texts at all.
    """
    special = [BOS, END_OF_TEXT]
    least = len(special) + 256
    if vocab_size < least or digits < 1:
        raise UsageError(
            f"vocab_size = {vocab_size} must be at least {least}, and digits = {digits} at least 1"
        )
    stream = itertools.islice(texts, documents)
    first = next(stream, None)
    if first is None:
        raise BadInputError("no texts to train a tokenizer on; give a corpus with documents in it")
    backend = tokenizers.Tokenizer(models.BPE())
    split = _BYTE_SPLIT.format(digits=digits)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(itertools.chain([first], stream), trainer=trainer)
    bos, end = (backend.token_to_id(token) for token in special)
    backend.post_processor = processors.TemplateProcessing(
        single=[BOS, "$A"], pair=[BOS, "$A", BOS, "$B:1"], special_tokens=[(BOS, bos)]
    )
    return Tokenizer(backend, bos_id=bos, eos_id=end)


def _learn(
    texts: list[str], reserved: Sequence[str], vocab_size: int, min_frequency: int
) -> dict[str, Any]:
    """The vocabulary and merges, with `reserved` numbered right after the special tokens."""
    backend = _pipeline({}, [])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[*SPECIAL, *reserved],
        end_of_word_suffix=_SUFFIX,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer=trainer)
    return json.loads(backend.to_str())["model"]


def _pipeline(vocab: dict[str, int], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=UNKNOWN, end_of_word_suffix=_SUFFIX)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()]
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.BPEDecoder(suffix=_SUFFIX)
    return backend
