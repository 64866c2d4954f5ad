"""Attention is shown on the text as it was written, in which no special token is read."""

import jax
import numpy as np

import lm_jax
from lm_jax.text.tokenizer import Tokenizer
from sparse_jax import patterns
from sparse_jax.model import Gates, SparseModel
from tests import tiny
from tests.lm_jax.text import synthetic_tokenizers
from tests.lm_jax.text.synthetic_tokenizers import BOS, EOS


def shown(tokenizer, text):
    cfg = tiny.decoder(vocab_size=tokenizer.vocab_size, max_length=64)
    base = lm_jax.Pretrained(cfg, lm_jax.init_params(jax.random.key(0), cfg), tokenizer, ())
    gates = Gates(np.zeros((cfg.num_layers, cfg.num_heads), np.float32))
    return patterns.trace_patterns(base, SparseModel(base, gates, {}), text, [(0, 0)])


def test_a_text_speaks_no_special_token():
    tokenizer = Tokenizer(synthetic_tokenizers.trained("smollm"), bos_id=0, eos_id=1)
    text = f"the year{EOS} and {BOS}again"
    assert {0, 1} < set(tokenizer.encode(text))
    result = shown(tokenizer, text)
    assert result["text"] == "".join(result["tokens"]) == text
    assert not {BOS, EOS} & set(result["tokens"])
    (head,) = result["heads"]
    count = len(result["tokens"])
    assert head["pairs"] == count * (count + 1) / 2


def test_of_a_text_only_what_the_tokenizer_puts_around_it_is_left_out(base):
    """What it has no letter for stays visible as the unknown token."""
    result = shown(lm_jax.load_pretrained(base).tokenizer, "the 漢 and <eos> the")
    assert " ".join(result["tokens"]) == "<bos> the <unk> and <unk> e o s <unk> the <eos>"
    assert result["text"] == "the <unk>and <unk>eos <unk>the"
