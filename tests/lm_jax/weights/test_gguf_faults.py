"""A GGUF file that cannot be used is refused with what is wrong and the remedy."""

import dataclasses

import gguf
from gguf.constants import GGMLQuantizationType as Quant
import numpy as np
import pytest

from tests.lm_jax.weights.gguf_files import LLAMA, file_of, random_params, refused


@pytest.fixture
def file(tmp_path):
    cfg = dataclasses.replace(LLAMA, num_layers=1)
    return file_of(cfg, random_params(cfg), tmp_path / "folder")


def test_an_architecture_that_is_not_supported(file, tmp_path):
    file.kind = gguf.MODEL_ARCH.GEMMA
    refused(file.write(tmp_path / "m.gguf"), "'gemma' is not supported", "did you mean 'gemma")


@pytest.mark.parametrize(
    "field", ["block_count", "embedding_length", "attention.layer_norm_rms_epsilon"]
)
def test_a_missing_field(file, tmp_path, field):
    del file.fields[field]
    refused(file.write(tmp_path / "m.gguf"), "m.gguf", f"llama.{field} is missing")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"rope.scaling.type": "yarn"},
            ("llama.rope.scaling.type = 'yarn'", "'none' and 'linear'"),
        ),
        ({"rope.dimension_count": 8}, ("llama.rope.dimension_count = 8", "only 16 is")),
        ({"attention.value_length": 8}, ("llama.attention.value_length = 8",)),
        ({"attention.head_count": [4, 2]}, ("one positive number for all layers",)),
        ({"block_count": 10**9}, ("llama.block_count = 1000000000 is absurd", "12 tensors")),
        ({"block_count": 0}, ("llama.block_count = 0",)),
        ({"expert_count": 8, "expert_used_count": 2}, ("expert_count, expert_used_count", "known")),
        ({"attention.scale": 0.1}, ("attention.scale", "might change the model")),
        ({"block_count": 2}, ("missing model.layers.1.mlp.up_proj.weight",)),
    ],
)
def test_a_field_that_cannot_be_used(file, tmp_path, fields, words):
    file.fields |= fields
    refused(file.write(tmp_path / "m.gguf"), *words)


def test_tensors_that_are_missing_unknown_or_not_finite(file, tmp_path):
    file.tensors["blk.0.attn_q.bias"] = np.ones(64, np.float32)
    w = file.tensors.pop("blk.0.ffn_up.weight")
    refused(
        file.write(tmp_path / "m.gguf"),
        "2 differences",
        "missing model.layers.0.mlp.up_proj.weight",
        "unused model.layers.0.self_attn.q_proj.bias",
    )
    del file.tensors["blk.0.attn_q.bias"]
    w[0, 0] = np.nan
    file.tensors["blk.0.ffn_up.weight"] = w
    refused(file.write(tmp_path / "m.gguf"), "NaN or infinite", "model.layers.0.mlp.up_proj.weight")
    del file.tensors["token_embd.weight"]
    refused(file.write(tmp_path / "m.gguf"), "token_embd.weight is missing")


def test_a_quantisation_that_the_package_cannot_undo(file, tmp_path, monkeypatch):
    def none(data, kind):
        raise NotImplementedError

    path = file.write(tmp_path / "m.gguf", Quant.Q8_0)
    monkeypatch.setattr("gguf.quants.dequantize", none)
    refused(path, "quantised as Q8_0", "another quantisation")


def test_a_part_of_a_split_file(file, tmp_path):
    refused(file.write(tmp_path / "m.gguf", split=3), "one part of a split", "--merge")


@pytest.mark.parametrize("size", [0, 3, 20, 300, 2000, -50])
def test_a_truncated_file(file, tmp_path, size):
    path = file.write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:size])
    refused(path, str(path), "fetch it again")
