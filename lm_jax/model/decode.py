"""Generation with a cache: greedy or sampled, prompts of unequal length in one batch.

Prompts are read in one pass. For attention they are padded on the right: the cache keeps a length
per row, so a row's first new token is written over its first padding slot and padding is never
attended to. For a recurrent mixer they are padded on the left, where it does not
change the empty state.

A greedy continuation is that of `forward` without a cache on the text so far, of each row by
itself, whatever the other rows and `max_new_tokens`. Where rotations depend on how many tokens a
row has (`DecoderConfig.rope` by LongRoPE or dynamic NTK), a new token can change those of all
others, and so what every layer makes of them: the row is then read again. By LongRoPE that happens
once, at the token after `original_length`; by dynamic NTK at every token from there on.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import BadInputError, UsageError
from lm_jax.model import decoder
from lm_jax.model.arguments import check_prompts
from lm_jax.model.attention import Attend, Fused, PerLayer, as_pytree, softmax
from lm_jax.model.config import DecoderConfig
from lm_jax.model.edits import resolve
from lm_jax.model.mixers import ATTENTION, Mixer
from lm_jax.model.params import ParamTree
from lm_jax.model.sampling import Sampling, append_token, sample, text_window

_GREEDY = Sampling()

# A text that is read again is padded to a multiple of so many tokens.
_REREAD = 128
# A cache for this many new tokens is the first; each after it is twice as long.
_FIRST_CACHE = 64
# Caches of fewer rows and positions than this do not grow: every growth compiles a step again.
_SMALL_CACHE = 4_096


def pad_prompts(
    prompts: Sequence[Sequence[int]], cfg: DecoderConfig, *, left: bool = False
) -> tuple[np.ndarray, ...]:
    """Token ids `[B, T]` padded with 0 on the right, or on the left, and lengths `[B]`.

    Raises:
      BadInputError: for no prompt, an empty one, or an id outside the vocabulary.
      UsageError: for text, or ids that are not in lists.
    """
    check_prompts(prompts)
    if len(prompts) == 0 or any(len(p) == 0 for p in prompts):
        raise BadInputError("prompts: give at least one prompt, each of at least one token")
    lengths_B = np.array([len(p) for p in prompts], np.int32)
    tokens_BT = np.zeros((len(prompts), lengths_B.max()), np.int32)
    for row, prompt in zip(tokens_BT, prompts, strict=True):
        row[slice(-len(prompt), None) if left else slice(len(prompt))] = prompt
    if tokens_BT.min() < 0 or tokens_BT.max() >= cfg.vocab_size:
        raise BadInputError(
            f"prompts: a token id is outside 0..{cfg.vocab_size - 1}; wrong tokenizer?"
        )
    return tokens_BT, lengths_B


def generate(
    params: ParamTree,
    prompts: Sequence[Sequence[int]],
    cfg: DecoderConfig,
    *,
    max_new_tokens: int,
    sampling: Sampling = _GREEDY,
    key: jax.Array | None = None,
    stop_id: int | Collection[int] | None = None,
    attend: Attend | Fused | PerLayer = softmax,
    mixer: Mixer = ATTENTION,
    edits: Mapping[str, Any] | None = None,
    length_step: int = 1,
) -> list[list[int]]:
    """Continues each prompt by up to `max_new_tokens`, ending a row after a stop id.

    `stop_id` is one id, several (`Tokenizer.stop_ids`), or None for no end. Returns the new ids of
    every row, its stop id included. Compiles once for each longest prompt, number of stop ids and
    `max_new_tokens`; prompts are padded to a multiple of `length_step` tokens, which changes no
    answer and lets prompts of similar lengths share a program. `edits` are those of
    `lm_jax.forward`, the same at every position: leaves have length 1 along T.

    Raises:
      BadInputError: if a prompt is empty, holds an unknown id, or would outgrow `cfg.max_length`.
      UsageError: if sampling has no key, or a stop id is no id.
    """
    if max_new_tokens < 1:
        raise UsageError(f"max_new_tokens = {max_new_tokens} must be at least 1")
    if key is None and sampling.temperature > 0.0:
        raise UsageError("key: sampling needs a random key")
    stops = _stop_ids(stop_id, cfg)
    tokens_BT, lengths_B = pad_prompts(prompts, cfg, left=mixer.recurrent)
    longest = int(lengths_B.max()) + max_new_tokens
    if longest > cfg.max_length and not mixer.recurrent:
        raise BadInputError(
            f"prompt of {lengths_B.max()} tokens + max_new_tokens = {max_new_tokens} exceeds the "
            f"model's context of {cfg.max_length}; shorten one of them"
        )
    more = -tokens_BT.shape[1] % length_step
    if not mixer.recurrent:
        more = min(more, cfg.max_length - longest)
    tokens_BT = np.pad(tokens_BT, ((0, 0), (more, 0) if mixer.recurrent else (0, more)))
    # Everything that a row may read back, and no place without penalties.
    width = tokens_BT.shape[1] + max_new_tokens if sampling.penalises else 0
    new_BT = _generate(
        params,
        tokens_BT,
        lengths_B,
        text_window(prompts, width, cfg.vocab_size),
        jax.random.key(0) if key is None else key,
        as_pytree(attend),
        resolve(edits, cfg),
        np.array(stops, np.int32),
        cfg=cfg,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        mixer=mixer,
    )
    return [_until(row, stops) for row in np.asarray(new_BT).tolist()]


def stream(
    params: ParamTree,
    prompt: Sequence[int],
    cfg: DecoderConfig,
    *,
    mixer: Mixer,
    sampling: Sampling = _GREEDY,
    key: jax.Array | None = None,
    stop_id: int | Collection[int] | None = None,
    edits: Mapping[str, Any] | Callable[[int, int], Mapping[str, Any]] | None = None,
) -> Iterator[int]:
    """Continues one prompt, one token at a time, under the `edits` of `generate`.

    Edits that differ by position are a function that is called with the first position of a pass,
    counted from the beginning of the prompt, and the number of its positions, T.

    A recurrent mixer continues without end in constant memory; penalties go by the latest
    `cfg.max_length` tokens. One that keeps every position has a cache for the model's context,
    `cfg.max_length`, and ends where prompt and new ids fill it.

    Yields the new ids one by one, up to a stop id, which is not yielded; `stop_id` is as of
    `generate`. Compiles once for each length of prompt.

    Raises:
      BadInputError: an empty prompt, an unknown id, or a prompt that fills the context.
      UsageError: sampling has no key, or a stop id is no id.
    """
    if not mixer.recurrent and len(prompt) >= cfg.max_length:
        raise BadInputError(
            f"prompt of {len(prompt)} tokens leaves no place in the model's context of "
            f"{cfg.max_length}; shorten it"
        )
    if key is None and sampling.temperature > 0.0:
        raise UsageError("key: sampling needs a random key")
    key = jax.random.key(0) if key is None else key
    stops = _stop_ids(stop_id, cfg)
    tokens_BT, _ = pad_prompts([prompt], cfg)
    dtype = jax.tree.leaves(params["embed"])[0].dtype
    cache = decoder.init_cache(cfg, 1, cfg.max_length, dtype=dtype, mixer=mixer)
    width = cfg.max_length if sampling.penalises else 0
    window_BW = text_window([prompt], width, cfg.vocab_size)
    counts = itertools.count() if mixer.recurrent else range(cfg.max_length - len(prompt))
    start = 0
    text = list(prompt)
    for count in counts:
        length = None
        if start and not mixer.recurrent and decoder.rotates_anew(cfg, len(text)):
            # Padded, so that not every length is compiled.
            padded = min(-(-len(text) // _REREAD) * _REREAD, cfg.max_length)
            tokens_BT = np.zeros((1, padded), np.int32)
            tokens_BT[0, : len(text)] = text
            start, length = 0, np.int32(len(text))
        places = start, tokens_BT.shape[1]
        next_B, cache, window_BW = _next(
            params,
            cache,
            tokens_BT,
            length,
            window_BW,
            jax.random.fold_in(key, count),
            resolve(edits(*places) if callable(edits) else edits, cfg),
            cfg=cfg,
            sampling=sampling,
            mixer=mixer,
        )
        token = int(next_B[0])
        if token in stops:
            return
        yield token
        start, tokens_BT = len(text), next_B[:, None]
        text.append(token)


# Without a donated cache a step would copy all of it.
@functools.partial(
    jax.jit, static_argnames=("cfg", "sampling", "mixer"), donate_argnames=("cache",)
)
def _next(params, cache, tokens_BT, length, window_BW, key, edits, *, cfg, sampling, mixer):
    """The token after `tokens_BT`, or after the whole text, which is their first `length`."""
    run = functools.partial(decoder.forward, params, cfg=cfg, mixer=mixer, edits=edits)
    if length is None:
        last_B1 = jnp.full((1, 1), tokens_BT.shape[1] - 1)
        out = run(tokens_BT, cache=cache, logits_at=last_B1)
        logits_BV, cache = out.logits[:, 0], out.cache
    else:
        logits_BV, cache = _read(run, cache, tokens_BT, length[None])
    next_B = sample(key, logits_BV, sampling, window_BW)
    return next_B, cache, append_token(window_BW, next_B)


def _read(run, cache, tokens_BT, lengths_B):
    """Last logits and cache of texts that are padded on the right to T, from their beginning."""
    valid_BT = jnp.arange(tokens_BT.shape[1])[None] < lengths_B[:, None]
    cache = cache.replace(length_B=jnp.zeros_like(cache.length_B))
    out = run(tokens_BT, cache=cache, logits_at=lengths_B[:, None] - 1, valid_BT=valid_BT)
    # The next token of a row takes the place of its first padding.
    return out.logits[:, 0], out.cache.replace(length_B=lengths_B)


def _stop_ids(stop_id: int | Collection[int] | None, cfg: DecoderConfig) -> tuple[int, ...]:
    """The stop ids as a tuple, empty for None; an id outside the vocabulary is refused."""
    if stop_id is None:
        return ()
    stops = (stop_id,) if isinstance(stop_id, int | np.integer) else tuple(stop_id)
    for i in stops:
        if not 0 <= i < cfg.vocab_size:
            raise UsageError(f"stop_id = {i} is outside 0..{cfg.vocab_size - 1}")
    return stops


def _until(row: list[int], stops: Sequence[int]) -> list[int]:
    end = next((count for count, token in enumerate(row, 1) if token in stops), len(row))
    return row[:end]


@functools.partial(jax.jit, static_argnames=("cfg", "max_new_tokens", "sampling", "mixer"))
def _generate(
    params,
    tokens_BT,
    lengths_B,
    window_BW,
    key,
    attend,
    edits,
    stop_K,
    *,
    cfg,
    max_new_tokens,
    sampling,
    mixer,
):
    B, T = tokens_BT.shape
    dtype = jax.tree.leaves(params["embed"])[0].dtype
    first, *longer = _cache_lengths(B, T, max_new_tokens, mixer)
    cache = decoder.init_cache(cfg, B, first, dtype=dtype, mixer=mixer)
    run = functools.partial(
        decoder.forward, params, cfg=cfg, attend=attend, mixer=mixer, edits=edits
    )
    if mixer.recurrent:
        valid_BT = jnp.arange(T)[None] >= T - lengths_B[:, None]
        last_B1 = jnp.full((B, 1), T - 1)
        out: Any = run(tokens_BT, cache=cache, logits_at=last_B1, valid_BT=valid_BT)
        cache = out.cache
        logits_BV = out.logits[:, 0]
    else:
        logits_BV, cache = _read(run, cache, tokens_BT, lengths_B)
    keys = jax.random.split(key, max_new_tokens)
    first_B = sample(keys[0], logits_BV, sampling, window_BW)
    widest = 0 if mixer.recurrent else decoder.last_change(cfg, T + max_new_tokens)

    def stops(tokens_B):
        return (tokens_B[:, None] == stop_K[None]).any(-1)

    def unfinished(length, state):
        count, _, _, _, _, done_B = state
        return (count < min(length - T, max_new_tokens)) & ~done_B.all()

    def extend(state):
        count, cache, last_B, window_BW, new_BT, done_B = state
        out: Any = run(last_B[:, None], cache=cache)
        logits_BV, cache = out.logits[:, 0], out.cache
        if widest:
            anew_B = decoder.rotates_anew(cfg, cache.length_B) & ~done_B
            text_BT = _text(tokens_BT, lengths_B, new_BT)[:, :widest]
            logits_BV, cache = _reread(run, anew_B, logits_BV, cache, text_BT)
        next_B = sample(keys[count], logits_BV, sampling, window_BW)
        window_BW = append_token(window_BW, next_B)
        new_BT = new_BT.at[:, count].set(next_B)
        return count + 1, cache, next_B, window_BW, new_BT, done_B | stops(next_B)

    new_BT = jnp.zeros((B, max_new_tokens), jnp.int32).at[:, 0].set(first_B)
    window_BW = append_token(window_BW, first_B)
    state = (1, cache, first_B, window_BW, new_BT, stops(first_B))
    state = jax.lax.while_loop(functools.partial(unfinished, first), extend, state)
    for length in longer:
        count, cache, *rest = state
        state = count, decoder.grown(cache, cfg, length, mixer=mixer), *rest
        state = jax.lax.while_loop(functools.partial(unfinished, length), extend, state)
    return state[4]


def _cache_lengths(rows: int, prompt: int, new: int, mixer: Mixer) -> list[int]:
    """How many positions the caches have, one after another.

    Each step reads its cache to the end. Of many rows, that takes most of the time.
    """
    lengths = [prompt + new]
    if not mixer.recurrent and rows * lengths[0] > _SMALL_CACHE:
        grown = _FIRST_CACHE
        while grown < new:
            lengths.insert(-1, prompt + grown)
            grown *= 2
    return lengths


def _text(tokens_BT, lengths_B, new_BM):
    """Prompts padded on the right, each with its M new tokens after it."""
    B, M = new_BM.shape
    at_BM = lengths_B[:, None] + jnp.arange(M)[None]
    return jnp.pad(tokens_BT, ((0, 0), (0, M))).at[jnp.arange(B)[:, None], at_BM].set(new_BM)


def _reread(run, anew_B, logits_BV, cache, text_BT):
    """The last logits and the cache; the rows `anew_B` are read again from what they hold."""

    def read_again():
        # A longer row, whose rotations do not change, is read in part and not taken.
        lengths_B = jnp.minimum(cache.length_B, text_BT.shape[1])
        again_BV, again = _read(run, cache, text_BT, lengths_B)

        def chosen(again, before, batch_axis):
            axes = [axis for axis in range(again.ndim) if axis != batch_axis]
            return jnp.where(jnp.expand_dims(anew_B, axes), again, before)

        layers = jax.tree.map(functools.partial(chosen, batch_axis=1), again.layers, cache.layers)
        return chosen(again_BV, logits_BV, 0), cache.replace(layers=layers)

    return jax.lax.cond(anew_B.any(), read_again, lambda: (logits_BV, cache))
