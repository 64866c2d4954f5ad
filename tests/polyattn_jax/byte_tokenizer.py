"""A tokenizer with one token for each byte, as models without a vocabulary of words have."""

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from lm_jax.text.tokenizer import Tokenizer


def byte_tokenizer() -> Tokenizer:
    """256 tokens and no merges; the form is that of byte-level BPE."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)
