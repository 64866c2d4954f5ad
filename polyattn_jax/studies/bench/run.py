"""Times decoding with softmax and with recipes in turns.

Besides what every study has, the work folder holds

    shards/        rows of the lengths that are done
    turns.parquet  one row per length, method and turn (`results.TURNS`)
"""

from collections.abc import Iterator
import dataclasses
import functools
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa

import lm_jax
from lm_jax.assets import published
from lm_jax.errors import UsageError
from lm_jax.model import decoder
from lm_jax.model.mixers import ATTENTION, Mixer
from lm_jax.model.precision import exact_jit
from lm_jax.run.finished import Inputs
from lm_jax.run.rows import Unit
from lm_jax.study import Work
from lm_jax.weights import runs
from lm_jax.weights.load import Pretrained, identities
from polyattn_jax.audit.audited_model import model_identity
from polyattn_jax.audit.results.provenance import read_provenance
from polyattn_jax.recipes.decoding.state_attention import state_mixer
from polyattn_jax.recipes.substitute import recipe
from polyattn_jax.studies.bench import numbers
from polyattn_jax.studies.bench.results import SOFTMAX, TURNS, BenchSummary
from polyattn_jax.studies.bench.settings import BenchConfig

# Tokens of the text on which decoding is compared with whole rows, at least.
_COMPARED = 96


def inputs(config: BenchConfig) -> Inputs:
    """The model."""
    return identities({"model": config.model}, model_identity)


@dataclasses.dataclass(frozen=True)
class _Method:
    """A model that decodes one text, token by token."""

    model: Pretrained
    mixer: Mixer

    def empty(self, positions: int, dtype: Any) -> Any:
        return decoder.init_cache(self.model.cfg, 1, positions, dtype=dtype, mixer=self.mixer)

    def step(
        self, cache: Any, tokens_BT: jax.Array, *, exact: bool = False
    ) -> tuple[jax.Array, Any]:
        """The logits after these tokens, and the cache with them."""
        step = _exact_step if exact else _step
        return step(self.model.params, cache, tokens_BT, cfg=self.model.cfg, mixer=self.mixer)


def _advance(params: Any, cache: Any, tokens_BT: jax.Array, *, cfg: Any, mixer: Any) -> Any:
    last_11 = jnp.full((1, 1), tokens_BT.shape[1] - 1)
    out = lm_jax.forward(params, tokens_BT, cfg, mixer=mixer, cache=cache, logits_at=last_11)
    return out.logits[:, 0], out.cache


# Without a donated cache a step would copy all of it.
_COMPILED: Any = {"static_argnames": ("cfg", "mixer"), "donate_argnames": ("cache",)}
_step = jax.jit(_advance, **_COMPILED)
_exact_step = exact_jit(_advance, **_COMPILED)


def measure_all(config: BenchConfig, work: Work) -> BenchSummary:
    """Compares and times, or resumes the lengths that are not done."""
    name = published.resolve_model(config.model)
    dtype = jnp.dtype(config.dtype)
    model = runs.softmax_run(name, dtype=dtype) or lm_jax.load_pretrained(name, dtype=dtype)
    longest = max(config.lengths) + _timed_after(config)
    if model.cfg.rope is None and longest > model.cfg.max_length:
        raise UsageError(
            f"config.lengths = {config.lengths}: {config.model} has {model.cfg.max_length} learned "
            f"positions, and the longest text has {longest:,} tokens; lower it"
        )
    methods = {SOFTMAX: _Method(model, ATTENTION)}
    methods |= {text: _Method(model, state_mixer(text)) for text in config.recipes}
    deviations = {
        text: _deviation(methods[text], text, compared(model, text)) for text in config.recipes
    }
    plan: dict[Unit, int] = {(0, str(length), ""): length for length in config.lengths}
    table = work.units(
        "turns",
        TURNS,
        plan,
        lambda length: pa.Table.from_pylist(list(_timed(methods, config, length)), schema=TURNS),
        noun="lengths",
    )
    return BenchSummary(
        model=config.model,
        model_sha256=model.identity.text,
        provenance=read_provenance(work.path, config),
        device=jax.devices()[0].device_kind,
        cores=os.cpu_count() or 1,
        dtype=config.dtype,
        tokens=config.tokens,
        turns=config.turns,
        deviations=deviations,
        compared={text: compared(model, text) for text in config.recipes},
        results=numbers.results(table, config),
    )


def _timed_after(config: BenchConfig) -> int:
    """Tokens after the text: of every turn, of one that is not kept, and one before each."""
    return (config.tokens + 1) * (config.turns + 1)


def _timed(
    methods: dict[str, _Method], config: BenchConfig, length: int
) -> Iterator[dict[str, Any]]:
    """Rows of one length: every method in turn, after one turn that is not kept."""
    one_11 = jnp.ones((1, 1), jnp.int32)
    room = length + _timed_after(config)
    held: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for name, method in methods.items():
        dtype = jnp.dtype(config.dtype)
        kept = jax.eval_shape(functools.partial(method.empty, length, dtype))
        sizes[name] = sum(part.size * part.dtype.itemsize for part in jax.tree.leaves(kept.layers))
        cache = method.empty(room, dtype)
        held[name] = cache.replace(length_B=cache.length_B + length)
    for turn in range(-1, config.turns):
        for name, method in methods.items():
            cache = held.pop(name)
            logits_BV, cache = jax.block_until_ready(method.step(cache, one_11))
            start = time.perf_counter()
            for _ in range(config.tokens):
                logits_BV, cache = method.step(cache, one_11)
            jax.block_until_ready((logits_BV, cache))
            seconds = (time.perf_counter() - start) / config.tokens
            held[name] = cache
            if turn >= 0:
                yield {
                    "length": length,
                    "method": name,
                    "turn": turn,
                    "seconds": seconds,
                    "state_bytes": sizes[name],
                }


def compared(model: Pretrained, text: str) -> int:
    """Tokens on which decoding with a recipe is compared: keys leave a window and its slots turn.

    Raises:
      UsageError: the model has too few positions for that.
    """
    needed, most = state_mixer(text).compared, model.cfg.max_length
    if needed > most:
        raise UsageError(
            f"config.recipes: {text} is compared with whole rows on {needed} tokens, and the model "
            f"has {most} positions; name a smaller window"
        )
    return min(max(needed, _COMPARED), most)


def _deviation(method: _Method, text: str, count: int) -> float:
    """The largest difference of decoded logits from those of the recipe on whole rows."""
    cfg, params = method.model.cfg, method.model.params
    tokens_BT = np.random.default_rng(0).integers(0, cfg.vocab_size, (1, count)).astype(np.int32)
    whole_TV = np.asarray(_whole(params, tokens_BT, recipe(text), cfg=cfg))
    cache = method.empty(count, jax.tree.leaves(params["embed"])[0].dtype)
    off = 0.0
    for at, expected_V in enumerate(whole_TV):
        logits_BV, cache = method.step(cache, jnp.asarray(tokens_BT[:, at : at + 1]), exact=True)
        off = max(off, float(np.abs(np.asarray(logits_BV)[0] - expected_V).max()))
    return off / float(np.abs(whole_TV).max())


@functools.partial(exact_jit, static_argnames="cfg")
def _whole(params: Any, tokens_BT: Any, attend: Any, *, cfg: Any) -> jax.Array:
    return lm_jax.forward(params, tokens_BT, cfg, attend=attend).logits[0]
