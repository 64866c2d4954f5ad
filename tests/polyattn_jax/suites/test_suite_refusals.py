"""Unsound prompts, arguments and files of prompts are refused by name."""

import dataclasses
import json
import re

import pytest

from lm_jax.errors import BadInputError, UsageError
from polyattn_jax import suites
from polyattn_jax.suites import prompts as prompts_lib
from tests.polyattn_jax.synthetic_suites import HAYSTACK, VOCABULARY, WordTokenizer


def tampered(suite, **changes):
    return [dataclasses.replace(suite.prompts[0], **changes), *suite.prompts[1:]]


def audit(prompts, tokenizer, plant, **options):
    return prompts_lib.audit_prompts("s", prompts, vocabulary=tokenizer, plant=plant, **options)


def test_audit_catches_leaks_and_false_claims_in_text(tokenizer):
    suite = suites.niah(tokenizer, haystack=HAYSTACK, pad=3, n=3)
    first = suite.prompts[0]
    noun = first.meta["answer"].strip()
    assert audit(suite.prompts, tokenizer, "single")["passed"] == 3

    def refused(match, plant="single", **changes):
        with pytest.raises(BadInputError, match=match):
            audit(tampered(suite, **changes), tokenizer, plant)

    def rewritten(text):
        tokens = tuple(tokenizer.encode(text))
        return {"text": text, "tokens": tokens, "query_positions": (len(tokens) - 1,)}

    leaky = f"{first.text[: -len('The secret word is')]}Some {noun} here. The secret word is"
    refused("the answer leaks: token", **rewritten(leaky))
    shouted = leaky.replace(f"Some {noun}", f"Some {noun.upper()}")
    refused(f"the word '{noun}' occurs 2 times in the text, not 1", **rewritten(shouted))
    refused("does not hold the answer", answer_position=first.answer_position - 1)
    refused("the control holds its answer", plant="absent")
    refused("does not give its tokens", text=first.text.replace("secret", "small"))
    refused("fuses with the prompt's end", meta={"answer": "ful"})
    refused("occurs twice", id=suite.prompts[1].id)


def test_audit_catches_false_claims_about_random_tokens():
    suite = suites.induction(vocabulary=50, length=21, n=2)
    tokens = suite.prompts[0].tokens

    def refused(match, **changes):
        with pytest.raises(BadInputError, match=match):
            audit(tampered(suite, **changes), 50, "pair", max_length=21)

    refused("must occur once before, at 9, not at", tokens=(tokens[-1], *tokens[1:]))
    refused("does not hold the answer", target=(suite.prompts[0].target + 1) % 50)
    refused("'induction-0000': it has 22 tokens, the limit is 21", tokens=(*tokens, 1))
    refused("token 50 is outside the vocabulary of 50", tokens=(50, *tokens[1:]))
    refused("must ascend within", query_positions=(21,))
    refused("query_positions must end there", query_positions=(3,))
    refused("targets for", target=(1, 2))
    refused("must be of one form", target=(1,), query_positions=(20,))
    refused("it has no tokens", tokens=(), query_positions=())


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda t: suites.induction(vocabulary=9, length=40, n=0), BadInputError, "is empty"),
        (lambda t: suites.induction(vocabulary=9, length=40), BadInputError, "needs 21 distinct"),
        (lambda t: suites.induction(vocabulary=9, length=2), UsageError, "length=2 leaves 2"),
        (lambda t: suites.repeated_tokens(vocabulary=9, half=1), UsageError, "half=1"),
        (lambda t: suites.mqar(vocabulary=99, length=30), UsageError, "raise it to 31"),
        (lambda t: suites.mqar(vocabulary=15, length=31), BadInputError, "needs 16 distinct"),
        (lambda t: suites.niah(t), UsageError, "pad= or length="),
        (lambda t: suites.niah(t, pad=1), UsageError, "haystack= is missing"),
        (lambda t: suites.niah(t, pad=0, queries=0), UsageError, "queries=0"),
        (lambda t: suites.niah(t, pad=1, haystack="x"), BadInputError, "no usable sentence"),
        (lambda t: suites.niah(t, pad=9, haystack=HAYSTACK[:4]), BadInputError, "only 4 usable"),
        (lambda t: suites.niah(t, length=9, haystack=HAYSTACK), UsageError, "give 10 or more"),
        (lambda t: suites.niah(t, length=12, haystack=HAYSTACK), BadInputError, "gives 12 tokens"),
        (
            lambda t: suites.niah(t, length=40, haystack=HAYSTACK, max_length=39),
            BadInputError,
            "'niah-0000': it has 40 tokens, the limit is 39",
        ),
    ],
)
def test_unusable_arguments_are_refused_by_name(tokenizer, make, error, match):
    with pytest.raises(error, match=re.escape(match)):
        make(tokenizer)


def test_jsonl_prompts_become_an_audited_suite(tmp_path, starting):
    path = tmp_path / "mine.jsonl"
    rows = [
        {"id": "a", "prompt": "Some small apple is", "answer": " there"},
        {"id": "b", "prompt": "The word is apple. The word is", "answer": " apple tree"},
        {"id": "c", "prompt": "apple apple", "answer": " apple", "meta": {"kind": "easy"}},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    suite = suites.load_jsonl(path, starting, max_length=10)
    assert [prompt.id for prompt in suite.prompts] == ["a", "b", "c"]
    assert [starting.decode(prompt.meta["answer_ids"]) for prompt in suite.prompts] == [
        "there",
        "apple tree",
        "apple",
    ]
    # Of an answer of two tokens the first is forced, and both are asked for.
    first, tree = suite.prompts[1].target
    assert suite.prompts[1].tokens[-1] == first and starting.decode([tree]) == "tree"
    assert [len(prompt.query_positions) for prompt in suite.prompts] == [1, 2, 1]
    assert [prompt.answer_position for prompt in suite.prompts] == [None, None, None]
    assert suite.prompts[2].meta["kind"] == "easy"
    assert suite.manifest["audit"]["longer_answers"] == 1
    assert suite.name == "mine"


def test_special_tokens_in_a_prompt_are_plain_text(tmp_path):
    # `</s>` is the end-of-text token of this tokenizer, and `<s>` its start token.
    tokenizer = WordTokenizer([*VOCABULARY, "/", "s", "<", ">", "</"], start=True)
    tokenizer.backend.add_special_tokens(["<s>", "</s>"])
    assert 2 in tokenizer.encode("The word </s> is")
    path = tmp_path / "mine.jsonl"
    row = {"id": "a", "prompt": "The word </s> is <s>", "answer": " </s>"}
    path.write_text(json.dumps(row), encoding="utf-8")
    suite = suites.load_jsonl(path, tokenizer)
    (prompt,) = suite.prompts
    assert prompt.tokens[0] == 1 and not {1, 2} & {*prompt.tokens[1:], *prompt.meta["answer_ids"]}
    # With all of the answer's tokens but the last.
    assert tokenizer.decode(prompt.tokens) == "<s> The word </ s > is < s > </ s"
    assert "plain text" in suite.manifest["special_tokens"]
    # The haystack is a user's file too.
    haystack = [*HAYSTACK, *(f"Some people </s> wait there {noun}." for noun in ("today", "home"))]
    needles = suites.niah(tokenizer, haystack=haystack, length=60, n=5)
    assert not any({1, 2} & set(prompt.tokens[1:]) for prompt in needles.prompts)


GOOD = '{"id": "a", "prompt": "Some apple is", "answer": " here"}'


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ('{"id": "b", ', "not JSON"),
        ('{"id": "b", "prompt": "The word is"}', "field 'answer' is missing"),
        ('{"id": 3, "prompt": "The word is", "answer": " a"}', "field 'id' must be a text"),
        ('{"id": "a", "prompt": "The word is", "answer": " a"}', "'a' was used on line 1"),
        ('{"id": "b", "prompt": "The \\ud800 is", "answer": " a"}', "lone surrogate"),
        ('{"id": "b", "prompt": "a a a a a a a", "answer": " a"}', "'b' has 7 tokens, the limit"),
        ('{"id": "b", "prompt": "The word", "answer": "s"}', "fuses with the prompt's end"),
        (b'{"id": "b", "prompt": "\xff", "answer": " a"}', "not UTF-8 at byte 23"),
    ],
)
def test_jsonl_faults_name_their_line(tmp_path, tokenizer, line, match):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(f"{GOOD}\n\n".encode() + (line if isinstance(line, bytes) else line.encode()))
    with pytest.raises(BadInputError, match=re.escape(match)) as caught:
        suites.load_jsonl(path, tokenizer, max_length=6)
    assert str(caught.value).startswith(f"{path}:3: ")


def test_jsonl_without_prompts_or_file_is_refused(tmp_path, tokenizer):
    with pytest.raises(BadInputError, match="No such file"):
        suites.load_jsonl(tmp_path / "none.jsonl", tokenizer)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(BadInputError, match="no prompts: write one JSON object"):
        suites.load_jsonl(tmp_path / "empty.jsonl", tokenizer)
