"""Graphs of this project in a fresh process: `graphs_tracer` starts it.

    python -m tools.bench.workers.graph FOLDER

FOLDER holds `model/`, `dictionary/` and `tokens.npy`. It writes an empty object of JSON, and then,
for each line that it reads, makes the graph of the prompt with all rows and writes its seconds,
wall and CPU; the first graph is kept as `our_active.npy` and `our_adjacency.npy`, in the order of
circuit-tracer.
"""

import dataclasses
import json
from pathlib import Path
import sys
import time

import numpy as np

import lm_jax
from sparse_jax.graphs import Graph, attribute
from sparse_jax.graphs.influence import ERROR, FEATURE
from sparse_jax.transcoders import files

_COLUMNS = ("layer", "position", "feature")


def active(graph: Graph) -> np.ndarray:
    """Layer, position and feature of each active feature, `[X, 3]`."""
    columns = [np.asarray(graph.nodes[name].fill_null(-1)) for name in _COLUMNS]
    return np.stack(columns, 1)[graph.kinds == FEATURE]


def square(graph: Graph) -> np.ndarray:
    """The adjacency matrix as circuit-tracer has it: square, without bias, without first errors."""
    sources = graph.num_sources
    size = sources + len(graph.probabilities)
    matrix_NN = np.zeros((size, size), np.float32)
    matrix_NN[graph.row_nodes, :sources] = graph.adjacency
    position = np.asarray(graph.nodes["position"].fill_null(-1))[:sources]
    first = (graph.kinds[:sources] == ERROR) & (position == 0)
    matrix_NN[:, :sources][:, first] = 0.0
    return matrix_NN


def main() -> None:
    """The worker."""
    folder = Path(sys.argv[1])
    model = lm_jax.load_pretrained(folder / "model")
    transcoder, _ = files.load(folder / "dictionary")
    # circuit-tracer gives the first position no features.
    transcoder = dataclasses.replace(transcoder, skip_start=1)
    tokens = np.load(folder / "tokens.npy")
    print(json.dumps({}), flush=True)
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        graph = attribute(model, transcoder, tokens)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if not (folder / "our_active.npy").exists():
            np.save(folder / "our_active.npy", active(graph))
            np.save(folder / "our_adjacency.npy", square(graph))
        print(json.dumps({"wall": wall, "cpu": cpu}), flush=True)


if __name__ == "__main__":
    main()
