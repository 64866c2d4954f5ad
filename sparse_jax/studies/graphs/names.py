"""Names of nodes in words, and the answer of a graph in one sentence.

A feature is named by its label; without one, by the tokens on which it is most active in the texts
of the run; without texts, by the tokens whose logits it raises most. A node with an activation
below 0 has the tokens on which its neuron is lowest, and those whose logits that raises.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import re
from typing import Any

import numpy as np

from lm_jax.report.markup import number
from sparse_jax.graphs import graph_json
from sparse_jax.graphs.features import Text
from sparse_jax.graphs.graph_document import likeliest_logit, strongest_path
from sparse_jax.graphs.influence import TOKEN
from sparse_jax.graphs.neurons import NEURON
from sparse_jax.graphs.paths import StrongestPath

_TOKENS = 3
PROMPT_END, TITLE_END = 60, 36


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


class Names:
    """Names of the nodes of a document.

    Args:
      document: document of a graph.
      features: texts and logits of features, by layer and index.
    """

    def __init__(
        self, document: Mapping[str, Any], features: Mapping[tuple[int, int], FeatureExamples]
    ) -> None:
        nodes = [*document["nodes"], *document.get("qk_only_nodes", [])]
        self._nodes = {node["node_id"]: node for node in nodes}
        self._tokens = document["metadata"]["prompt_tokens"]
        self._features = features
        self._what = "neurons" if has_neurons(document) else "features"

    def short(self, name: str) -> str:
        """What a node is, without its place.

        Args:
          name: id of the node.
        """
        node = self._nodes[name]
        match graph_json.kind(node):
            case "token":
                return f"token {quoted(self._tokens[node['ctx_idx']])}"
            case "error":
                return f"what the {self._what} of layer {node['layer']} leave out"
            case "feature":
                return node["clerp"] or self._by_tokens(node) or _number(node)
        return node["clerp"] or name

    def __getitem__(self, name: str) -> str:
        """What a node is, with its number and place.

        Args:
          name: id of the node.
        """
        node, short = self._nodes[name], self.short(name)
        place = f"({node['ctx_idx']})"
        match graph_json.kind(node):
            case "token":
                return f"{short} {place}"
            case "error":
                return f"{short} at {quoted(self._tokens[node['ctx_idx']])} {place}"
            case "feature":
                what = short if short == _number(node) else f"{short}, {_number(node)}"
                return f"{what} at {quoted(self._tokens[node['ctx_idx']])} {place}"
        return short

    def step(self, name: str) -> str:
        """A node as a step of a path.

        Args:
          name: id of a token or a feature.
        """
        node = self._nodes[name]
        if graph_json.kind(node) == TOKEN:
            return self.short(name)
        noun = "neuron" if node["feature_type"] == NEURON else "feature"
        key = graph_json.feature_of(node)
        what = noun if key is None else f"{noun} {key[1]}"
        named = "" if self.short(name) == _number(node) else f" ({self.short(name)})"
        at = quoted(self._tokens[node["ctx_idx"]])
        return f"{what}{named} of layer {node['layer']} at {at}"

    def _by_tokens(self, node: Mapping[str, Any]) -> str:
        """The tokens that activate a feature, or those that it raises; "" if neither is known."""
        key = graph_json.feature_of(node)
        known = None if key is None else self._features.get(key)
        if known is None:
            return ""
        sign = -1 if (node.get("activation") or 0.0) < 0 else 1
        if active := _active_tokens(known.lowest if sign < 0 else known.texts, sign):
            return f"active on {active}"
        raised = _distinct(known.bottom_logits if sign < 0 else known.top_logits)
        return f"raises {raised}" if raised else ""


def has_neurons(document: Mapping[str, Any]) -> bool:
    """Whether the features of a graph are neurons."""
    return any(node["feature_type"] == NEURON for node in document["nodes"])


def find_path(document: Mapping[str, Any]) -> StrongestPath | None:
    """The strongest path to the most probable next token of a graph; None where there is none."""
    logit = likeliest_logit(document)
    return None if logit is None else strongest_path(document, logit)


def answer(
    document: Mapping[str, Any],
    path: StrongestPath | None,
    features: Mapping[tuple[int, int], FeatureExamples],
) -> str:
    """Prompt, next token, and the strongest path to it in one sentence.

    Args:
      document: document of a graph.
      path: strongest path of the graph (`find_path`).
      features: texts and logits of features, by layer and index; those on the path suffice.
    """
    prompt = prompt_end(document["metadata"]["prompt_tokens"])
    logit = likeliest_logit(document)
    if logit is None:
        return f"The graph of “{prompt}” has no logit, so it explains no next token."
    node, names = document["nodes"][logit], Names(document, features)
    token = logit_token(node)
    probability = node.get("token_prob")
    start = f"After “{prompt}”, {token} "
    if probability is None:
        start += "is the first logit"
    else:
        # A logit difference is named by both tokens, and has the probability of the first.
        whose = "its first token has" if " − " in token else "has"
        start += f"{whose} a probability of {number(100 * probability, '.1f')} %"
    if path is None:
        return f"{start}; no path of the graph leads from a token to it."
    ids = [document["nodes"][i]["node_id"] for i in path.sources]
    steps = " → ".join([*map(names.step, ids), token])
    # Paths that begin at errors, and edges that pass no feature, may have more.
    kind = "neurons" if has_neurons(document) else "features"
    via = f"through {kind} to it" if len(path.sources) > 1 else "from a token to it"
    return (
        f"{start}; the strongest path {via} is {steps}, with {_percent(path.share)} of its "
        "influence in the graph."
    )


def features_on(document: Mapping[str, Any], path: StrongestPath | None) -> set[tuple[int, int]]:
    """Layer and index of the features on a path, which `answer` names."""
    nodes = [] if path is None else [document["nodes"][i] for i in path.sources]
    return {key for node in nodes if (key := graph_json.feature_of(node))}


def logit_token(node: Mapping[str, Any]) -> str:
    """The token of a logit, in quotes, as this program and circuit-tracer label it."""
    found = re.fullmatch(r'Output "(.*)" \(p=[\d.]+\)', node["clerp"], re.DOTALL)
    return quoted(found[1]) if found else node["clerp"] or node["node_id"]


def prompt_end(tokens: Sequence[str], most: int = PROMPT_END) -> str:
    """The end of a prompt on one line, without a mark of its start such as `<bos>`.

    Args:
      tokens: tokens of the prompt.
      most: characters that are kept of a longer one, from a space on.
    """
    marked = tokens[:1] and re.fullmatch(r"<[^<>\s]+>", tokens[0]) and len(tokens) > 1
    text = inline("".join(tokens[1:] if marked else tokens))
    if len(text) <= most:
        return text
    return f"… {text[-most:].partition(' ')[2] or text[-most:]}"


def inline(text: str) -> str:
    """A token or prompt on one line."""
    return text.replace("\n", "↵").strip(" ") or "␣"


def quoted(token: str) -> str:
    """A token on one line in quotes."""
    return f"“{inline(token)}”"


def _number(node: Mapping[str, Any]) -> str:
    key = graph_json.feature_of(node)
    return f"feature {key[1] if key else node['feature']} of layer {node['layer']}"


def _active_tokens(texts: Sequence[Text], sign: int) -> str:
    """The token of the largest activation of each text, of these texts."""
    found = []
    for text in texts:
        size_T = sign * np.asarray(text.activations, np.float64)
        if len(size_T) and size_T.max() > 0:
            found.append(text.tokens[int(np.argmax(size_T))])
    return _distinct(found)


def _distinct(tokens: Sequence[str]) -> str:
    """The first tokens that differ in more than space, in quotes."""
    return ", ".join(list(dict.fromkeys(map(quoted, tokens)))[:_TOKENS])


def _percent(share: float) -> str:
    """A share in per cent, with two digits where it is small."""
    if share < 1e-4:
        return "under 0.01 %"
    return f"{number(100 * share, '.0f' if share > 0.0995 else '.2g')} %"
