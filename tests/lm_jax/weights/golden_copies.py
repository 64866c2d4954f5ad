"""Copies of the golden model folders, for tests that damage or rearrange them."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import lm_jax
from lm_jax.errors import BadInputError
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
