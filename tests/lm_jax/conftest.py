"""Fixtures: data sets of few words, tokenizers of few merges, copies of golden models."""

from tests.lm_jax.text.synthetic_corpus import folder, prepared, tokenizer
from tests.lm_jax.text.synthetic_tokenizers import prefixing, sentencepiece, smollm
from tests.lm_jax.weights.golden_copies import copy

__all__ = ["copy", "folder", "prefixing", "prepared", "sentencepiece", "smollm", "tokenizer"]
