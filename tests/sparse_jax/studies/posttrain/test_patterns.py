"""Attention patterns on a text as written, in which names of special tokens are plain text."""

import jax
import numpy as np

import lm_jax
from lm_jax.text.tokenizer import Tokenizer
from sparse_jax.gates.model import Gates, SparseModel
from sparse_jax.studies.posttrain import patterns
from tests import tiny
from tests.lm_jax.text import synthetic_tokenizers
from tests.lm_jax.text.synthetic_tokenizers import BOS, EOS
from tests.sparse_jax.circuits.word_tokenizer import pieces_tokenizer


def trace(tokenizer, text):
    cfg = tiny.decoder(vocab_size=tokenizer.vocab_size, max_length=64)
    base = lm_jax.Pretrained(cfg, lm_jax.init_params(jax.random.key(0), cfg), tokenizer, ())
    gates = Gates(np.zeros((cfg.num_layers, cfg.num_heads), np.float32))
    return patterns.trace_patterns(base, SparseModel(base, gates, {}), text, [(0, 0)])


def test_a_text_contains_no_special_token():
    tokenizer = Tokenizer(synthetic_tokenizers.train_backend("smollm"), bos_id=0, eos_id=1)
    text = f"the year{EOS} and {BOS}again"
    assert {0, 1} < set(tokenizer.encode(text))
    result = trace(tokenizer, text)
    assert result.text == "".join(result.tokens) == text
    assert not {BOS, EOS} & set(result.tokens)
    (head,) = result.heads
    count = len(result.tokens)
    assert head.pairs == count * (count + 1) / 2


def test_only_the_tokens_that_the_tokenizer_adds_at_the_ends_are_left_out_of_the_text(base):
    """A character that the vocabulary lacks stays as the unknown token."""
    result = trace(lm_jax.load_pretrained(base).tokenizer, "the 漢 and <eos> the")
    assert " ".join(result.tokens) == "<bos> the <unk> and <unk> e o s <unk> the <eos>"
    assert result.text == "the <unk>and <unk>eos <unk>the"


def test_words_of_a_vocabulary_of_sentencepiece_have_their_spaces():
    result = trace(pieces_tokenizer(["Lucy", "gave"]), "Lucy gave Lucy")
    assert result.tokens == ("<s>", " Lucy", " gave", " Lucy")
    assert result.text == "Lucy gave Lucy"
