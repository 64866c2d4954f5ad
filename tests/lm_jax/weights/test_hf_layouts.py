"""Folders as hubs and tools lay them out: ties, names, shards, links, and code that is not run."""

import json
import os
import pickle
import shutil
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import lm_jax
from tests.lm_jax.weights.golden_copies import (
    CONFIG,
    FIRST,
    INDEX,
    SECOND,
    UP,
    WEIGHTS,
    change_config,
    change_weights,
    equal,
    refused,
    shard,
    write_index,
)
from tools import make_goldens

# Tied heads


@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_stored_copy_of_the_tied_head_is_accepted(copy, bfloat16):
    folder = copy("llama_mha_tied_bias")
    original = lm_jax.load_pretrained(folder)

    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        if bfloat16:
            for name in tensors:
                tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)

    change_weights(folder, change)
    if not bfloat16:
        equal(lm_jax.load_pretrained(folder), original)
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
    original = lm_jax.load_pretrained(folder)

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
    equal(lm_jax.load_pretrained(folder), original)


def test_the_text_model_of_a_checkpoint_of_more_parts(copy):
    folder = copy("gemma4")
    original = lm_jax.load_pretrained(folder)
    text = json.loads((folder / CONFIG).read_text())

    def change(tensors):
        for name in list(tensors):
            nested = name.replace("model.", "model.language_model.", 1)
            tensors[nested] = tensors.pop(name)
        # Released files hold what layers with the keys of others do not read.
        tensors["model.language_model.layers.4.self_attn.k_proj.weight"] = np.ones((8, 24))
        tensors["model.language_model.layers.5.self_attn.k_norm.weight"] = np.ones(16)
        tensors["model.vision_tower.patch_embedder.input_proj.weight"] = np.ones((2, 3))
        tensors["model.embed_audio.embedding_projection.weight"] = np.ones((2, 3))

    change_weights(folder, change)
    (folder / CONFIG).write_text(json.dumps({"model_type": "gemma4", "text_config": text}))
    loaded = lm_jax.load_pretrained(folder)
    assert loaded.cfg == original.cfg
    equal(loaded, original)
    change_weights(folder, lambda tensors: tensors.update({"model.other.weight": np.ones(2)}))
    refused(folder, "unused model.other.weight")
    text["num_hidden_layers"] = 10**9
    (folder / CONFIG).write_text(json.dumps({"model_type": "gemma4", "text_config": text}))
    refused(folder, "num_hidden_layers = 1000000000 is absurd")


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
    original = copy()
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123abc"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in (WEIGHTS, CONFIG):
        shutil.copy(original / file, blobs / f"digest-{file}")
        (snapshot / file).symlink_to(f"../../blobs/digest-{file}")
    equal(lm_jax.load_pretrained(snapshot), lm_jax.load_pretrained(original))
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
