"""Workloads of `score_stats`: small test cases, and the audit's sizes to time.

Test cases have small integers for queries and keys, so that every product is exact in
float32 and in bfloat16 whatever the order of its sum: argmax, status and the count of active
distractors are then the same in every implementation. Ties are frequent.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from iaj_kernels.core.cases import Arrays, Case, Suite
from iaj_kernels.score_stats.api import IMPLEMENTATIONS, score_stats

TEST = frozenset({"test"})
GPU = frozenset({"gpu", "budget"})

# Options of a case that describe data, and are not passed on to the operation.
_DATA = ("biases", "target", "segments", "start", "integers")


def _case(
    sizes: tuple[int, ...],
    uses: frozenset[str] = TEST,
    dtype: str = "float32",
    options: Mapping[str, Any] | None = None,
) -> Case:
    options = {"integers": True, **(options or {})}
    named: dict[str, int] = dict(zip("BTSNKH", sizes, strict=True))
    lines = [f"{letter.lower()}{size}" for letter, size in named.items()]
    lines += [name for name in options if name != "integers"]
    # Registers are held for each bias and degree, so tiles are looked up by their numbers too.
    named["X"] = len(options.get("biases", (0.0,)))
    named["P"] = len(options.get("degrees", (2, 4, 8, 16)))
    return Case("_".join([*lines, dtype]), named, dtype, options, uses)


def _timed(sizes: tuple[int, ...], uses: frozenset[str], dtype: str, biases: int = 1) -> Case:
    several = {"biases": (0.0, 1.5)[:biases]} if biases > 1 else {}
    return _case(sizes, uses, dtype, {"integers": False, **several})


CPU = frozenset({"cpu"})

CASES = (
    _case((2, 1, 1, 2, 2, 64)),
    _case((2, 2, 2, 2, 2, 64)),
    _case((1, 63, 63, 2, 1, 64)),
    _case((2, 65, 65, 4, 2, 64), options={"biases": (0.0, 1.375, -3.25)}),
    _case((1, 200, 200, 2, 2, 128)),
    _case((2, 3, 200, 4, 1, 64), options={"start": (17, 190), "degrees": (1, 2.5, 3, 16)}),
    _case((1, 65, 200, 2, 2, 64), options={"target": "BT", "biases": (0.0, 30.0)}),
    _case((1, 65, 65, 2, 2, 64), options={"target": "BTN", "window": 9}),
    _case((2, 65, 65, 2, 1, 64), options={"segments": True, "cap": 4.0}),
    _case((1, 63, 130, 2, 2, 64), options={"causal": False, "soft_cap": 32.0, "scale": 0.5}),
    _case((1, 130, 130, 2, 2, 256), dtype="bfloat16"),
    _case((1, 65, 65, 4, 2, 64), dtype="bfloat16", options={"window": 20, "segments": True}),
    _timed((8, 1, 4096, 12, 12, 64), CPU, "float32", 2),
    _timed((1, 8, 4096, 12, 12, 64), CPU, "float32", 2),
    _timed((8, 8, 1024, 12, 12, 64), CPU, "float32", 2),
    _timed((1, 1024, 1024, 12, 12, 64), CPU, "float32", 2),
    _timed((1, 8192, 8192, 12, 12, 64), GPU, "bfloat16"),
    _timed((1, 8192, 8192, 12, 12, 128), GPU, "bfloat16"),
    _timed((1, 8192, 8192, 12, 12, 64), GPU, "bfloat16", 2),
    _timed((8, 8, 4096, 32, 8, 128), GPU, "bfloat16", 2),
    _timed((1, 2048, 2048, 12, 12, 64), GPU, "float32"),
)


def make(case: Case, key: jax.Array) -> Arrays:
    """Queries, keys, biases, and the targets, segments and starts that the case asks for."""
    B, T, S, N, K, H = (case.sizes[letter] for letter in "BTSNKH")
    keys = jax.random.split(key, 4)

    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        if case.options["integers"]:
            return jax.random.randint(key, shape, -3, 4).astype(case.dtype)
        return jax.random.normal(key, shape).astype(case.dtype)

    arrays = {
        "q": draw(keys[0], (B, T, N, H)),
        "k": draw(keys[1], (B, S, K, H)),
        "bias": jnp.asarray(case.options.get("biases", 0.0), jnp.float32),
    }
    if "target" in case.options:
        shape = tuple(case.sizes[letter] for letter in case.options["target"])
        # One past either end as well: a target outside the row is INVALID.
        arrays["target"] = jax.random.randint(keys[2], shape, -1, S + 1)
    if "start" in case.options:
        arrays["start"] = jnp.asarray(case.options["start"], jnp.int32)
    if "segments" in case.options:
        # Two documents, then padding.
        position = jnp.arange(S, dtype=jnp.int32)
        row = jnp.where(position < S // 3, 0, jnp.where(position < S - S // 5, 1, -1))
        arrays["segments"] = jnp.broadcast_to(row, (B, S))
    return arrays


def call(case: Case, arrays: Arrays, implementation: str | None) -> dict[str, jax.Array]:
    """Every field of the statistics."""
    stats = score_stats(
        arrays["q"],
        arrays["k"],
        bias=arrays["bias"],
        target=arrays.get("target"),
        segment_ids=arrays.get("segments"),
        start=arrays.get("start"),
        implementation=implementation,
        **{name: value for name, value in case.options.items() if name not in _DATA},
    )
    return stats._asdict()


SUITE = Suite(
    op="score_stats",
    cases=CASES,
    make=make,
    call=call,
    differentiable=(),
    implementations=tuple(IMPLEMENTATIONS),
    tiles=(
        {"queries": (32, 64, 128), "keys": (32, 64, 128), "warps": (4, 8)},
        {"stages": (1, 2, 3)},
    ),
)
