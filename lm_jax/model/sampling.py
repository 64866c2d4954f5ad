"""How the next token is sampled from logits, after penalties on what was said.

1. Repetition [1]: the logit of every token that occurred is divided by the penalty where positive,
   and multiplied where negative.
2. No n-gram twice [2]: a token that would complete an n-gram of the text gets -inf.

The text is the prompt and what was generated. Its latest ids are a window of fixed width [B, W],
the newest at the end; places before its beginning hold the size of the vocabulary, which is no id.

[1] Keskar et al., CTRL, 2019, section 4.1.  [2] Paulus, Xiong & Socher, 2018, section 2.5.
"""

from collections.abc import Sequence
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is sampled from logits.

    `temperature` 0 is greedy. `top_k` keeps the k largest logits (0: all); `top_p` then keeps the
    smallest set of most probable tokens whose mass reaches p (1: all; Holtzman et al., 2020). Ties
    at the edge are kept. Before all of them, and in greedy decoding too, `repetition_penalty` (1:
    none) and `no_repeat_ngram` (0: none) act on the tokens of prompt and continuation
    (`penalise`).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    no_repeat_ngram: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise UsageError(f"temperature = {self.temperature} must be 0 (greedy) or more")
        if self.top_k < 0:
            raise UsageError(f"top_k = {self.top_k} must be 0 (all) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top_p = {self.top_p} must be in (0, 1]")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0.0):
            raise UsageError(
                f"repetition_penalty = {self.repetition_penalty} must be above 0 (1: none)"
            )
        if self.no_repeat_ngram < 0:
            raise UsageError(f"no_repeat_ngram = {self.no_repeat_ngram} must be 0 (none) or more")

    @property
    def penalises(self) -> bool:
        """Whether logits depend on the tokens of the text so far."""
        return self.repetition_penalty != 1.0 or self.no_repeat_ngram > 0

    def draw(self, key: jax.Array, logits_BV: jax.Array) -> jax.Array:
        """One id per row: the largest logit after Gumbel noise on every one."""
        return jax.random.categorical(key, logits_BV, axis=-1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class InverseSampling(Sampling):
    """`Sampling` by inversion of the cumulative distribution, with two random numbers a row.

    The distribution is the same but for roundings, and what a key gives is another. Shares of
    blocks of sqrt(V) neighbouring tokens are rounded to 2^-23, so that one of less may never be
    drawn. A vocabulary of V tokens needs no V random numbers, which take most of the time of small
    models on a CPU.
    """

    def draw(self, key: jax.Array, logits_BV: jax.Array) -> jax.Array:
        """One id per row: first a block of neighbouring tokens, then one of them.

        A second random number resolves the tokens of a block, so that rare ones beside frequent
        ones, of less than the spacing of float32 between 0 and 1, have their share too.
        """
        B, V = logits_BV.shape
        width = math.isqrt(V - 1) + 1
        blocks = -(-V // width)
        p_BV = jnp.exp(logits_BV - logits_BV.max(-1, keepdims=True))
        p_BKW = jnp.pad(p_BV, ((0, 0), (0, blocks * width - V))).reshape(B, blocks, width)
        u_2B = jax.random.uniform(key, (2, B))
        block_B = _first_above(p_BKW.sum(-1), u_2B[0])
        inside_B = _first_above(p_BKW[jnp.arange(B), block_B], u_2B[1])
        return (block_B * width + inside_B).astype(jnp.int32)


def filter_logits(logits_BV: jax.Array, sampling: Sampling) -> jax.Array:
    """Logits divided by the temperature, -inf where top-k or top-p leaves a token out."""
    # From the largest down, so that a tiny temperature does not overflow.
    logits_BV = (logits_BV - logits_BV.max(-1, keepdims=True)) / sampling.temperature
    if sampling.top_k:
        k = min(sampling.top_k, logits_BV.shape[-1])
        edge = jax.lax.top_k(logits_BV, k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV >= edge, logits_BV, -jnp.inf)
    if sampling.top_p < 1.0:
        sorted_BV = -jnp.sort(-logits_BV, axis=-1)
        probs_BV = jax.nn.softmax(sorted_BV, axis=-1)
        # A token stays while the mass of the tokens before it has not reached p.
        before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV
        stays = before_BV < sampling.top_p
        edge = jnp.where(stays, sorted_BV, jnp.inf).min(-1, keepdims=True)
        logits_BV = jnp.where(logits_BV >= edge, logits_BV, -jnp.inf)
    return logits_BV


def sample(
    key: jax.Array, logits_BV: jax.Array, sampling: Sampling, window_BW: jax.Array | None = None
) -> jax.Array:
    """One token id per row, after the text whose ids end `window_BW` (`text_window`)."""
    if sampling.penalises and window_BW is not None:
        logits_BV = penalise(
            logits_BV,
            window_BW,
            repetition=sampling.repetition_penalty,
            no_repeat_ngram=sampling.no_repeat_ngram,
        )
    if sampling.temperature == 0.0:
        return logits_BV.argmax(-1).astype(jnp.int32)
    return sampling.draw(key, filter_logits(logits_BV, sampling))


def _first_above(p_BX: jax.Array, u_B: jax.Array) -> jax.Array:
    """The first index at which the running sum exceeds the share u of the whole."""
    sums_BX = jnp.cumsum(p_BX, axis=-1)
    # A running sum that is computed in parts may fall by a rounding; no zero is ever taken for it.
    above_BX = (sums_BX > u_B[:, None] * sums_BX[:, -1:]) & (p_BX > 0)
    return jnp.where(above_BX.any(-1), above_BX.argmax(-1), p_BX.argmax(-1))


def text_window(prompts: Sequence[Sequence[int]], width: int, vocab_size: int) -> np.ndarray:
    """The window [B, W] after each of the prompts."""
    result = np.full((len(prompts), width), vocab_size, np.int32)
    for row, prompt in zip(result, prompts, strict=True):
        if kept := min(len(prompt), width):
            row[-kept:] = prompt[-kept:]
    return result


def append_token(window_BW: jax.Array, next_B: jax.Array) -> jax.Array:
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
