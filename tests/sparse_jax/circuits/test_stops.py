"""Every loop over compiled calls obeys a request to stop before its next call."""

import jax
import numpy as np
import pytest

from lm_jax.errors import StoppedError
from lm_jax.run import processes, stop
from sparse_jax.circuits import components, discover, mib, patching
from sparse_jax.circuits.component_graph import ComponentGraph
from tests.sparse_jax.circuits.small_models import circuit_model, ioi_batch, some_edges

SIZES = np.array([1, 3, 4, 6, 7])
EDGES = np.array([(0, 0, 5, 2), (0, 3, 7, 7), (1, 1, 12, 4), (1, 2, 3, 0)])


def head_curve(model, batch):
    ranks = discover.ranks(np.random.default_rng(0).random((2, len(batch.clean_BT), 4)))
    return discover.head_curve(model, batch, ranks, "zero", sizes=SIZES, at_once=2)


def edge_curve(model, batch):
    mask = discover.visible_edges(model, batch)
    ranks = discover.ranks(discover.random_importance(mask, 0))
    return discover.edge_curve(model, batch, ranks, "zero", sizes=SIZES, at_once=2)


def component_curve(model, batch):
    mask = discover.component_edges(model, batch)
    ranks = discover.ranks(discover.random_importance(mask, 0))
    return discover.component_curve(model, batch, ranks, "zero", sizes=SIZES, at_once=2)


def mib_curve(model, batch):
    scores = np.random.default_rng(0).random(ComponentGraph.of(model.cfg).ungrouped().mask_UR.shape)
    return mib.evaluate(model, batch, scores, absolute=False, ablation="zero", at_once=2)


def component_effects(model, batch):
    edges = some_edges(ComponentGraph.of(model.cfg))[:6]
    return components.component_effects(model, batch, edges, at_once=2)


# Each with its calls: 8 heads, 4 and 6 edges; 5 sizes and the empty circuit; MIB's 10 shares and
# the empty circuit; the steps of a path.
LOOPS = {
    "heads": (lambda *of: patching.head_effects(*of, at_once=2), 4),
    "token edges": (lambda *of: patching.edge_effects(*of, EDGES, at_once=2), 2),
    "component edges": (component_effects, 3),
    "path": (lambda *of: components.component_attributions(*of, steps=4), 4),
    "circuits of heads": (head_curve, 3),
    "circuits of token edges": (edge_curve, 3),
    "circuits of component edges": (component_curve, 3),
    "circuits of MIB": (mib_curve, 6),
}


@pytest.fixture(scope="module")
def given():
    return circuit_model(), ioi_batch()


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_looks_at_the_request_before_each_call(name, given, monkeypatch):
    """A stop after so many looks ends it there, and with the last look everything was computed."""
    (loop, calls), seen = LOOPS[name], []
    look = processes.check_stop

    def counted(where):
        seen.append(where)
        if len(seen) > allowed:
            stop.request()
        look(where)

    monkeypatch.setattr(processes, "check_stop", counted)
    for allowed in (0, 1, calls - 1):
        seen.clear()
        with pytest.raises(StoppedError, match="run the same command again"):
            loop(*given)
        assert len(seen) == allowed + 1
        stop._stop.clear()
    seen.clear()
    allowed = calls
    loop(*given)
    assert len(seen) == calls


def test_of_several_processes_none_stops_alone(given, monkeypatch):
    """The others would wait for it; all stop after the same unit."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(stop, "requested", lambda: True)
    assert len(head_curve(*given).metric_KB) == len(SIZES)
