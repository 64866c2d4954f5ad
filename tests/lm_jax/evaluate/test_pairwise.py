"""Judges of pairs: what they are asked, what they answer, and what is refused."""

from http.server import BaseHTTPRequestHandler, HTTPServer
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from lm_jax.errors import BadInputError, UsageError
from lm_jax.evaluate import chat, pairwise
from lm_jax.evaluate.answers import Answers, digest
from lm_jax.evaluate.multiple_choice import Scorer
from lm_jax.evaluate.pairwise import PerplexityJudge, Shown, TokensJudge
from lm_jax.text.tokenizer import Tokenizer

SHOWN = Shown("the war was\nlong", "and hard", "hard and")


def test_the_prompt_is_the_same_in_every_process():
    # A stored answer is found by this digest: a change of the wording orphans all of them.
    assert digest(pairwise.prompt(SHOWN)) == (
        "758e2918680715ba1f91af600417f255e27fb1e67e20f06381f76200efe29652"
    )


def test_the_prompt_shows_both_in_their_order():
    asked = pairwise.prompt(SHOWN)
    assert "Text:\nthe war was long\n\nContinuation A:\nand hard\n" in asked
    assert "Continuation B:\nhard and\n" in asked
    assert pairwise.prompt(SHOWN.swapped).index("hard and") < asked.index("hard and")
    # A brace in a text is no field of the template.
    assert "{0} {x}" in pairwise.prompt(Shown("{0} {x}", "", ""))


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("A", "A"),
        (" B.\n", "B"),
        ("**Tie**", "Tie"),
        ('```json\n{"verdict": "B"}\n```', "B"),
        ("A is better", None),
        ("", None),
        ('{"winner": "A"}', None),
        ('{"verdict": "A"', None),
    ],
)
def test_an_answer_is_one_word_or_an_object(answer, verdict):
    assert pairwise.parse(answer) == verdict


def scorer_of(place):
    raise AssertionError(place)


def test_answers_come_from_a_file_in_both_orders(tmp_path):
    file = tmp_path / "answers.jsonl"
    file.touch()
    judged = pairwise.build(f"cached:{file}", scorer=scorer_of)
    assert pairwise.both_orders(judged, [SHOWN]) == [(None, None)]
    asked = [
        json.loads(line)
        for line in (tmp_path / "answers.jsonl.missing").read_text("utf-8").splitlines()
    ]
    assert [one["prompt"] for one in asked] == [
        pairwise.prompt(SHOWN),
        pairwise.prompt(SHOWN.swapped),
    ]
    replies = [
        {"prompt_sha256": one["prompt_sha256"], "answer": answer}
        for one, answer in zip(asked, ("A", "neither, I think"), strict=True)
    ]
    file.write_text("\n".join(map(json.dumps, replies)), "utf-8")
    judged = pairwise.build(f"cached:{file}", scorer=scorer_of)
    assert pairwise.both_orders(judged, [SHOWN]) == [("A", None)]
    assert judged.unreadable == 1 and judged.name == "cached:answers.jsonl"


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("null:fist", "did you mean 'null:first'"),
        ("cache:answers.jsonl", "is unknown"),
        ("tokens:", "is unknown; did you mean 'tokens:FOLDER'"),
        ("gpt", "known: cached:FILE, chat:MODEL@URL"),
        ("chat:http://localhost", "is not chat:MODEL@URL"),
        ("chat:m@ftp://localhost", "is not chat:MODEL@URL"),
    ],
)
def test_an_unknown_judge_is_refused(name, match):
    with pytest.raises(UsageError, match=match):
        pairwise.check(name)


# Language models over bytes, given as logits


def byte_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({mark: i for i, mark in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens(["<|start|>"])
    return Tokenizer(backend, 256, None)


TOKENIZER = byte_tokenizer()


def bigram_scorer(likely, *, max_length=2048):
    """A model that finds these characters likelier, wherever they are."""
    bias_V = np.zeros(257, np.float32)
    for character, value in likely.items():
        (i,) = TOKENIZER.encode(character, add_special_tokens=False)
        bias_V[i] = value

    def logits(tokens_BT, valid_BT):
        return jnp.broadcast_to(jnp.asarray(bias_V), (*tokens_BT.shape, 257))

    return Scorer(jax.jit(logits), TOKENIZER, max_length)


def test_perplexity_prefers_the_likelier_text_per_token_in_both_orders():
    judged = PerplexityJudge("perplexity:m", bigram_scorer({"e": 3.0, "z": -3.0}))
    shown = [
        Shown("the", " eee", " zzz"),
        # Twice as long, and as likely per token: a tie, where the sum would decide.
        Shown("the", "e", "ee"),
        Shown("the", "", "z"),
        Shown("the", " ", ""),
    ]
    both = pairwise.both_orders(judged, shown)
    assert both == [("A", "B"), ("Tie", "Tie"), ("B", "A"), ("Tie", "Tie")]


@pytest.mark.parametrize(
    ("likely", "verdict"),
    [({"A": 4.0}, "A"), ({"B": 4.0}, "B"), (dict.fromkeys("Tie", 9.0), "Tie")],
)
def test_tokens_takes_the_likeliest_answer_whatever_the_order(likely, verdict):
    judged = TokensJudge("tokens:m", bigram_scorer(likely))
    assert pairwise.both_orders(judged, [SHOWN]) == [(verdict, verdict)]


def test_a_question_longer_than_the_model_reads_is_refused():
    judged = TokensJudge("tokens:m", bigram_scorer({}, max_length=64))
    with pytest.raises(UsageError, match=r"reads 64 tokens, and a question has \d+"):
        judged.verdicts([SHOWN])


# An endpoint on this machine


class Endpoint(BaseHTTPRequestHandler):
    """Answers with what the test put into `replies`, and keeps what it was sent."""

    replies: list
    received: list

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.received.append((self.path, dict(self.headers), json.loads(body)))
        status, content = self.replies.pop(0)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        del args


@pytest.fixture
def endpoint():
    Endpoint.replies, Endpoint.received = [], []
    server = HTTPServer(("127.0.0.1", 0), Endpoint)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"small@http://127.0.0.1:{server.server_port}/v1/", Endpoint
    server.shutdown()
    thread.join()
    server.server_close()


def completion(text):
    return 200, json.dumps({"choices": [{"message": {"content": text}}]}).encode()


def test_an_endpoint_is_asked_once_for_every_prompt(endpoint, tmp_path, monkeypatch):
    place, server = endpoint
    monkeypatch.setenv(chat.KEY, "secret")
    file = tmp_path / "answers.jsonl"
    server.replies += [completion("A"), completion("Tie")]
    judged = pairwise.build(f"chat:{place}", scorer=scorer_of, answers=file)
    assert pairwise.both_orders(judged, [SHOWN]) == [("A", "Tie")]
    path, headers, body = server.received[0]
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer secret"
    assert body["model"] == "small" and body["temperature"] == 0
    assert body["messages"] == [{"role": "user", "content": pairwise.prompt(SHOWN)}]
    # What was answered is kept, without the key, and not asked for again.
    again = pairwise.build(f"chat:{place}", scorer=scorer_of, answers=file)
    assert pairwise.both_orders(again, [SHOWN]) == [("A", "Tie")] and len(server.received) == 2
    assert "secret" not in file.read_text("utf-8")
    assert Answers(file).find(pairwise.prompt(SHOWN)) == "A"


@pytest.mark.parametrize(
    ("reply", "match"),
    [
        ((500, b"no"), "did not answer .*500"),
        ((200, b"no"), "answered, but not with a chat completion"),
        ((200, b'{"choices": []}'), "answered, but not with a chat completion"),
        (completion(None), "which is no text"),
    ],
)
def test_an_endpoint_that_fails_is_named(endpoint, reply, match):
    place, server = endpoint
    server.replies.append(reply)
    _, ask = chat.endpoint(place)
    with pytest.raises(BadInputError, match=match):
        ask("question")
