"""Sweeps of patches, circuits and edits compile once, whatever prompt, place or strength."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from sparse_jax.circuits import components, discover, patching
from sparse_jax.circuits.component_graph import ComponentGraph
from sparse_jax.circuits.runs import measure
from sparse_jax.gates.model import constant_gates
from tests.sparse_jax.circuits.small_models import circuit_model, ioi_batch, some_edges

DIRECTIONS = ("noising", "denoising")
EDGES = np.array([(0, 0, 5, 2), (0, 3, 7, 7), (1, 1, 12, 4), (1, 2, 3, 0)])


def head_sweep(model, batch, second):
    return patching.head_effects(model, batch, direction=DIRECTIONS[second], at_once=3)


def edge_sweep(model, batch, second):
    edges = EDGES[::-1] - [0, 0, 0, 1] * (EDGES[::-1] > 0) if second else EDGES
    return patching.edge_effects(model, batch, edges, direction=DIRECTIONS[second], at_once=3)


def edge_attributions(model, batch, second):
    return patching.edge_attributions(model, batch, direction=DIRECTIONS[second])


def component_sweep(model, batch, second):
    edges = some_edges(ComponentGraph.of(model.cfg))[second:][:9]
    return components.component_effects(model, batch, edges, direction=DIRECTIONS[second])


def curve_of(name):
    exists = {"head": None, "edge": discover.visible_edges, "component": discover.component_edges}
    function = getattr(discover, f"{name}_curve")
    options = {} if name == "edge" else {"key": jax.random.key(0)}

    def curve(model, batch, second):
        mask = np.ones((2, 3, 4), bool) if name == "head" else exists[name](model, batch)
        ranks = discover.ranks(discover.random_importance(mask, second))
        sizes = [2 + second, 5 + second]
        return function(model, batch, ranks, "counterfactual", sizes=sizes, **options).metric_KB

    return curve


@jax.jit
def metric_under(model, batch, edits):
    return measure(model, batch, batch.clean_BT, edits=edits)[0]


def edited_run(model, batch, second):
    """One head of one layer, scaled by a strength."""
    layer, head, strength = ((0, 1, 0.5), (1, 3, -2.0))[second]
    factor = jnp.ones((1, 1, 4, 1)).at[..., head, :].set(strength)
    edits = {"attn.z": lm_jax.OneLayer(jnp.asarray(layer), lm_jax.Scale(factor))}
    return metric_under(model, batch, edits)


SWEEPS = {
    "heads": head_sweep,
    "edges": edge_sweep,
    "attributions": edge_attributions,
    "components": component_sweep,
    **{f"{name} curve": curve_of(name) for name in ("head", "edge", "component")},
    "edits": edited_run,
}


@contextlib.contextmanager
def compilations():
    """The list of programs that are compiled inside."""
    found = []

    def listen(event, seconds, **about):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(about)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("name", SWEEPS)
def test_other_prompts_layers_heads_and_strengths_compile_nothing_more(name):
    """And other weights, gates and directions."""
    batch, model = ioi_batch(), circuit_model(bias=0.3)
    swapped = dataclasses.replace(batch, clean_BT=batch.corrupt_BT, corrupt_BT=batch.clean_BT)
    params = jax.tree.map(lambda x: 1.1 * x, model.params)
    other = dataclasses.replace(model, params=params, gates=constant_gates(model.cfg, 0.2))
    with compilations() as found:
        jax.jit(lambda x: x + len(name))(1.0)
        assert len(found) == 1
        first = np.asarray(SWEEPS[name](model, batch, 0))
        before = len(found)
        second = np.asarray(SWEEPS[name](other, swapped, 1))
        assert len(found) == before, found[before:]
    assert (first != second).mean() > 0.1
