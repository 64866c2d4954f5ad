"""Values by which circuits are ranked, against means written out; tokens of the drawn prompt."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pyarrow.compute as pc
import pytest

from sparse_jax.circuits.component_graph import ComponentGraph
from sparse_jax.circuits.components import component_attributions
from sparse_jax.circuits.discover import Curve, visible_edges
from sparse_jax.circuits.runs import Batch, CircuitModel
from sparse_jax.circuits.tasks import load_task, make_task
from sparse_jax.studies.circuits.kinds import ComponentEdges, Heads
from sparse_jax.studies.circuits.measurements import rows
from sparse_jax.studies.circuits.parts import ATTRIBUTION, Part, values_table
from sparse_jax.studies.circuits.piece import Measurement, SourceCircuit, _rank_values
from sparse_jax.studies.circuits.settings import CircuitConfig
from tests.sparse_jax.circuits.small_models import circuit_model
from tests.sparse_jax.circuits.small_study import write_lines
from tests.sparse_jax.circuits.word_tokenizer import pieces_tokenizer, word_tokenizer

# Three components in two prompts, of which the second is shorter: it lacks the last component.
IMPORTANCE = np.array([[[3.0, -4.0, 1.0], [-2.0, -2.0, -np.inf]]])
REAL = np.isfinite(IMPORTANCE)
_HEADS = ("layer", "head", "prompt")


@pytest.mark.parametrize(
    ("ranking", "scope", "values"),
    [
        ("signed", "prompt", [[3.0, -4.0, 1.0], [-2.0, -2.0, -np.inf]]),
        ("absolute", "prompt", [[3.0, 4.0, 1.0], [2.0, 2.0, -np.inf]]),
        # The mean of the prompts that have a component, and the absolute value of that mean.
        ("signed", "task", [[0.5, -3.0, 1.0], [0.5, -3.0, -np.inf]]),
        ("absolute", "task", [[0.5, 3.0, 1.0], [0.5, 3.0, -np.inf]]),
    ],
)
def test_values_of_every_ranking_are_those_written_out(ranking, scope, values):
    result = _rank_values(IMPORTANCE, REAL, ranking, scope)
    np.testing.assert_array_equal(result, [values])


def test_exported_scores_are_of_each_query_head_s_keys_and_values():
    """Those of the model with the shared keys and values repeated, not sums over query heads."""
    tokenizer = word_tokenizer()
    task = make_task("ioi", tokenizer, count=2, seed=0)
    model = circuit_model(num_layers=1)
    shared = ComponentGraph.of(model.cfg)

    def stored(part):
        assert part == Part("component_edges", ATTRIBUTION)
        return values_table(np.ones((shared.num_writers, 2, shared.num_readers)))

    config = CircuitConfig(components=("component_edges",), ig_steps=2)
    measurement = Measurement(config, {"task": "ioi", "model": "dense"}, model, task, stored)
    scores_UR = measurement.scores_UR()
    mixer = model.params["blocks"]["mixer"]
    mixer = mixer | {name: jnp.repeat(mixer[name], 2, axis=2) for name in ("k", "v")}
    repeated = CircuitModel(
        model.params | {"blocks": model.params["blocks"] | {"mixer": mixer}},
        dataclasses.replace(model.cfg, num_kv_heads=model.cfg.num_heads),
    )
    assert scores_UR.shape == ComponentGraph.of(repeated.cfg).mask_UR.shape
    effects = component_attributions(repeated, Batch.of(task), steps=2)
    wanted_UR = -np.asarray(effects, np.float64).mean(1)
    # Both are float32 sums over the same two steps, in programs of one shape.
    size = np.abs(wanted_UR).max()
    np.testing.assert_allclose(scores_UR, wanted_UR, rtol=0, atol=1e-5 * size)


def test_the_drawn_prompt_begins_with_a_first_token_of_id_0():
    tokenizer = word_tokenizer(special=["<bos>"])
    task = make_task("ioi", tokenizer, count=2, seed=0)
    model = circuit_model(vocab_size=tokenizer.vocab_size)
    names = {"task": "ioi", "model": "dense"}

    def stored(part):
        kind = {"quantity": part.measurement.removesuffix("s"), "method": "clean"}
        return rows([1.0, 2.0], {"prompt": [0, 1]}, **kind, **names)

    config = CircuitConfig(components=("component_edges",), shown=1)
    drawn = Measurement(config, names, model, task, stored).drawn(tokenizer)
    ids = tokenizer.encode(task.examples[1].clean)
    assert ids[0] == 0 and drawn.metric == 2.0
    assert drawn.tokens == tuple(tokenizer.decode([each]) for each in ids)


def test_the_drawn_prompt_has_the_spaces_of_its_words(tmp_path):
    tokenizer = pieces_tokenizer(["Lucy", "Tom", "Ben", "saw", "gave", "ball"])
    lines = [
        {
            "clean": f"{name} saw Tom",
            "corrupt": f"Tom saw {name}",
            "answers": [" gave"],
            "wrong_answers": [" ball"],
        }
        for name in ("Lucy", "Ben")
    ]
    task = load_task(write_lines(tmp_path / "mine.jsonl", *lines), tokenizer)
    model = circuit_model(vocab_size=tokenizer.vocab_size)
    names = {"task": "mine", "model": "dense"}

    def stored(part):
        del part
        kind = {"quantity": "metric", "method": "clean"}
        return rows([1.0, 2.0], {"prompt": [0, 1]}, **kind, **names)

    config = CircuitConfig(components=("component_edges",), shown=0)
    drawn = Measurement(config, names, model, task, stored).drawn(tokenizer)
    assert drawn.tokens == ("<s>", " Lucy", " saw", " Tom")


def test_edges_that_are_patched_exactly_are_drawn_uniformly(monkeypatch):
    """Whatever their attribution is, so that no method is judged on its own choice."""
    opened = np.zeros((3, 2, 4), bool)
    opened[:, 0] = opened[1, 1, 2] = True
    opened[0, 0, 0] = False
    places = {tuple(place) for place in np.argwhere(opened.any(1)).tolist()}
    counts, draws, size = dict.fromkeys(places, 0), 600, 4
    for seed in range(draws):
        config = CircuitConfig(components=("component_edges",), edge_sample=size, seed=seed)
        measurement = object.__new__(Measurement)
        measurement._config = config
        monkeypatch.setattr(measurement, "_open_components", lambda kind: opened, raising=False)
        sample = measurement._patched_places(ComponentEdges).tolist()
        assert len(set(map(tuple, sample))) == size and sample == sorted(sample)
        for place in sample:
            counts[tuple(place)] += 1
    share = size / len(places)
    # Four standard errors of as many draws.
    reach = 4 * np.sqrt(draws * share * (1 - share))
    assert all(abs(count - draws * share) < reach for count in counts.values())


def _planted(monkeypatch, component):
    """A measurement, of a circuit of two components, where three edges of as many heads are open.

    The importance of those is 2, -1 and -3, and that of all closed ones is 0.
    """
    tokenizer = word_tokenizer()
    task = make_task("ioi", tokenizer, count=2, seed=0)
    model = circuit_model(vocab_size=tokenizer.vocab_size)
    names = {"task": "ioi", "model": "sparse"}
    real = visible_edges(model, Batch.of(task))
    open_edges = np.zeros_like(real)
    importance = np.zeros(real.shape)
    for place, value in {(0, 1, 3, 2): 2.0, (1, 0, 5, 1): -1.0, (1, 2, 4, 4): -3.0}.items():
        layer, *rest = place
        open_edges[layer, :, *rest] = True
        importance[layer, :, *rest] = value
    monkeypatch.setattr(Measurement, "_open_edges", open_edges)

    def stored(part):
        if part.measurement == ATTRIBUTION:
            return values_table(-importance)
        if part.measurement == "effects":
            effects_LNB = -importance.sum((3, 4)).swapaxes(1, 2)
            axes = {name: np.arange(n) for name, n in zip(_HEADS, effects_LNB.shape, strict=True)}
            kind = {"quantity": "effect", "component": "heads", "method": "exact"}
            return rows(effects_LNB, axes, **kind, direction="noising", **names)
        if part.measurement == "metrics":
            kind = {"quantity": "metric", "method": "clean"}
            return rows([1.0, 1.0], {"prompt": [0, 1]}, **kind, **names)
        # The effect of an empty circuit, and of one, two and four components.
        curve = np.repeat([[0.0], [0.2], [1.0], [1.0]], 2, 1)
        axes = {"size": [0, 1, 2, 4], "prompt": [0, 1]}
        return rows(curve, axes, quantity="curve", component=component, **names)

    config = CircuitConfig(components=(component,))
    return Measurement(config, names, model, task, stored)


def test_the_drawn_edges_are_those_of_the_circuit(monkeypatch):
    """Open edges are in a circuit before closed ones, whose importance of 0 may be higher."""
    drawn = _planted(monkeypatch, "token_edges").drawn(word_tokenizer())
    assert drawn.edges_needed == 2
    places = [(each.layer, each.head, each.query, each.key) for each in drawn.edges]
    assert places == [(0, 1, 3, 2), (1, 0, 5, 1)]
    assert [each.importance for each in drawn.edges] == [2.0, -1.0]


def test_a_head_without_an_open_edge_is_not_needed_before_one_with_some(monkeypatch):
    drawn = _planted(monkeypatch, "heads").drawn(word_tokenizer())
    assert drawn.heads_needed == 2
    assert [(each.layer, each.head) for each in drawn.heads] == [(0, 1), (1, 0)]
    assert [each.importance for each in drawn.heads] == [2.0, -1.0]


def test_no_circuit_of_another_wording_has_a_head_without_an_open_edge_first(monkeypatch):
    measurement = _planted(monkeypatch, "heads")
    # The other wording's circuit: the same three heads, and one that is closed in these prompts.
    source_LN = np.zeros((2, 4))
    source_LN[[0, 1, 1, 0], [1, 0, 2, 3]] = 3.0, -2.0, -1.0, 0.5
    kept = []

    def circuits(model, batch, ranks_LBN, ablation, *, sizes, key, at_once, recorded):
        assert ablation == CircuitConfig().ablations[0]
        by_prompt = ranks_LBN.swapaxes(0, 1)
        kept.append([np.argwhere(ranks_LN < sizes[0]) for ranks_LN in by_prompt])
        metric_KB = np.ones((1, 2))
        return Curve(sizes, metric_KB, metric_KB[0], metric_KB[0])

    monkeypatch.setattr(Heads, "_evaluate", staticmethod(circuits))
    measurement.measure(Part("heads", "transfer"), SourceCircuit(source_LN, size=2))
    for transferred, own in zip(*kept, strict=True):
        assert transferred.tolist() == [[0, 1], [1, 2]]
        assert own.tolist() == [[0, 1], [1, 0]]


def test_component_edges_with_weight_are_those_of_open_writers(monkeypatch):
    measurement = _planted(monkeypatch, "component_edges")
    counts = measurement.measure(Part("", "metrics"), None)
    counts = counts.filter(pc.field("quantity") == "open")["value"].to_pylist()
    graph = ComponentGraph.of(measurement._model.cfg)
    closed = [name for name in graph.writer_names if "h" in name]
    for name in ("a0.h1", "a1.h0", "a1.h2"):
        closed.remove(name)
    mask_UR = graph.mask_UR.copy()
    mask_UR[[graph.writer_names.index(name) for name in closed]] = False
    assert counts == [mask_UR.sum()] * 2
