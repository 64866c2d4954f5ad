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
from pathlib import Path
import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lm_jax
from lm_jax.errors import UserError
from lm_jax.model.config import DecoderConfig
from lm_jax.model.edits import Replace
from lm_jax.model.sites import keep
from lm_jax.run.files import write_json
from sparse_jax.circuits import patching
from sparse_jax.circuits.metrics import Continuations
from sparse_jax.circuits.runs import Batch, CircuitModel, measure, metric
from tools.bench.posttrain import SHAPE
from tools.bench.timing import PROFILE, conditions, in_turns, profiled, ratio

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
        if not (off := float(np.abs(np.asarray(sweep()) - want).max())) <= TOLERANCE:
            print(f"at_once {width}: effects differ from the loop's by {off:.1e}, not timed")
            return {}
    runs = [lambda: loop(model, batch)]
    runs += [lambda sweep=sweep: jax.block_until_ready(sweep()) for sweep in sweeps.values()]
    seconds = in_turns(runs, repeats)
    heads = cfg.num_layers * cfg.num_heads
    print(
        f"{heads} heads x {prompts} prompts of {length} tokens: one run per head "
        f"{statistics.median(seconds[0]):.1f} s"
    )
    for width, taken in zip(sweeps, seconds[1:], strict=True):
        print(
            f"  at_once {width:3}: {statistics.median(taken):.1f} s, "
            f"{ratio(seconds[0], taken)} times faster"
        )
    return {"loop": seconds[0], "sweep": dict(zip(map(str, sweeps), seconds[1:], strict=True))}


@profiled
def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], parents=[PROFILE])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--at_once", type=int, nargs="+", default=[8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=SHAPE.vocab_size)
    parser.add_argument("--json", type=Path, help="file for the raw figures")
    arguments = parser.parse_args(argv)
    cfg = dataclasses.replace(SHAPE, num_layers=arguments.layers, vocab_size=arguments.vocab)
    try:
        results: dict[str, Any] = {"conditions": conditions(("jax", "jaxlib", "numpy"))}
        results["seconds"] = bench(
            cfg, arguments.prompts, arguments.length, arguments.at_once, arguments.repeats
        )
        if not results["seconds"]:
            return 1
        if arguments.json:
            write_json(arguments.json, results)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
