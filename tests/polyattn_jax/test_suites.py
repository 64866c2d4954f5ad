"""Suites are deterministic, their answers are where they say, and an unsound prompt is refused."""

from collections import Counter
import dataclasses
import json
import random
import re

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from lm_jax import assets, corpora
from lm_jax.errors import BadInputError, UsageError
from polyattn_jax import suites
from polyattn_jax.suites import haystack as haystack_lib
from polyattn_jax.suites import prompts as prompts_lib

NOUNS = suites.shipped_nouns()
PROSE = (
    "the a this that every some small large quiet bright slow early late people travel work wait "
    "sing often never always there here near far away again together home today"
)
PLAIN = PROSE.split()


class WordTokenizer:
    """One token a word or mark, spaces dropped; enough of the interface for a suite."""

    sha256 = "0" * 64
    eos_id = None

    def __init__(self, words, *, start=False, end=False):
        vocab = ["<unk>", "<s>", "</s>", *dict.fromkeys(words)]
        self.backend = Tokenizer(
            models.WordLevel({word: i for i, word in enumerate(vocab)}, unk_token="<unk>")
        )
        self.backend.pre_tokenizer = pre_tokenizers.Whitespace()
        self.bos_id = 1 if start else None
        template = ["<s>"] * start + ["$A"] + ["</s>"] * end
        self.backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 1), ("</s>", 2)]
        )

    @property
    def vocab_size(self):
        return self.backend.get_vocab_size()

    def encode(self, text, *, add_special_tokens=True):
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids):
        return " ".join(self.backend.id_to_token(i) for i in ids)


def sentences(count):
    """Distinct sentences of 4 to 9 words; every other one names a noun in one of its spellings."""
    draw = random.Random(0)
    made = {}
    while len(made) < count:
        first, *rest = draw.choices(PLAIN, k=draw.randint(4, 9))
        if len(made) % 2:
            noun = draw.choice(NOUNS)
            rest[draw.randrange(len(rest))] = draw.choice([noun, noun.title(), noun.upper()])
        made[f"{first.title()} {' '.join(rest)}."] = None
    return list(made)


HAYSTACK = sentences(500)
VOCABULARY = [
    *("The", "secret", "word", "is", ".", "room", "open", "wide", "old", "man", "long", "day"),
    *("little", "over"),
    *(form for word in (*PLAIN, *NOUNS) for form in (word, word.title(), word.upper())),
]


@pytest.fixture(scope="module")
def tokenizer():
    return WordTokenizer(VOCABULARY)


@pytest.fixture(scope="module")
def starting():
    return WordTokenizer(VOCABULARY, start=True)


def build(kind, seed=0, n=5):
    if kind == "repeated":
        return suites.repeated_tokens(vocabulary=97, half=9, n=n, seed=seed)
    if kind == "mqar":
        return suites.mqar(vocabulary=97, length=50, pairs=4, n=n, seed=seed)
    if kind == "niah":
        return suites.niah(WordTokenizer(VOCABULARY), haystack=HAYSTACK, length=60, n=n, seed=seed)
    return suites.induction(vocabulary=97, length=40, n=n, seed=seed, form=kind)


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
        # The oracle knows only the rule: what came after the last token when it was seen before.
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
        shown = dict(zip(tokens[: 2 * pairs : 2], tokens[1 : 2 * pairs : 2], strict=True))
        assert len(shown) == pairs and not set(shown) & set(shown.values())
        asked = [i for i in range(2 * pairs, length) if tokens[i] in shown]
        assert sorted(tokens[i] for i in asked) == sorted(shown)
        assert asked[-1] == length - 1
        assert prompt.query_positions == tuple(asked if read == "all" else asked[-1:])
        for query, target, answer in prompt.answers():
            assert shown[tokens[query]] == target == tokens[answer]
            assert answer < 2 * pairs
            assert query == length - 1 or tokens[query + 1] == target
        assert sum(token in shown.values() for token in tokens) == 2 * pairs - 1


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
    refused("the first prompt", id="x", query_positions=(19, 20))
    refused("targets for", target=(1, 2))
    refused("must be of one form", target=(1,), query_positions=(20,))
    refused("it has no tokens", tokens=(), query_positions=())


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda t: suites.induction(vocabulary=9, length=40, n=0), BadInputError, "is empty"),
        (lambda t: suites.induction(vocabulary=9, length=40), BadInputError, "needs 21 distinct"),
        (lambda t: suites.induction(vocabulary=9, length=2), UsageError, "length=2 leaves 2"),
        (lambda t: suites.induction(vocabulary=9, length=5, form="x"), UsageError, "form='x'"),
        (lambda t: suites.induction(vocabulary=9, length=5, seed=-1), UsageError, "seed=-1"),
        (lambda t: suites.repeated_tokens(vocabulary=9, half=1), UsageError, "half=1"),
        (lambda t: suites.mqar(vocabulary=99, length=40, common=0), UsageError, "common=0"),
        (lambda t: suites.mqar(vocabulary=99, length=30), UsageError, "raise it to 31"),
        (lambda t: suites.mqar(vocabulary=99, length=30, pairs=0), UsageError, "pairs=0"),
        (lambda t: suites.mqar(vocabulary=15, length=31), BadInputError, "needs 16 distinct"),
        (lambda t: suites.mqar(vocabulary=99, length=40, read="x"), UsageError, "read='x'"),
        (lambda t: suites.niah(t), UsageError, "pad= or length="),
        (lambda t: suites.niah(t, pad=1, length=9), UsageError, "pad= or length="),
        (lambda t: suites.niah(t, pad=1), UsageError, "haystack= is missing"),
        (lambda t: suites.niah(t, pad=-1, haystack="x"), UsageError, "pad=-1"),
        (lambda t: suites.niah(t, pad=1, haystack="x", depth=2), UsageError, "depth=2"),
        (lambda t: suites.niah(t, pad=1, haystack="x", pad_unit="w"), UsageError, "pad_unit='w'"),
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
        (
            lambda t: suites.niah(WordTokenizer(VOCABULARY, end=True), pad=0),
            BadInputError,
            "adds tokens after a text",
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
    assert [starting.decode([prompt.target]) for prompt in suite.prompts] == [
        "there",
        "apple",
        "apple",
    ]
    assert [prompt.answer_position for prompt in suite.prompts] == [None, 4, None]
    assert starting.decode(suite.prompts[1].meta["answer_ids"]) == "apple tree"
    assert suite.prompts[2].meta["kind"] == "easy"
    assert suite.manifest["audit"]["longer_answers"] == 1
    assert suite.name == "mine"


GOOD = '{"id": "a", "prompt": "Some apple is", "answer": " here"}'


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ('{"id": "b", ', "not JSON"),
        ('["b"]', "not a JSON object"),
        ('{"id": "b", "prompt": "The word is"}', "field 'answer' is missing"),
        ('{"id": "b", "prompt": "", "answer": " a"}', "field 'prompt' must be a text"),
        ('{"id": 3, "prompt": "The word is", "answer": " a"}', "field 'id' must be a text"),
        ('{"id": "a", "prompt": "The word is", "answer": " a"}', "'a' was used on line 1"),
        ('{"id": "b", "prompt": "The \\ud800 is", "answer": " a"}', "lone surrogate"),
        ('{"id": "b", "prompt": "a a a a a a a", "answer": " a"}', "'b' has 7 tokens, the limit"),
        ('{"id": "b", "prompt": "The word", "answer": "s"}', "fuses with the prompt's end"),
        ('{"id": "b", "prompt": "a", "answer": " a", "note": 1}', "unknown field 'note'"),
        ('{"id": "b", "prompt": "a", "answer": " a", "meta": 1}', "'meta' must be an object"),
        ('{"id": "b", "prompt": "a", "answer": " a", "meta": {"x": NaN}}', "NaN"),
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
    with pytest.raises(BadInputError, match="suite 'empty' is empty"):
        suites.load_jsonl(tmp_path / "empty.jsonl", tokenizer)


@given(
    count=st.integers(1, 13), size=st.integers(1, 5), buckets=st.sampled_from([None, (60, 30, 90)])
)
def test_batches_hold_every_prompt_once_and_have_few_shapes(count, size, buckets):
    suite = suites.niah(
        WordTokenizer(VOCABULARY), haystack=HAYSTACK, pad=4, n=count, queries=3, depth=1.0
    )
    longest = max(len(prompt.tokens) for prompt in suite.prompts)
    found = set()
    for batch in suites.batches(suite, size, buckets=buckets):
        length = batch.tokens_BT.shape[1]
        assert batch.tokens_BT.shape[0] == size == len(batch.ids)
        assert length in (buckets or (longest,))
        assert batch.tokens_BT.dtype == batch.target_BQ.dtype == np.int32
        for row in range(size):
            prompt = suite.prompts[batch.index_B[row]]
            end = batch.lengths_B[row]
            assert tuple(batch.tokens_BT[row, :end]) == prompt.tokens
            assert not batch.tokens_BT[row, end:].any()
            assert not any(end <= bucket < length for bucket in buckets or ())
            assert tuple(batch.query_positions_BQ[row]) == prompt.query_positions
            assert batch.target_BQ[row].tolist() == [-1, -1, prompt.target]
            assert batch.target_B[row] == prompt.target
            assert batch.ids[row] == prompt.id
            answer = prompt.answer_position
            assert batch.answer_position_B[row] == answer
            # With the needle at the end, the first query precedes it or not, by where it stands.
            expected = [answer if answer <= q else -1 for q in prompt.query_positions]
            assert batch.answer_position_BQ[row].tolist() == expected
            if batch.valid_B[row]:
                assert prompt.id not in found
                found.add(prompt.id)
        assert batch.valid_B[0]
    assert len(found) == count


def test_batches_carry_one_target_for_each_query():
    suite = suites.mqar(vocabulary=97, length=50, pairs=4, n=3, read="all")
    (batch,) = suites.batches(suite, 4)
    assert batch.valid_B.tolist() == [True, True, True, False]
    rows, _ = np.indices(batch.target_BQ.shape)
    assert (batch.tokens_BT[rows, batch.answer_position_BQ] == batch.target_BQ).all()
    keys = batch.tokens_BT[rows, batch.answer_position_BQ - 1]
    assert (batch.tokens_BT[rows, batch.query_positions_BQ] == keys).all()
    assert batch.target_BQ.shape == (4, 4)


@pytest.mark.parametrize(
    ("size", "buckets", "match"),
    [(0, None, "batch_size=0"), (2, (39,), "'induction-0000' has 40 tokens"), (2, (), "buckets")],
)
def test_batches_refuse_what_cannot_hold_a_prompt(size, buckets, match):
    with pytest.raises(UsageError, match=match):
        suites.batches(build("block"), size, buckets=buckets)


@pytest.mark.real("smollm2", "wiki")
def test_real_tokenizer_takes_every_shipped_noun_and_every_length():
    from lm_jax.hf.tokenizer import Tokenizer

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
