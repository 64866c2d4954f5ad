"""A judge's labels: whose features they are of, what it is asked, and where they end up."""

import dataclasses
import json

from lm_jax.evaluate.answers import digest
from lm_jax.evaluate.judge import Label, prompt
from lm_jax.run.files import read_json
from lm_jax.run.results import load_result
from lm_jax.study import frame
from sparse_jax.graphs import graph_json
from sparse_jax.graphs.features import FeatureData, Text
from sparse_jax.studies.graphs import labels
from sparse_jax.studies.graphs.report_text import summary_lines
from sparse_jax.studies.graphs.results import GraphSummary
from sparse_jax.studies.graphs.run import PIECES
from tests.sparse_jax.graphs.small_command import BARE, PROMPTS, of_dense, run

ANSWER = {"theme": "<b>names</b>", "disentanglement": 8, "coverage": 9, "themes": 1}


def data(*texts):
    return FeatureData(texts, (), (), 0.5, 0.0, 1.0, (), ())


class Asked:
    """A judge that calls every theme "theme" and keeps what it was asked."""

    name = "asked"

    def __init__(self):
        self.texts = []

    def label(self, texts):
        self.texts.append(texts)
        return Label("theme", 9.0, 9.0, 1, "")


def test_words_have_the_largest_activation_of_their_tokens():
    text = Text(
        ("un", "think", "able", " odd", "ity", "\n", "end"), (0.0, 3.0, 1.0, 0.5, 2.0, 4.0, 0)
    )
    assert labels.words(text) == (["unthinkable", " oddity", "\n", "end"], [3.0, 2.0, 4.0, 0])


def test_a_judge_is_asked_for_features_with_texts_and_without_a_label():
    text = Text(("a", " word"), (0.0, 1.0))
    judge = Asked()
    known = {(0, 1): "mine"}
    own = {(0, 1): data(text), (0, 2): data(), (1, 3): data(text, text)}
    assert labels.judged(judge, own, known) == {(1, 3): "theme"}
    assert judge.texts == [[(["a", " word"], [0.0, 1.0])] * 2]


def test_a_negative_neuron_is_judged_by_its_lowest_activations():
    """Nodes with 2 and -3: the texts below 0, with what is lowest marked most."""
    nodes = [
        {"feature_type": "mlp neuron", "layer": "1", "feature": graph_json.pair_number(1, 3)}
        | {"activation": activation}
        for activation in (2.0, -3.0)
    ]
    assert labels.negative([{"nodes": nodes[:1]}]) == set()
    below = labels.negative([{"nodes": nodes[:1]}, {"nodes": nodes}])
    assert below == {(1, 3)}
    judge, lowest = Asked(), Text(("low", " high"), (-4.0, 1.0))
    highest = Text(("high", " low"), (1.0, -2.0))
    own = dataclasses.replace(data(highest), lowest=(lowest,))
    assert labels.judged(judge, {(1, 3): own}, {}, below) == {(1, 3): "theme"}
    assert judge.texts == [[(["low", " high"], [4.0, -1.0])]]


def test_labels_of_a_file_are_read_as_they_were_written(tmp_path):
    own = {(1, 20): "dates", (0, 3): "names"}
    file = tmp_path / "labels.json"
    file.write_text(json.dumps(labels.to_json(own)), "utf-8")
    assert labels.read_labels(str(file)) == own


def test_stored_answers_become_labels_of_the_graph_and_remake_no_graph(models, tmp_path):
    """An empty file collects the prompts; answered, it labels. A label of the user comes first."""
    answers, folder = tmp_path / "answers.jsonl", tmp_path / "run"
    answers.write_text("", "utf-8")
    arguments = [
        *of_dense(models),
        f"--prompt={PROMPTS[0]}",
        f"--workdir={folder}",
        f"--judge=cached:{answers}",
        f"--config.corpus.source={models / 'text'}",
        *("--config.context=16", "--config.examples=2", "--config.mediated=3"),
        *("--config.max_features=6", *BARE),
    ]
    assert run(*arguments) == 0
    summary = load_result(folder / frame.SUMMARY, GraphSummary)
    (file,) = (folder / each.file for each in summary.graphs)
    missing = answers.with_name("answers.jsonl.missing")
    asked = [json.loads(line) for line in missing.read_text("utf-8").splitlines()]
    (corpus,) = summary.features
    assert f"0 of {corpus.features} shown features have a label" in "\n".join(
        summary_lines(summary)
    )
    assert (corpus.labelled, corpus.judge) == (0, "cached:answers.jsonl")
    assert len(asked) == corpus.features - corpus.silent > 1
    shown = {graph_json.feature_of(node) for node in graph_json.read(file)["nodes"]} - {None}

    # The first prompt is that of a feature whose texts are in features/.
    lines = [{"prompt_sha256": each["prompt_sha256"], "answer": answer(each)} for each in asked]
    answers.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    mine = sorted(shown)[0]
    (tmp_path / "mine.json").write_text(json.dumps(labels.to_json({mine: "mine"})), "utf-8")
    pieces = [each.stat().st_mtime_ns for each in sorted((folder / PIECES).iterdir())]
    again = [*arguments, f"--labels={tmp_path / 'mine.json'}", "--resume=force"]
    assert run(*again) == 0
    assert pieces == [each.stat().st_mtime_ns for each in sorted((folder / PIECES).iterdir())]
    (corpus,) = load_result(folder / frame.SUMMARY, GraphSummary).features
    silent = corpus.features - len(asked)
    stored = read_json(folder / "labels_model.json")
    assert corpus.labelled == len(stored)
    assert corpus.features - silent <= corpus.labelled <= corpus.features
    for node in graph_json.read(file)["nodes"]:
        feature = graph_json.feature_of(node)
        if feature is not None:
            layer, index = feature
            assert node["clerp"] == stored.get(f"{layer}_{index}", "")
    assert stored[f"{mine[0]}_{mine[1]}"] == "mine"
    assert sum(text == ANSWER["theme"] for text in stored.values()) >= len(asked) - 1
    # A label is text on the page, not markup.
    assert ANSWER["theme"] not in (folder / frame.REPORT).read_text("utf-8")


def answer(asked):
    assert digest(asked["prompt"]) == asked["prompt_sha256"]
    assert asked["prompt"].startswith(prompt([([""], [0.0])])[:40])
    return json.dumps(ANSWER | {"explanation": "Names."})
