"""Suites over a tokenizer of whole words and a synthetic haystack."""

import random

from tokenizers import Tokenizer, models, pre_tokenizers, processors

from polyattn_jax import suites

NOUNS = suites.shipped_nouns()
PROSE = (
    "the a this that every some small large quiet bright slow early late people travel work wait "
    "sing often never always there here near far away again together home today"
)
PLAIN = PROSE.split()


class WordTokenizer:
    """One token a word or mark, spaces dropped; enough of the interface for a suite."""

    sha256 = "0" * 64
    eos_id = None

    def __init__(self, words, *, start=False, end=False):
        vocab = ["<unk>", "<s>", "</s>", *dict.fromkeys(words)]
        self.backend = Tokenizer(
            models.WordLevel({word: i for i, word in enumerate(vocab)}, unk_token="<unk>")
        )
        self.backend.pre_tokenizer = pre_tokenizers.Whitespace()
        self.bos_id = 1 if start else None
        template = ["<s>"] * start + ["$A"] + ["</s>"] * end
        self.backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 1), ("</s>", 2)]
        )

    @property
    def vocab_size(self):
        return self.backend.get_vocab_size()

    def encode(self, text, *, add_special_tokens=True, split_special_tokens=False):
        self.backend.encode_special_tokens = split_special_tokens
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids):
        return " ".join(self.backend.id_to_token(i) for i in ids)


def sentences(count):
    """Distinct sentences of 4 to 9 words; every other one names a noun in one of its spellings."""
    draw = random.Random(0)
    sentences = {}
    while len(sentences) < count:
        first, *rest = draw.choices(PLAIN, k=draw.randint(4, 9))
        if len(sentences) % 2:
            noun = draw.choice(NOUNS)
            rest[draw.randrange(len(rest))] = draw.choice([noun, noun.title(), noun.upper()])
        sentences[f"{first.title()} {' '.join(rest)}."] = None
    return list(sentences)


HAYSTACK = sentences(500)
VOCABULARY = [
    *("The", "secret", "word", "is", ".", "room", "open", "wide", "old", "man", "long", "day"),
    *("little", "over"),
    *(form for word in (*PLAIN, *NOUNS) for form in (word, word.title(), word.upper())),
]


def build(kind, seed=0, n=5):
    if kind == "repeated":
        return suites.repeated_tokens(vocabulary=97, half=9, n=n, seed=seed)
    if kind == "mqar":
        return suites.mqar(vocabulary=97, length=50, pairs=4, n=n, seed=seed)
    if kind == "niah":
        return suites.niah(WordTokenizer(VOCABULARY), haystack=HAYSTACK, length=60, n=n, seed=seed)
    return suites.induction(vocabulary=97, length=40, n=n, seed=seed, form=kind)
