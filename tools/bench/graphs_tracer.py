"""Time of attribution graphs relative to circuit-tracer, of the same files in one run.

    python -m venv tracer
    tracer/bin/pip install torch==2.13.0 transformers==4.57.3 transformer-lens==3.2.1 nnsight==0.8.1
    tracer/bin/pip install --no-deps circuit-tracer==0.5.0
    python -m tools.bench.graphs_tracer --python tracer/bin/python      16 tokens, 2,000 features
    python -m tools.bench.graphs_tracer --python tracer/bin/python --length 64 --active 8000

A model of four layers of width 256 and a cross-layer transcoder of 2,048 features a layer, both
random, are written as files that both programs load. Each runs in fresh processes that wait while
the other works: a first graph, with whatever is compiled, and then later ones in turns. Ours has
two first graphs: without a cache of compiled programs, and with the one that an earlier process
left, as commands of `iaj` have. All features have rows. First the graphs are compared: the same
active features, and entries within float32; if they differ, nothing is timed and the exit code is
1. circuit-tracer runs at the fastest of the batch sizes that are given, which must not be the
largest or the smallest. Seconds, and CPU seconds, which a busy machine changes less, are of graphs
alone, without loading. Later graphs are of the same prompt.
"""

import argparse
from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import json
from pathlib import Path
import sys
import tempfile
from typing import Any

import numpy as np

import lm_jax
from sparse_jax.transcoders import Origin, save
from tools.bench import front, graphs, patching_lens
from tools.bench.timing import ratio
from tools.bench.workers.waiting import Waiting

# Of entries, relative to the sum of absolute entries of their row: both programs round each
# addition on a row's path in float32, which for these models are fewer than 30,000; the random sum
# of their roundings is below the square root of it.
TOLERANCE = 30_000**0.5 * 2.0**-24
SHAPE = dataclasses.replace(
    graphs.PAIR, family="llama", rope=lm_jax.Rope(), tie_embeddings=False, max_length=256
)
WORKER = Path(__file__).parent / "workers" / "tracer.py"
Start = Callable[[], Waiting]
THEIRS, OURS, COMPILED = "circuit-tracer", "ours", "ours, compiled before"


def write(folder: Path, length: int, features: int, active: int) -> None:
    """Writes what both workers read."""
    model = graphs.random_model(SHAPE)
    # Id 0 is circuit-tracer's special first token.
    tokens = np.random.default_rng(0).integers(1, SHAPE.vocab_size, length)
    tokens[0] = 0
    transcoder = graphs.random_transcoder(model, tokens, features, active)
    lm_jax.save_pretrained(folder / "model", model.cfg, model.params)
    save(folder / "dictionary", transcoder, Origin("random"))
    np.save(folder / "tokens.npy", tokens)
    weights = patching_lens.weights(model.params, model.cfg)
    np.savez(folder / "model.npz", allow_pickle=False, **weights)
    settings = patching_lens.settings(SHAPE)
    (folder / "settings.json").write_text(json.dumps(settings))


def starts(python: str, folder: Path) -> dict[str, Start]:
    """How a fresh process of each program is started."""
    theirs = [python, "-I", str(WORKER), str(folder)]
    ours = [sys.executable, "-m", "tools.bench.workers.graph", str(folder)]
    no_cache = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return {
        THEIRS: lambda: Waiting(theirs, f"--python={python}: circuit-tracer there"),
        OURS: lambda: Waiting(ours, "our own process", no_cache),
        COMPILED: lambda: Waiting(ours, "our own process", cache),
    }


def difference(folder: Path) -> float:
    """Largest difference of entries, of the row's absolute sum; infinity for other features."""
    if not np.array_equal(np.load(folder / "active.npy"), np.load(folder / "our_active.npy")):
        return float("inf")
    ours_NN, theirs_NN = (np.load(folder / name) for name in ("our_adjacency.npy", "adjacency.npy"))
    if ours_NN.shape != theirs_NN.shape:
        return float("inf")
    size_N1 = np.abs(theirs_NN).sum(1, keepdims=True)
    off_NN = np.abs(ours_NN - theirs_NN)
    return float((off_NN / np.where(size_N1 == 0, 1, size_N1)).max())


def measure(
    folder: Path, started: dict[str, Start], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Graphs of both, compared, and their seconds; {} where they differ."""
    first: dict[str, list[dict[str, float]]] = {name: [] for name in started}
    later: dict[str, list[dict[str, float]]] = {name: [] for name in (THEIRS, OURS)}
    batch, versions, off = "", {}, 0.0
    for turn in range(arguments.starts + 1):
        with contextlib.ExitStack() as stack:
            running = {}
            for name, start in started.items():
                running[name] = start()
                stack.callback(running[name].close)
            if turn:
                for name, each in running.items():
                    first[name].append(each.run(batch))
            else:
                # A trial: which batch is the fastest, and a cache of compiled programs.
                versions = running[THEIRS].started["versions"]
                running[COMPILED].run()
                running[THEIRS].run(arguments.batch[0])
                off = difference(folder)
                what = "features or entries, of their row's sum, differ by"
                if not front.agrees(f"{arguments.length} tokens", off, TOLERANCE, what):
                    return {}
                seconds = {size: running[THEIRS].run(size)["wall"] for size in arguments.batch}
                batch = min(seconds, key=seconds.__getitem__)
                if len(seconds) > 1 and batch in (min(seconds, key=int), max(seconds, key=int)):
                    print(f"--batch: {batch} is the fastest; give smaller and larger ones, too")
                    return {}
            if turn == arguments.starts:
                for _ in range(arguments.repeats):
                    for name, own in later.items():
                        own.append(running[name].run(batch))
    print(", ".join(f"{name} {value}" for name, value in versions.items()))
    features = len(np.load(folder / "active.npy"))
    print(f"{features} features, {arguments.length} tokens; circuit-tracer at batch {batch}")
    ratios = {}
    for what, series in (("first", first), ("later", later)):
        for name, own in series.items():
            parts = []
            for clock, unit in (("wall", "s"), ("cpu", "CPU s")):
                ours, theirs = ([each[clock] for each in x] for x in (own, series[THEIRS]))
                text = f"{min(ours):.2f} to {max(ours):.2f} {unit}"
                if name != THEIRS:
                    ratios[f"{what}, {name}, {clock}"] = found = ratio(theirs, ours)
                    text += f" ({found} times as fast)"
                parts.append(text)
            print(f"  {what} graph, {name}: {', '.join(parts)}", flush=True)
    return {
        "versions": versions,
        "features": features,
        "tokens": arguments.length,
        "batch": int(batch),
        "largest_difference": off,
        "first": first,
        "later": later,
        "ratios": {what: dataclasses.asdict(each) for what, each in ratios.items()},
    }


def run(arguments: argparse.Namespace, record: front.Record) -> bool:
    """Compares and times both; false where graphs differ."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, arguments.length, arguments.features, arguments.active)
        started = starts(arguments.python, folder)
        return record.keep("graphs", measure(folder, started, arguments))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = front.parser("bench.graphs_tracer", __doc__, repeats=5)
    parser.add_argument("--python", required=True, help="interpreter that has circuit-tracer")
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--features", type=int, default=2_048, help="of each layer")
    parser.add_argument("--active", type=int, default=2_000, help="features that are active")
    parser.add_argument(
        "--batch", nargs="+", default=["4", "8", "16", "32", "64"], help="of circuit-tracer"
    )
    parser.add_argument(
        "--starts", type=int, default=3, help="fresh processes of each, after a trial"
    )
    return front.run(run, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
