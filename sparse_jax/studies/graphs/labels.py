"""Labels of features: read from a file, or by a judge from the texts on which they are most active.

{"<layer>_<feature>": "text"}

A neuron may have nodes of both signs and has one label: the judge reads the texts of the sign of
its strongest node (`negative`).
"""

from collections.abc import Collection, Iterable, Mapping
import re
from typing import Any

from lm_jax.errors import BadInputError
from lm_jax.evaluate.judge import Judge
from lm_jax.run import stop
from lm_jax.run.files import load_json
from lm_jax.text import lines
from sparse_jax.graphs import graph_json
from sparse_jax.graphs.features import Feature, FeatureData, Text

Labels = dict[Feature, str]


def read_labels(path: str) -> Labels:
    """Labels of features by layer and index.

    Raises:
      BadInputError: the file cannot be read, or an entry is no label.
    """
    text = lines.decode(lines.read_data(path, ".json file"), path)
    try:
        tree = load_json(text)
    except ValueError as error:
        raise BadInputError(f"{path}: not JSON ({error}); write one object of labels") from error
    if not isinstance(tree, dict):
        raise BadInputError(f'{path} is no object; write {{"<layer>_<feature>": "text"}}')
    labels = {}
    for name, text in tree.items():
        if not re.fullmatch(r"\d+_\d+", name) or not isinstance(text, str):
            raise BadInputError(
                f'{path}: {name!r} with {text!r} is no label; write "<layer>_<feature>": "text"'
            )
        layer, feature = map(int, name.split("_"))
        labels[layer, feature] = text
    return labels


def to_json(labels: Mapping[Feature, str]) -> dict[str, str]:
    """Labels as `read_labels` reads them."""
    return {f"{layer}_{index}": text for (layer, index), text in sorted(labels.items())}


def labelled(document: Mapping[str, Any], labels: Mapping[Feature, str]) -> dict[str, Any]:
    """A graph document with these labels and no others."""

    def named(node: Mapping[str, Any]) -> Mapping[str, Any]:
        feature = graph_json.feature_of(node)
        return node if feature is None else {**node, "clerp": labels.get(feature, "")}

    lists = {key: document.get(key, []) for key in ("nodes", "qk_only_nodes")}
    return {**document, **{key: [named(node) for node in own] for key, own in lists.items()}}


def negative(documents: Iterable[Mapping[str, Any]]) -> set[Feature]:
    """Features whose node with the largest activation by absolute value is negative."""
    strongest: dict[Feature, float] = {}
    for node in (node for document in documents for node in document["nodes"]):
        if (feature := graph_json.feature_of(node)) is not None:
            known = strongest.get(feature, 0.0)
            strongest[feature] = max(known, node.get("activation") or 0.0, key=abs)
    return {feature for feature, activation in strongest.items() if activation < 0}


def judged(
    judge: Judge,
    data: Mapping[Feature, FeatureData],
    known: Mapping[Feature, str],
    below: Collection[Feature] = (),
) -> Labels:
    """Themes that a judge names, of the features that have texts and no label yet.

    Args:
      judge: judge that names the themes.
      data: texts of the features.
      known: labels that there are.
      below: features whose texts are those with the lowest activations.

    Raises:
      StoppedError: on a signal; a local judge has stored its answers so far.
    """
    labels = {}
    for feature, each in data.items():
        texts = each.examples
        if feature in below:
            texts = [Text(one.tokens, tuple(-a for a in one.activations)) for one in each.lowest]
        if feature in known or not texts:
            continue
        stop.check(f"before the label of feature {feature[1]} in layer {feature[0]}")
        label = judge.label([words(text) for text in texts])
        if label is not None:
            labels[feature] = label.theme
    return labels


def words(text: Text) -> tuple[list[str], list[float]]:
    """The words of a text, each with the largest activation of its tokens.

    A token that begins with white space, or follows one that ends with it, begins a word.
    """
    spelled: list[str] = []
    largest: list[float] = []
    for token, activation in zip(text.tokens, text.activations, strict=True):
        if not spelled or token[:1].isspace() or spelled[-1][-1:].isspace():
            spelled.append(token)
            largest.append(activation)
        else:
            spelled[-1] += token
            largest[-1] = max(largest[-1], activation)
    return spelled, largest
