"""Shared by the tests of multiple choice: a small tokenizer, a random decoder, questions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

import lm_jax
from lm_jax.evaluate.multiple_choice import Question, Scorer
from lm_jax.text.tokenizer import Tokenizer
from tests import tiny

TEXT = "the cat sat on the mat and the dog ate the cake; a bird sang a song over the rainy hills. "
BEGIN, END = "<s>", "</s>"

QUESTIONS = [
    Question("0", "Question: Who sat on the mat?\nAnswer:", ("the cat", "a dog", "rain"), 0),
    Question("1", "The dog ate", ("the hills", "the cake"), 1),
    Question("2", "Question: What sang?\nAnswer:", ("a song, long ago", "a bird", "42", "zoë"), 1),
    Question("3", "A song over the", ("rainy hills and the mat ", "cat"), 0),
    Question("4", f"the {TEXT * 2}Question: Where?\nAnswer:", ("on the mat", "in the cake"), 0),
    Question("5", "Is <s> a", ("cat </s>", "mat"), 1),
    Question("6", "the cat sat on", ("the cat sat on the mat", "the", "song"), 0),
]


def tokenizer(*, template: str | None = None, special: bool = True) -> Tokenizer:
    """Byte-level BPE, learned from `TEXT`; `template` puts special tokens around a text."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=[BEGIN, END] if special else [],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT], trainer)
    if template is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[(BEGIN, 0), (END, 1)]
        )
    return Tokenizer(backend, *((0, 1) if special else (None, None)))


def decoder_logits(seed: int, vocab_size: int):
    """The logits of a random decoder that reads up to 64 tokens."""
    params = lm_jax.init_params(jax.random.key(seed), tiny.decoder(vocab_size=vocab_size))
    # Freshly drawn, it knows nothing: all choices would be near a tie.
    return functools.partial(_logits, jax.tree.map(lambda x: 5.0 * x, params))


@jax.jit
def _logits(params, tokens_BT, valid_BT=None):
    cfg = tiny.decoder(vocab_size=params["embed"]["tokens"].shape[0])
    return lm_jax.forward(params, tokens_BT, cfg, valid_BT=valid_BT).logits


def unigram_logits(log_probs_V: np.ndarray):
    """A model to which every position is alike."""

    def logits(tokens_BT, valid_BT):
        return jnp.broadcast_to(log_probs_V[None, None], (*tokens_BT.shape, log_probs_V.size))

    return logits


def scorer(seed: int = 0, **changes) -> Scorer:
    """A random decoder, its tokenizer, and a window shorter than the longest question."""
    bpe = tokenizer()
    fields = {"tokenizer": bpe, "max_length": 64} | changes
    return Scorer(decoder_logits(seed, bpe.vocab_size), **fields)
