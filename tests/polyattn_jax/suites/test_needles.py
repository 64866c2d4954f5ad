"""Harder suites: answers agree with a lookup in the text, unsound prompts are refused by name."""

import dataclasses
import json
import re

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from lm_jax.errors import BadInputError, CorruptError, UsageError
from lm_jax.text.tokenizer import Tokenizer
from polyattn_jax.audit.suite_answers import failure
from polyattn_jax.suites import named, needles, openings
from polyattn_jax.suites import prompts as prompts_lib
from tests.polyattn_jax.synthetic_suites import HAYSTACK, NOUNS, VOCABULARY, WordTokenizer

SECRET = {"two_needles": 2, "four_needles": 4, "decoys": 3}
SPELLED = ("pass_key", "ruler_single", "ruler_multi", "ruler_paper_single", "ruler_paper_multi")
# As in test_suites: a fingerprint that changes changes every published result.
GOLDEN = {
    "needle": "f5af5233f8a8e0a3",
    "two_needles": "51ee7de883589788",
    "four_needles": "cf97a7627928bcf9",
    "decoys": "ab1a8f824d34afe9",
    "pass_key": "d644b909a47e5e5f",
    "ruler_single": "ab2824e3b06f4279",
    "ruler_multi": "7451238aeb731662",
    "ruler_paper_single": "05df6402bca6e93d",
    "ruler_paper_multi": "0ced1c3e8522d6ff",
    "copying": "fe41d509e05c9719",
    "induction": "4cdd8565d2f2f9b2",
    "induction_pair": "e51c6391811ca48d",
    "mqar": "9d3011415f38873f",
}


@pytest.fixture(scope="module")
def words():
    """One token for each word of the needle sentences, and a token before each text."""
    return WordTokenizer([*VOCABULARY, *needles.ORDINALS, *needles.DECOYS], start=True)


@pytest.fixture(scope="module")
def pieces():
    """Byte-level BPE that joins some digits and letters, so that keys differ in their tokens."""
    pairs = [a + b for group in ("0123456789", "ABCDEFGH", "abcdef") for a in group for b in group]
    joined = [*pairs[::3], *(f"Ġ{word[0]}" for word in VOCABULARY if word.isalpha())]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys([*alphabet, *joined]))}
    merges = [(piece[0], piece[1]) for piece in dict.fromkeys(joined)]
    backend = Backend(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def build(name, tokenizer, **options):
    options = {"length": 160, "n": 6, "seed": 0, "max_length": 400} | options
    return named.build(name, tokenizer, haystack=" ".join(HAYSTACK), **options)


@pytest.mark.parametrize("name", SECRET)
@pytest.mark.parametrize("seed", [0, 5])
def test_the_secret_word_is_that_of_the_modifier_in_the_cue(words, name, seed):
    suite = build(name, words, seed=seed, n=12)
    asked = set()
    for prompt in suite.prompts:
        planted = re.findall(r"The (\w+) secret word is (\w+)\.", prompt.text)
        by_modifier = dict(planted)
        modifier = re.fullmatch(r".* The (\w+) secret word is", prompt.text)[1]
        assert len(planted) == len(by_modifier) == len(set(by_modifier.values())) == SECRET[name]
        assert words.decode([prompt.target]) == by_modifier[modifier]
        assert prompt.tokens[prompt.answer_position] == prompt.target
        assert prompt.tokens.count(prompt.target) == 1 and len(prompt.tokens) == 160
        others = {m: words.backend.token_to_id(noun) for m, noun in planted if m != modifier}
        assert dict(prompt.meta["others"]) == {m: [i] for m, i in others.items()}
        assert failure(prompt, 0, prompt.target) == ""
        assert [failure(prompt, 0, token) for token in others.values()] == list(others)
        assert failure(prompt, 0, prompt.tokens[-1]) == "other"
        rest = [part.strip() for part in re.findall(r"[^.]+\.", prompt.text)]
        hay = [part for part in rest if "secret" not in part]
        assert set(hay) <= set(HAYSTACK) and len(set(hay)) == len(hay)
        places = [i for i, part in enumerate(rest) if "secret" in part]
        depths = suite.manifest["depths"]
        want = [round(d * len(hay)) + i for i, d in enumerate(depths)]
        assert places == want
        for noun in by_modifier.values():
            assert prompts_lib.words(prompt.text).count(noun) == 1
        asked.add(modifier)
    assert asked == ({"real"} if name == "decoys" else set(by_modifier))


@pytest.mark.parametrize("name", SPELLED)
def test_a_key_of_several_tokens_is_looked_up_in_the_text(pieces, name):
    suite = build(name, pieces, length=1200, max_length=1200)
    counts = set()
    for prompt in suite.prompts:
        if name == "pass_key":
            value = re.match(r"The pass key is ([A-Z0-9]{8})\. ", prompt.text)[1]
            held = {"": value}
            assert prompt.text.endswith("The pass key is")
        else:
            plural = "uuids" if "paper" in name else "numbers"
            held = dict(
                re.findall(rf"One of the special magic {plural} for (\w+) is: (\S+)\.", prompt.text)
            )
            key = re.findall(r"for (\w+) mentioned in the provided text", prompt.text)
            assert len(key) == 2 and key[0] == key[1]
            value = held[key[0]]
            form = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}" if "paper" in name else r"\d{7}"
            assert re.fullmatch(form, value) and set(held) <= set(NOUNS)
        assert len(held) == (4 if "multi" in name else 1)
        # All that is read: the text, then the answer but its last token.
        ids = pieces.encode(f"{prompt.text} {value}")
        assert ids == [*prompt.tokens, prompt.target[-1]] and len(prompt.tokens) == 1200
        assert pieces.decode(list(prompt.target)).strip() == value
        first = len(pieces.encode(prompt.text)) - 1
        assert prompt.query_positions == tuple(range(first, first + len(prompt.target)))
        assert tuple(prompt.tokens[i] for i in prompt.answer_position) == prompt.target
        assert prompt.answer_position[-1] < first
        assert prompt.text.count(value) == 1
        counts.add(len(prompt.target))
        for _, other in prompt.meta["others"]:
            assert pieces.decode(other).strip() in set(held.values()) - {value}
    assert counts == {suite.manifest["value_tokens"]}


def test_keys_are_of_the_usual_number_of_tokens(pieces):
    make = needles._RULER["number"][0]
    rng = np.random.RandomState(3)
    lengths = [len(needles._continuation(pieces, "is", make(rng))) for _ in range(400)]
    values, counts = np.unique(lengths, return_counts=True)
    assert len(values) > 1
    suite = build("ruler_single", pieces, length=600, max_length=600, n=2)
    # The sample of the suite has half as many draws, so that near ties may fall either way.
    usual = counts[values.tolist().index(suite.manifest["value_tokens"])]
    assert usual > 0.8 * counts.max()
    with pytest.raises(BadInputError, match="the tokenizer cannot spell"):
        build("pass_key", WordTokenizer(VOCABULARY))


def test_openings_that_were_changed_are_refused(monkeypatch):
    monkeypatch.setattr(openings, "OPENINGS_SHA256", "0" * 64)
    with pytest.raises(CorruptError, match=r"openings\.txt: sha256 40c9e33b76e0 is not"):
        openings.openings()


def test_openings_are_continued_by_their_next_token(pieces):
    shipped = openings.openings()
    assert len(shipped) == openings.COUNT and all(len(text) > 40 for text in shipped.values())
    suite = build("copying", pieces, n=openings.COUNT, length=300, common=200)
    assert {prompt.meta["work"] for prompt in suite.prompts} == {*shipped}
    for prompt in suite.prompts:
        text, kept = shipped[prompt.meta["work"]], prompt.meta["text"]
        assert text.startswith(kept) and len(kept) >= len(text) // 2
        assert text[len(kept)] == " " and len(prompt.tokens) == 300
        ids = pieces.encode(kept)
        assert list(prompt.tokens[-len(ids) :]) == ids
        assert prompt.target == pieces.encode(text)[len(ids)]
        padding = prompt.tokens[: -len(ids)]
        assert len(padding) == prompt.meta["padding"] and max(padding) < 200
    assert named.available("copying", 200) == openings.COUNT
    assert (named.available("copying", 10), named.available("mqar", 200)) == (10, 200)
    with pytest.raises(UsageError, match=r"n=55, but there are 54 openings.* give 54 or fewer"):
        build("copying", pieces, n=55, length=300)
    with pytest.raises(
        UsageError, match=r"suite 'copying': length=20 is too short for the opening"
    ):
        build("copying", pieces, length=20)


def test_an_answer_that_leaks_or_is_misplaced_is_refused(pieces):
    suite = build("ruler_multi", pieces, length=700, max_length=700, n=2)
    first = suite.prompts[0]
    answer, size = first.target, len(first.target)

    def refused(match, **changes):
        prompts = [dataclasses.replace(first, **changes), suite.prompts[1]]
        with pytest.raises(BadInputError, match=match):
            prompts_lib.audit_prompts("s", prompts, vocabulary=pieces, plant="span")

    where = first.answer_position
    refused("does not hold the answer", answer_position=tuple(i + 1 for i in where))
    refused("must follow", tokens=(*first.tokens[:-1], first.tokens[0]))
    leaky = (*first.tokens[: where[0] - 1 - size], *answer, *first.tokens[where[0] - 1 :])
    refused("the answer leaks", tokens=leaky)
    refused("is a tuple with their positions", answer_position=None)
    twice = first.text.replace("\n", f" {first.meta['answer'].strip()}\n", 1)
    refused("does not give its tokens", text=twice)
    refused("fuses with the prompt's end", meta={"answer": "9"})


def test_names_of_suites_and_what_is_wrong_with_them(words):
    for name in named.NAMES:
        assert named.split(named.key(name, 512)) == (name, 512)
        assert named.split(name) == (name, None)
    assert named.split("niah_64") == ("niah", 64)
    assert "'decoy'; did you mean 'decoys'" in named.problems("config.suites", ("decoy",))[0]
    assert "names a suite twice" in named.problems("f", ("mqar", "mqar"))[0]
    with pytest.raises(UsageError, match="suite 'decoys': length=20 is too short"):
        build("decoys", words, length=20)
    with pytest.raises(UsageError, match="name has 'none'"):
        build("none", words)
    with pytest.raises(UsageError, match="name has 'decoys@64'"):
        build("decoys@64", words)


def test_an_entry_may_have_a_length_of_its_own():
    assert named.read_entry("decoys") == ("decoys", None)
    assert named.read_entry("decoys@512") == ("decoys", 512)
    entries = ("decoys@512", "mqar", "decoys@64")
    wanted = (("decoys", 512), ("mqar", 32), ("mqar", 16), ("decoys", 64))
    assert named.at_lengths(entries, (32, 16)) == wanted
    assert named.at_lengths(("mqar", "decoys"), (8,)) == (("mqar", 8), ("decoys", 8))
    assert named.problems("f", entries, (32, 16)) == []


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (("decoy@64",), "'decoy@64'; did you mean 'decoys'"),
        (("decoys@",), "'decoys@', whose length is no number of tokens; write 'decoys@512'"),
        (("decoys@long",), "'decoys@long', whose length is no number"),
        (("decoys@-4",), "'decoys@-4', whose length is no number"),
        (("decoys@0",), "'decoys@0', whose length is no number"),
        (("decoys@64@8",), "'decoys@64@8', whose length is no number"),
        (("decoys@64", "decoys@64"), "names a suite twice"),
        (("decoys", "decoys@32"), "asks for decoys_32 twice, once at a length of its own"),
    ],
)
def test_a_wrong_length_of_an_entry_is_named(entries, said):
    (fault,) = named.problems("config.suites", entries, (32, 16))
    assert fault.startswith("config.suites ") and said in fault


@pytest.mark.parametrize("name", named.NAMES)
def test_same_seed_same_prompts_and_published_fingerprint(words, pieces, name):
    tokenizer = pieces if name in (*SPELLED, "copying") else words
    size = {"length": 1000, "max_length": 1000} if name in SPELLED else {"length": 300}
    first, other = build(name, tokenizer, **size), build(name, tokenizer, seed=1, **size)
    assert first.name == name and other.sha256 != first.sha256
    assert build(name, tokenizer, n=2, **size).prompts == first.prompts[:2]
    assert json.loads(json.dumps(first.manifest))["n"] == 6
    assert first.sha256.startswith(GOLDEN[name])
