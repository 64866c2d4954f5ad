"""Tokens of a SentencePiece vocabulary are shown with the space that decoding one leaves out."""

import types

import numpy as np
import pytest

from sparse_jax.graphs import attribute, graph_json
from sparse_jax.graphs.features import collect
from sparse_jax.studies.graphs import inputs, piece, prompts
from sparse_jax.studies.graphs.prompts import Prompt
from tests.sparse_jax.circuits.word_tokenizer import pieces_tokenizer
from tests.sparse_jax.graphs.small_graphs import small_model, small_transcoder
from tests.sparse_jax.graphs.test_prompts import constant

WORDS = ("Lucy", "gave", "ball", "Tom")


@pytest.fixture(scope="module")
def tokenizer():
    return pieces_tokenizer(WORDS)


def ids_of(tokenizer, *words):
    return [tokenizer.encode(word, add_special_tokens=False)[0] for word in words]


def renumbered(tokenizer):
    """The tokenizer for the ids of a small model: those of the words again and again."""
    table = ids_of(tokenizer, *WORDS)
    return types.SimpleNamespace(
        piece=lambda i: tokenizer.piece(table[i % len(table)]),
        decode=lambda ids: tokenizer.decode([table[i % len(table)] for i in ids]),
    )


def test_tokens_of_a_prompt_and_of_its_answers(tokenizer, monkeypatch):
    monkeypatch.setattr(inputs, "_forward_at", inputs._forward_at.__wrapped__)
    lucy, tom = ids_of(tokenizer, "Lucy", "Tom")
    assert tokenizer.decode([tom]) == "Tom"
    own = [Prompt("Lucy gave ball", answers=(" Tom",)), Prompt("Tom gave ball", answers=(" Lucy",))]
    encoded = prompts.encode(own, tokenizer, max_length=64)
    assert encoded[0].tokens == ("<s>", " Lucy", " gave", " ball")
    logits_BV = np.zeros((2, tokenizer.vocab_size))
    logits_BV[:, tom] = 1.0
    _, (right, wrong) = inputs.choose_targets({"dense": constant(logits_BV, tokenizer)}, encoded)
    assert right.answers == {"dense": " Tom"} and right.target == " Tom"
    assert wrong.why == "dense answers ' Tom'" and lucy != tom


def test_tokens_of_a_written_graph_and_its_logits(tokenizer, tmp_path):
    model, transcoder = small_model("llama"), small_transcoder()
    named = renumbered(tokenizer)
    graph = attribute(model, transcoder, [0, 1, 2])
    graph.to_json(tmp_path / "pieces.json", tokenizer=named)
    document = graph_json.read(tmp_path / "pieces.json")
    assert document["metadata"]["prompt_tokens"] == [" Lucy", " gave", " ball"]
    source = types.SimpleNamespace(source=types.SimpleNamespace(tokenizer=named))
    difference = attribute(model, transcoder, [0, 1, 2], targets=[1], against=[2, 3])
    difference.to_json(tmp_path / "difference.json", tokenizer=named)
    nodes = graph_json.read(tmp_path / "difference.json")["nodes"]
    (target,) = (node for node in nodes if node["feature_type"] == "logit")
    assert target["clerp"].startswith('Output " gave − ball, Tom" (p=')
    (token,) = piece._logits(difference, source)
    assert token.token == " gave − ball, Tom"
    shown = [each.token for each in piece._logits(graph, source)]
    assert shown and all(each[1:] in WORDS and each[0] == " " for each in shown)


def test_tokens_of_features(tokenizer, monkeypatch):
    model, transcoder = small_model("llama"), small_transcoder()
    V = model.cfg.vocab_size
    named = renumbered(tokenizer)
    tokens_BS = np.arange(2 * 13).reshape(2, 13) % V
    monkeypatch.setattr("sparse_jax.graphs.features._batches", lambda *args: iter([tokens_BS]))
    source = types.SimpleNamespace(model=model, tokenizer=named)
    data = collect(source, transcoder, [(0, f) for f in range(4)], object(), context=12)
    shown = {token for each in data.values() for token in (*each.top_logits, *each.bottom_logits)}
    texts = [text for each in data.values() for text in each.examples]
    assert texts and shown == {f" {word}" for word in WORDS}
    assert {token for text in texts for token in text.tokens} == shown
