"""Decoding with a cache: tokens/s after prompts of growing length, and bytes of the cache."""

from collections.abc import Sequence
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lm_jax
from lm_jax.model.decoder import init_cache
from tools.bench import front
from tools.bench.shapes import BenchConfig, build, random_params
from tools.bench.timing import ratio

# Of logits in float32, decoded against parallel, relative to the largest.
TOLERANCE = 1e-4
# Tokens of a prompt that are read at once; of attention fewer, for its scores are a matrix.
CHUNK, ATTENTION_CHUNK = 8_192, 512


class Decoder:
    """A model with its cache, which reads prompts in chunks and then decodes token by token."""

    def __init__(self, config: BenchConfig, name: str = "protot") -> None:
        self.cfg, self.mixer = build(name, config)
        self.params = random_params(self.cfg, self.mixer, "float32")
        # Without a donated cache every step would copy it, which costs attention the most.
        run = functools.partial(_continue, cfg=self.cfg, mixer=self.mixer)
        self._run = jax.jit(run, donate_argnums=1)

    def _empty(self, positions: int) -> Any:
        """An empty cache; a recurrent mixer has no use for a number of positions."""
        return init_cache(self.cfg, 1, positions, dtype=jnp.float32, mixer=self.mixer)

    def read(self, length: int, room: int) -> Any:
        """The cache after `length` tokens, with room for further ones."""
        cache = self._empty(length + room)
        chunk = CHUNK if self.mixer.recurrent else ATTENTION_CHUNK
        for start in range(0, length, chunk):
            tokens = jnp.ones((1, min(chunk, length - start)), jnp.int32)
            _, cache = self._run(self.params, cache, tokens)
        return jax.block_until_ready(cache)

    def seconds_per_token(self, cache: Any, tokens: int) -> float:
        """Mean seconds of `tokens` steps from a copy of a cache, after one untimed step."""
        one, cache = jnp.ones((1, 1), jnp.int32), jax.tree.map(jnp.copy, cache)
        _, cache = jax.block_until_ready(self._run(self.params, cache, one))
        start = time.perf_counter()
        for _ in range(tokens):
            _, cache = self._run(self.params, cache, one)
        jax.block_until_ready(cache)
        return (time.perf_counter() - start) / tokens

    def error(self, length: int) -> float:
        """The largest difference of decoded logits from parallel ones, relative to the largest."""
        tokens = jnp.asarray(np.random.default_rng(0).integers(1, 99, (1, length)), jnp.int32)
        whole = lm_jax.forward(self.params, tokens, self.cfg, mixer=self.mixer).logits[0, -1]
        _, cache = self._run(self.params, self._empty(length), tokens[:, : length // 2])
        for i in range(length // 2, length - 1):
            _, cache = self._run(self.params, cache, tokens[:, i : i + 1])
        logits, _ = self._run(self.params, cache, tokens[:, -1:])
        return float(jnp.abs(logits[0] - whole).max() / jnp.abs(whole).max())


def _continue(params: Any, cache: Any, tokens: jax.Array, *, cfg: Any, mixer: Any) -> Any:
    last_11 = jnp.full((1, 1), tokens.shape[1] - 1)
    out = lm_jax.forward(params, tokens, cfg, mixer=mixer, cache=cache, logits_at=last_11)
    return out.logits[:, 0], out.cache


# A GPU's default rounds the factors of a float32 product to ten bits.
@jax.default_matmul_precision("float32")
def bench_decode(
    config: BenchConfig,
    lengths: Sequence[int],
    tokens: int,
    repeats: int,
    names: Sequence[str] = ("protot",),
) -> dict[str, Any]:
    """Times decoding after each prompt; {} and a line if it differs from the forward pass.

    Returns:
      Tokens/s of every turn and bytes of the cache by length; by model where there are several.
    """
    decoders = {name: Decoder(config, name) for name in names}
    for name, decoder in decoders.items():
        what = "logits of decoding differ from those of the parallel pass by"
        if not front.agrees(name, decoder.error(96), TOLERANCE, what):
            return {}
    # One more place, for the untimed step.
    caches = {
        name: {length: decoder.read(length, tokens + 1) for length in lengths}
        for name, decoder in decoders.items()
    }
    rates = {name: {length: [] for length in lengths} for name in names}
    for _ in range(repeats):
        for name, decoder in decoders.items():
            for length, cache in caches[name].items():
                rates[name][length].append(1.0 / decoder.seconds_per_token(cache, tokens))
    print(f"decoding at batch 1, {tokens} tokens after each prompt, {repeats} turns")
    results = {}
    for name in names:
        label = f"{name:10} " if len(names) > 1 else ""
        own, first = rates[name], rates[name][lengths[0]]
        size = {
            length: sum(x.nbytes for x in jax.tree.leaves(cache))
            for length, cache in caches[name].items()
        }
        for length in lengths:
            print(
                f"  {label}after {length:7,}  {statistics.median(own[length]):8.1f} tokens/s  "
                f"of the first {ratio(own[length], first)}  cache {size[length]:,} bytes"
            )
        results[name] = {"tokens_per_second": own, "cache_bytes": size}
    return results if len(names) > 1 else results[names[0]]
