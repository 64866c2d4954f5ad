"""Nodes are named in words, and a graph's answer names prompt, token and strongest path."""

import copy

import pytest

from sparse_jax.graphs import graph_json
from sparse_jax.graphs.features import Text
from sparse_jax.graphs.neurons import NEURON
from sparse_jax.studies.graphs import names, page
from sparse_jax.studies.graphs.names import FeatureExamples, Names
from tests.browser import PageReader
from tools.bench.graph_documents import synthetic

# The one feature of `of_one_feature`.
KEY = (0, 7)
KNOWN = FeatureExamples(
    [Text(["a", " Paris"], [0.5, 2.0]), Text(["Paris", " b"], [1.0, 0.0]), Text(["x"], [0.5])],
    top_logits=[" up", "up", " high"],
    bottom_logits=[" down"],
    lowest=[Text([" cold", "a"], [-3.0, 1.0])],
)


@pytest.fixture
def of_one_feature():
    """A feature without a label, its error, a token and a logit, joined in a chain."""
    document = synthetic(features=1, layers=1, positions=1, logits=1, links=0)
    feature, _, token, logit = document["nodes"]
    feature |= {"feature": graph_json.pair_number(*KEY), "clerp": "", "activation": 1.0}
    logit |= {"clerp": 'Output " Rome" (p=0.250)', "token_prob": 0.25}
    ends = [(feature, logit, 3.0), (token, logit, 1.0), (token, feature, 5.0)]
    document["links"] = [
        {"source": s["node_id"], "target": t["node_id"], "weight": w} for s, t, w in ends
    ]
    document["metadata"]["prompt_tokens"] = ["in\n"]
    return document


def name(document, known=KNOWN):
    return Names(document, {KEY: known} if known else {}).short(document["nodes"][0]["node_id"])


def test_a_feature_is_named_by_label_then_texts_then_logits_then_number(of_one_feature):
    feature = of_one_feature["nodes"][0]
    assert name(of_one_feature) == "active on “Paris”, “x”"
    no_texts = FeatureExamples([], KNOWN.top_logits, KNOWN.bottom_logits)
    assert name(of_one_feature, no_texts) == "raises “up”, “high”"
    assert name(of_one_feature, None) == "feature 7 of layer 0"
    feature["clerp"] = "cities"
    assert name(of_one_feature) == "cities"


def test_a_node_below_zero_has_the_names_of_its_sign(of_one_feature):
    of_one_feature["nodes"][0]["activation"] = -1.0
    assert name(of_one_feature) == "active on “cold”"
    no_texts = FeatureExamples([], KNOWN.top_logits, KNOWN.bottom_logits)
    assert name(of_one_feature, no_texts) == "raises “down”"


def test_errors_say_whose_rest_they_are_and_where(of_one_feature):
    error, token = (node["node_id"] for node in of_one_feature["nodes"][1:3])
    own = Names(of_one_feature, {})
    assert own[error] == "what the features of layer 0 leave out at “in↵” (0)"
    assert own[token] == "token “in↵” (0)"
    neurons = copy.deepcopy(of_one_feature)
    neurons["nodes"][0]["feature_type"] = NEURON
    assert Names(neurons, {}).short(error) == "what the neurons of layer 0 leave out"


def test_the_answer_names_prompt_token_path_and_share(of_one_feature):
    path = names.find_path(of_one_feature)
    assert names.features_on(of_one_feature, path) == {KEY}
    sentence = names.answer(of_one_feature, path, {KEY: KNOWN})
    assert sentence == (
        "After “in↵”, “Rome” has a probability of 25.0 %; the strongest path through features to "
        "it is token “in↵” → feature 7 (active on “Paris”, “x”) of layer 0 at “in↵” → “Rome”, with "
        "75 % of its influence in the graph."
    )
    text = " ".join(PageReader(page.build(of_one_feature, features={KEY: KNOWN})).text.split())
    # It opens the page, before the graph itself.
    assert text.index(sentence) < text.index("Explore the graph")


def test_the_answer_says_which_paths_its_strongest_one_is_among(of_one_feature):
    """An edge from a token or an error may be stronger than any path through a feature."""
    neurons = copy.deepcopy(of_one_feature)
    neurons["nodes"][0]["feature_type"] = NEURON
    sentence = names.answer(neurons, names.find_path(neurons), {})
    assert "the strongest path through neurons to it is" in sentence
    token, logit = (
        of_one_feature["nodes"][i]["node_id"] for i in (2, names.likeliest_logit(neurons))
    )
    of_one_feature["links"] = [{"source": token, "target": logit, "weight": 1.0}]
    sentence = names.answer(of_one_feature, names.find_path(of_one_feature), {})
    assert "the strongest path from a token to it is token “in↵” → “Rome”" in sentence


def test_the_answer_says_that_there_is_no_path_or_no_logit(of_one_feature):
    of_one_feature["links"] = []
    assert names.find_path(of_one_feature) is None
    assert "no path of the graph leads" in names.answer(of_one_feature, None, {})
    of_one_feature["nodes"].pop()
    assert "has no logit" in names.answer(of_one_feature, names.find_path(of_one_feature), {})


def test_a_long_prompt_keeps_its_end_and_loses_the_mark_of_its_start():
    assert names.prompt_end(["<bos>", "The", " end"]) == "The end"
    assert names.prompt_end(["<bos>"]) == "<bos>"
    long = names.prompt_end(["<s>", *(f" w{i}" for i in range(60))])
    assert long.startswith("… w") and long.endswith(" w58 w59")
    assert len(long) <= names.PROMPT_END + 2
