"""Folders that are damaged or of another model are refused with a remedy."""

import dataclasses
import json
import shutil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers

import lm_jax
from lm_jax.errors import BadInputError, UsageError
from lm_jax.evaluate import framing
from lm_jax.text import preparation
from lm_jax.text.tokenizer import Tokenizer
from tests.lm_jax.weights.golden_copies import (
    CONFIG,
    UP,
    WEIGHTS,
    change_config,
    change_weights,
    refused,
)
from tools import make_goldens

# Files whose content is not that of their name


def header(text):
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("damage", "hint"),
    [
        (lambda b: b[:-100], "download it again"),
        (lambda b: b[:40], "download it again"),
        (lambda b: b"", "download it again"),
        (lambda b: b + bytes(64), "download it again"),
        (lambda b: header(b"{not json") + b[2000:], "download it again"),
        (lambda b: b"\xff" * 8 + b[8:], "download it again"),
        (lambda b: b"<!DOCTYPE html><title>404</title>", "HTML page"),
        (lambda b: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    ],
    ids=["cut", "half a header", "empty", "padded", "bad json", "huge header", "html", "lfs"],
)
def test_damaged_weights(copy, damage, hint):
    folder = copy()
    (folder / WEIGHTS).write_bytes(damage((folder / WEIGHTS).read_bytes()))
    refused(folder, str(folder / WEIGHTS), hint)


@pytest.mark.parametrize("content", ["", "{", "[]", '"text"', "\x00"])
def test_config_that_is_no_json_object(copy, content):
    folder = copy()
    (folder / CONFIG).write_text(content)
    refused(folder, str(folder / CONFIG), "download it again")


def test_no_config_no_weights_no_folder(copy, tmp_path):
    folder = copy()
    (folder / WEIGHTS).unlink()
    refused(folder, "neither model.safetensors nor")
    (folder / CONFIG).unlink()
    refused(folder, "config.json is missing")
    refused(folder / "absent", "is no folder or .gguf file")
    refused("smolm2", "did you mean 'smollm2'?")
    (tmp_path / "weights.bin").write_bytes(b"")
    refused(tmp_path / "weights.bin", "neither a Hugging Face folder nor")


def test_another_family(copy):
    folder = copy()
    shutil.copy(make_goldens.GOLDEN / "gemma3" / CONFIG, folder / CONFIG)
    refused(folder, "missing model.layers.0.self_attn.q_norm.weight", "take weights and config")


# Weights of another model


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_hidden_layers": 4}, ("9 differences", "missing model.layers.3.mlp.up_proj.weight")),
        ({"num_hidden_layers": 2}, ("9 differences", "unused model.layers.2.mlp.up_proj.weight")),
        ({"hidden_size": 32}, ("lm_head.weight has shape (48, 24), not (48, 32)", "and 10 more")),
        ({"num_attention_heads": 0}, ("cannot be read", "mend that field")),
        ({"num_key_value_heads": 3}, ("num_heads = 4 is not a multiple of num_kv_heads = 3",)),
        ({"vocab_size": 47}, ("model.embed_tokens.weight has shape (48, 24), not (47, 24)",)),
        ({"num_hidden_layers": 10**9}, ("num_hidden_layers = 1000000000 is absurd", "30 tensors")),
        ({"hidden_size": 10**9}, ("lm_head.weight has shape (48, 24), not (48, 1000000000)",)),
        ({"vocab_size": 10**18}, ("must be a positive integer below 2^31",)),
        ({"attention_bias": True}, ("missing model.layers.0.self_attn.q_proj.bias",)),
    ],
)
def test_config_of_another_size(copy, fields, words):
    folder = copy()
    change_config(folder, **fields)
    refused(folder, *words)


@pytest.mark.parametrize("case", ["qwen2", "stablelm", "gpt2"])
def test_no_heads(copy, case):
    folder = copy(case)
    change_config(folder, **{"n_head" if case == "gpt2" else "num_attention_heads": 0})
    refused(folder, "num_heads = 0 must be a positive integer")


def test_all_differences_are_listed_at_once(copy):
    folder = copy()

    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.0.extra"] = np.zeros(3, np.float32)
        tensors[UP] = tensors[UP].T.copy()

    change_weights(folder, change)
    refused(
        folder,
        "3 differences",
        "missing model.norm.weight",
        "unused model.layers.0.extra (3,)",
        f"{UP} has shape (24, 40), not (40, 24)",
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite(copy, value):
    folder = copy()

    def change(tensors):
        tensors[UP][3, 2] = value
        tensors["lm_head.weight"][0, 0] = value

    change_weights(folder, change)
    refused(folder, "NaN or infinite", UP, "lm_head.weight")


def test_weights_beyond_the_dtype_that_is_asked_for(copy):
    folder = copy()
    change_weights(folder, lambda tensors: tensors.update({UP: 1e300 * np.ones((40, 24))}))
    refused(folder, "beyond float32", UP)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, ml_dtypes.float8_e4m3fn])
def test_quantised_tensors(copy, dtype):
    folder = copy()
    change_weights(folder, lambda tensors: tensors.update({UP: tensors[UP].astype(dtype)}))
    refused(folder, UP, "quantised weights cannot be read")


# Settings that the decoder does not have


@pytest.mark.parametrize(
    ("case", "fields", "words"),
    [
        (
            "llama_mqa",
            {"model_type": "mamba"},
            ("'mamba'", "gpt_neox, llama, mistral, olmo, olmo2, phi3, qwen2, qwen3, stablelm"),
        ),
        ("olmo", {"clip_qkv": 8.0}, ("clip_qkv = 8.0", "OLMo-7B-hf")),
        ("llama_mqa", {"hidden_act": "silo"}, ("hidden_act", "did you mean 'silu'?")),
        ("gpt2", {"activation_function": "quick_gelu"}, ("activation_function", "'quick_gelu'")),
        ("gemma3", {"use_bidirectional_attention": True}, ("use_bidirectional_attention",)),
        ("gemma3", {"attn_logit_softcapping": 50.0}, ("attn_logit_softcapping = 50.0",)),
        ("qwen3", {"layer_types": ["full_attention"] * 2}, ("layer_types", "mend that field")),
        ("qwen3", {"layer_types": ["chunked_attention"] * 3}, ("layer_types has", "known: ")),
        ("gemma4", {"enable_moe_block": True}, ("enable_moe_block = True",)),
        ("gemma4", {"per_layer_config": {"1": {"intermediate_size": 3}}}, ("per_layer_config",)),
        ("llama_mqa", {"quantization_config": {"quant_method": "gptq"}}, ("quantised", "GGUF")),
        ("llama_mqa", {"auto_map": {"AutoConfig": "x.Y"}}, ("auto_map", "run code")),
    ],
)
def test_unsupported_setting(copy, case, fields, words):
    folder = copy(case)
    change_config(folder, **fields)
    refused(folder, "config.json", *words)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "ntk", "factor": 2.0}, ("rope_type = 'ntk'", "known: default, dynamic, ")),
        ({"rope_type": "dynamic"}, ("rope_parameters.factor = None",)),
        (
            {"rope_type": "longrope", "original_max_position_embeddings": 8},
            ("rope_parameters.short_factor = None must be a list",),
        ),
        ({"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}, ("rope_parameters has mscale, ",)),
        ({"rope_type": "lama3", "factor": 2.0}, ("did you mean 'llama3'?",)),
        ({"rope_type": "linear", "factor": -1.0}, ("rope_parameters.factor = -1.0",)),
        ({"rope_theta": 10**400}, ("rope_theta = 1000",)),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 0.5,
            },
            ("scaling.original_length = 0 must be a positive", "must be below high_freq_factor = "),
        ),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor = 0.5",)),
    ],
)
def test_unsupported_rope(rope, words):
    from lm_jax.weights.families import fields

    with pytest.raises(BadInputError) as caught:
        fields.read_rope({"rope_theta": 1e4} | rope, 32)
    for word in words:
        assert word in str(caught.value)


def test_unsupported_rope_in_a_folder(copy):
    folder = copy()
    change_config(folder, rope_parameters={"rope_type": "ntk", "factor": 4.0, "rope_theta": 1e4})
    refused(folder, "config.json: rope_parameters.rope_type = 'ntk' is not supported")


def test_factors_for_another_number_of_pairs(copy):
    folder = copy()
    rope = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0], "rope_theta": 1e4}
    change_config(folder, rope_parameters=rope)
    refused(folder, "rope.scaling has 1 short and 1 long factors for 3 pairs")


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.int32])
def test_another_dtype(dtype):
    with pytest.raises(UsageError, match="give float32 or bfloat16"):
        lm_jax.load_pretrained(make_goldens.GOLDEN / "llama_mqa", dtype=dtype)


# Tokenizers


def word_level(ids):
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in ids}, unk_token=f"w{min(ids)}")
    )
    return Tokenizer(backend)


def test_a_tokenizer_with_ids_beyond_the_embedding(copy):
    folder = copy()
    word_level(range(48)).save(folder)
    assert lm_jax.load_pretrained(folder).tokenizer.vocab_size == 48
    word_level(range(49)).save(folder)
    refused(folder, "ids up to 48", "48 rows")
    # Fewer tokens than rows, yet one of them without a row.
    word_level([0, 1, 2, 60]).save(folder)
    refused(folder, "ids up to 60")


def with_added(count, *, special=True):
    """A tokenizer of 48 words and, after them, so many tokens that were added."""
    tokenizer = word_level(range(48))
    tokenizer.backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    names = ["<pad>", *(f"<extra_{i}>" for i in range(1, count))]
    added = [tokenizers.AddedToken(name, special=special) for name in names]
    (tokenizer.backend.add_special_tokens if special else tokenizer.backend.add_tokens)(added)
    return tokenizer


@pytest.mark.parametrize(("count", "special"), [(1, True), (2, False), (64, True)])
def test_a_few_added_tokens_may_lack_a_row(count, special, copy, tmp_path, caplog):
    folder = copy()
    with_added(count, special=special).save(folder)
    model = lm_jax.load_pretrained(folder)
    assert caplog.text.count("no row in the embedding for '<pad>'") == len(caplog.records) == 1
    tokenizer = model.tokenizer
    assert tokenizer.vocab_size == 48 and tokenizer.encode("w3 w47") == [3, 47]
    # A lookup beyond the embedding would give another row, or NaN, without an error.
    with pytest.raises(BadInputError, match=r"the token '<pad>' has the id 48, .* 48 rows; leave"):
        tokenizer.encode("w3 <pad>")
    if special:
        # In text from outside it is no token.
        assert max(tokenizer.encode("w3 <pad>", split_special_tokens=True)) < 48
        assert preparation.document_ids(tokenizer, "w3 <pad>") == [3, 0, tokenizer.eos_id]

    # The model is converted and saved with its tokenizer, and read again alike.
    lm_jax.save_pretrained(tmp_path / "saved", model.cfg, model.params, tokenizer)
    assert lm_jax.load_pretrained(tmp_path / "saved").tokenizer.embedding_rows == 48


def test_an_added_token_without_a_row_ends_no_text(copy):
    """The model cannot give it, and a lookup of it would be refused in every generation."""
    folder = copy()
    with_added(2).save(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [48, 7, 49]}))
    model = lm_jax.load_pretrained(folder)
    assert {48, 49} & set(Tokenizer.from_folder(folder).stop_ids)
    assert max(model.tokenizer.stop_ids) < 48 and 7 in model.tokenizer.stop_ids
    # Nor does one that a chat template puts after an answer.
    template = "{% for each in messages %}{{ each.content }}<pad>{% endfor %}"
    chat = dataclasses.replace(model.tokenizer, chat_template=template)
    assert framing.stop_ids(dataclasses.replace(chat, embedding_rows=None))[-1] == 48
    assert framing.stop_ids(chat) == model.tokenizer.stop_ids
    stops = framing.stop_ids(chat)
    lm_jax.generate(model.params, [[3]], model.cfg, max_new_tokens=1, stop_id=stops)


def test_other_ids_beyond_the_embedding_are_of_another_model(copy):
    folder = copy()
    with_added(65).save(folder)
    refused(folder, "ids up to 112", "48 rows")
    many = with_added(1)
    many.backend.add_tokens([f"x{i}" for i in range(300)])
    many.save(folder)
    refused(folder, "ids up to 348", "48 rows")
    for kind, word in (("bos", "begins"), ("eos", "ends")):
        dataclasses.replace(with_added(1), **{f"{kind}_id": 48}).save(folder)
        refused(folder, f"'<pad>', which {word} a text", "48 rows")
