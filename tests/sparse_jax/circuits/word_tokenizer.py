"""Tokenizers whose tokens are whole words, numbers of one digit, or numbers of two digits.

That of `year_tokenizer` has some whole years besides, as GPT-2's.
"""

import re

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from lm_jax.text.tokenizer import Tokenizer
from sparse_jax.circuits import generators
from sparse_jax.circuits.generators import paper, stories

STORY_KINDS = ("girls", "boys", "spots", "toys", "plurals", "numbers")
KINDS = ("names", "places", "things", "events", "words", "arguments", "functions")
TEMPLATES = (
    paper.IOI,
    paper.IOI_LONG,
    paper.IOI_REPHRASED,
    paper.YEARS,
)
_DIGITS = {1: r"\d", 2: r"\d{1,2}"}


def word_tokenizer(*, digits=1, without=(), special=(), with_stories=False):
    """One token for each word, punctuation mark, and group of so many digits.

    With `special` texts begin with these tokens, whose ids are from 0. Words of stories have tokens
    only where they are asked for.
    """
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Whitespace(),
            pre_tokenizers.Split(tokenizers.Regex(_DIGITS[digits]), "isolated"),
        ]
    )
    texts = [" ".join(generators.words(kind)) for kind in KINDS]
    texts += [template for each in TEMPLATES for template in each.values()]
    texts += [" ".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), 'self def param : ( ) , . """ :param ):']
    if with_stories:
        texts += [" ".join(generators.words(kind)) for kind in STORY_KINDS]
        wordings = [wording for each in stories.WORDINGS for wording in each.values()]
        texts += [re.sub(r"\{\w+\}", "a", wording) for wording in wordings]
        texts += ["girl boy she he her his herself himself was were one found lost happy sad"]
    pieces = {piece for text in texts for piece, _ in split.pre_tokenize_str(text)}
    pieces |= {f"{number:0{size}d}" for size in range(1, digits + 1) for number in range(10**size)}
    vocab = {
        piece: i for i, piece in enumerate([*special, "<unk>", *sorted(pieces - set(without))])
    }
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = split
    if special:
        backend.add_special_tokens(list(special))
        backend.post_processor = processors.TemplateProcessing(
            single=f"{' '.join(special)} $A",
            special_tokens=[(each, vocab[each]) for each in special],
        )
    return Tokenizer(backend)


def year_tokenizer(fused=()):
    """Byte-level BPE that divides " 1742" into " 17" and "42", as GPT-2's, but for some years."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tens = [("Ġ", "1"), *(("Ġ1", str(digit)) for digit in range(1, 8))]
    pairs = [(f"{number:02d}"[0], f"{number:02d}"[1]) for number in range(100)]
    merges = [*tens, *pairs, *((f"Ġ{year[:2]}", year[2:]) for year in fused)]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def pieces_tokenizer(words):
    """A SentencePiece vocabulary as Llama 2 has it, in which each of some words is one token.

    Its first ids are the unknown token, the beginning and the end of a text, then 256 bytes. It
    puts the beginning before a text, and decodes a word by itself without its space.
    """
    known = [f"\N{LOWER ONE EIGHTH BLOCK}{word}" for word in words]
    # A word is joined from the left, so all of its beginnings are tokens, and all of its letters.
    starts = {piece[:end] for piece in known for end in range(1, len(piece) + 1)}
    letters = {letter for piece in known for letter in piece}
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += sorted(starts | letters)
    return Tokenizer.from_pieces(pieces, [-float(len(piece)) for piece in pieces])
