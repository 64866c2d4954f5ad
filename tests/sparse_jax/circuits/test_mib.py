"""MIB's files: round trips, faults refused, pruning by search, and areas of the ten sizes."""

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.errors import BadInputError, UsageError
from sparse_jax.circuits import components, curves, discover, mib
from sparse_jax.circuits.component_ablation import ablate_edges
from sparse_jax.circuits.component_graph import ComponentGraph
from sparse_jax.circuits.runs import measure
from tests import rounding, tiny
from tests.sparse_jax.circuits import oracle
from tests.sparse_jax.circuits.small_models import circuit_model, ioi_batch

CFG = tiny.decoder(num_layers=3, num_heads=4, num_kv_heads=4)
SHARED = ComponentGraph.of(tiny.decoder(num_layers=3, num_heads=4, num_kv_heads=2))


@pytest.fixture
def graph():
    return ComponentGraph.of(CFG)


@pytest.fixture
def scores(graph):
    return np.where(graph.mask_UR, np.random.default_rng(0).normal(size=graph.mask_UR.shape), 0.0)


def test_a_round_trip(tmp_path, graph, scores):
    scores[0, 0] = np.nan
    kept = graph.mask_UR & (np.nan_to_num(scores) > 0.3)
    mib.save_graph(tmp_path / "graph.json", graph, scores, kept)
    result = mib.load_graph(tmp_path / "graph.json")
    assert result.graph == graph
    np.testing.assert_array_equal(result.scores_UR, scores)
    np.testing.assert_array_equal(result.kept_UR, kept)
    content = json.loads((tmp_path / "graph.json").read_text())
    assert content["cfg"] == {
        "n_layers": 3,
        "n_heads": 4,
        "parallel_attn_mlp": False,
        "d_model": CFG.hidden_size,
    }
    assert len(content["edges"]) == graph.num_edges
    assert len(content["nodes"]) == graph.num_writers + 1
    edge = content["edges"]["a0.h1->a1.h3<k>"]
    place = graph.writer_names.index("a0.h1"), graph.reader_names.index("a1.h3<k>")
    assert edge["score"] == scores[place]
    assert np.isnan(content["edges"]["input->a0.h0<q>"]["score"])


def test_scores_of_keys_that_query_heads_share_are_refused(tmp_path):
    """They are sums over the query heads, and so scores of none of them."""
    with pytest.raises(UsageError, match=r"4 query heads share 2 key heads.*components\.ungrouped"):
        mib.save_graph(tmp_path / "graph.json", SHARED, np.where(SHARED.mask_UR, 1.0, 0.0))


# Of a file: the path of what is another value, or is missing where there is no value.
SCORE, GONE = ("edges", "input->m0", "score"), object()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (SCORE, "high", r"edges\['input->m0'\]\.score = 'high' must be a finite number"),
        (SCORE, True, r"score = True must be a finite number"),
        (SCORE, float("inf"), r"score = inf must be a finite number"),
        (
            ("edges", "m0->logits"),
            GONE,
            r"edges: 261 names in place of 262: 1 missing, such as 'm0",
        ),
        (("edges", "m1->m0"), {}, r"edges: 263 names in place of 262: 1 unknown, such as 'm1->m0'"),
        (("nodes", "a1.h2"), GONE, r"nodes: 16 names in place of 17: 1 missing, such as 'a1\.h2'"),
        (("nodes", "a9.h0"), {"in_graph": True}, r"1 unknown, such as 'a9\.h0'"),
        (("cfg", "n_heads"), 5, r"nodes: 17 names in place of 20: 3 missing, such as 'a0\.h4'"),
        (("cfg", "n_layers"), 3.0, r"cfg\.n_layers = 3\.0 must be a positive integer"),
        (("edges", "input->m0", "in_graph"), GONE, r"1 missing, such as 'in_graph'"),
        (("edges", "input->m0", "in_graph"), 1, r"in_graph must be true or false"),
        (("nodes", "m0"), {}, r"nodes\['m0'\]\.in_graph must be true or false"),
    ],
)
def test_faults_are_refused_with_the_place(tmp_path, graph, scores, path, value, message):
    file = tmp_path / "graph.json"
    mib.save_graph(file, graph, scores)
    content = json.loads(file.read_text())
    *outer, last = path
    inner = functools.reduce(dict.__getitem__, outer, content)
    if value is GONE:
        del inner[last]
    else:
        inner[last] = value
    file.write_text(json.dumps(content))
    with pytest.raises(BadInputError, match=message):
        mib.load_graph(file)


def test_a_name_that_is_there_twice_is_refused(tmp_path, graph, scores):
    file = tmp_path / "graph.json"
    mib.save_graph(file, graph, scores)
    text = file.read_text()
    file.write_text(text.replace('"edges": {', '"edges": {"input->m0": {}, ', 1))
    with pytest.raises(BadInputError, match="'input->m0' is there twice"):
        mib.load_graph(file)
    file.write_text(text[:-5])
    with pytest.raises(BadInputError, match="export the graph again"):
        mib.load_graph(file)
    with pytest.raises(BadInputError, match="give a readable"):
        mib.load_graph(tmp_path / "none.json")


def connected_by_search(graph, kept):
    """Edges on a path from the input to the logits, found by walking along names."""
    writers, readers = graph.writer_names, graph.reader_names
    edges = {(writers[u], readers[r].split("<")[0], (u, r)) for u, r in np.argwhere(kept).tolist()}
    while True:
        sources, targets = {a for a, _, _ in edges}, {b for _, b, _ in edges}
        left = {
            (a, b, place)
            for a, b, place in edges
            if (a == "input" or a in targets) and (b == "logits" or b in sources)
        }
        if left == edges:
            return {place for _, _, place in edges}
        edges = left


@pytest.mark.parametrize("share", [0.05, 0.15, 0.3])
def test_pruning_leaves_what_is_on_a_path(graph, share):
    wide = graph.ungrouped()
    rng = np.random.default_rng(1)
    some = 0
    for _ in range(20):
        kept = wide.mask_UR & (rng.random(wide.mask_UR.shape) < share)
        result = {tuple(place) for place in np.argwhere(mib.prune(wide, kept)).tolist()}
        assert result == connected_by_search(wide, kept)
        some += 0 < len(result) < kept.sum()
    # A few edges are rarely on a path, and most of many are.
    assert some or share != 0.15


def test_the_top_edges_are_ranked_by_either_score_and_unscored_ones_stay(graph, scores):
    wide = graph.ungrouped()
    scores[0, 3] = np.nan
    for absolute in (False, True):
        kept = mib.top_edges(wide, scores, 10, absolute=absolute)
        assert kept.sum() == 11 and kept[0, 3] and not (kept & ~wide.mask_UR).any()
        ranked = np.abs(scores) if absolute else scores
        least = np.nanmin(ranked[kept])
        assert (ranked[wide.mask_UR & ~kept] <= least).all()
    assert mib.top_edges(wide, scores, 10**6, absolute=True).sum() == wide.num_edges


def test_the_ten_sizes_are_rounded_down(monkeypatch):
    """Those of a graph of 3,628 edges, by hand; before pruning, which hides them in the curve."""
    asked = []

    def top_edges(graph, scores, count, *, absolute):
        asked.append(count)
        return graph.mask_UR

    monkeypatch.setattr(mib, "top_edges", top_edges)
    model = circuit_model("llama", num_layers=6, num_heads=8, num_kv_heads=8)
    graph = ComponentGraph.of(model.cfg)
    assert graph.num_edges == 3628
    mib.evaluate(model, ioi_batch(1), graph.mask_UR * 1.0, absolute=False)
    assert asked == [3, 7, 18, 36, 72, 181, 362, 725, 1814, 3628]


def test_ten_sizes_of_a_ranking():
    """Everything kept explains all; the number of edges is that after pruning."""
    batch = ioi_batch()
    model = circuit_model("llama", num_layers=6)
    graph = ComponentGraph.of(model.cfg)
    scores = -np.asarray(components.component_attributions(model, batch)).mean(1)
    single = components.component_attributions(components.ungrouped(model), batch)
    own = -np.asarray(single).mean(1)
    results = [mib.evaluate(model, batch, own, absolute=each) for each in (False, True)]
    wide = graph.ungrouped()

    def ends(model):
        values = discover.component_values(model, batch, "counterfactual")
        edits = ablate_edges(model, jnp.ones((len(values), 1, graph.num_readers)), values)
        empty, _ = measure(model, batch, batch.clean_BT, edits=edits)
        return measure(model, batch, batch.clean_BT)[0], empty

    whole, empty = (oracle.part(oracle.expected(ends, model), i) for i in range(2))
    for result in results:
        assert result.edges[-1] == wide.num_edges
        nominal = [int(k * wide.num_edges) for k in curves.MIB_FRACTIONS]
        assert (result.edges <= nominal).all() and (np.diff(result.edges) >= 0).all()
        rounding.assert_within(result.metric_KB[-1], whole)
        # f - 1 is the mean of a difference of two such metrics, over that of whole and empty.
        off = 2 * whole.bounds.mean() / np.abs((result.whole_B - result.empty_B).mean())
        assert abs(result.faithfulness[-1] - 1) <= off < 0.1
        cpr, cmd = result.cpr_cmd
        assert cpr + cmd >= 0.999 - 1e-9
    assert (results[0].metric_KB != results[1].metric_KB).any()
    # The same circuits with readers that query heads share: all of them, and none.
    exists = discover.component_edges(model, batch)
    ranks = discover.ranks(np.where(exists, scores[:, None], -np.inf))
    shared = discover.component_curve(
        model, batch, ranks, "counterfactual", sizes=[graph.num_edges]
    )
    for each in (*results, shared):
        rounding.assert_within(each.empty_B, empty)
        rounding.assert_within(each.whole_B, whole)


def test_scores_of_another_graph_are_refused():
    batch, model = ioi_batch(2), circuit_model("llama")
    graph = ComponentGraph.of(model.cfg)
    with pytest.raises(BadInputError, match=r"scores have shape \(11, 19\), .* \(11, 27\)"):
        mib.evaluate(model, batch, np.zeros(graph.mask_UR.shape), absolute=True)
