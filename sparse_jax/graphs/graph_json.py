"""Attribution graphs as JSON: the schema of Neuronpedia and circuit-tracer, with extensions.

    metadata, qParams, nodes, links    as those tools read them
    mediation        per link, what heads and pairs of a query and a key carry of it (`Mediated`)
    bias             per target, what is constant in its pre-activation or logit
    interventions    effects of scaling a source, predicted and measured; optional
    group_interventions
                     effects of scaling several sources at once on the first logit; optional
    group_scores     how far groups of sources act as one thing (`groups.GroupScore`); optional
    qk               attention scores by the sources that make them, as `qk_tracing_results` has
                     them; sources that pruning removed are in `qk_only_nodes`; optional

    interventions[i] = {"source": id, "factor": number, "effects": [effect, ...]}
    effect = {"target": id, "predicted": x, "frozen": x, "attention_frozen": x, "free": x}

    group_interventions[i] = {"members": [id, ...], "factor": number, "predicted": x,
                              "outcomes": [outcome, ...]}
    group_scores[i] = {"members": [id, ...], "removed": count,
                       "within": x or null, "outside": x or null, "off": x or null}
    outcome = {"mode": "free", "change": x, "probability": p,
               "top": [{"token": text, "probability": p}, ...]}

The factor multiplies what the source writes. An effect is the change of the target's pre-activation
or logit: as the links predict it, and measured with all that the graph freezes frozen, with
attention alone frozen, and with nothing frozen. Of a group, the change is that of the first logit,
the probability that of its token, and the most probable next tokens follow.

What is written (`document`) and what is read passes the same checks (`check`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import graphlib
import math
import os
from pathlib import Path
import re
import reprlib
import sys
from typing import Any, NoReturn

from lm_jax.errors import BadInputError, CorruptError
from lm_jax.run.files import load_json, write_json
from sparse_jax.graphs.effects import MODES
from sparse_jax.graphs.influence import ERROR, FEATURE, TOKEN

# Of the extensions: the lists of a mediated link with the length of an entry, and the effects.
_SHARES = {"heads": 3, "pairs": 5}
EFFECTS = ("predicted", *MODES)
# Contributors of an entry of a file, and how many nodes each has.
_CONTRIBUTORS = {
    "pair_wise_contributors": 2,
    "top_q_marginal_contributors": 1,
    "top_k_marginal_contributors": 1,
}


def kind(node: Mapping[str, Any]) -> str:
    """Kind of a node: feature (neurons and the like too), error, token, logit or bias."""
    feature_type = node["feature_type"]
    if feature_type in ("logit", "bias"):
        return feature_type
    return TOKEN if feature_type == "embedding" else ERROR if "error" in feature_type else FEATURE


def feature_of(node: Mapping[str, Any]) -> tuple[int, int] | None:
    """Layer and index of a feature node; None where its file does not number features by pairs."""
    number = node["feature"]
    if kind(node) != FEATURE or not isinstance(number, int) or number < 0:
        return None
    both = (math.isqrt(8 * number + 1) - 1) // 2
    index = number - both * (both + 1) // 2
    return (both - index, index) if str(both - index) == str(node["layer"]) else None


def pair_number(layer: int, feature: int) -> int:
    """Cantor's number of a pair, which names a feature in feature files."""
    return (layer + feature) * (layer + feature + 1) // 2 + feature


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    # No math.isfinite: it raises for whole numbers beyond the floats.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max


def _is_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_text, value))


# What a field must be: a test, and its name in a message.
_Fields = Mapping[str, tuple[Callable[[Any], bool], str]]
_TEXT, _TEXTS = (_is_text, "text"), (_is_texts, "list of texts")
_WHOLE, _FINITE = (_is_whole, "whole number"), (_is_finite, "finite number")
_METADATA: _Fields = {"slug": _TEXT, "scan": _TEXT, "prompt_tokens": _TEXTS, "prompt": _TEXT}
_PARAMETERS: _Fields = {
    "pinnedIds": _TEXTS,
    "supernodes": (
        lambda value: isinstance(value, list) and all(each and _is_texts(each) for each in value),
        "list of supernodes, each a label and ids",
    ),
}
_NODE: _Fields = {
    "node_id": _TEXT,
    "feature": (lambda value: value is None or _is_whole(value), "whole number or null"),
    "layer": (lambda value: _is_text(value) or _is_whole(value), "text or whole number"),
    "ctx_idx": _WHOLE,
    "feature_type": _TEXT,
    "jsNodeId": _TEXT,
    "clerp": _TEXT,
}
_MEASURED: _Fields = dict.fromkeys(("activation", "influence", "token_prob"), _FINITE)
_SCORES = ("members", "removed", "within", "outside", "off")
_LINK: _Fields = {"source": _TEXT, "target": _TEXT, "weight": _FINITE}


def _check_fields(
    owner: Any,
    fields: _Fields,
    place: str,
    refuse: Callable[[str], NoReturn],
    *,
    optional: bool = False,
) -> None:
    """Refuses an object without these fields, unless they are optional, or with other types."""
    for name, (is_one, what) in fields.items():
        if not isinstance(owner, Mapping) or name not in owner:
            if optional:
                continue
            refuse(f"{place} has no {name}")
        if not is_one(owner[name]):
            refuse(f"{place}.{name} = {reprlib.repr(owner[name])} is no {what}")


def check(graph: Any, name: str) -> None:
    """Checks a document.

    Raises:
      BadInputError: a field is missing or of the wrong type, an id is doubled or unknown, a number
        is not finite, or links form a cycle; the message names it.
    """

    def refuse(what: str) -> NoReturn:
        raise BadInputError(f"{name}: {what}; export it again")

    if not isinstance(graph, Mapping):
        refuse("it is no JSON object")
    parts = {"metadata": Mapping, "qParams": Mapping, "nodes": list, "links": list}
    for key, container in parts.items():
        if not isinstance(graph.get(key), container):
            refuse(f"{key} is missing or no {'list' if container is list else 'object'}")
    _check_fields(graph["metadata"], _METADATA, "metadata", refuse)
    slug = graph["metadata"]["slug"]
    if not re.fullmatch(r"[A-Za-z0-9_-]+", slug):
        refuse(f"metadata.slug = {slug!r} must be of letters, digits, - and _")
    length = len(graph["metadata"]["prompt_tokens"])
    _check_fields(graph["qParams"], _PARAMETERS, "qParams", refuse, optional=True)
    ids: set[str] = set()
    _check_nodes(graph["nodes"], "nodes", ids, length, refuse)
    inputs: dict[str, set[str]] = {each: set() for each in ids}
    for k, link in enumerate(graph["links"]):
        _check_fields(link, _LINK, f"links[{k}]", refuse)
        for end in ("source", "target"):
            if link[end] not in ids:
                refuse(f"links[{k}].{end} = {link[end]!r} is no node")
        if link["source"] in inputs[link["target"]]:
            refuse(f"two links go from {link['source']!r} to {link['target']!r}")
        inputs[link["target"]].add(link["source"])
    try:
        graphlib.TopologicalSorter(inputs).prepare()
    except graphlib.CycleError as error:
        refuse(f"links form a cycle: {' -> '.join(map(repr, error.args[1]))}")
    _check_extensions(graph, ids, refuse)
    _check_scores(graph, ids, length, refuse)


def _check_nodes(
    nodes: list[Any], name: str, ids: set[str], length: int, refuse: Callable[[str], NoReturn]
) -> None:
    """Checks nodes and adds their ids."""
    for k, node in enumerate(nodes):
        _check_fields(node, _NODE, f"{name}[{k}]", refuse)
        if node["node_id"] in ids:
            refuse(f"two nodes have the id {node['node_id']!r}")
        ids.add(node["node_id"])
        if not 0 <= node["ctx_idx"] < length:
            refuse(f"node {node['node_id']!r} is at position {node['ctx_idx']!r} of {length}")
        if kind(node) in (FEATURE, ERROR) and not re.fullmatch(r"\d+", str(node["layer"])):
            refuse(f"node {node['node_id']!r} has layer = {node['layer']!r}, no whole number")
        measured = {key: node[key] for key in _MEASURED if node.get(key) is not None}
        _check_fields(measured, _MEASURED, f"{name}[{k}]", refuse, optional=True)


def _check_extensions(
    graph: Mapping[str, Any], ids: Collection[str], refuse: Callable[[str], NoReturn]
) -> None:
    def rows(owner: Mapping[str, Any], name: str, place: str, fields: Sequence[str]) -> list[Any]:
        values = owner.get(name, [])
        if not isinstance(values, list):
            refuse(f"{place} is no list")
        for k, row in enumerate(values):
            for field in fields:
                if not isinstance(row, Mapping) or field not in row:
                    refuse(f"{place}[{k}] has no {field}")
        return values

    def check_node(row: Mapping[str, Any], field: str, place: str) -> None:
        if not isinstance(row[field], str) or row[field] not in ids:
            refuse(f"{place}.{field} = {row[field]!r} is no node")

    def check_number(row: Mapping[str, Any], field: str, place: str) -> None:
        if not _is_finite(row[field]):
            refuse(f"{place}.{field} = {row[field]!r} is no finite number")

    for k, row in enumerate(rows(graph, "bias", "bias", ("node_id", "bias"))):
        check_node(row, "node_id", f"bias[{k}]")
        check_number(row, "bias", f"bias[{k}]")
    for k, row in enumerate(rows(graph, "mediation", "mediation", ("source", "target"))):
        for end in ("source", "target"):
            check_node(row, end, f"mediation[{k}]")
        for name, size in _SHARES.items():
            place = f"mediation[{k}].{name}"
            for share in rows(row, name, place, ()):
                if not _is_share(share, size):
                    refuse(f"{place} has {share!r}, not {size - 1} indices and a finite share")
    fields = ("source", "factor", "effects")
    for k, row in enumerate(rows(graph, "interventions", "interventions", fields)):
        place = f"interventions[{k}]"
        check_node(row, "source", place)
        check_number(row, "factor", place)
        for j, effect in enumerate(rows(row, "effects", f"{place}.effects", ("target", *EFFECTS))):
            check_node(effect, "target", f"{place}.effects[{j}]")
            for field in EFFECTS:
                check_number(effect, field, f"{place}.effects[{j}]")
    for k, row in enumerate(rows(graph, "group_interventions", "group_interventions", ())):
        if problem := _group_problem(row, ids):
            refuse(f"group_interventions[{k}] {problem}")
    for k, row in enumerate(rows(graph, "group_scores", "group_scores", _SCORES)):
        if problem := _members_problem(row["members"], ids):
            refuse(f"group_scores[{k}] {problem}")
        if not _is_whole(row["removed"]) or row["removed"] < 2:
            refuse(f"group_scores[{k}].removed = {row['removed']!r} is no number of members")
        for field in _SCORES[2:]:
            if row[field] is not None:
                check_number(row, field, f"group_scores[{k}]")


def _members_problem(members: Any, ids: Collection[str]) -> str:
    """What is wrong with the members of a group; "" if nothing."""
    if not _is_texts(members) or not members:
        return f"has members = {reprlib.repr(members)}, no list of ids"
    for member in members:
        if member not in ids:
            return f"has member {member!r}, which is no node"
    return ""


def _group_problem(entry: Any, ids: Collection[str]) -> str:
    """What is wrong with an intervention on a group; "" if nothing."""
    for name in ("members", "factor", "predicted", "outcomes"):
        if not isinstance(entry, Mapping) or name not in entry:
            return f"has no {name}"
    for name in ("factor", "predicted"):
        if not _is_finite(entry[name]):
            return f"has {name} = {entry[name]!r}, no finite number"
    if problem := _members_problem(entry["members"], ids):
        return problem
    if not isinstance(entry["outcomes"], list | tuple):
        return "has no list outcomes"
    for outcome in entry["outcomes"]:
        if not isinstance(outcome, Mapping) or outcome.get("mode") not in MODES:
            return f"has an outcome without a mode of {', '.join(MODES)}"
        top = outcome.get("top")
        if not isinstance(top, list | tuple) or not all(isinstance(each, Mapping) for each in top):
            return f"has no list top of mode {outcome['mode']}"
        numbers = [outcome.get("change"), outcome.get("probability")]
        numbers += [each.get("probability") for each in top]
        if not all(map(_is_finite, numbers)):
            return f"has an outcome of mode {outcome['mode']} with a value that is no finite number"
        if not all(_is_text(each.get("token")) for each in top):
            return f"has a top token of mode {outcome['mode']} that is no text"
    return ""


def _is_share(share: Any, size: int) -> bool:
    if not isinstance(share, list | tuple) or len(share) != size or not _is_finite(share[-1]):
        return False
    return all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in share[:-1])


def _check_scores(
    graph: Mapping[str, Any], ids: set[str], length: int, refuse: Callable[[str], NoReturn]
) -> None:
    """Checks attention scores, which may name more nodes than links do; adds their ids."""
    for key in ("qk", "qk_only_nodes"):
        if not isinstance(graph.get(key, []), list):
            refuse(f"{key} is no list")
    _check_nodes(graph.get("qk_only_nodes", []), "qk_only_nodes", ids, length, refuse)
    for k, entry in enumerate(graph.get("qk", [])):
        if problem := _score_problem(entry, ids, length):
            refuse(f"qk[{k}] {problem}")


def _score_problem(entry: Any, ids: Collection[str], length: int) -> str:
    """What is wrong with an entry of `qk.as_json`'s form; "" if nothing."""
    places = ("layer", "head", "query", "key")
    for name in (*places, "score", *_CONTRIBUTORS):
        if not isinstance(entry, Mapping) or name not in entry:
            return f"has no {name}"
    for name in places:
        if type(entry[name]) is not int or entry[name] < 0:
            return f"has {name} = {entry[name]!r}"
    if not entry["key"] <= entry["query"] < length:
        return f"has key {entry['key']} and query {entry['query']} of {length} tokens"
    if not _is_finite(entry["score"]):
        return f"has score {entry['score']!r}"
    for name, count in _CONTRIBUTORS.items():
        if not isinstance(entry[name], list):
            return f"has no list {name}"
        for each in entry[name]:
            if not isinstance(each, list | tuple) or len(each) != count + 1:
                return f"has {name} with {each!r}"
            for node in each[:-1]:
                if not isinstance(node, str) or node not in ids:
                    return f"has {name} with {node!r}, which is no node"
            if not _is_finite(each[-1]):
                return f"has {name} with value {each[-1]!r}"
    return ""


def write(path: str | os.PathLike[str], graph: Mapping[str, Any]) -> None:
    """Writes a document that passes `check`.

    Raises:
      BadInputError: it does not.
      StorageError: the file cannot be written.
    """
    check(graph, str(path))
    write_json(path, graph)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a document strictly, from here or elsewhere.

    Raises:
      BadInputError: there is no such file, or it does not pass `check`.
      CorruptError: it is no JSON.
    """
    path = Path(path)
    if not path.is_file():
        raise BadInputError(f"{path} is not there; name the JSON file of a graph")
    try:
        graph = load_json(path.read_text("utf-8"))
    except ValueError as error:
        raise CorruptError(f"{path} is damaged: {error}") from error
    check(graph, str(path))
    return graph
