"""Tokenizers in folders and GGUF files: saved and read back, and refused where damaged."""

import dataclasses
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers

from lm_jax.errors import BadInputError
from lm_jax.text.gguf_reader import open_gguf
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.weights.compat import transformers
from tests.lm_jax.text.synthetic_tokenizers import (
    BOS,
    EOS,
    ODD,
    SPM_TEXT,
    TEXT,
    byte_level_fields,
    sentencepiece_fields,
    train_backend,
    write_gguf,
)


@pytest.mark.parametrize("model_type", [None, "llama", "gemma3_text"])
@pytest.mark.parametrize("name", ["smollm", "sentencepiece", "prefixing"])
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
    # A false flag removes the token that tokenizer.json adds.
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
        ({"merges": None}, "no field tokenizer.ggml.merges"),
        ({"merges": ["zz zzz"]}, "entries that make no token, such as 'zz zzz'"),
        ({"tokens": ["a"] * 5, "token_type": [1] * 5}, "has 4 tokens twice"),
        ({"bos_token_id": 300}, "bos_token_id 300 is outside 0..299"),
        ({"model": "llama"}, "no field tokenizer.ggml.scores"),
    ],
)
def test_gguf_fields_that_cannot_be_used(tmp_path, change, message):
    fields = byte_level_fields(train_backend("smollm"), "smollm") | change
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
