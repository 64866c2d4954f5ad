"""The page of one attribution graph: an offline HTML file with a viewer.

    (folder / "graph.html").write_text(build(graph_json.read(folder / "graph.json")), "utf-8")

The page holds the whole document and measures nothing. Its scripts are `viewer_data.js` (the
graph), `viewer_layout.js` and `viewer_canvas.js` (layers by positions), `viewer_input.js` (pointer,
keyboard), `viewer_measured.js` (interventions), `viewer_panel.js` (what is selected),
`viewer_groups.js` (pinned nodes, supernodes) and `viewer_state.js` (saving, loading, the start).
Tables of the strongest nodes and edges work without scripts. Prose and controls are in
`viewer.html.j2`.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
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
from sparse_jax.graphs.graph_document import edge_shares
from sparse_jax.graphs.influence import ERROR, FEATURE, LOGIT, TOKEN
from sparse_jax.graphs.neurons import NEURON
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
_LONGEST_TITLE = 100
_SETTINGS = ("info", "generation_settings", "pruning_settings", "transcoder_list")


@dataclasses.dataclass(frozen=True)
class FeatureExamples:
    """What the panel of a feature shows of a corpus.

    Attributes:
      texts: those with the largest activations, largest first.
      top_logits: tokens whose logits its decoders raise most, as text; of a node with an activation
        below 0, those whose logits they lower.
      bottom_logits: tokens whose logits they lower most.
      lowest: texts with the lowest activations, lowest first, for nodes with one below 0.
    """

    texts: Sequence[Text]
    top_logits: Sequence[str] = ()
    bottom_logits: Sequence[str] = ()
    lowest: Sequence[Text] = ()


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
    viewer = _report(document, lambda: _sections(document, features or {}, proposals))
    return _page_text(viewer, provenance or {})


def of_folder(folder: Path, file: str) -> Report:
    """The viewer of a graph of a work folder; its sections are read when they are asked for.

    Args:
      folder: work folder.
      file: the graph in it.
    """
    document = graph_json.read(folder / file)

    def sections() -> list[Section]:
        proposals = read_json(folder / proposals_file(file))
        return _sections(document, _read_examples(folder, document), proposals)

    return _report(document, sections)


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


def _report(document: Mapping[str, Any], sections: Callable[[], list[Section]]) -> Report:
    metadata = document["metadata"]
    about = {"graph": metadata["slug"], "model": metadata["scan"], "prompt": metadata["prompt"]}
    about |= {key: metadata[key] for key in _SETTINGS if key in metadata}
    return Report(
        f"Attribution graph of “{_cut(_inline(metadata['prompt']))}”",
        sections,
        lead=[_lead(document), *_scores(metadata)],
        lines=(),
        facts=about,
        script=report.script("sparse_jax.studies.graphs", *_SCRIPTS),
        style=importlib.resources.files("sparse_jax.studies.graphs")
        .joinpath("viewer.css")
        .read_text("utf-8"),
    )


def _sections(
    document: Mapping[str, Any],
    features: Mapping[tuple[int, int], FeatureExamples],
    proposals: Sequence[Sequence[str]],
) -> list[Section]:
    share_E = edge_shares(document)
    return [
        _viewer(document, share_E, features, proposals),
        *([_interventions(document)] if document.get("interventions") else []),
        *([_groups(document, proposals)] if document.get("group_interventions") else []),
        *([_attention(document)] if document.get("qk") else []),
        _strongest(document, share_E),
        section("Terms", _PROSE("terms")),
    ]


def _read_examples(
    folder: Path, document: Mapping[str, Any]
) -> dict[tuple[int, int], FeatureExamples]:
    """What the panels of all features of a graph show, from the files of these features."""
    own = folder / FEATURES / document["metadata"]["scan"]
    keys = {key for node in document["nodes"] if (key := graph_json.feature_of(node))}
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
    features: Mapping[tuple[int, int], FeatureExamples],
    proposals: Sequence[Sequence[str]],
) -> Section:
    nodes = document["nodes"]
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
        "examples": examples,
        "proposals": [list(group) for group in proposals],
    }
    return section("Explore the graph", _PROSE("viewer", json_script(data)))


def _texts_json(texts: Sequence[Text]) -> list[dict[str, Any]]:
    return [
        {"tokens": list(text.tokens), "activations": [float(x) for x in text.activations]}
        for text in texts
    ]


def _lead(document: Mapping[str, Any]) -> Markup:
    metadata, kinds = document["metadata"], [graph_json.kind(n) for n in document["nodes"]]
    pruning = metadata.get("pruning_settings") or {}
    return _PROSE(
        "lead",
        neurons=any(node["feature_type"] == NEURON for node in document["nodes"]),
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


def _interventions(document: Mapping[str, Any]) -> Section:
    names = _Names(document)
    rows = [
        [names[one["source"]], one["factor"], names[effect["target"]]]
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
    labels = {frozenset(ids): label for label, *ids in proposals}
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


def _attention(document: Mapping[str, Any]) -> Section:
    names = _Names(document)
    rows = [
        [
            f"L{one['layer']}H{one['head']}",
            *(one[name] for name in ("query", "key", "score")),
            *(names[query], names[key], term),
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


def _strongest(document: Mapping[str, Any], share_E: np.ndarray) -> Section:
    names, nodes, links = _Names(document), document["nodes"], document["links"]
    ranked = sorted(
        (node for node in nodes if node.get("influence") is not None),
        key=lambda node: (node["influence"], node["node_id"]),
    )
    tokens = document["metadata"]["prompt_tokens"]
    node_rows = [
        [
            names[node["node_id"]],
            graph_json.kind(node),
            f"{node['ctx_idx']} “{_inline(tokens[node['ctx_idx']])}”",
            node.get("activation"),
            100 * node["influence"],
        ]
        for node in ranked[:_LISTED]
    ]
    edge_rows = [
        [names[links[e]["source"]], names[links[e]["target"]], links[e]["weight"], 100 * share_E[e]]
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


class _Names:
    """Names of nodes for people, by id."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        nodes = [*document["nodes"], *document.get("qk_only_nodes", [])]
        self._nodes = {node["node_id"]: node for node in nodes}
        self._tokens = document["metadata"]["prompt_tokens"]

    def __getitem__(self, name: str) -> str:
        node = self._nodes[name]
        token = _inline(self._tokens[node["ctx_idx"]])
        match graph_json.kind(node):
            case "token":
                return f"token “{token}” ({node['ctx_idx']})"
            case "logit" | "bias":
                return node["clerp"] or name
            case "error":
                return f"error of layer {node['layer']} at “{token}” ({node['ctx_idx']})"
        key = graph_json.feature_of(node)
        what = f"feature {key[1] if key else node['feature']} of layer {node['layer']}"
        label = f"{node['clerp']}, " if node["clerp"] else ""
        return f"{label}{what} at “{token}” ({node['ctx_idx']})"


def _next_tokens(top: Sequence[Mapping[str, Any]]) -> str:
    """The most probable next tokens with their probabilities."""
    each = [f"“{_inline(one['token'])}” {100 * one['probability']:.1f} %" for one in top[:_TOKENS]]
    return ", ".join(each)


def _cut(text: str) -> str:
    """The end of a long prompt, which its logits follow."""
    return text if len(text) <= _LONGEST_TITLE else f"…{text[1 - _LONGEST_TITLE :]}"


def _inline(text: str) -> str:
    """A token or prompt on one line."""
    return text.replace("\n", "↵").strip(" ") or "␣"
