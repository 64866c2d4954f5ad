"""Penalties on tokens that occurred: by hand, by definition, as transformers has them, decoding."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.model import decode
from lm_jax.model.sampling import Sampling, append_token, penalise, text_window
from tests import tiny
from tools import make_goldens

V = 6
LOGITS = np.array([2.0, -1.0, 0.5, 0.0, -0.25, 4.0], np.float32)


def penalised(text, *, repetition=1.0, no_repeat_ngram=0, width=8, logits=LOGITS):
    result = penalise(
        jnp.asarray(logits)[None],
        jnp.asarray(text_window([text], width, len(logits))),
        repetition=repetition,
        no_repeat_ngram=no_repeat_ngram,
    )
    return np.asarray(result[0])


def by_definition(logits, text, repetition, n):
    """Token by token over the text, in the same float32 operations."""
    result = logits.copy()
    for token in set(text):
        x = result[token]
        result[token] = x / np.float32(repetition) if x > 0 else x * np.float32(repetition)
    for end in range(n, len(text) + 1) if n else ():
        *head, token = text[end - n : end]
        if head == list(text[len(text) - n + 1 :][: n - 1]):
            result[token] = -np.inf
    return result


def test_repetition_divides_positive_logits_and_multiplies_negative_ones():
    wanted = [1.0, -2.0, 0.5, 0.0, -0.5, 4.0]
    np.testing.assert_array_equal(penalised([0, 1, 3, 4, 1], repetition=2.0), wanted)


def test_an_n_gram_is_not_said_twice():
    # After 1 2 came 3 and 5, and the text ends in 1 2 again.
    wanted = np.where([0, 0, 0, 1, 0, 1], -np.inf, LOGITS)
    np.testing.assert_array_equal(penalised([1, 2, 3, 1, 2, 5, 1, 2], no_repeat_ngram=3), wanted)
    # Overlapping: after 4 4 came 4.
    wanted = np.where(np.arange(V) == 4, -np.inf, LOGITS)
    np.testing.assert_array_equal(penalised([4, 4, 4], no_repeat_ngram=3), wanted)
    # No token twice.
    wanted = np.where([1, 0, 0, 0, 0, 1], -np.inf, LOGITS)
    np.testing.assert_array_equal(penalised([0, 5, 0], no_repeat_ngram=1), wanted)


@pytest.mark.parametrize("text", [[3], [3, 3]])
def test_a_text_too_short_for_an_n_gram_bans_nothing(text):
    np.testing.assert_array_equal(penalised(text, no_repeat_ngram=4), LOGITS)


def test_only_the_window_counts():
    text = [1, 2, 3, 0, 1, 2]
    assert np.isneginf(penalised(text, no_repeat_ngram=3, width=6)[3])
    # Without its first token, 1 2 3 is no longer in it.
    np.testing.assert_array_equal(penalised(text, no_repeat_ngram=3, width=5), LOGITS)


def test_random_texts_are_penalised_by_the_definition():
    rng = np.random.default_rng(0)
    for n, length in itertools.product(range(5), (1, 2, 3, 9, 24)):
        text = rng.integers(3, size=length).tolist()
        logits = rng.normal(size=V).astype(np.float32)
        found = penalised(text, repetition=1.3, no_repeat_ngram=n, width=24, logits=logits)
        # One rounding of a product or quotient, which a compiler may do as a reciprocal: 2 units.
        wanted = by_definition(logits, text, 1.3, n)
        np.testing.assert_allclose(found, wanted, rtol=2 * 2.0**-23)


def test_a_window_grows_at_its_end():
    window = text_window([[1, 2, 3], [4]], 3, V)
    np.testing.assert_array_equal(window, [[1, 2, 3], [V, V, 4]])
    longer = append_token(jnp.asarray(window), jnp.array([5, 0]))
    np.testing.assert_array_equal(longer, [[2, 3, 5], [V, 4, 0]])
    none = append_token(jnp.asarray(text_window([[1], [2]], 0, V)), jnp.array([5, 0]))
    assert none.shape == (2, 0)


@functools.cache
def model(case):
    loaded = lm_jax.load_pretrained(make_goldens.GOLDEN / case)
    return loaded.params, loaded.cfg


PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5, 8]]
NEW = 9
BOTH = Sampling(repetition_penalty=1.5, no_repeat_ngram=2)


def test_decoding_is_penalised_by_prompt_and_continuation():
    """In a batch of unequal prompts, and in a stream, as by full passes and the definition."""
    params, cfg = model("llama_gqa")
    new_ids = lm_jax.generate(params, PROMPTS, cfg, max_new_tokens=NEW, sampling=BOTH)
    for prompt, ids in zip(PROMPTS, new_ids, strict=True):
        text = list(prompt)
        for _ in range(NEW):
            padded = np.zeros((1, 16), np.int32)
            padded[0, : len(text)] = text
            logits_TV = tiny.forward(params, padded, cfg=cfg).logits[0]
            text.append(
                int(by_definition(np.array(logits_TV[len(text) - 1]), text, 1.5, 2).argmax())
            )
        assert ids == text[len(prompt) :]
    assert new_ids != lm_jax.generate(params, PROMPTS, cfg, max_new_tokens=NEW)
    streamed = decode.stream(
        params, PROMPTS[0], cfg, mixer=lm_jax.model.mixers.ATTENTION, sampling=BOTH
    )
    assert list(itertools.islice(streamed, NEW)) == new_ids[0]
    bigrams = [(*pair,) for pair in itertools.pairwise(PROMPTS[0] + new_ids[0])]
    assert len(set(bigrams)) == len(bigrams)


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0 must be above 0"),
        ({"repetition_penalty": np.inf}, "repetition_penalty = inf"),
        ({"no_repeat_ngram": -1}, "no_repeat_ngram = -1 must be 0"),
    ],
)
def test_impossible_penalties_are_refused(setting, match):
    with pytest.raises(UsageError, match=match):
        Sampling(**setting)


@pytest.mark.torch
def test_penalties_are_those_of_transformers():
    import torch
    from transformers.generation import logits_process

    rng = np.random.default_rng(1)
    for length in (1, 3, 5, 12, 24):
        text = rng.integers(3, size=length).tolist()
        ids, scores = torch.tensor([text]), torch.tensor(LOGITS)[None]
        scores = logits_process.RepetitionPenaltyLogitsProcessor(1.05)(ids, scores)
        wanted = logits_process.NoRepeatNGramLogitsProcessor(4)(ids, scores)[0].numpy()
        found = penalised(text, repetition=1.05, no_repeat_ngram=4, width=24)
        np.testing.assert_allclose(found, wanted, rtol=2 * 2.0**-23)
