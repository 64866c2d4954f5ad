"""Counts, indices and names of the component graph against the table of MIB's graphs and loops."""

import numpy as np
import pytest

from lm_jax import LayerShape, Pretrained
from lm_jax.errors import UsageError
from sparse_jax import circuits
from sparse_jax.circuits.component_graph import ComponentGraph
from sparse_jax.circuits.runs import CircuitModel
from tests import tiny

# Layers, query heads, key heads, edges: GPT-2 small, SmolLM2-135M, Gemma-3-270M, two toys.
SIZES = [
    (12, 12, 12, 32_491),
    (30, 9, 3, 123_211),
    (18, 4, 1, 10_342),
    (4, 4, 4, 479),
    (6, 8, 8, 3_628),
]


def config(layers, heads, kv_heads, **changes):
    return tiny.decoder(num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, **changes)


def edges_by_loops(layers, heads, parallel):
    """Names of all edges, in the order of the formulae, written down pair by pair."""
    writers, edges = ["input"], []
    for layer in range(layers):
        own = [f"a{layer}.h{head}" for head in range(heads)]
        edges += [(u, f"{head}<{part}>") for part in "qkv" for head in own for u in writers]
        edges += [(u, f"m{layer}") for u in (writers if parallel else writers + own)]
        writers += [*own, f"m{layer}"]
    return edges + [(u, "logits") for u in writers]


@pytest.mark.parametrize(("layers", "heads", "kv_heads", "edges"), SIZES)
def test_number_of_edges(layers, heads, kv_heads, edges):
    cfg = config(layers, heads, kv_heads)
    assert circuits.num_edges(cfg) == edges
    graph = ComponentGraph.of(cfg).ungrouped()
    assert (graph.num_writers, graph.num_readers) == (
        1 + layers * (heads + 1),
        layers * (3 * heads + 1) + 1,
    )


@pytest.mark.parametrize("parallel", [False, True])
def test_edges_are_those_of_counting_every_pair(parallel):
    graph = ComponentGraph.of(config(3, 4, 2, parallel_residual=parallel)).ungrouped()
    wanted = edges_by_loops(3, 4, parallel)
    result = [(graph.writer_names[u], graph.reader_names[r]) for u, r in np.argwhere(graph.mask_UR)]
    assert sorted(result) == sorted(wanted) and graph.num_edges == len(wanted)
    # The indices of EAP-IG.
    assert graph.writer_names.index("a2.h3") == 1 + 2 * 5 + 3
    assert graph.writer_names.index("m1") == 1 + 1 * 5 + 4
    for part, offset in (("q", 0), ("k", 4), ("v", 8)):
        assert graph.reader_names.index(f"a1.h2<{part}>") == 13 + offset + 2
    assert graph.reader_names.index("m2") == 2 * 13 + 12
    assert graph.reader_names[-1] == "logits"


def test_shared_keys_are_one_reader():
    """Nine query heads, three key heads: SmolLM2's layer has 16 readers in place of 28."""
    graph = ComponentGraph.of(config(2, 9, 3))
    assert graph.layer_readers == 16 and graph.num_readers == 33
    assert graph.reader_names[9:12] == ("a0.h0-2<k>", "a0.h3-5<k>", "a0.h6-8<k>")
    assert (graph.mask_UR * graph.multiplicity_R).sum() == graph.ungrouped().num_edges
    wide = graph.ungrouped()
    assert (graph.expand(graph.mask_UR) == wide.mask_UR).all()
    shared = graph.expand(np.arange(graph.num_readers))
    for part in "kv":
        for head in range(9):
            name = graph.reader_names[shared[wide.reader_names.index(f"a1.h{head}<{part}>")]]
            first = head // 3 * 3
            assert name == f"a1.h{first}-{first + 2}<{part}>"
    for name, writer in zip(wide.reader_names[:-1], wide.writer_of_R, strict=False):
        assert wide.writer_names[writer] == name.split("<")[0]
    assert wide.writer_of_R[-1] == wide.num_writers


def test_a_model_without_mlps_is_refused():
    with pytest.raises(UsageError, match="mlp_size = 0"):
        circuits.num_edges(tiny.decoder(mlp_size=0))


def test_a_model_whose_layers_differ_is_refused():
    cfg = tiny.decoder(family="gemma4_text", layers=(LayerShape(), LayerShape(kv=0)))
    with pytest.raises(UsageError, match="component graph cannot take family gemma4_text"):
        circuits.num_edges(cfg)
    with pytest.raises(UsageError, match="graph or transcoder cannot take family gemma4_text"):
        CircuitModel.of(Pretrained(cfg, {}, None, ()))
