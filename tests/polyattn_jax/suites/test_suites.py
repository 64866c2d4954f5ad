"""Suites are deterministic, and their answers are where they say."""

from collections import Counter
import json
import re

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from lm_jax import assets
from lm_jax.errors import BadInputError
from lm_jax.text import corpora
from polyattn_jax import suites
from polyattn_jax.suites import haystack as haystack_lib
from polyattn_jax.suites import prompts as prompts_lib
from tests.polyattn_jax.synthetic_suites import HAYSTACK, NOUNS, VOCABULARY, WordTokenizer, build

# The fingerprints of the suites as this file builds them. One that changes changes every published
# result: prompts are no longer those that were measured.
GOLDEN = {
    "block": "c599556e1e3a4da73cf38707451b57f61e97d1f25803b5b8d0eb0f10fa268108",
    "pair": "9d61a181e380dd2446fa89ca2111fb2d79a019fa44815c97bf54601273f0fcf1",
    "repeated": "0ee998be0af42da5958fd4f7dc205304819ed3d0fa401301a1ada8ab210afde7",
    "mqar": "5ccd82be89c9cbbcf68e9996b00b2f50374fd4bbbd6986e11438632e106ca541",
    "niah": "e7b935d7e49b75636ae6ef5da2eee6f72fa92d4dffcff97c1c96e0c9d101832e",
}


@pytest.mark.parametrize("kind", GOLDEN)
def test_same_seed_same_prompts_and_published_fingerprint(kind):
    first, again, other = build(kind), build(kind), build(kind, seed=1)
    assert first == again
    assert first.sha256 == GOLDEN[kind]
    assert other.sha256 != first.sha256
    assert build(kind, n=2).prompts == first.prompts[:2]
    assert json.loads(json.dumps(first.manifest))["n"] == 5


@given(
    form=st.sampled_from(["block", "pair"]),
    length=st.integers(3, 150),
    seed=st.integers(0, 2**32 - 1),
)
def test_induction_answer_is_unambiguous(form, length, seed):
    suite = suites.induction(vocabulary=200, length=length, n=2, seed=seed, form=form)
    for prompt in suite.prompts:
        tokens, answer = prompt.tokens, prompt.answer_position
        assert len(tokens) == length
        # The oracle knows only the rule: what followed the earlier occurrence of the last token.
        before = [i for i in range(length - 1) if tokens[i] == tokens[-1]]
        assert before == [answer - 1]
        assert tokens[answer] == prompt.target
        assert tokens.count(prompt.target) == 1


def test_induction_block_repeats_the_first_half():
    (prompt,) = suites.induction(vocabulary=500, length=201, n=1).prompts
    assert prompt.tokens[101:] == prompt.tokens[:100]
    assert prompt.target == prompt.tokens[100]
    assert len(set(prompt.tokens)) == 101


def test_random_tokens_spare_special_ones_and_begin_as_the_tokenizer_does(starting, tokenizer):
    small = WordTokenizer(list("abcdefg"), start=True)
    suite = suites.induction(vocabulary=small, length=12, n=40)
    used = Counter(token for prompt in suite.prompts for token in prompt.tokens[1:])
    # Ids 0, 1 and 2 are <unk>, <s> and </s>.
    assert set(used) == set(range(3, small.vocab_size))
    assert all(prompt.tokens[0] == 1 and len(prompt.tokens) == 12 for prompt in suite.prompts)
    assert suite.manifest["start_tokens"] == [1]
    assert suite.manifest["random_tokens"] == 7
    assert prompts_lib.start_tokens(tokenizer) == ()
    listed = WordTokenizer(list("abcd"))
    listed.special_ids = (5,)
    assert prompts_lib.ordinary_tokens(listed).tolist() == [3, 4, 6]
    assert prompts_lib.ordinary_tokens(listed, common=2).tolist() == [3, 4]
    common = suites.mqar(vocabulary=500, length=60, n=9, common=30)
    assert {token for prompt in common.prompts for token in prompt.tokens} == set(range(30))


@given(half=st.integers(2, 60), seed=st.integers(0, 2**32 - 1))
def test_repeated_tokens_score_the_same_targets_in_both_copies(half, seed):
    suite = suites.repeated_tokens(vocabulary=90, half=half, n=1, seed=seed)
    (prompt,) = suite.prompts
    first, second = suites.copies(prompt)
    assert prompt.tokens[:half] == prompt.tokens[half:]
    assert prompt.target[first] == prompt.target[second] == prompt.tokens[1:half]
    for query, target, answer in prompt.answers():
        assert prompt.tokens[query + 1] == target
        assert answer == (query + 1 - half if query >= half else -1)


@given(
    pairs=st.integers(1, 12),
    noise=st.integers(0, 60),
    seed=st.integers(0, 2**32 - 1),
    read=st.sampled_from(["last", "all"]),
)
def test_mqar_answers_agree_with_a_lookup_of_the_pairs(pairs, noise, seed, read):
    length = 4 * pairs - 1 + noise
    suite = suites.mqar(vocabulary=120, length=length, pairs=pairs, n=2, seed=seed, read=read)
    for prompt in suite.prompts:
        tokens = prompt.tokens
        assert len(tokens) == length
        value_of = dict(zip(tokens[: 2 * pairs : 2], tokens[1 : 2 * pairs : 2], strict=True))
        assert len(value_of) == pairs and not set(value_of) & set(value_of.values())
        queries = [i for i in range(2 * pairs, length) if tokens[i] in value_of]
        assert sorted(tokens[i] for i in queries) == sorted(value_of)
        assert queries[-1] == length - 1
        assert prompt.query_positions == tuple(queries if read == "all" else queries[-1:])
        for query, target, answer in prompt.answers():
            assert value_of[tokens[query]] == target == tokens[answer]
            assert answer < 2 * pairs
            assert query == length - 1 or tokens[query + 1] == target
        assert sum(token in value_of.values() for token in tokens) == 2 * pairs - 1


@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_needle_prompts_reach_the_exact_length_with_the_needle_where_it_should_be(start, depth):
    tokenizer = WordTokenizer(VOCABULARY, start=start)
    for length in (12 + 10, 47, 128, 333):
        suite = suites.niah(tokenizer, haystack=HAYSTACK, length=length, n=4, depth=depth)
        for prompt in suite.prompts:
            noun = prompt.meta["answer"].strip()
            assert len(prompt.tokens) == length
            assert prompt.tokens[0] == 1 or not start
            assert tokenizer.decode([prompt.tokens[prompt.answer_position]]) == noun
            assert prompt.text.endswith(". The secret word is")
            parts = re.findall(r"[^.]+\.", prompt.text)
            at = round(depth * (len(parts) - 1))
            assert parts[at].strip() == f"The secret word is {noun}."
            assert all(part.strip() in HAYSTACK for i, part in enumerate(parts) if i != at)
            assert len(set(parts)) == len(parts)


@given(seed=st.integers(0, 2**32 - 1), pad=st.integers(0, 12))
def test_no_spelling_of_the_needle_is_in_the_haystack(seed, pad):
    tokenizer = WordTokenizer(VOCABULARY)
    suite = suites.niah(tokenizer, haystack=HAYSTACK, pad=pad, n=2, seed=seed)
    for prompt in suite.prompts:
        assert prompt.meta["sentences"] == pad == prompt.text.count(".") - 1
        noun = prompt.meta["answer"].strip()
        assert len(re.findall(rf"\b{noun}\b", prompt.text, re.IGNORECASE)) == 1
        spelled = {tokenizer.backend.token_to_id(f) for f in (noun, noun.title(), noun.upper())}
        assert [token for token in prompt.tokens if token in spelled] == [prompt.target]


def test_padding_in_tokens_counts_the_haystack_alone(tokenizer):
    bare = suites.niah(tokenizer, pad=0, n=1).prompts[0]
    assert len(bare.tokens) == 10
    for pad in (8, 32, 128):
        suite = suites.niah(tokenizer, haystack=HAYSTACK, pad=pad, pad_unit="tokens", n=3)
        assert {len(prompt.tokens) for prompt in suite.prompts} == {10 + pad}


@pytest.mark.parametrize("size", [{"pad": 7}, {"length": 64}, {"pad": 0}])
def test_control_is_the_same_prompt_without_its_needle(tokenizer, size):
    options = {"haystack": HAYSTACK, "n": 30, "depth": 0.3, **size}
    planted = suites.niah(tokenizer, **options)
    control = suites.niah(tokenizer, needle=False, **options)
    assert control.manifest["audit"]["plant"] == "absent"
    for with_needle, without in zip(planted.prompts, control.prompts, strict=True):
        assert without.id == with_needle.id
        assert without.target == with_needle.target
        assert without.target not in without.tokens
        assert without.answer_position is None
        assert len(without.tokens) == len(with_needle.tokens)
        needle = f"The secret word is{with_needle.meta['answer']}."
        before, after = with_needle.text.split(needle)
        assert without.text.startswith(before) and without.text.endswith(after)


def test_needles_are_drawn_from_the_whole_list(tokenizer):
    suite = suites.niah(tokenizer, pad=0, n=3000)
    counts = Counter(prompt.meta["answer"].strip() for prompt in suite.prompts)
    assert set(counts) == set(NOUNS)
    # 15 expected of each; a Poisson count above 40 has a chance below 1e-7.
    assert max(counts.values()) < 40


def test_shipped_nouns_are_200_plain_words():
    assert len(NOUNS) == len(set(NOUNS)) == 200
    assert sorted(NOUNS) == NOUNS
    assert all(re.fullmatch("[a-z]{2,}", noun) for noun in NOUNS)


def test_nouns_that_are_not_one_token_are_dropped_and_too_few_refused():
    knows_60 = WordTokenizer([*VOCABULARY[:5], *NOUNS[:60]])
    assert list(suites.single_token_nouns(knows_60, [*NOUNS, "ice cream", "word"])) == NOUNS[:60]
    assert suites.niah(knows_60, pad=0, n=3).manifest["nouns_kept"] == 60
    with pytest.raises(BadInputError, match=r"49 of 200 are one token.* pass nouns="):
        suites.niah(WordTokenizer([*VOCABULARY[:5], *NOUNS[:49]]), pad=0)


def test_haystack_keeps_plain_sentences_only():
    text = 'It was a dog of war.Then we\n  sailed very far away.  He said "no" to all of us. Why? '
    text += "The secret plan went quite wrong. see what the small ones do. Was it all just a game?"
    kept = haystack_lib.sentences(text)
    assert kept[:2] == ["It was a dog of war.", "Then we sailed very far away."]
    assert list(filter(haystack_lib.usable, kept)) == [*kept[:2], "Was it all just a game?"]


@given(
    lengths=st.lists(st.integers(2, 9), min_size=1, max_size=9),
    need=st.integers(1, 60),
    seed=st.integers(0, 1000),
)
def test_fit_is_exact_and_finds_every_small_sum(lengths, need, seed):
    allowed = np.arange(len(lengths))
    chosen = haystack_lib.fit(lengths, allowed, need, np.random.RandomState(seed))
    sums = {0}
    for length in lengths:
        sums |= {total + length for total in sums}
    if chosen is not None:
        assert len(set(chosen)) == len(chosen)
        assert sum(lengths[i] for i in chosen) == need
    # Below the closing range the search is complete.
    elif need < 2 * max(lengths):
        assert need not in sums


@pytest.mark.real("smollm2", "wiki")
def test_real_tokenizer_takes_every_shipped_noun_and_every_length():
    from lm_jax.text.tokenizer import Tokenizer

    weights = assets.path("smollm2", assets.models()["smollm2"])
    tokenizer = Tokenizer.from_gguf(weights)
    assert list(suites.single_token_nouns(tokenizer, NOUNS)) == NOUNS
    essays = corpora.essays()
    for length in (256, 512):
        suite = suites.niah(tokenizer, haystack=essays, length=length, n=10, max_length=length)
        assert {len(prompt.tokens) for prompt in suite.prompts} == {length}
    # The paper counts 128 distractors as about 1,500 tokens.
    suite = suites.niah(tokenizer, haystack=essays, pad=128, n=10)
    assert np.mean([len(prompt.tokens) for prompt in suite.prompts]) == pytest.approx(
        1500, rel=0.05
    )
