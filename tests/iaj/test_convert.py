"""`iaj convert`: checkpoints load like their source, and damage is detected."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from iaj import convert
import lm_jax
from lm_jax.checkpoint.folder import MANIFEST, save_checkpoint, verify_checkpoint
from lm_jax.errors import BadInputError, CorruptError
from lm_jax.parallel import sharding
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.weights import load
from tools import make_goldens


@pytest.fixture
def source(tmp_path):
    """A golden folder with a tokenizer."""
    folder = tmp_path / "source"
    shutil.copytree(make_goldens.GOLDEN / "llama_gqa", folder)
    words = {f"w{i}": i for i in range(48)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    Tokenizer(backend, bos_id=1, eos_id=2).save(folder)
    return folder


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("case", sorted(make_goldens.CASES))
def test_the_config_of_every_family_comes_back(case, tmp_path):
    folder = make_goldens.GOLDEN / case
    convert.convert(folder, tmp_path / "out")
    source, converted = (lm_jax.load_pretrained(f) for f in (folder, tmp_path / "out"))
    assert converted.cfg == source.cfg
    assert converted.tokenizer is None
    equal(converted.params, source.params)


def test_config_and_tokenizer_are_read_before_any_weight(source, tmp_path, monkeypatch):
    convert.convert(source, tmp_path / "out")
    whole = lm_jax.load_pretrained(source)

    def read(*args, **kwargs):
        raise AssertionError("weights were read")

    with monkeypatch.context() as patch:
        patch.setattr(load, "load_params", read)
        patch.setattr(load, "load_arrays", read)
        models = [load.open_pretrained(folder) for folder in (source, tmp_path / "out")]
    for model in models:
        assert model.cfg == whole.cfg and model.tokenizer.sha256 == whole.tokenizer.sha256
    assert models[0].files == whole.files
    equal(models[1].load().params, whole.params)


def test_the_command(source, tmp_path, capsys):
    out = tmp_path / "out"
    assert convert.main([str(source), str(out), "--dtype=bfloat16", "--mesh=1,2,2"]) == 0
    printed = capsys.readouterr().out
    for word in ("config.json", "tokenizer.json", "bfloat16", "from source, sha256"):
        assert word in printed
    expected = lm_jax.load_pretrained(source, dtype=jnp.bfloat16)
    manifest = verify_checkpoint(out)
    assert manifest["notes"]["mesh"] == {"data": 1, "fsdp": 2, "tensor": 2}
    assert manifest["notes"]["provenance"]["data"] == {"weights": expected.sha256}
    assert manifest["parameters"] == lm_jax.count_params(expected.cfg)

    mesh = sharding.make_mesh(tensor=2, fsdp=2)
    alone, sharded = (lm_jax.load_pretrained(out, dtype=jnp.bfloat16, mesh=m) for m in (None, mesh))
    for model in (alone, sharded):
        assert model.cfg == expected.cfg
        assert model.tokenizer.sha256 == expected.tokenizer.sha256
        assert (model.tokenizer.bos_id, model.tokenizer.eos_id) == (1, 2)
        equal(model.params, expected.params)
    assert alone.sha256 == sharded.sha256
    wanted = sharding.param_shardings(mesh, lm_jax.param_spec(expected.cfg))
    assert jax.tree.map(lambda leaf: leaf.sharding, sharded.params) == wanted
    # A float32 load of a bfloat16 folder is exact, as it is from a Hugging Face folder.
    wider = lm_jax.load_pretrained(out)
    equal(wider.params, jax.tree.map(lambda a: a.astype(jnp.float32), expected.params))


def test_a_converted_folder_can_be_saved_for_transformers(tmp_path):
    folder = make_goldens.GOLDEN / "gpt2"
    convert.convert(folder, tmp_path / "out")
    converted = lm_jax.load_pretrained(tmp_path / "out")
    lm_jax.save_pretrained(tmp_path / "back", converted.cfg, converted.params)
    equal(lm_jax.load_pretrained(tmp_path / "back").params, converted.params)


def test_damage_is_detected_when_loading(source, tmp_path):
    out = tmp_path / "out"
    convert.convert(source, out)
    for name in ("config.json", "tokenizer.json"):
        content = (out / name).read_text()
        (out / name).write_text(content.replace("4", "5", 1))
        with pytest.raises(CorruptError, match=name):
            lm_jax.load_pretrained(out)
        (out / name).write_text(content)
    (out / MANIFEST).unlink()
    with pytest.raises(BadInputError, match="no whole checkpoint"):
        lm_jax.load_pretrained(out)


def test_a_config_of_another_version(source, tmp_path):
    model = lm_jax.load_pretrained(source)
    config = dataclasses.asdict(model.cfg) | {"new_field": 1}

    def beside(folder):
        (folder / "config.json").write_text(json.dumps(config))

    save_checkpoint(tmp_path / "out", model.params, beside=beside)
    with pytest.raises(BadInputError, match=r"new_field is not a field.*convert the model again"):
        lm_jax.load_pretrained(tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["{source}"], 2, "OUT"),
        (["{source}", "{out}", "--mesh=4"], 2, "data,fsdp,tensor"),
        (["{source}", "{out}", "--mesh=3,1,1"], 2, "4 devices"),
        (["{source}", "{out}", "--dtype=float16"], 2, "float16"),
        (["{source}/absent", "{out}"], 3, "no folder or .gguf file"),
        (["{source}", "{source}"], 3, "exists"),
        (["{source}", "/proc/none/out"], 5, "cannot be written"),
    ],
)
def test_errors_are_one_line_with_their_exit_code(source, tmp_path, capsys, arguments, code, word):
    filled = [a.format(source=source, out=tmp_path / "out") for a in arguments]
    assert convert.main(filled) == code
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert word in error
    assert not (tmp_path / "out").exists()
