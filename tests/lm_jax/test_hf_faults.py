"""Folders that are damaged, hostile or of another model are refused, and say what to do."""

import json
import os
import pickle
import shutil
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
import tokenizers

import lm_jax
from lm_jax.errors import BadInputError, UsageError
from lm_jax.hf.tokenizer import Tokenizer
from tools import make_goldens

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def copy(tmp_path):
    """A function that copies a golden case into a folder that the test may damage."""

    def make(case="llama_mqa"):
        folder = tmp_path / "model"
        shutil.copytree(make_goldens.GOLDEN / case, folder)
        (folder / "expected.safetensors").unlink()
        return folder

    return make


def refused(folder, *words):
    """Loading is refused in one line that holds `words`."""
    with pytest.raises(BadInputError) as caught:
        lm_jax.load_pretrained(folder)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return message


def equal(a, b):
    a, b = (lm_jax.params.by_path(model.params) for model in (a, b))
    assert a.keys() == b.keys()
    for name, leaf in a.items():
        assert leaf.dtype == b[name].dtype
        np.testing.assert_array_equal(leaf, b[name], err_msg=name)


def change_config(folder, **fields):
    raw = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(raw | fields))


def change_weights(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def shard(folder):
    """Splits the weights of a folder in two shards with an index, which it returns."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    index = {}
    for file, names in ((FIRST, sorted(tensors)[::2]), (SECOND, sorted(tensors)[1::2])):
        save_file({name: tensors[name] for name in names}, folder / file)
        index |= dict.fromkeys(names, file)
    write_index(folder, index)
    return index


def write_index(folder, index):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


# Files that are not what their name says


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
    refused(folder / "absent", "no such file or folder")
    refused("smolm2", "did you mean 'smollm2'?")
    (tmp_path / "weights.bin").write_bytes(b"")
    refused(tmp_path / "weights.bin", "neither a Hugging Face folder nor")


# Weights of another model


def test_another_family(copy):
    folder = copy()
    shutil.copy(make_goldens.GOLDEN / "gemma3" / CONFIG, folder / CONFIG)
    refused(folder, "missing model.layers.0.self_attn.q_norm.weight", "take weights and config")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_hidden_layers": 4}, ("9 differences", "missing model.layers.3.mlp.up_proj.weight")),
        ({"num_hidden_layers": 2}, ("9 differences", "unused model.layers.2.mlp.up_proj.weight")),
        ({"num_hidden_layers": -1}, ("num_layers = -1 must be a positive integer",)),
        ({"hidden_size": 32}, ("lm_head.weight has shape (48, 24), not (48, 32)", "and 10 more")),
        ({"num_attention_heads": 8}, ("self_attn.q_proj.weight has shape (24, 24), not (48, 24)",)),
        ({"num_key_value_heads": 3}, ("num_heads = 4 is not a multiple of num_kv_heads = 3",)),
        ({"vocab_size": 47}, ("model.embed_tokens.weight has shape (48, 24), not (47, 24)",)),
        ({"hidden_size": "wide"}, ("config.json", "hidden_size")),
        ({"attention_bias": True}, ("missing model.layers.0.self_attn.q_proj.bias",)),
    ],
)
def test_config_of_another_size(copy, fields, words):
    folder = copy()
    change_config(folder, **fields)
    refused(folder, *words)


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
            ("'mamba'", "gemma3_text, gpt2, gpt_neox, llama, olmo"),
        ),
        ("llama_mqa", {"model_type": None}, ("model_type = None",)),
        ("olmo", {"clip_qkv": 8.0}, ("clip_qkv = 8.0", "OLMo-7B-hf")),
        ("llama_mqa", {"hidden_act": "silo"}, ("hidden_act", "did you mean 'silu'?")),
        ("gpt2", {"activation_function": "quick_gelu"}, ("activation_function", "'quick_gelu'")),
        ("gpt2", {"scale_attn_weights": False}, ("scale_attn_weights = False",)),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ("scale_attn_by_inverse_layer_idx",)),
        ("gpt2", {"add_cross_attention": True}, ("add_cross_attention = True",)),
        ("gemma3", {"use_bidirectional_attention": True}, ("use_bidirectional_attention",)),
        ("gemma3", {"attn_logit_softcapping": 50.0}, ("attn_logit_softcapping = 50.0",)),
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
        ({"rope_type": "yarn", "factor": 2.0}, ("rope_type = 'yarn'", "known: default, linear")),
        ({"rope_type": "lama3", "factor": 2.0}, ("did you mean 'llama3'?",)),
        ({"rope_type": "linear"}, ("rope_parameters.factor = None",)),
        ({"rope_type": "linear", "factor": -1.0}, ("rope_parameters.factor = -1.0",)),
        ({"rope_type": "llama3", "factor": 8.0}, ("rope_parameters.low_freq_factor = None",)),
        ({"rope_theta": "1e4"}, ("rope_theta = '1e4'",)),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor = 0.5",)),
    ],
)
def test_unsupported_rope(rope, words):
    from lm_jax.hf import table

    with pytest.raises(BadInputError) as caught:
        table.read_rope({"rope_theta": 1e4} | rope)
    for word in words:
        assert word in str(caught.value)


def test_unsupported_rope_in_a_folder(copy):
    folder = copy()
    change_config(folder, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4})
    refused(folder, "config.json: rope_parameters.rope_type = 'yarn' is not supported")


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.int32])
def test_another_dtype(dtype):
    with pytest.raises(UsageError, match="give float32 or bfloat16"):
        lm_jax.load_pretrained(make_goldens.GOLDEN / "llama_mqa", dtype=dtype)


# Tied heads


@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_stored_copy_of_the_tied_head_is_accepted(copy, bfloat16):
    folder = copy("llama_mha_tied_bias")
    plain = lm_jax.load_pretrained(folder)

    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        if bfloat16:
            for name in tensors:
                tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)

    change_weights(folder, change)
    if not bfloat16:
        equal(lm_jax.load_pretrained(folder), plain)
    assert "unembed" not in lm_jax.load_pretrained(folder).params


def test_a_head_that_differs_from_its_tie(copy):
    folder = copy("llama_mha_tied_bias")
    embedding = load_file(folder / WEIGHTS)["model.embed_tokens.weight"]
    head = embedding.copy()
    head[5, 7] += 1e-3
    change_weights(folder, lambda tensors: tensors.update({"lm_head.weight": head}))
    refused(folder, "lm_head.weight differs", "set tie_word_embeddings to false")
    change_config(folder, tie_word_embeddings=False)
    np.testing.assert_array_equal(lm_jax.load_pretrained(folder).params["unembed"], head.T)


def test_a_tied_model_without_its_embedding(copy):
    folder = copy("llama_mha_tied_bias")

    def change(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    change_weights(folder, change)
    refused(folder, "missing model.embed_tokens.weight", "unused lm_head.weight")


def test_an_untied_model_without_its_head(copy):
    folder = copy()
    change_weights(folder, lambda tensors: tensors.pop("lm_head.weight"))
    refused(folder, "1 differences", "missing lm_head.weight")


# Names as hubs have them


@pytest.mark.parametrize(
    ("case", "prefix"),
    [("gpt2", "transformer."), ("neox", "gpt_neox."), ("llama_mqa", "model.")],
)
def test_names_without_the_prefix_and_stored_buffers(copy, case, prefix):
    folder = copy(case)
    plain = lm_jax.load_pretrained(folder)

    def change(tensors):
        for name in list(tensors):
            tensors[name.removeprefix(prefix)] = tensors.pop(name)
        if case == "gpt2":
            tensors["h.0.attn.bias"] = np.tril(np.ones((1, 1, 32, 32), bool))
            tensors["h.1.attn.masked_bias"] = np.float32([-1e4])
        if case == "neox":
            tensors["layers.0.attention.bias"] = np.ones((1, 1, 4, 4), np.uint8)
            tensors["layers.2.attention.rotary_emb.inv_freq"] = np.ones(2, np.float32)
        if case == "llama_mqa":
            tensors["layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)

    change_weights(folder, change)
    equal(lm_jax.load_pretrained(folder), plain)


def test_a_prefix_that_is_there_is_asked_of_every_name(copy):
    folder = copy()
    change_weights(
        folder, lambda tensors: tensors.update({"norm.weight": tensors.pop("model.norm.weight")})
    )
    refused(folder, "missing model.norm.weight", "unused norm.weight")


# Pickles, code, links


class Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt"])
def test_pickles_are_never_loaded(copy, tmp_path, name):
    folder = copy()
    (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    refused(folder, name, "never loaded", "save_pretrained")
    assert not (tmp_path / "sprung").exists()


def test_code_in_the_folder_is_not_run(copy, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    folder = copy()
    (folder / "modeling_trap.py").write_text(f"import os; os.mkdir({str(tmp_path / 'sprung')!r})")
    change_config(folder, auto_map={"AutoConfig": "modeling_trap.Trap"})
    refused(folder, "auto_map")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "sub/inside.safetensors",
        "/etc/outside.safetensors",
        "..\\outside.safetensors",
        "..",
        "",
        "weights.bin",
    ],
)
def test_an_index_that_leaves_the_folder(copy, name):
    folder = copy()
    index = shard(folder)
    (folder / "sub").mkdir()
    for place in (folder.parent / "outside.safetensors", folder / "sub" / "inside.safetensors"):
        shutil.copy(folder / SECOND, place)
    write_index(folder, {k: name if v == SECOND else v for k, v in index.items()})
    refused(folder, INDEX, "no plain *.safetensors name")


def test_a_link_that_leaves_the_folder(copy):
    folder = copy()
    shutil.move(folder / WEIGHTS, folder.parent / "outside.safetensors")
    (folder / WEIGHTS).symlink_to("../outside.safetensors")
    refused(folder, "is a link out of its folder", "outside.safetensors")
    shutil.move(folder.parent / "outside.safetensors", folder / "inside.safetensors")
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("inside.safetensors")
    equal(lm_jax.load_pretrained(folder), lm_jax.load_pretrained(make_goldens.GOLDEN / "llama_mqa"))


def test_the_blobs_of_a_hub_snapshot(copy, tmp_path):
    plain = copy()
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123abc"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in (WEIGHTS, CONFIG):
        shutil.copy(plain / file, blobs / f"digest-{file}")
        (snapshot / file).symlink_to(f"../../blobs/digest-{file}")
    equal(lm_jax.load_pretrained(snapshot), lm_jax.load_pretrained(plain))
    (snapshot / WEIGHTS).unlink()
    (snapshot / WEIGHTS).symlink_to("../../../model/model.safetensors")
    refused(snapshot, "is a link out of its folder")


# Shards


def test_shards_load_as_one_file_does(copy):
    folder = copy()
    whole = lm_jax.load_pretrained(folder)
    shard(folder)
    sharded = lm_jax.load_pretrained(folder)
    equal(sharded, whole)
    assert [file.name for file in sharded.files] == [FIRST, SECOND]


def test_missing_and_damaged_shards(copy):
    folder = copy()
    shard(folder)
    content = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(content[:-1])
    refused(folder, SECOND, "download it again")
    (folder / SECOND).unlink()
    refused(folder, f"missing shards {SECOND}", "download")


def test_shards_that_do_not_fit_their_index(copy):
    folder = copy()
    index = shard(folder)
    name = next(name for name, file in index.items() if file == FIRST)
    write_index(folder, index | {name: SECOND, "model.other": FIRST})
    refused(
        folder,
        f"{name} is indexed in {SECOND}, stored in {FIRST}",
        f"model.other is indexed in {FIRST}, stored in none",
    )
    write_index(folder, {name: file for name, file in index.items() if name != UP})
    refused(folder, f"{UP} is indexed in no shard")
    for broken in ({}, {"weight_map": {}}, {"weight_map": [FIRST]}, {"weight_map": {UP: 3}}):
        (folder / INDEX).write_text(json.dumps(broken))
        refused(folder, "no weight_map")


def test_a_tensor_in_two_shards(copy):
    folder = copy()
    shard(folder)
    first, second = load_file(folder / FIRST), load_file(folder / SECOND)
    name = min(second)
    save_file(first | {name: second[name]}, folder / FIRST)
    refused(folder, "stored in two shards", name)


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
