"""Time of exact patching of all heads relative to a loop of one run per head.

    python -m tools.bench.patching                        six layers of SmolLM2's shape, 20 prompts
    python -m tools.bench.patching --layers 30 --repeats 1    all 270 heads
    python -m tools.bench.patching --at_once 4 8 16

The loop runs the same forward pass, compiled once with the head as an argument, on all prompts, and
waits for each result, as libraries do that patch by hooks. First the effects of both are compared;
if they differ, nothing is timed and the exit code is 1. Both run in turns, so that load on the
machine affects both; the median ratio is printed with its range.
"""

import argparse
from collections.abc import Sequence
import dataclasses
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lm_jax
from lm_jax.model.config import DecoderConfig
from lm_jax.model.edits import Replace
from lm_jax.model.sites import keep
from sparse_jax.circuits import patching
from sparse_jax.circuits.metrics import Continuations
from sparse_jax.circuits.runs import Batch, CircuitModel, measure, metric
from tools.bench import front
from tools.bench.posttrain import SHAPE
from tools.bench.timing import Pass

# Of logits of order 1 in float32, over two orders of summation.
TOLERANCE = 1e-3


def random_batch(cfg: DecoderConfig, prompts: int, length: int) -> Batch:
    """Prompts of random tokens, of which the corrupt ones differ in a third."""
    rng = np.random.default_rng(0)
    clean_BT, other_BT = rng.integers(0, cfg.vocab_size, (2, prompts, length))
    corrupt_BT = np.where(rng.random((prompts, length)) < 1 / 3, other_BT, clean_BT)
    right_BA, wrong_BA = rng.integers(0, cfg.vocab_size, (2, prompts, 1))
    none_B0 = jnp.zeros((prompts, 0), jnp.int32)
    return Batch(
        jnp.asarray(clean_BT),
        jnp.asarray(corrupt_BT),
        jnp.ones((prompts, length), bool),
        jnp.full((prompts, 2), length - 1),
        Continuations(
            jnp.asarray(right_BA),
            jnp.asarray(wrong_BA),
            jnp.zeros(prompts, jnp.int32),
            none_B0,
            none_B0,
        ),
        metric="logit_difference",
    )


@jax.jit
def _other(model: CircuitModel, batch: Batch) -> jax.Array:
    return measure(model, batch, batch.corrupt_BT, record={"attn.z": keep})[1]["attn.z"]


@jax.jit
def _patched(model: CircuitModel, batch: Batch, other: jax.Array, index: jax.Array) -> jax.Array:
    L, N = model.cfg.num_layers, model.cfg.num_heads
    mask_LN = jnp.arange(L * N).reshape(L, N) == index
    edits = {"attn.z": Replace(other, mask_LN[:, None, None, :, None])}
    return measure(model, batch, batch.clean_BT, edits=edits)[0]


def loop(model: CircuitModel, batch: Batch) -> np.ndarray:
    """Effects of all heads, one run after the other, `[L, N, B]`."""
    L, N = model.cfg.num_layers, model.cfg.num_heads
    other, before_B = _other(model, batch), metric(model, batch, batch.clean_BT)
    effects = [np.asarray(_patched(model, batch, other, i) - before_B) for i in range(L * N)]
    return np.stack(effects).reshape(L, N, -1)


def bench(
    cfg: DecoderConfig, prompts: int, length: int, at_once: Sequence[int], repeats: int
) -> dict[str, Any]:
    """Times the sweep at each width and the loop in turns; {} and a line if they differ."""
    params = jax.jit(functools.partial(lm_jax.init_params, cfg=cfg))(jax.random.key(0))
    # Larger than initial weights, so that heads have effects.
    model = CircuitModel(jax.tree.map(lambda x: 3.0 * x, params), cfg)
    batch = random_batch(cfg, prompts, length)
    sweeps = {
        width: functools.partial(patching.head_effects, model, batch, at_once=width)
        for width in at_once
    }
    want = loop(model, batch)
    for width, sweep in sweeps.items():
        off = float(np.abs(np.asarray(sweep()) - want).max())
        if not front.agrees(f"at_once {width}", off, TOLERANCE, "effects differ by"):
            return {}
    heads = cfg.num_layers * cfg.num_heads
    runs: dict[str, Pass] = {"one run per head": lambda: loop(model, batch)}
    for width, sweep in sweeps.items():
        runs[f"at_once {width}"] = lambda sweep=sweep: jax.block_until_ready(sweep())
    label = f"{heads} heads x {prompts} prompts of {length} tokens"
    first, *others = front.timed(label, runs, repeats).values()
    return {"loop": first, "sweep": dict(zip(map(str, sweeps), others, strict=True))}


def run(arguments: argparse.Namespace, record: front.Record) -> bool:
    """Compares and times both; false where effects differ."""
    cfg = dataclasses.replace(SHAPE, num_layers=arguments.layers, vocab_size=arguments.vocab)
    given = arguments.prompts, arguments.length, arguments.at_once, arguments.repeats
    return record.keep("seconds", bench(cfg, *given))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = front.parser("bench.patching", __doc__, repeats=3)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--at_once", type=int, nargs="+", default=[8])
    parser.add_argument("--vocab", type=int, default=SHAPE.vocab_size)
    return front.run(run, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
