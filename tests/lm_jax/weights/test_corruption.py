"""A checkpoint with a random fault ends in a named error or in exactly the weights that it holds.

Five families, each as one file and as two shards, get fifty faults; a GGUF file and a converted
folder get as many each. Safetensors and GGUF have no checksum, so a bit flipped inside a weight is
another weight: what is loaded then is what is stored, as other readers of the formats see it. A
converted folder has a manifest of digests, and gives the weights that were converted, or an error.
"""

import json
import math
import shutil

import gguf
import jax
import numpy as np
import pytest

from iaj.convert import convert
import lm_jax
from lm_jax.errors import UserError
from lm_jax.weights.families import FAMILIES, table
from tests.lm_jax.weights import gguf_files
from tests.lm_jax.weights.golden_copies import CONFIG, INDEX, equal, shard

CASES = ("llama_gqa", "gpt2", "gemma3", "phi3", "stablelm_parallel_qk_norm")
FAULTS = 50
OTHER_VALUES = (
    *(0, -1, 1, 2, 5, 10**9, 10**18, 0.0, 2.5, -2.5, 1e-300, 1e300, math.nan, math.inf),
    *("", "wide", None, True, False, [], [3], ["full_attention"], {}, {"factor": 2.0}),
)


# Faults: each changes a folder in place


def flip_bytes(rng, folder):
    """A few bytes anywhere in a file, or near its start, where headers are."""
    path, data = random_file(rng, folder)
    reach = len(data) if rng.integers(2) else min(len(data), 2000)
    for at in rng.integers(0, reach, rng.integers(1, 4)):
        data[at] ^= int(rng.integers(1, 256))
    path.write_bytes(data)


def cut(rng, folder):
    path, data = random_file(rng, folder)
    path.write_bytes(data[: rng.integers(0, len(data))])


def append(rng, folder):
    path, data = random_file(rng, folder)
    path.write_bytes(data + rng.bytes(rng.integers(1, 100)))


def lose(rng, folder):
    random_file(rng, folder)[0].unlink()


def rename(rng, folder):
    """A file takes another name, which may be that of its neighbour."""
    path, _ = random_file(rng, folder)
    other, _ = random_file(rng, folder)
    path.rename(other if rng.integers(2) else path.with_name("other" + path.suffix))


def exchange(rng, folder):
    """Two files trade their contents."""
    (path, data), (other, other_data) = random_file(rng, folder), random_file(rng, folder)
    path.write_bytes(other_data)
    other.write_bytes(data)


def become_a_folder(rng, folder):
    path, _ = random_file(rng, folder)
    path.unlink()
    path.mkdir()


def change_value(rng, folder):
    """A setting of config.json becomes one out of range or of another type, or is left out."""
    config = json.loads((folder / CONFIG).read_text())
    holder = config
    key = random_of(rng, sorted(holder))
    while isinstance(holder[key], dict) and holder[key] and rng.integers(4):
        holder = holder[key]
        key = random_of(rng, sorted(holder))
    if rng.integers(8):
        holder[key] = random_of(rng, OTHER_VALUES)
    else:
        del holder[key]
    (folder / CONFIG).write_text(json.dumps(config))


def change_header(rng, folder):
    """A tensor is renamed, lost, moved, or of another shape or type, in the header of a file."""
    path = random_of(rng, sorted(folder.glob("*.safetensors")))
    header, data = split(path)
    name, other = (random_of(rng, sorted(header.keys() - {"__metadata__"})) for _ in range(2))
    match rng.integers(5):
        case 0:
            header[name + "s" if rng.integers(2) else name[1:]] = header.pop(name)
        case 1:
            header[name], header[other] = header[other], header[name]
        case 2:
            del header[name]
        case 3:
            field = random_of(rng, sorted(header[name]))
            header[name][field] = random_of(rng, [[0, 4], "F16", "I32", "", None, [-1], 10**9])
        case _:
            header[name]["shape"] = header[name]["shape"][::-1]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def change_index(rng, folder):
    """A tensor is renamed, lost or said to be elsewhere in the index of shards."""
    if not (folder / INDEX).exists():
        change_header(rng, folder)
        return
    index = json.loads((folder / INDEX).read_text())
    shards = index["weight_map"]
    name, other = (random_of(rng, sorted(shards)) for _ in range(2))
    match rng.integers(4):
        case 0:
            shards[name + "s"] = shards.pop(name)
        case 1:
            shards[name], shards[other] = shards[other], shards[name]
        case 2:
            del shards[name]
        case _:
            shards[name] = random_of(rng, [*OTHER_VALUES, "../model.safetensors", CONFIG])
    (folder / INDEX).write_text(json.dumps(index))


OF_FILES = (flip_bytes, cut, append, lose, rename, exchange, become_a_folder)
OF_FOLDERS = (
    *OF_FILES,
    *(change_value, change_value, change_value, change_header, change_index),
)


def random_of(rng, items):
    return items[rng.integers(len(items))]


def random_file(rng, folder):
    path = random_of(
        rng, sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    )
    return path, bytearray(path.read_bytes())


# What a folder holds


def split(path):
    """The header and the data of a safetensors file."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def stored(files):
    """The tensors of float32 files, read as the format's definition says."""
    tensors = {}
    for path in files:
        header, data = split(path)
        for name, entry in header.items():
            if name != "__metadata__":
                part = data[slice(*entry["data_offsets"])]
                tensors[name] = np.frombuffer(part, "<f4").reshape(entry["shape"])
    return tensors


def tensors_of(model):
    """The parameters of a model under the names of its family."""
    leaves = {name: np.asarray(a) for name, a in lm_jax.params.by_path(model.params).items()}
    tensors = {}
    for entry in FAMILIES[model.cfg.family].entries(model.cfg):
        for layer, names in enumerate(table.names_by_layer(entry, model.cfg.num_layers)):
            values = [leaves[path] for path in entry.params]
            written = entry.write(*(a[layer] if entry.per_layer else a for a in values))
            tensors |= zip(names, [written] if entry.heads is None else written, strict=True)
    return tensors


def assert_weights(model, want):
    """The model has these tensors, bit by bit, and its config can be computed with."""
    got = tensors_of(model)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        np.testing.assert_array_equal(got[name].view(np.uint32), tensor.view(np.uint32), name)


def assert_usable(model):
    """A forward pass of the config can be traced."""
    tokens_BT = jax.ShapeDtypeStruct((1, 3), np.int32)
    jax.eval_shape(lambda p, t: lm_jax.forward(p, t, model.cfg).logits, model.params, tokens_BT)


def outcomes(clean, faults, check, *, seed):
    """Loads copies of a folder with a fault each; how many were refused, and how many held.

    `check(model, folder)` looks at what was loaded.
    """
    refused, held = 0, 0
    folder = clean.with_name("damaged")
    for i in range(FAULTS):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(clean, folder)
        rng = np.random.default_rng([seed, i])
        random_of(rng, faults)(rng, folder)
        file = folder / "model.gguf"
        try:
            model = lm_jax.load_pretrained(file if (clean / file.name).exists() else folder)
        except UserError as error:
            refused += "\n" not in str(error)
        else:
            check(model, folder)
            held += 1
    assert refused + held == FAULTS, "an error of several lines"
    return refused, held


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_damaged_folder(copy, case, sharded):
    folder = copy(case)
    (folder / "generation_config.json").unlink()
    if sharded:
        shard(folder)
    usable = {lm_jax.load_pretrained(folder).cfg}

    def check(model, folder):
        assert_weights(model, stored(model.files))
        if model.cfg not in usable:
            assert_usable(model)
            usable.add(model.cfg)

    refused, held = outcomes(folder, OF_FOLDERS, check, seed=2 * CASES.index(case) + sharded)
    assert refused > FAULTS / 2
    assert held


def test_a_damaged_gguf_file(tmp_path):
    # Its converter changes no tensor of this family.
    cfg = gguf_files.QWEN2
    file = gguf_files.file_of(cfg, gguf_files.random_params(cfg), tmp_path / "folder")
    clean = tmp_path / "clean"
    clean.mkdir()
    file.write(clean / "model.gguf")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, cfg.num_layers)

    def check(model, folder):
        reader = gguf.GGUFReader(folder / "model.gguf")
        want = {tensor.name: np.asarray(tensor.data) for tensor in reader.tensors}
        got = tensors_of(model)
        assert_weights(
            model, {name: want[names.get_name(name, (".weight", ".bias"))] for name in got}
        )
        assert len(got) == len(want)
        assert_usable(model)

    refused, held = outcomes(clean, (flip_bytes, flip_bytes, cut, append), check, seed=10)
    assert refused
    assert held


def test_a_damaged_converted_folder(copy, tmp_path):
    clean = tmp_path / "converted"
    convert(copy(), clean)
    original = lm_jax.load_pretrained(clean)

    def check(model, folder):
        assert model.cfg == original.cfg
        equal(model, original)

    refused, _ = outcomes(clean, OF_FILES, check, seed=11)
    assert refused > FAULTS / 2
