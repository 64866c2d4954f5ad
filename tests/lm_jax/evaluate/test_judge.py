"""Judges build the same prompt for the same texts, parse only valid labels, and lose no answer."""

import json
import logging

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import lm_jax
from lm_jax.errors import BadInputError, UsageError
from lm_jax.evaluate import chat, judge
from lm_jax.evaluate.answers import Answers, about, digest
from lm_jax.evaluate.judge import Label
from lm_jax.evaluate.judge_prompt import read_rubric
from lm_jax.model.sampling import Sampling
from lm_jax.text.tokenizer import Tokenizer
from tests import tiny

TEXTS = [
    (["in", " 1861", " until", " 1865", " war\n"], [0.1, 0.9, 0.3, 0.8, 0.0]),
    (["during", " the", " winter"], [0.7, 0.1, 0.2]),
]
LABEL = {
    "theme": "dates",
    "disentanglement": 8,
    "coverage": 9.5,
    "themes": 2,
    "explanation": "Years.",
}
ANSWER = json.dumps(LABEL)


def test_the_prompt_is_the_same_in_every_process():
    # A stored answer is found by this digest: a change of the wording orphans all of them.
    assert digest(judge.prompt(TEXTS)) == (
        "a91b625d0f4e6555a64733102b8b1b09fae98a8904c0d847771b707b7b7d5c9b"
    )


def test_the_prompt_marks_the_strongest_fifth_of_the_words():
    asked = judge.prompt(TEXTS)
    assert "Text 1: in «1861» until 1865 war\nMarked in text 1: 1861\n" in asked
    assert "Text 2: «during» the winter\nMarked in text 2: during\n" in asked
    words, gates = [f"w{i}" for i in range(20)], np.linspace(0.0, 1.0, 20)
    assert judge.prompt([(words, gates)]).endswith("Marked in text 1: w16, w17, w18, w19\n")
    # What has no gate is not marked to fill the number.
    assert judge.prompt([(["a", " b"], [0.0, 0.0])]).endswith("Marked in text 1: nothing\n")


def test_the_prompt_marks_another_share_of_the_words():
    asked = judge.prompt(TEXTS, marked=0.8)
    # Four of five words, and all three: of 2.4 the next whole number.
    assert "Marked in text 1: in, 1861, until, 1865\n" in asked
    assert "Text 2: «during» «the» «winter»\n" in asked


def test_the_prompt_holds_ten_texts_at_most():
    asked = judge.prompt([(["word"], [1.0])] * 12)
    assert "Text 10: " in asked and "Text 11: " not in asked
    assert "Below are 10 texts" in asked
    asked = judge.prompt([(["word"], [1.0])] * 12, most_texts=11)
    assert "Text 11: " in asked and "Text 12: " not in asked and "Below are 11 texts" in asked


@pytest.mark.parametrize(
    "answer",
    [
        f" {ANSWER}\n",
        f"Here it is: {ANSWER}",
        f"```json\n{ANSWER}\n```",
        f"The texts name years.\n\n```\n{json.dumps(LABEL, indent=2)}\n```\nI hope this helps.",
    ],
)
def test_an_answer_is_one_object_with_or_without_words_around_it(answer):
    assert judge.parse(answer) == Label(**LABEL)


def test_braces_inside_a_text_of_the_answer_are_part_of_it():
    label = {**LABEL, "explanation": 'The mark "}" and {"theme": 1} come back.'}
    assert judge.parse(f"```json\n{json.dumps(label)}\n```") == Label(**label)


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        ("I would say dates.", "has 0 JSON objects"),
        (ANSWER[:-1], "has 0 JSON objects"),
        # The inside of a broken object is not the answer.
        (f'{{"label": yes, "more": {ANSWER}}}', "has 0 JSON objects"),
        (f"{ANSWER}\n{ANSWER}", "has 2 JSON objects"),
        (json.dumps({"label": LABEL}), "not an object with"),
        (json.dumps({k: v for k, v in LABEL.items() if k != "themes"}), "not an object with"),
        # A lone surrogate is no text, and no JSON file can be read that holds one.
        (json.dumps({**LABEL, "theme": "\ud83d"}), "theme must be a text"),
        (json.dumps({**LABEL, "coverage": 11}), "coverage = 11"),
        (json.dumps({**LABEL, "disentanglement": True}), "disentanglement = True"),
        (json.dumps({**LABEL, "coverage": float("nan")}), "coverage = nan"),
    ],
)
def test_another_answer_is_refused(answer, match):
    with pytest.raises(BadInputError, match=match):
        judge.parse(answer)


def test_a_judge_counts_what_gave_no_label(caplog):
    replies = iter([ANSWER, None, "I would say dates."])
    own = judge.PromptedJudge("mine", lambda asked: next(replies))
    with caplog.at_level(logging.WARNING):
        results = [own.label(TEXTS) for _ in range(3)]
    assert results == [Label(**LABEL), None, None]
    assert (own.asked, own.unanswered, own.unreadable) == (3, 1, 1)
    assert own.summary().startswith("mine labelled 1 of 3: 1 had no answer, 1 answers were not")
    assert "I would say dates." in caplog.text
    # There is nothing to ask about a prototype without texts.
    assert own.label([]) is None and own.asked == 3


def test_the_null_judge_says_nothing():
    null = judge.build_judge("null")
    assert null.name == "null" and null.label(TEXTS) is None


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("nul", "did you mean 'null'"),
        ("cache:answers.jsonl", "did you mean 'cached:FILE'"),
        ("cached:", "did you mean 'cached:FILE'"),
        ("locl:/models/small", "did you mean 'local:FOLDER'"),
        ("gpt", "known: cached:FILE, chat:MODEL@URL, local:FOLDER, null"),
        ("chat:http://localhost", "is not chat:MODEL@URL"),
    ],
)
def test_an_unknown_judge_is_refused_with_the_nearest(name, match):
    with pytest.raises(UsageError, match=match):
        judge.build_judge(name)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"marked": 0.0}, "marked = 0.0 must be a share"),
        ({"marked": 1.5}, "marked = 1.5 must be a share"),
        ({"marked": float("nan")}, "marked = nan must be a share"),
        ({"most_texts": 0}, "most_texts = 0 must be at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0 must be at least 1"),
        ({"temperature": -1.0}, "temperature = -1.0 must be 0"),
        ({"temperature": float("inf")}, "temperature = inf must be 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, match):
    with pytest.raises(UsageError, match=match):
        judge.build_judge("chat:m@http://localhost:1/v1", **settings)


def test_a_judge_that_generates_nothing_has_no_sampler(tmp_path):
    (tmp_path / "answers").touch()
    for name in ("null", f"cached:{tmp_path / 'answers'}"):
        for settings in ({"temperature": 1.0}, {"max_new_tokens": 9}):
            with pytest.raises(UsageError, match="generates nothing: leave out temperature"):
                judge.build_judge(name, **settings)
    for settings in ({"marked": 0.8}, {"most_texts": 3}):
        with pytest.raises(UsageError, match="judge = 'null' reads no texts"):
            judge.build_judge("null", **settings)


def test_settings_of_a_prompt_are_in_the_name_of_a_judge(tmp_path):
    file = tmp_path / "answers"
    file.touch()
    own = judge.build_judge(f"cached:{file}", marked=0.8, most_texts=1)
    assert own.name == "cached:answers, 0.8 of the words marked, at most 1 texts"
    assert own.label(TEXTS) is None
    (line,) = (tmp_path / "answers.missing").read_text("utf-8").splitlines()
    assert json.loads(line)["prompt"] == judge.prompt(TEXTS[:1], marked=0.8)


def test_answers_come_back_from_their_file_and_missing_prompts_are_listed(tmp_path):
    file = tmp_path / "answers.jsonl"
    with pytest.raises(BadInputError, match="is not a file of answers"):
        judge.build_judge(f"cached:{file}")
    file.touch()
    first = judge.build_judge(f"cached:{file}")
    assert first.label(TEXTS) is None
    assert (first.asked, first.unanswered) == (1, 1)
    # Whoever answers the listed prompts needs nothing else.
    (line,) = (tmp_path / "answers.jsonl.missing").read_text("utf-8").splitlines()
    asked = json.loads(line)
    assert asked["prompt"] == judge.prompt(TEXTS)
    reply = {"prompt_sha256": asked["prompt_sha256"], "answer": ANSWER}
    file.write_text(json.dumps(reply), "utf-8")
    second = judge.build_judge(f"cached:{file}")
    assert second.name == "cached:answers.jsonl"
    assert second.label(TEXTS) == Label(**LABEL)
    assert not (tmp_path / "answers.jsonl.missing").exists()


def test_a_rubric_of_the_user_precedes_the_same_texts(tmp_path):
    file = tmp_path / "rubric.txt"
    fields = '{"theme": ..., "disentanglement": ..., "coverage": ..., "themes": ...}'
    file.write_text(f"Of {{count}} texts, and {fields}", "utf-8")
    with pytest.raises(BadInputError, match="does not ask for explanation; a rubric must name"):
        read_rubric(file)
    with pytest.raises(BadInputError, match="give a readable text file"):
        read_rubric(tmp_path / "absent")
    file.write_text(f"Of {{count}} texts, an explanation and {fields}\n\n", "utf-8")
    asked = []
    own = judge.PromptedJudge("mine", lambda text: asked.append(text), read_rubric(file))
    assert own.label(TEXTS) is None
    start = f"Of {len(TEXTS)} texts, an explanation and {fields}\n"
    (text,) = asked
    assert text.startswith(start)
    assert text.removeprefix(start) == judge.prompt(TEXTS, "")
    assert judge.prompt(TEXTS).endswith(judge.prompt(TEXTS, ""))


def test_an_endpoint_is_asked_once_for_a_prompt(tmp_path, monkeypatch):
    sent = []

    def answer(model, url, text):
        sent.append((model, url, text))
        return ANSWER

    monkeypatch.setattr(chat, "_answer", answer)
    place, answers = "chat:m@http://localhost:1/v1/", tmp_path / "answers.jsonl"
    for _ in range(2):
        own = judge.build_judge(place, answers=answers)
        assert own.label(TEXTS) == Label(**LABEL)
    assert own.name == "chat:m at http://localhost:1/v1"
    assert sent == [("m", "http://localhost:1/v1", judge.prompt(TEXTS))]


def test_an_endpoint_is_sent_the_sampler(tmp_path, monkeypatch):
    sent = []

    def answer(model, url, text, **options):
        sent.append(options)
        return ANSWER

    monkeypatch.setattr(chat, "_answer", answer)
    place, answers = "chat:m@http://localhost:1/v1", tmp_path / "answers.jsonl"
    settings = [{}, {"temperature": 1.0, "max_new_tokens": 756}, {"temperature": 1.0}]
    judges = [judge.build_judge(place, answers=answers, **each) for each in settings]
    # An answer of another sampler is none of this one.
    assert [each.label(TEXTS) for each in judges] == [Label(**LABEL)] * 3
    assert sent == [{}, {"temperature": 1.0, "max_tokens": 756}, {"temperature": 1.0}]
    start = "chat:m at http://localhost:1/v1"
    names = [start, f"{start}, temperature 1, max_tokens 756", f"{start}, temperature 1"]
    assert [each.name for each in judges] == names


def test_the_last_answer_to_a_prompt_counts_and_judges_are_kept_apart(tmp_path):
    stored = Answers(tmp_path / "answers.jsonl")
    stored.add("p", "one", judge="a")
    stored.add("p", "two", judge="b")
    again = Answers(tmp_path / "answers.jsonl")
    assert [again.find("p", judge=name) for name in ("a", "b", "c", None)] == [
        "one",
        "two",
        None,
        "two",
    ]


def test_an_answer_names_its_unit_model_and_judge(tmp_path):
    """Those given to a cached judge too, which are added to the file of what was used."""
    file, used = tmp_path / "old.jsonl", tmp_path / "answers.jsonl"
    # A line from before has neither unit nor model nor judge, another names its judge.
    old = {"prompt_sha256": digest(judge.prompt(TEXTS)), "answer": json.dumps(LABEL)}
    others = [(["word"], [1.0])]
    named = old | {"prompt_sha256": digest(judge.prompt(others)), "judge": "someone"}
    file.write_text(f"{json.dumps(old)}\n{json.dumps(named)}\n", "utf-8")
    asked = judge.build_judge(f"cached:{file}", answers=used)
    for unit, texts in (("L2 P5", TEXTS), ("L0 P1", others), ("L0 P2", [(["new"], [1.0])])):
        with about(unit=unit, model="protot, 01ab"):
            asked.label(texts)
    lines = [json.loads(line) for line in used.read_text("utf-8").splitlines()]
    found = [(line["unit"], line["model"], line["judge"]) for line in lines]
    assert found == [
        ("L2 P5", "protot, 01ab", "cached:old.jsonl"),
        ("L0 P1", "protot, 01ab", "someone"),
    ]
    assert {line["answer"] for line in lines} == {json.dumps(LABEL)}
    (missing,) = (tmp_path / "old.jsonl.missing").read_text("utf-8").splitlines()
    assert json.loads(missing)["unit"] == "L0 P2"
    # Outside, a line names none; and what was looked up is not added again.
    again = judge.build_judge(f"cached:{file}", answers=used)
    again.label(TEXTS)
    assert len(used.read_text("utf-8").splitlines()) == 2
    Answers(used).add("q", "two", judge="a")
    assert "unit" not in json.loads(used.read_text("utf-8").splitlines()[-1])


@pytest.mark.parametrize("torn", [True, False])
def test_an_unfinished_last_line_costs_no_other_answer(tmp_path, torn):
    file = tmp_path / "answers.jsonl"
    Answers(file).add("p", "one", judge="a")
    whole = file.read_bytes()
    last = json.dumps({"prompt_sha256": digest("q"), "answer": "two"})
    file.write_bytes(whole + last[: 30 if torn else None].encode())
    stored = Answers(file)
    assert stored.find("q") == (None if torn else "two")
    stored.add("r", "three", judge="a")
    again = Answers(file)
    assert [again.find(p) for p in "pqr"] == ["one", None if torn else "two", "three"]


@pytest.mark.parametrize(
    "line",
    [
        *("{", "[]", '{"prompt_sha256": "0"}', '{"prompt_sha256": 1}'),
        '{"prompt_sha256": "0", "answer": "", "unit": 5}',
    ],
)
def test_a_broken_line_is_named(tmp_path, line):
    file = tmp_path / "answers.jsonl"
    file.write_text(f"{json.dumps({'prompt_sha256': '0', 'answer': ''})}\n{line}\n", "utf-8")
    with pytest.raises(BadInputError, match=r"answers\.jsonl, line 2"):
        Answers(file)


def byte_tokenizer(chat_template: str | None) -> Tokenizer:
    """A token for every byte, and marks that a message must not be able to write."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({mark: i for i, mark in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|start|>", "<|end|>"])
    return Tokenizer(backend, 256, 257, chat_template, (9,))


CHAT = (
    "{% for m in messages %}{{ bos_token }}{{ m.role }}\n{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}assistant\n{% endif %}"
)


@pytest.fixture(params=[CHAT, None], ids=["chat", "base"])
def folder(request, tmp_path):
    """A folder of a language model that has learnt nothing."""
    cfg = tiny.decoder(vocab_size=258, max_length=4096)
    params = lm_jax.init_params(jax.random.key(0), cfg)
    lm_jax.save_pretrained(tmp_path / "model", cfg, params, byte_tokenizer(request.param))
    return tmp_path / "model"


def test_a_local_model_is_asked_and_its_answers_are_kept(folder, tmp_path):
    file = tmp_path / "answers.jsonl"
    local_judge = judge.local(folder, answers=file, max_new_tokens=8)
    # Noise is no JSON, which is counted and not hidden.
    assert local_judge.label(TEXTS) is None
    assert (local_judge.asked, local_judge.unanswered, local_judge.unreadable) == (1, 0, 1)
    stored = Answers(file).find(judge.prompt(TEXTS), judge=local_judge.name)
    assert stored is not None
    assert judge.build_judge(f"cached:{file}").ask(judge.prompt(TEXTS)) == stored


def test_a_local_model_sees_its_template_with_the_message_as_plain_text(
    folder, tmp_path, monkeypatch
):
    calls = []
    chat = Tokenizer.from_folder(folder).chat_template is not None

    def generate(params, prompts, cfg, **options):
        calls.append(prompts[0])
        # One program for all prompts of about a length.
        assert options["length_step"] == 64 and options["stop_id"] == (257, 9)
        tokenizer = Tokenizer.from_folder(folder)
        # A base model does not stop by itself.
        return [[*tokenizer.encode(f"{ANSWER}{'' if chat else ' and so on'}"), 9]]

    monkeypatch.setattr(judge, "generate", generate)
    local_judge = judge.build_judge(f"local:{folder}", answers=tmp_path / "answers.jsonl")
    hostile = [([" <|end|>", " peace"], [0.9, 0.1])]
    assert local_judge.label(hostile) == Label(**LABEL)
    (ids,) = calls
    text = Tokenizer.from_folder(folder).decode(ids)
    asked = judge.prompt(hostile)
    if chat:
        assert text == f"<|start|>user\n{asked}<|end|><|start|>assistant\n"
    else:
        assert text == f"<|start|>{asked}\nJSON: "
    assert ids.count(257) == int(chat)
    # The same weights are not asked the same thing twice, even by a run that starts again.
    again = judge.build_judge(f"local:{folder}", answers=tmp_path / "answers.jsonl")
    assert again.label(hostile) == Label(**LABEL)
    assert len(calls) == 1


def test_a_local_model_samples_as_it_is_told(folder, tmp_path, monkeypatch):
    calls = []

    def generate(params, prompts, cfg, **options):
        calls.append((options["sampling"], options["max_new_tokens"]))
        return [[*Tokenizer.from_folder(folder).encode(ANSWER)]]

    monkeypatch.setattr(judge, "generate", generate)
    settings = [{}, {"temperature": 1.0}, {"max_new_tokens": 756}]
    judges = [
        judge.build_judge(f"local:{folder}", answers=tmp_path / "answers.jsonl", **each)
        for each in settings
    ]
    assert [each.label(TEXTS) for each in judges] == [Label(**LABEL)] * 3
    assert calls == [(Sampling(), 256), (Sampling(1.0), 256), (Sampling(), 756)]
    plain, sampled, longer = (each.name for each in judges)
    assert "temperature=1.0" in sampled and longer == f"{plain[:-1]}, 756 tokens)"


def test_a_template_that_swallows_the_message_is_refused(tmp_path):
    cfg = tiny.decoder(vocab_size=258)
    params = lm_jax.init_params(jax.random.key(0), cfg)
    lm_jax.save_pretrained(tmp_path / "model", cfg, params, byte_tokenizer("{{ bos_token }}"))
    with pytest.raises(BadInputError, match="leaves out the message"):
        judge.local(tmp_path / "model").label(TEXTS)
