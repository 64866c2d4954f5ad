"""Every file that says what ends a text is read, and all of it is kept on export."""

import dataclasses
import json

import jax
import pytest

from iaj import convert
import lm_jax
from lm_jax.errors import BadInputError
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.weights import hub
from lm_jax.weights.compat import transformers
from tests import tiny
from tests.lm_jax.text.synthetic_tokenizers import (
    BOS,
    EOS,
    byte_level_fields,
    train_backend,
    write_gguf,
)


@pytest.fixture(scope="module")
def backend():
    """300 tokens, of which 0 and 1 are special."""
    return train_backend("smollm")


@pytest.mark.parametrize(
    ("files", "eos", "stops"),
    [
        ({}, None, ()),
        ({"config": {"eos_token_id": 5}}, 5, (5,)),
        ({"config": {"eos_token_id": [5, 7]}}, 5, (5, 7)),
        ({"config": {"text_config": {"eos_token_id": [5, 7]}}}, 5, (5, 7)),
        ({"generation_config": {"eos_token_id": 5}}, None, (5,)),
        ({"generation_config": {"eos_token_id": [5, 7]}}, None, (5, 7)),
        ({"tokenizer_config": {"eos_token": EOS}}, 1, (1,)),
        ({"tokenizer_config": {"eos_token": EOS, "eot_token": BOS}}, 1, (1, 0)),
        ({"tokenizer_config": {"extra_special_tokens": {"eot_token": BOS}}}, None, (0,)),
        ({"special_tokens_map": {"eom_token": {"content": BOS}}}, None, (0,)),
        # The union of all: transformers stops at a part of it.
        (
            {
                "tokenizer_config": {"eos_token": EOS},
                "generation_config": {"eos_token_id": [7, 1, 9]},
                "config": {"eos_token_id": [5, 1]},
            },
            1,
            (1, 7, 9, 5),
        ),
        # What the tokenizer lacks is never generated: the default of a config of GPT-2.
        (
            {"tokenizer_config": {"eos_token": EOS}, "config": {"eos_token_id": 50256}},
            1,
            (1,),
        ),
    ],
)
def test_each_file_of_a_folder_that_names_an_end(backend, tmp_path, files, eos, stops):
    backend.save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.eos_id, tokenizer.stop_ids) == (eos, stops)


@pytest.mark.parametrize("value", ["</s>", [1, "2"], True, {"a": 1}, 1.5])
@pytest.mark.parametrize("name", ["config", "generation_config"])
def test_an_end_that_is_no_id_is_refused(backend, tmp_path, name, value):
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / f"{name}.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(BadInputError, match=rf"{name}.json: eos_token_id = .* must be a token id"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("fields", "stops"),
    [
        ({}, (1,)),
        ({"eot_token_id": 5}, (1, 5)),
        ({"eom_token_id": 6}, (1, 6)),
        ({"eos_token_ids": [1, 8, 9]}, (1, 8, 9)),
        ({"eot_token_id": 5, "eom_token_id": 6, "eos_token_ids": [1, 5, 8]}, (1, 5, 6, 8)),
        ({"eos_token_id": None, "eot_token_id": 5}, (5,)),
    ],
)
def test_each_field_of_a_gguf_file_that_names_an_end(backend, tmp_path, fields, stops):
    path = write_gguf(tmp_path / "m.gguf", byte_level_fields(backend, "smollm") | fields)
    assert Tokenizer.from_gguf(path).stop_ids == stops


def test_an_end_of_a_turn_outside_the_vocabulary_of_a_gguf_file_is_refused(backend, tmp_path):
    fields = byte_level_fields(backend, "smollm") | {"eot_token_id": 300}
    with pytest.raises(BadInputError, match=r"eot_token_id 300 is outside 0\.\.299"):
        Tokenizer.from_gguf(write_gguf(tmp_path / "m.gguf", fields))


@pytest.fixture(scope="module")
def chat_model(backend, tmp_path_factory):
    """A model whose texts end at 1 and whose turns end at 7, as a folder and in memory."""
    cfg = tiny.decoder(vocab_size=300)
    params = lm_jax.init_params(jax.random.key(0), cfg)
    folder = tmp_path_factory.mktemp("stops") / "model"
    lm_jax.save_pretrained(folder, cfg, params, Tokenizer(backend, 0, 1, None, (7, 5)))
    return folder


def test_an_exported_model_ends_at_the_same_ids_here_and_in_transformers(chat_model, tmp_path):
    folders = [chat_model, tmp_path / "converted", tmp_path / "back"]
    convert.convert(chat_model, folders[1])
    converted = lm_jax.load_pretrained(folders[1])
    lm_jax.save_pretrained(folders[2], converted.cfg, converted.params, converted.tokenizer)
    for folder in folders:
        tokenizer = lm_jax.load_pretrained(folder).tokenizer
        assert (tokenizer.eos_id, tokenizer.stop_ids) == (1, (1, 7, 5))
    for folder in (chat_model, folders[2]):
        # What GenerationMixin reads, and ends at every id of.
        theirs = transformers().GenerationConfig.from_pretrained(folder)
        assert theirs.eos_token_id == [1, 7, 5]
        assert transformers().AutoConfig.from_pretrained(folder).eos_token_id == 1


def test_one_end_is_in_the_config_alone(backend, tmp_path):
    cfg = tiny.decoder(vocab_size=300)
    params = lm_jax.init_params(jax.random.key(0), cfg)
    lm_jax.save_pretrained(tmp_path / "model", cfg, params, Tokenizer(backend, 0, 1))
    assert not (tmp_path / "model" / "generation_config.json").exists()
    theirs = transformers().GenerationConfig.from_pretrained(
        tmp_path / "model", config_file_name="config.json"
    )
    assert theirs.eos_token_id == 1


def test_another_main_end_keeps_the_others(backend):
    tokenizer = dataclasses.replace(Tokenizer(backend, 0, 1, None, (7,)), eos_id=None)
    assert tokenizer.stop_ids == (7,)


def test_the_list_of_ends_is_fetched_from_the_hub():
    assert "generation_config.json" in hub.FILES
