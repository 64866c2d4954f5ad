"""Penalties on what was said: logits that depend on the tokens of the text so far.

1. Repetition [1]: the logit of every token that occurred is divided by the penalty where positive,
   and multiplied where negative.
2. No n-gram twice [2]: a token that would complete an n-gram of the text gets -inf.

The text is the prompt and what was generated. Its latest ids are a window of fixed width [B, W],
the newest at the end; places before its beginning hold the size of the vocabulary, which is no id.

[1] Keskar et al., CTRL, 2019, section 4.1.  [2] Paulus, Xiong & Socher, 2018, section 2.5.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


def window(prompts: Sequence[Sequence[int]], width: int, vocab_size: int) -> np.ndarray:
    """The window [B, W] after each of the prompts."""
    result = np.full((len(prompts), width), vocab_size, np.int32)
    for row, prompt in zip(result, prompts, strict=True):
        if kept := min(len(prompt), width):
            row[-kept:] = prompt[-kept:]
    return result


def append(window_BW: jax.Array, next_B: jax.Array) -> jax.Array:
    """The window one token later; it may have no width."""
    return jnp.concatenate([window_BW, next_B[:, None]], axis=1)[:, 1:]


def penalise(
    logits_BV: jax.Array, window_BW: jax.Array, *, repetition: float, no_repeat_ngram: int
) -> jax.Array:
    """Logits after both penalties, in the order above; 1 and 0 leave them as they are."""
    if repetition != 1.0:
        scaled_BV = jnp.where(logits_BV > 0, logits_BV / repetition, logits_BV * repetition)
        logits_BV = jnp.where(_among(window_BW, logits_BV.shape), scaled_BV, logits_BV)
    if no_repeat_ngram:
        banned_BX = _completing(window_BW, no_repeat_ngram, logits_BV.shape[-1])
        logits_BV = jnp.where(_among(banned_BX, logits_BV.shape), -jnp.inf, logits_BV)
    return logits_BV


def _among(ids_BX: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Which ids a row lists, `[B, V]`; the size of the vocabulary stands for no id."""
    rows_B1 = jnp.arange(shape[0])[:, None]
    return jnp.zeros(shape, bool).at[rows_B1, ids_BX].set(True, mode="drop")


def _completing(window_BW: jax.Array, n: int, vocab_size: int) -> jax.Array:
    """The ids that followed earlier occurrences of the last n - 1 ids, the others no id."""
    before = n - 1
    window_BW = jnp.pad(window_BW, ((0, 0), (before, 0)), constant_values=vocab_size)
    W = window_BW.shape[1]
    last_Bn = window_BW[:, W - before :]
    follows_BX = window_BW[:, before:]
    same_BX = jnp.ones(follows_BX.shape, bool)
    for i in range(before):
        same_BX &= window_BW[:, i : W - before + i] == last_Bn[:, i : i + 1]
    # A text of fewer than n - 1 tokens has no n-gram to complete.
    full_B1 = (last_Bn < vocab_size).all(1, keepdims=True)
    return jnp.where(same_BX & full_B1, follows_BX, vocab_size)
