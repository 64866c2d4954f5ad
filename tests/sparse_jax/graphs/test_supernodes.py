"""Proposed supernodes: planted groups are found, and every pair of a group is alike and near."""

import numpy as np
import pytest

from lm_jax.errors import UsageError
from sparse_jax.graphs import graph_json, supernodes
from tools.bench.graph_documents import synthetic


def planted():
    """Features a, b of layers 0, 1 and c, d of layer 1, which read and write in pairs; e alone."""

    def feature(name, layer, index, label=""):
        both = layer + index
        return {
            "node_id": name,
            "feature": both * (both + 1) // 2 + index,
            "layer": str(layer),
            "ctx_idx": 0,
            "feature_type": "cross layer transcoder",
            "jsNodeId": name,
            "clerp": label,
        }

    tokens = [
        {**feature(f"E{k}", 0, 0), "feature_type": "embedding", "layer": "E", "clerp": f"tok{k}"}
        for k in range(2)
    ]
    logits = [
        {**feature(f"out{k}", 0, k), "feature_type": "logit", "layer": "3", "clerp": f"Output {k}"}
        for k in range(2)
    ]
    features = [feature(*one) for one in (("a", 0, 1), ("b", 1, 2), ("c", 1, 3), ("d", 1, 4))]
    features.append(feature("e", 2, 5))
    links = [
        *[("E0", "a", 1.0), ("E0", "b", 3.0), ("E1", "c", 1.0), ("E1", "d", 0.5)],
        *[("a", "out0", 1.0), ("b", "out0", 2.0), ("c", "out1", -1.0), ("d", "out1", -2.0)],
        *[("E0", "e", 1.0), ("E1", "e", 1.0), ("e", "out0", 1.0), ("e", "out1", -1.0)],
    ]
    return {
        "metadata": {"slug": "x", "scan": "y", "prompt": "t", "prompt_tokens": ["t"]},
        "qParams": {},
        "nodes": [*tokens, *features, *logits],
        "links": [dict(zip(("source", "target", "weight"), one, strict=True)) for one in links],
    }


def members(proposals):
    return {frozenset(ids) for _, *ids in proposals}


def test_planted_groups_are_found_and_named():
    document = planted()
    graph_json.check(document, "planted")
    assert supernodes.propose(document, similarity=0.9) == [
        ["layers 0–1 to Output 0", "a", "b"],
        ["layer 1 to Output 1", "c", "d"],
    ]


def test_a_band_of_layers_keeps_features_apart():
    assert members(supernodes.propose(planted(), band=0, similarity=0.9)) == {frozenset("cd")}
    # e reads both tokens and writes to both logits: its cosine with each other feature is .71.
    assert members(supernodes.propose(planted(), band=0, similarity=0.7)) == {frozenset("cd")}
    # e is two layers above a.
    assert members(supernodes.propose(planted(), band=1, similarity=0.7)) == {
        frozenset("ab"),
        frozenset("cde"),
    }


def test_decoders_join_and_part():
    one, other, third = np.eye(3)
    # (1 + 1 + 0) / 3 for a and b; (1 + 1 + 1) / 3 for c and d.
    decoders = {(0, 1): one, (1, 2): other, (1, 3): one, (1, 4): one, (2, 5): third}
    assert members(supernodes.propose(planted(), decoders=decoders, similarity=0.9)) == {
        frozenset("cd")
    }
    assert members(supernodes.propose(planted(), decoders=decoders, similarity=0.66)) == {
        frozenset("ab"),
        frozenset("cd"),
    }
    # Those of b are not given: links decide.
    without = {key: value for key, value in decoders.items() if key != (1, 2)}
    assert frozenset("ab") in members(
        supernodes.propose(planted(), decoders=without, similarity=0.9)
    )


def test_the_order_of_nodes_and_links_does_not_matter():
    document = synthetic(features=60, links=400, seed=3)
    shuffled = dict(document)
    rng = np.random.default_rng(0)
    for key in ("nodes", "links"):
        shuffled[key] = [document[key][i] for i in rng.permutation(len(document[key]))]
    options = {"similarity": 0.2, "band": 2}
    proposals = supernodes.propose(document, **options)
    assert len(proposals) > 3
    assert proposals == supernodes.propose(shuffled, **options)
    labels = [label for label, *_ in proposals]
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize("seed", range(3))
def test_every_pair_of_a_group_is_near_and_alike(seed):
    document = synthetic(features=50, links=300, layers=5, seed=seed)
    similarity, band = 0.3, 1
    node = {each["node_id"]: each for each in document["nodes"]}
    total = dict.fromkeys(node, 0.0)
    for link in document["links"]:
        total[link["target"]] += abs(link["weight"])
    reads, writes = ({name: {} for name in node} for _ in range(2))
    for link in document["links"]:
        reads[link["target"]][link["source"]] = link["weight"]
        writes[link["source"]][link["target"]] = link["weight"] / total[link["target"]]

    def cosine(a, b):
        norms = np.sqrt(sum(x * x for x in a.values()) * sum(x * x for x in b.values()))
        return sum(a[key] * b[key] for key in a.keys() & b.keys()) / norms if norms else 0.0

    proposals = supernodes.propose(document, similarity=similarity, band=band)
    assert proposals
    seen = [name for _, *ids in proposals for name in ids]
    assert len(seen) == len(set(seen))
    for _, *ids in proposals:
        assert len(ids) > 1
        for a in ids:
            for b in ids:
                if a != b:
                    assert abs(int(node[a]["layer"]) - int(node[b]["layer"])) <= band
                    mean = (cosine(reads[a], reads[b]) + cosine(writes[a], writes[b])) / 2
                    # A sum of 600 products of unit vectors.
                    assert mean >= similarity - 1e-9 - 600 * np.finfo(float).eps


def test_few_features_and_wrong_options():
    document = planted()
    document["nodes"] = [n for n in document["nodes"] if n["node_id"] not in "bcde"]
    names = {n["node_id"] for n in document["nodes"]}
    document["links"] = [
        link for link in document["links"] if {link["source"], link["target"]} <= names
    ]
    assert supernodes.propose(document) == []
    with pytest.raises(UsageError, match="band = -1"):
        supernodes.propose(planted(), band=-1)
    with pytest.raises(UsageError, match=r"similarity = 0\.0"):
        supernodes.propose(planted(), similarity=0.0)
