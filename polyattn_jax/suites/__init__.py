"""Prompt suites: data with known answers, an audit at build time and a manifest hash.

From "When Does Polynomial Attention Concentrate?", section 5.1 and Appendices B and E: induction,
multi-query associative recall and needle in a haystack; Appendices X, Z, AA and AI: harder needles
(`needles`). `named` has the suites that an audit knows by name. A suite needs a tokenizer, never a
model.
"""

from polyattn_jax.suites import named
from polyattn_jax.suites.batching import Batch, batches
from polyattn_jax.suites.induction import copies, induction, repeated_tokens
from polyattn_jax.suites.jsonl import load_jsonl, read_jsonl
from polyattn_jax.suites.mqar import mqar
from polyattn_jax.suites.niah import niah, shipped_nouns, single_token_nouns
from polyattn_jax.suites.prompts import Prompt, Suite, Tokenizer
from polyattn_jax.suites.texts import load_texts, read_texts

__all__ = [
    "Batch",
    "Prompt",
    "Suite",
    "Tokenizer",
    "batches",
    "copies",
    "induction",
    "load_jsonl",
    "load_texts",
    "mqar",
    "named",
    "niah",
    "read_jsonl",
    "read_texts",
    "repeated_tokens",
    "shipped_nouns",
    "single_token_nouns",
]
