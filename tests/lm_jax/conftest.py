"""Data sets are made of few words."""

from tests.lm_jax.made_corpus import folder, prepared, tokenizer

__all__ = ["folder", "prepared", "tokenizer"]
