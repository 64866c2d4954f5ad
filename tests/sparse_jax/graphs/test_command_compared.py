"""The command on two models: ratios and key edges are those of their definitions."""

import json

import jax
import numpy as np
import pytest

import lm_jax
from lm_jax.run.results import load_result
from lm_jax.study import frame
from sparse_jax import transcoders
from sparse_jax.gates import model as sparse_model
from sparse_jax.graphs import attribute, graph_json
from sparse_jax.graphs.influence import FEATURE
from sparse_jax.studies.graphs import labels
from sparse_jax.studies.graphs.results import GraphSummary
from sparse_jax.studies.graphs.settings import COMPARED
from tests.sparse_jax.graphs.small_command import BARE, PROMPTS, at, run, small

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("few_are_alike")]


def check_key_edge(graph, pruned, key_edge):
    """The strongest kept edge of an earlier feature to the first logit, by its definition."""
    nodes = graph.nodes.to_pylist()
    last = max(row["position"] for row in nodes if row["kind"] == "token")
    logit = next(i for i, row in enumerate(nodes) if row["kind"] == "logit")
    r = graph.row_nodes.tolist().index(logit)
    earlier = {
        s: abs(graph.adjacency[r, s])
        for s in np.flatnonzero(pruned.kept_RS[r])
        if nodes[s]["kind"] == FEATURE and nodes[s]["position"] < last
    }
    if not earlier:
        assert key_edge is None
        return
    source = max(earlier, key=lambda s: earlier[s])
    row = nodes[source]
    assert key_edge.source == f"{row['layer']}_{row['feature']}_{row['position']}"
    assert key_edge.weight == graph.adjacency[r, source]
    score_LNTS = graph.mediation(int(source), logit).astype(np.float64)
    assert [(c.component, c.fraction) for c in key_edge.carriers] == [
        *(("heads", 0.8), ("heads", 0.9), ("pairs", 0.8), ("pairs", 0.9))
    ]
    for each in key_edge.carriers:
        shares = score_LNTS.sum((2, 3)) if each.component == "heads" else score_LNTS
        sorted_C = np.sort(np.abs(shares).ravel())[::-1]
        reached = np.cumsum(sorted_C) >= each.fraction * sorted_C.sum()
        assert each.needed == 1 + np.argmax(reached)


# As many tokens as the first.
UNANSWERED = "After the lunch , Tom and Anna went to the park . Tom gave a ball to"


def written(folder, sources):
    """A file of the prompts, as if two said the same, and the token that both graphs explain.

    Right is whatever either model answers, of the third nothing.
    """
    lines, targets = [], {}
    for text in PROMPTS:
        logits = {role: next_logits(model, text) for role, model in sources.items()}
        right = sorted({int(logits_V.argmax()) for logits_V in logits.values()})
        both = sum(jax.nn.log_softmax(logits_V) for logits_V in logits.values())
        targets[text] = max(right, key=lambda token: both[token])
        decode = sources["dense"].tokenizer.decode
        answers = [f" {decode([token])}" for token in right]
        lines.append({"prompt": text, "meaning": "a gift", "kind": "ioi", "answers": answers})
    lines.append({"prompt": UNANSWERED, "slug": "unanswered"})
    path = folder / "mine.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    return path, targets


def next_logits(model, text):
    tokens = np.asarray([model_tokens(model, text)])
    if hasattr(model, "base"):
        return model.forward(tokens).logits[0, -1]
    return lm_jax.forward(model.params, tokens, model.cfg).logits[0, -1]


def test_two_models_are_compared_as_numpy_compares_them(models, tmp_path, capsys):
    folder = tmp_path / "run"
    asked = [f"--dense={models / 'dense'}", f"--dense_transcoder={models / 'dense_clt'}"]
    asked += [f"--sparse={models / 'sparse'}", f"--sparse_transcoder={models / 'sparse_clt'}"]
    sources = {
        "dense": lm_jax.load_pretrained(models / "dense"),
        "sparse": sparse_model.load(models / "sparse" / "model"),
    }
    file, targets = written(tmp_path, sources)
    asked += [f"--prompts={file}"]
    asked += [*small(models), *BARE, "--config.corpus.source=", "--config.mediated=0"]
    assert run(*asked, at(folder)) == 0
    out = capsys.readouterr().out
    summary = load_result(folder / frame.SUMMARY, GraphSummary)
    assert [each.gated for each in summary.models] == [False, True]
    check_compared(summary, sources, targets)
    counts, means, made, edges, apart_counts, heads = {}, {}, {}, {}, {}, {}
    for role, model in sources.items():
        transcoder, _ = transcoders.load(models / f"{role}_clt")
        mass_PC, count_P, apart_P = [], [], []
        edges |= {(role, each): np.zeros(2, int) for each in ("any", "different")}
        for text in PROMPTS:
            tokens = model_tokens(model, text)
            graph = attribute(model, transcoder, tokens, targets=(targets[text],))
            made[role, text] = graph
            pruned = graph.prune()
            rows, columns = np.nonzero(pruned.kept_RS)
            pairs = np.stack([columns, graph.row_nodes[rows]], 1)
            batches = [np.asarray(each.score_XLNTS) for each in graph.mediations(pairs)]
            score = np.concatenate(batches).astype(np.float64)
            heads[role, text] = np.abs(score).sum((0, 3, 4)).ravel()
            share_XC = np.sort(np.abs(score.reshape(len(score), -1)), 1)[:, ::-1]
            position_N = graph.nodes["position"].to_numpy()
            apart_X = position_N[pairs[:, 0]] != position_N[pairs[:, 1]]
            has_X = share_XC[:, 0] > 0
            # Nothing but attention leads from one position to another.
            assert has_X[apart_X].all()
            edges[role, "any"] += len(pairs), (~has_X).sum()
            edges[role, "different"] += apart_X.sum(), 0
            share_XC = share_XC[has_X]
            mass_XC = np.cumsum(share_XC, 1) / share_XC.sum(1, keepdims=True)
            apart_P.append((mass_XC[apart_X[has_X]] < 0.9).sum(1).mean() + 1)
            # Of all pairs, half are not causal and have no share: the count is that of the rest.
            mass_PC.append(mass_XC.mean(0))
            count_P.append((mass_XC < 0.9).sum(1).mean() + 1)
        counts[role], apart_counts[role] = np.array(count_P), np.mean(apart_P)
        longest = max(map(len, mass_PC))
        ends = [np.pad(m, (0, longest - len(m)), constant_values=1.0) for m in mass_PC]
        means[role] = np.mean(ends, 0)
    absolute = [r for r in summary.ratios if (r.component, r.sign) == ("pairs", "absolute")]
    ratio, apart = absolute
    assert (ratio.positions, apart.positions) == ("any", "different")
    assert ratio.paper == 16.1
    assert ratio.per_edge.n == ratio.of_mean.n == len(PROMPTS)
    wanted = counts["dense"].mean() / counts["sparse"].mean()
    np.testing.assert_allclose(ratio.per_edge.estimate, wanted, rtol=1e-12)
    wanted = apart_counts["dense"] / apart_counts["sparse"]
    np.testing.assert_allclose(apart.per_edge.estimate, wanted, rtol=1e-12)
    for each in absolute:
        for role in COMPARED:
            counted = getattr(each, role)
            assert [counted.total, counted.unmediated] == edges[role, each.positions].tolist()
    assert ratio.sparse.unmediated > 0
    assert not ratio.per_edge.bounded and "(n = 2: no interval)" in out
    # Between the counts whose masses are below and above.
    reached = {role: int(np.argmax(mean_C >= 0.9)) for role, mean_C in means.items()}
    masses = {
        each.role: each.needed_of_mean.estimate
        for each in summary.masses
        if (each.component, each.sign, each.positions) == ("pairs", "absolute", "any")
    }
    for role, k in reached.items():
        assert k <= masses[role] <= k + 1
    np.testing.assert_allclose(
        ratio.of_mean.estimate, masses["dense"] / masses["sparse"], rtol=1e-12
    )
    for result in (each for each in summary.graphs if each.slug != "unanswered"):
        graph = made[result.role, result.prompt]
        check_key_edge(graph, graph.prune(), result.key_edge)
        share_C = heads[result.role, result.prompt]
        np.testing.assert_allclose(result.head_shares, share_C / share_C.sum(), rtol=1e-5)
    assert any(result.key_edge for result in summary.graphs)
    assert "times as many as the sparse one" in out
    # One meaning has no interval.
    assert [each.role for each in summary.stability] == [*COMPARED, "sparse minus dense"]
    assert all(each.within is None for each in summary.stability)
    left_out = f"{ratio.sparse.unmediated:,} of {ratio.sparse.total:,}"
    assert f"edges of the dense model, {left_out} of the sparse one" in out
    check_labels(summary, folder, tmp_path, [*asked, at(folder), "--resume=force"])


def check_compared(summary, sources, targets):
    """Prompts that both models answer rightly count, by graphs of one token."""
    decode = sources["dense"].tokenizer.decode
    *counted, unanswered = summary.compared
    assert [each.target for each in counted] == [decode([targets[text]]) for text in PROMPTS]
    for each, text in zip(counted, PROMPTS, strict=True):
        assert not each.why
        for role, model in sources.items():
            assert each.answers[role] == decode([int(next_logits(model, text).argmax())])
    assert unanswered.why.startswith("it has no right answer") and not unanswered.target
    for each in summary.graphs:
        if each.slug != "unanswered":
            assert [node.id for node in each.logits] == [targets[each.prompt]]


def check_labels(summary, folder, files, asked):
    """Each model has labels of its own, and the files that the command writes are read back."""
    own = {role: {} for role in COMPARED}
    for each in summary.graphs:
        for node in graph_json.read(folder / each.file)["nodes"]:
            if (key := graph_json.feature_of(node)) is not None:
                own[each.role][key] = f"of the {each.role} model"
    assert set(own["dense"]) & set(own["sparse"])
    for role, known in own.items():
        (files / f"{role}.json").write_text(json.dumps(labels.to_json(known)), "utf-8")
    assert run(*asked, *(f"--{role}_labels={files / role}.json" for role in own)) == 0
    for role, known in own.items():
        assert labels.read_labels(str(folder / f"labels_{role}.json")) == known
    for each in summary.graphs:
        document = graph_json.read(folder / each.file)
        named = {node["clerp"] for node in document["nodes"] if graph_json.feature_of(node)}
        assert named == {f"of the {each.role} model"}


def model_tokens(model, text):
    tokenizer = (model.base if hasattr(model, "base") else model).tokenizer
    return tokenizer.encode(text)
