"""Tokenizers whose tokens are whole words, numbers of one digit, or numbers of two digits."""

import tokenizers
from tokenizers import models, pre_tokenizers, processors

from lm_jax.text.tokenizer import Tokenizer
from sparse_jax.circuits import generators

KINDS = ("names", "places", "things", "events", "words", "arguments", "functions")
TEMPLATES = (
    generators._IOI,
    generators._IOI_LONG,
    generators._IOI_REPHRASED,
    generators._YEARS,
)
_DIGITS = {1: r"\d", 2: r"\d{1,2}"}


def word_tokenizer(*, digits=1, without=(), special=()):
    """One token for each word, punctuation mark, and group of so many digits.

    With `special` texts begin with these tokens, whose ids are from 0.
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
