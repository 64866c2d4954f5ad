"""Data sets are made of few words, tokenizers of few merges; models are copies of golden ones."""

from tests.lm_jax.golden_copies import copy
from tests.lm_jax.made_corpus import folder, prepared, tokenizer
from tests.lm_jax.made_tokenizers import sentencepiece, smollm

__all__ = ["copy", "folder", "prepared", "sentencepiece", "smollm", "tokenizer"]
