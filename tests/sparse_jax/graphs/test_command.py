"""The command: its graph is that of `attribute`, its numbers those of the library."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import lm_jax
from lm_jax.model.layers import unembedding
from lm_jax.report.markup import number
from lm_jax.run.files import read_json
from lm_jax.run.results import load_result
from lm_jax.study import frame
from sparse_jax import transcoders
from sparse_jax.circuits.source_model import SourceModel
from sparse_jax.gates import model as sparse_model
from sparse_jax.graphs import (
    attribute,
    features,
    graph_json,
    interventions,
    scale_groups,
    score_groups,
    supernodes,
)
from sparse_jax.graphs import effects as effects_lib
from sparse_jax.graphs.features import SKIPPED_START
from sparse_jax.graphs.influence import FEATURE
from sparse_jax.studies.graphs import report, report_text
from sparse_jax.studies.graphs.intervened import SupernodeScore
from sparse_jax.studies.graphs.piece import mediated_edges
from sparse_jax.studies.graphs.results import FEATURES as FEATURE_FILES
from sparse_jax.studies.graphs.results import GraphSummary
from sparse_jax.studies.graphs.run import METADATA
from tests.sparse_jax.circuits.small_study import LAYERS
from tests.sparse_jax.graphs.small_command import (
    CONTEXT,
    EXAMPLES,
    FEATURES,
    MEDIATED,
    PROMPTS,
    at,
    of_dense,
    run,
    small,
    texts,
)

pytestmark = pytest.mark.usefixtures("few_are_alike")


@pytest.fixture(scope="module")
def alone(models, tmp_path_factory):
    """Two prompts of the dense model, one with targets and a label."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    lines = [
        {"prompt": PROMPTS[0], "slug": "mary", "kind": "ioi", "targets": [" John", " Mary"]},
        {"prompt": PROMPTS[1]},
    ]
    file = folder.parent / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    names = {f"{layer}_{i}": f"label of {i}" for layer in range(LAYERS) for i in range(FEATURES)}
    (folder.parent / "labels.json").write_text(json.dumps(names), "utf-8")
    assert run(*of_dense(models), *with_files(folder), *small(models), at(folder)) == 0
    return folder, load_result(folder / frame.SUMMARY, GraphSummary)


def with_files(folder):
    names = {"prompts": "prompts.jsonl", "labels": "labels.json"}
    return [f"--{flag}={folder.parent / name}" for flag, name in names.items()]


@pytest.fixture(scope="module")
def by_hand(models):
    """Source, transcoder and the graphs of both prompts."""
    source = SourceModel.load(str(models / "dense"))
    transcoder, _ = transcoders.load(models / "dense_clt")
    ids = [source.tokenizer.encode(text) for text in PROMPTS]
    targets = [source.tokenizer.encode(name)[0] for name in ("John", "Mary")]
    graphs = [
        attribute(source.model, transcoder, ids[0], targets=targets),
        attribute(source.model, transcoder, ids[1]),
    ]
    return source, transcoder, graphs


def test_the_graph_of_the_command_is_that_of_attribute(alone, by_hand):
    folder, summary = alone
    for graph, result in zip(by_hand[2], summary.graphs, strict=True):
        pruned = graph.prune()
        document = graph_json.read(folder / result.file)
        rows, sources = np.nonzero(pruned.kept_RS & (graph.adjacency != 0))
        weights = [link["weight"] for link in document["links"]]
        np.testing.assert_array_equal(weights, graph.adjacency[rows, sources].astype(np.float64))
        assert result.sizes.kept_edges == len(weights) > MEDIATED
        assert result.scores == graph.scores(pruned)
        assert document["metadata"]["transcoder_list"] == [summary.models[0].transcoder]
        assert document["metadata"]["scores"]["pruned"] == vars(graph.scores(pruned).pruned)
        labelled = [n for n in document["nodes"] if graph_json.feature_of(n)]
        assert labelled
        for node in labelled:
            assert node["clerp"] == f"label of {graph_json.feature_of(node)[1]}"
        assert result.row_error == tuple(graph.certificate())
        assert [each.id for each in result.logits] == [
            row["feature"] for row in graph.nodes.to_pylist() if row["kind"] == "logit"
        ]
    assert [each.token for each in summary.graphs[0].logits] == ["John", "Mary"]
    listed = read_json(folder / "graph" / METADATA)["graphs"]
    assert [each["slug"] for each in listed] == [Path(each.file).stem for each in summary.graphs]


def test_scores_and_interventions_are_those_of_the_library(alone, by_hand):
    """Scores of the pairs that carry most, and the most influential features times each factor."""
    folder, summary = alone
    source, _, graphs = by_hand
    for graph, result in zip(graphs, summary.graphs, strict=True):
        document = graph_json.read(folder / result.file)
        pruned = graph.prune()
        # All shares of all edges, not those that the file lists of each.
        edges = mediated_edges(graph, pruned, summary.config.mediated)
        batches = [np.asarray(each.score_XLNTS) for each in graph.mediations(edges)]
        size_LNTS = np.abs(np.concatenate(batches).astype(np.float64)).sum(0)
        most = np.stack(np.unravel_index(np.argsort(-size_LNTS, axis=None), size_LNTS.shape), 1)
        most = [tuple(pair) for pair in most[: summary.config.explained].tolist()]
        assert len(most) == summary.config.explained == len(result.score_errors)
        for place, one, error in zip(most, document["qk"], result.score_errors, strict=True):
            score = graph.qk(*place)
            assert (one["layer"], one["head"], one["query"], one["key"]) == place
            assert (one["score"], error) == (score.score, score.certificate())
            assert [value for *_, value in one["pair_wise_contributors"]] == [
                value for *_, value in score.top(5).pairs
            ]
        kept = np.flatnonzero(pruned.kept_S & (graph.edges().kind_S == FEATURE))
        strongest = kept[np.argsort(-pruned.influence_S[kept], kind="stable")][:8]
        factors = summary.config.factors
        wanted = [(int(node), factor) for node in strongest for factor in factors]
        assert len(wanted) == 8 * 3
        effects = interventions.measure(source.model, graph, wanted)
        ids = {node: f"{node}" for node in range(graph.nodes.num_rows)}
        by_library = effects_lib.as_json(effects, ids, count=graph.nodes.num_rows)
        for one, other in zip(document["interventions"], by_library, strict=True):
            assert one["factor"] == other["factor"]
            listed, known = (
                {tuple(each[name] for name in graph_json.EFFECTS) for each in own["effects"]}
                for own in (one, other)
            )
            # The library's list has the nodes that were pruned too.
            assert listed and listed <= known
        frozen, *others = result.agreements
        assert [each.mode for each in result.agreements] == list(effects_lib.MODES)
        assert frozen.interventions == len(wanted)
        assert frozen.spearman.estimate > 0.999 and frozen.error <= 1e-4 * frozen.largest
        assert all(each.error > frozen.error for each in others)


def test_the_page_opens_with_what_features_carry(alone):
    folder, summary = alone
    shares = [100 * each.scores.unpruned.replacement for each in summary.graphs]
    first, *_, last = report.answer(summary)
    ends = dict.fromkeys(f"{share:.0f}" for share in (min(shares), max(shares)))
    assert f"features carry {' to '.join(ends)} % of the influence" in first
    assert f"at most {number(max(max(each.row_error) for each in summary.graphs))}" in last
    (banner,) = report.build(summary.config, summary, folder).lead
    assert first in banner.unescape()


def test_supernodes_are_scaled_as_the_library_scales_them(alone, by_hand):
    folder, summary = alone
    source, transcoder, graphs = by_hand
    for graph, result in zip(graphs, summary.graphs, strict=True):
        document = graph_json.read(folder / result.file)
        nodes = {}
        for i, row in enumerate(graph.nodes.to_pylist()):
            if row["kind"] == FEATURE:
                nodes[f"{row['layer']}_{row['feature']}_{row['position']}"] = i
        keys = sorted({(row // FEATURES, row % FEATURES) for row in range(LAYERS * FEATURES)})
        proposals = supernodes.propose(document, decoders=features.decoders(transcoder, keys))[
            : summary.config.supernodes
        ]
        factors = summary.config.factors
        groups = [[nodes[name] for name in ids] for _, *ids in proposals]
        modes = ("attention_frozen", "free")
        effects = scale_groups(source.model, graph, groups, factors=factors, modes=modes)
        wanted = [(set(ids), factor) for _, *ids in proposals for factor in factors]
        assert [(set(one.members), one.factor) for one in result.supernodes] == wanted
        assert len(proposals) == summary.config.supernodes == 3
        predicted = [one.predicted for one in result.supernodes]
        assert predicted == effects.predicted_GFK[..., 0].ravel().tolist()
        for mode in modes:
            outcome = effects.outcomes[mode]
            own = [e for one in result.supernodes for e in one.outcomes if e.mode == mode]
            assert [each.change for each in own] == outcome.change_GFK[..., 0].ravel().tolist()
            probabilities = outcome.probability_GFK[..., 0].ravel().tolist()
            assert [each.probability for each in own] == probabilities
            ids = outcome.top_GFn.reshape(len(own), -1).tolist()
            assert [[token.id for token in each.top] for each in own] == ids
            tokens = [[source.tokenizer.decode([i]) for i in row] for row in ids]
            assert [[token.token for token in each.top] for each in own] == tokens
        # The file has the same.
        stored = [(set(one["members"]), one["factor"]) for one in document["group_interventions"]]
        assert stored == wanted
        # Beside each: the most influential kept features of its layers that are no members.
        pruned = graph.prune()
        kept = {name: node for name, node in nodes.items() if pruned.kept_S[node]}
        others = []
        for group in groups:
            layers = {graph.nodes["layer"][node].as_py() for node in group}
            beside = [
                node
                for name, node in kept.items()
                if node not in group and int(name.split("_")[0]) in layers
            ]
            others.append(sorted(beside, key=lambda node: -pruned.influence_S[node])[:8])
        assert all(len(group) <= 8 for group in groups) and any(others)
        is_kept_R = np.isin(graph.row_nodes, list(kept.values()))
        is_kept_R |= graph.kinds[graph.row_nodes] == "logit"
        scores = score_groups(source.model, graph, groups, others=others, rows=is_kept_R)
        assert [
            (each.removed, each.within, each.outside, each.off) for each in result.supernode_scores
        ] == [(each.members, each.within, each.outside, each.off) for each in scores]
        assert [each["off"] for each in document["group_scores"]] == [each.off for each in scores]


def test_mediated_edges_are_those_of_the_highest_score(alone, by_hand):
    folder, summary = alone
    graph, result = by_hand[2][0], summary.graphs[0]
    pruned = graph.prune()
    document = graph_json.read(folder / result.file)
    assert len(document["mediation"]) == result.sizes.mediated_edges == MEDIATED
    score_RS = np.where(pruned.kept_RS, pruned.score_RS, 0.0)
    highest = np.argsort(-score_RS, axis=None, kind="stable")[:MEDIATED]
    rows, sources = np.unravel_index(highest, score_RS.shape)
    pairs = np.stack([sources, graph.row_nodes[rows]], 1)
    shares = np.concatenate([np.asarray(each.score_XLNTS) for each in graph.mediations(pairs)])
    # Sums in float64 by numpy, of the definition: all heads of an edge, sorted by size.
    head_XC = np.abs(shares.astype(np.float64).sum((3, 4)).reshape(MEDIATED, -1))
    carried_X = head_XC.sum(1) > 0
    sorted_XC = np.sort(head_XC[carried_X], 1)[:, ::-1]
    mass_XC = np.cumsum(sorted_XC, 1) / sorted_XC.sum(1, keepdims=True)
    heads, apart = (m for m in result.masses if (m.component, m.sign) == ("heads", "absolute"))
    assert (heads.positions, apart.positions) == ("any", "different")
    assert (heads.edges, heads.unmediated) == (carried_X.sum(), (~carried_X).sum())
    assert heads.needed == np.mean([np.argmax(mass_C >= 0.9) + 1 for mass_C in mass_XC])
    over_X = shares.astype(np.float64).sum((1, 2, 3, 4)) / graph.edge_weights(pairs)
    np.testing.assert_allclose(result.over_count, np.median(over_X), rtol=1e-12)
    assert max(result.mediation_error) < 1e-5


def test_features_have_their_most_active_texts(models, alone, by_hand):
    folder, summary = alone
    source, transcoder, _ = by_hand
    file = max((folder / FEATURE_FILES).rglob("*.json"), key=lambda f: f.stat().st_size)
    stored = read_json(file)
    layer, index = stored["layer"], stored["feature"]
    assert int(file.stem) == stored["index"] == graph_json.pair_number(layer, index)

    @jax.jit
    def read(row_BT, valid_BT):
        return source.model.forward(row_BT, valid_BT, record={"mlp.in": lm_jax.keep}).records

    # Every window of every text by itself, without batches.
    found = []
    for text in texts():
        ids = source.tokenizer.encode(text)
        for start in range(0, len(ids) - 1, CONTEXT):
            window = np.array(ids[start : start + CONTEXT])
            missing = CONTEXT - len(window)
            row, valid = np.pad(window, (0, missing)), np.arange(CONTEXT) < len(window)
            input_LBTD = read(row[None], valid[None])["mlp.in"]
            act_T = np.asarray(transcoder.encode(input_LBTD[:, 0]))[layer, :, index]
            found.append(act_T[SKIPPED_START : len(window)])
    every = np.concatenate(found)
    largest = sorted((each.max() for each in found if each.size), reverse=True)[:EXAMPLES]
    (group,) = stored["examples_quantiles"]
    shown = [max(each["tokens_acts_list"]) for each in group["examples"]]
    # Rows of a batch may be summed in another order.
    np.testing.assert_allclose(shown, largest, rtol=1e-4)
    for each in group["examples"]:
        assert each["tokens_acts_list"][each["train_token_ind"]] == max(each["tokens_acts_list"])
        assert " ".join(each["tokens"]) in " ".join(texts())
    assert stored["activation_frequency"] == (every > 0).mean()
    assert sum(stored["histogram"]) == (every > 0).sum()
    (corpus,) = summary.features
    assert corpus.features == len(list((folder / FEATURE_FILES).rglob("*.json")))


def test_top_logits_are_those_of_all_that_the_feature_writes(alone, by_hand):
    folder, _ = alone
    source, transcoder, _ = by_hand
    params = source.model.params
    for file in sorted((folder / FEATURE_FILES).rglob("*.json"))[:5]:
        stored = read_json(file)
        layer, index = stored["layer"], stored["feature"]
        written = sum(
            np.asarray(transcoder.decoder(layer, to)[index], np.float64)
            for to in transcoder.cfg.targets(layer)
        )
        w_VD = np.asarray(unembedding(params, source.model.cfg), np.float64)
        logits_V = w_VD @ (written * np.asarray(params["final"]["scale"], np.float64))
        order = np.argsort(-logits_V)
        assert stored["top_logits"] == [source.tokenizer.decode([i]) for i in order[:10]]
        assert stored["bottom_logits"] == [source.tokenizer.decode([i]) for i in order[::-1][:10]]


def test_logits_of_many_features_are_held_some_at_a_time(by_hand, monkeypatch):
    source, transcoder, _ = by_hand
    shown = [(layer, index) for layer in range(LAYERS) for index in range(5)]
    whole = features.collect(source, transcoder, shown, None, context=CONTEXT)
    monkeypatch.setattr(features, "_LOGIT_CHUNK", 4)
    sizes, original = [], features._logits
    monkeypatch.setattr(
        features, "_logits", lambda *given: sizes.append(len(given[2])) or original(*given)
    )
    assert features.collect(source, transcoder, shown, None, context=CONTEXT) == whole
    assert sizes == [4, 4, 4] and len({each.top_logits for each in whole.values()}) > 5


def test_attribute_takes_folders(models, by_hand):
    source, transcoder, _ = by_hand
    ids = source.tokenizer.encode(PROMPTS[1])
    of_sparse = [
        models / "sparse",
        models / "sparse" / "model",
        sparse_model.load(models / "sparse" / "model"),
    ]
    first, *others = (attribute(each, transcoder, ids).adjacency for each in of_sparse)
    for other in others:
        np.testing.assert_array_equal(first, other)
    assert not np.array_equal(first, by_hand[2][1].adjacency)


def test_lines_on_supernodes_compare_those_that_have_both_figures(alone):
    _, summary = alone
    nan = float("nan")
    given = [(0.2, nan, 0.5), (0.9, 0.8, 0.1), (nan, 0.3, nan)]
    scores = tuple(SupernodeScore("s", ("a", "b"), 2, *each) for each in given)
    graph = dataclasses.replace(summary.graphs[0], supernode_scores=scores)
    alike, together = report_text._score_lines(graph)
    assert alike.strip() == (
        "1 supernode: effects of removing two members have a mean cosine of 0.90, those of a "
        "member and another feature of its layers 0.80"
    )
    assert together.strip().startswith("2 supernodes: removing all members is 30 % off the sum")
    assert not [*report_text._score_lines(dataclasses.replace(graph, supernode_scores=()))]
