"""The page of one attribution graph: an offline HTML file with a viewer.

    (folder / "graph.html").write_text(build(graph_json.read(folder / "graph.json")), "utf-8")

The page holds the whole document and measures nothing. Its scripts are `viewer_data.js` (the
graph), `viewer_layout.js` and `viewer_canvas.js` (layers by positions), `viewer_input.js` (pointer,
keyboard), `viewer_measured.js` (interventions), `viewer_panel.js` (what is selected),
`viewer_groups.js` (pinned nodes, supernodes) and `viewer_state.js` (saving, loading, the start).
Tables of the strongest nodes and edges work without scripts. Prose and controls are in
`viewer.html.j2`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import functools
import importlib.resources
from pathlib import Path
from typing import Any

from markupsafe import Markup
import numpy as np

from lm_jax import report
from lm_jax.report import Column, Report, Section, section, table
from lm_jax.report.markup import json_script
from lm_jax.report.prose import Prose
from lm_jax.run.files import read_json, write_text
from sparse_jax.graphs import graph_json, supernodes
from sparse_jax.graphs.features import Text
from sparse_jax.graphs.graph_document import edge_shares, likeliest_logit
from sparse_jax.graphs.influence import ERROR, FEATURE, LOGIT, TOKEN
from sparse_jax.graphs.paths import StrongestPath
from sparse_jax.studies.graphs import names
from sparse_jax.studies.graphs.names import FeatureExamples, Names
from sparse_jax.studies.graphs.results import FEATURES, proposals_file

MODE_NAMES = {"frozen": "all", "attention_frozen": "attention", "free": "nothing"}
_PROSE = Prose("sparse_jax.studies.graphs", "viewer.html.j2")
_SCRIPTS = (
    "viewer_data.js",
    "viewer_layout.js",
    "viewer_canvas.js",
    "viewer_input.js",
    "viewer_measured.js",
    "viewer_panel.js",
    "viewer_groups.js",
    "viewer_state.js",
)
_LISTED, _TOKENS = 20, 3
_SETTINGS = ("info", "generation_settings", "pruning_settings", "transcoder_list")


def build(
    document: Mapping[str, Any],
    *,
    features: Mapping[tuple[int, int], FeatureExamples] | None = None,
    proposals: Sequence[Sequence[str]] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> str:
    """The HTML text of the page.

    Args:
      document: graph as `graph_json` writes it. `metadata.scores`, a mapping of names to numbers,
        is shown if it is there; by convention its names are such as unpruned and pruned.
      features: texts of features, by layer and index.
      proposals: supernodes, each a label and ids; those of `supernodes.propose` by default.
      provenance: commit, versions and the like.

    Raises:
      BadInputError: the document does not pass `graph_json.check`.
    """
    graph_json.check(document, "the graph")
    if proposals is None:
        proposals = supernodes.propose(document)
    known, path = features or {}, names.find_path(document)
    sections = functools.partial(_sections, document, path, known, proposals)
    viewer = _report(document, names.answer(document, path, known), sections)
    return _page_text(viewer, provenance or {})


def of_folder(folder: Path, file: str) -> Report:
    """The viewer of a graph of a work folder; its sections are read when they are asked for.

    Args:
      folder: work folder.
      file: the graph in it.
    """
    document = graph_json.read(folder / file)
    path = names.find_path(document)

    def sections() -> list[Section]:
        keys = {key for node in document["nodes"] if (key := graph_json.feature_of(node))}
        proposals = read_json(folder / proposals_file(file))
        return _sections(document, path, _read_examples(folder, document, keys), proposals)

    return _report(document, answer(folder, document, path), sections)


def answer(folder: Path, document: Mapping[str, Any], path: StrongestPath | None) -> str:
    """The sentence that opens a page and the text of the terminal (`names.answer`).

    Args:
      folder: work folder.
      document: a graph of it.
      path: strongest path of the graph.
    """
    keys = names.features_on(document, path)
    return names.answer(document, path, _read_examples(folder, document, keys))


def answer_of_file(folder: Path, file: str) -> str:
    """`answer` of a graph that is not read yet.

    Args:
      folder: work folder.
      file: the graph in it.
    """
    document = graph_json.read(folder / file)
    return answer(folder, document, names.find_path(document))


def write(folder: Path, file: str, provenance: Mapping[str, Any]) -> None:
    """Writes the viewer of a graph of a work folder beside it.

    Args:
      folder: work folder.
      file: the graph in it.
      provenance: commit, versions and the like.
    """
    text = _page_text(of_folder(folder, file), provenance)
    write_text((folder / file).with_suffix(".html"), text)


def _page_text(viewer: Report, provenance: Mapping[str, Any]) -> str:
    return report.page(
        viewer.title,
        viewer.sections(),
        provenance=dict(viewer.facts) | dict(provenance),
        lead=viewer.lead,
        script=viewer.script,
        style=viewer.style,
    )


def _report(
    document: Mapping[str, Any], sentence: str, sections: Callable[[], list[Section]]
) -> Report:
    metadata = document["metadata"]
    about = {"graph": metadata["slug"], "model": metadata["scan"], "prompt": metadata["prompt"]}
    about |= {key: metadata[key] for key in _SETTINGS if metadata.get(key)}
    return Report(
        f"Attribution graph of “{names.prompt_end(metadata['prompt_tokens'], names.TITLE_END)}”",
        sections,
        lead=[report.verdict(sentence)],
        lines=(),
        facts=about,
        script=report.script("sparse_jax.studies.graphs", *_SCRIPTS),
        style=importlib.resources.files("sparse_jax.studies.graphs")
        .joinpath("viewer.css")
        .read_text("utf-8"),
    )


def _sections(
    document: Mapping[str, Any],
    path: StrongestPath | None,
    features: Mapping[tuple[int, int], FeatureExamples],
    proposals: Sequence[Sequence[str]],
) -> list[Section]:
    share_E, own = edge_shares(document), Names(document, features)
    return [
        _viewer(document, share_E, path, features, proposals),
        *([_interventions(document, own)] if document.get("interventions") else []),
        *([_groups(document, proposals)] if document.get("group_interventions") else []),
        *([_as_one(document, proposals)] if document.get("group_scores") else []),
        *([_attention(document, own)] if document.get("qk") else []),
        _strongest(document, share_E, own),
        section("What the graph holds", _holds(document), *_scores(document["metadata"])),
        section("Terms", _PROSE("terms")),
    ]


def _read_examples(
    folder: Path, document: Mapping[str, Any], keys: Collection[tuple[int, int]]
) -> dict[tuple[int, int], FeatureExamples]:
    """What the panels of features of a graph show, from the files of these features."""
    own = folder / FEATURES / document["metadata"]["scan"]
    return {
        key: _examples(read_json(own / f"{graph_json.pair_number(*key)}.json"))
        for key in sorted(keys)
    }


def _examples(stored: Mapping[str, Any]) -> FeatureExamples:
    highest, *lowest = (
        [Text(each["tokens"], each["tokens_acts_list"]) for each in group["examples"]]
        for group in stored["examples_quantiles"]
    )
    return FeatureExamples(highest, stored["top_logits"], stored["bottom_logits"], *lowest)


def _viewer(
    document: Mapping[str, Any],
    share_E: np.ndarray,
    path: StrongestPath | None,
    features: Mapping[tuple[int, int], FeatureExamples],
    proposals: Sequence[Sequence[str]],
) -> Section:
    nodes, own = document["nodes"], Names(document, features)
    keys = [graph_json.feature_of(node) for node in nodes]
    examples = {
        f"{key[0]}_{key[1]}": {
            "texts": _texts_json(features[key].texts),
            "lowest": _texts_json(features[key].lowest),
            "topLogits": list(features[key].top_logits),
            "bottomLogits": list(features[key].bottom_logits),
        }
        for key in sorted({key for key in keys if key in features})
    }
    data = {
        "document": document,
        "kinds": [graph_json.kind(node) for node in nodes],
        "indices": [key and key[1] for key in keys],
        "shares": [round(float(share), 7) for share in share_E],
        "names": [own.short(node["node_id"]) for node in nodes],
        "otherNames": {
            node["node_id"]: own[node["node_id"]] for node in document.get("qk_only_nodes", [])
        },
        "path": [] if path is None else [*path.sources, likeliest_logit(document)],
        "examples": examples,
        "proposals": [list(group) for group in proposals],
    }
    return section("Explore the graph", _PROSE("viewer", json_script(data)))


def _texts_json(texts: Sequence[Text]) -> list[dict[str, Any]]:
    return [
        {"tokens": list(text.tokens), "activations": [float(x) for x in text.activations]}
        for text in texts
    ]


def _holds(document: Mapping[str, Any]) -> Markup:
    metadata, kinds = document["metadata"], [graph_json.kind(n) for n in document["nodes"]]
    pruning = metadata.get("pruning_settings") or {}
    return _PROSE(
        "holds",
        neurons=names.has_neurons(document),
        model=metadata["scan"],
        tokens=len(metadata["prompt_tokens"]),
        counts={kind: kinds.count(kind) for kind in (FEATURE, ERROR, TOKEN, LOGIT)},
        links=len(document["links"]),
        node_threshold=pruning.get("node_threshold", metadata.get("node_threshold")),
        edge_threshold=pruning.get("edge_threshold"),
    )


def _scores(metadata: Mapping[str, Any]) -> list[Markup]:
    scores = metadata.get("scores")
    if not scores:
        return []
    names = list(dict.fromkeys(name for one in scores.values() for name in one))
    rows = [[name, *(one.get(name) for one in scores.values())] for name in names]
    heads = [name.replace("_", " ") for name in scores]
    rows = [[row[0].replace("_", " "), *row[1:]] for row in rows]
    columns = ["Score", *(Column(head, ".3f") for head in heads)]
    return [table(columns, rows, caption=_PROSE("scores"))]


def _interventions(document: Mapping[str, Any], own: Names) -> Section:
    rows = [
        [own[one["source"]], one["factor"], own[effect["target"]]]
        + [effect[name] for name in graph_json.EFFECTS]
        for one in document["interventions"]
        for effect in one["effects"]
    ]
    columns = [
        *("Source", "Times", "Target"),
        *("Predicted", "All frozen", "Attention frozen", "Free"),
    ]
    return section(
        "Interventions",
        _PROSE("interventions"),
        table(columns, rows, caption=_PROSE("interventions_caption"), n=len(rows)),
    )


def _groups(document: Mapping[str, Any], proposals: Sequence[Sequence[str]]) -> Section:
    labels = _labels(proposals)
    rows = [
        [
            labels.get(frozenset(one["members"]), ", ".join(one["members"])),
            *(len(one["members"]), one["factor"], MODE_NAMES[outcome["mode"]]),
            *(one["predicted"], outcome["change"], 100 * outcome["probability"]),
            _next_tokens(outcome["top"]),
        ]
        for one in document["group_interventions"]
        for outcome in one["outcomes"]
    ]
    target = next(node for node in document["nodes"] if graph_json.kind(node) == LOGIT)
    columns = [
        *("Supernode", "Nodes", "Times", "Frozen", "Predicted", "Measured"),
        *(Column("Probability, %", ".1f"), "Next tokens"),
    ]
    return section(
        "Interventions on supernodes",
        _PROSE("groups"),
        table(columns, rows, caption=_PROSE("groups_caption", target["clerp"]), n=len(rows)),
    )


def _as_one(document: Mapping[str, Any], proposals: Sequence[Sequence[str]]) -> Section:
    labels = _labels(proposals)
    rows = [
        [
            labels.get(frozenset(one["members"]), ", ".join(one["members"])),
            *(len(one["members"]), one["removed"], one["within"], one["outside"]),
            None if one["off"] is None else 100 * one["off"],
        ]
        for one in document["group_scores"]
    ]
    columns = [
        *("Supernode", "Nodes", "Removed", Column("Alike", ".2f"), Column("Others alike", ".2f")),
        Column("Off the sum, %", ".1f"),
    ]
    return section(
        "Do supernodes act as one?",
        _PROSE("as_one"),
        table(columns, rows, caption=_PROSE("as_one_caption"), n=len(rows)),
    )


def _labels(proposals: Sequence[Sequence[str]]) -> dict[frozenset[str], str]:
    """Labels of proposed supernodes, by their members."""
    return {frozenset(ids): label for label, *ids in proposals}


def _attention(document: Mapping[str, Any], own: Names) -> Section:
    rows = [
        [
            f"L{one['layer']}H{one['head']}",
            *(one[name] for name in ("query", "key", "score")),
            *(own[query], own[key], term),
        ]
        for one in document["qk"]
        for query, key, term in one["pair_wise_contributors"]
    ]
    columns = ["Head", "Query", "Key", "Score", "At the query", "At the key", "Term"]
    return section(
        "Attention scores",
        _PROSE("attention"),
        table(columns, rows, caption=_PROSE("attention_caption"), n=len(rows)),
    )


def _strongest(document: Mapping[str, Any], share_E: np.ndarray, own: Names) -> Section:
    nodes, links = document["nodes"], document["links"]
    ranked = sorted(
        (node for node in nodes if node.get("influence") is not None),
        key=lambda node: (node["influence"], node["node_id"]),
    )
    tokens = document["metadata"]["prompt_tokens"]
    node_rows = [
        [
            own[node["node_id"]],
            graph_json.kind(node),
            f"{node['ctx_idx']} “{names.inline(tokens[node['ctx_idx']])}”",
            node.get("activation"),
            100 * node["influence"],
        ]
        for node in ranked[:_LISTED]
    ]
    edge_rows = [
        [own[links[e]["source"]], own[links[e]["target"]], links[e]["weight"], 100 * share_E[e]]
        for e in np.argsort(share_E, kind="stable")[:_LISTED]
    ]
    share = Column("Cumulative share, %", ".1f")
    return section(
        "Strongest nodes and edges",
        table(
            ["Node", "Kind", "Position", "Activation", share],
            node_rows,
            caption=_PROSE("strongest_nodes", len(node_rows), len(nodes)),
        ),
        table(
            ["From", "To", "Weight", share],
            edge_rows,
            caption=_PROSE("strongest_edges", len(edge_rows), len(links)),
        ),
    )


def _next_tokens(top: Sequence[Mapping[str, Any]]) -> str:
    """The most probable next tokens with their probabilities."""
    each = [
        f"{names.quoted(one['token'])} {100 * one['probability']:.1f} %" for one in top[:_TOKENS]
    ]
    return ", ".join(each)
