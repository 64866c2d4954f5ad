"""Saved folders hold the model bit for bit, or do not exist; loading stays within memory."""

import dataclasses
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
import tokenizers

import lm_jax
from lm_jax.checkpoint.folder import MANIFEST, save_checkpoint
from lm_jax.errors import BadInputError, StorageError
from lm_jax.run.files import new_folder, write_json
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.weights.safetensors import write_folder
from tests.lm_jax.weights.golden_copies import shard
from tools import make_goldens

WEIGHTS, CONFIG = "model.safetensors", "config.json"
SOURCE = make_goldens.GOLDEN / "llama_mqa"


def bits(a):
    return np.asarray(a).view({2: np.uint16, 4: np.uint32}[a.dtype.itemsize])


def test_bfloat16_is_bitwise(tmp_path):
    model = lm_jax.load_pretrained(SOURCE, dtype=jnp.bfloat16)
    lm_jax.save_pretrained(tmp_path / "out", model.cfg, model.params)
    assert json.loads((tmp_path / "out" / CONFIG).read_text())["dtype"] == "bfloat16"
    again = lm_jax.load_pretrained(tmp_path / "out", dtype=jnp.bfloat16)
    wider = lm_jax.load_pretrained(tmp_path / "out")
    for name, leaf in lm_jax.params.by_path(model.params).items():
        np.testing.assert_array_equal(bits(lm_jax.params.by_path(again.params)[name]), bits(leaf))
        np.testing.assert_array_equal(
            lm_jax.params.by_path(wider.params)[name], leaf.astype(jnp.float32)
        )


def test_float32_loads_as_the_nearest_bfloat16():
    wide, narrow = (lm_jax.load_pretrained(SOURCE, dtype=d) for d in (jnp.float32, jnp.bfloat16))
    for name, leaf in lm_jax.params.by_path(wide.params).items():
        expected = np.asarray(leaf).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(
            bits(lm_jax.params.by_path(narrow.params)[name]), expected.view(np.uint16)
        )


def test_transposed_arrays_are_stored_as_they_read(tmp_path):
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    strided = np.arange(8, dtype=np.float32)[::2]
    write_folder(tmp_path / "out", {}, {"turned": w.T, "strided": strided}, None)
    stored = load_file(tmp_path / "out" / WEIGHTS)
    np.testing.assert_array_equal(stored["turned"], w.T)
    np.testing.assert_array_equal(stored["strided"], strided)


def test_a_write_that_does_not_read_back(tmp_path, monkeypatch):
    def bad_writer(tensors, path, metadata):
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, path, metadata)

    monkeypatch.setattr("safetensors.numpy.save_file", bad_writer)
    with pytest.raises(StorageError, match="did not read back"):
        write_folder(tmp_path / "out", {}, {"w": np.ones(3, np.float32)}, None)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_target_is_left_alone(tmp_path):
    model = lm_jax.load_pretrained(SOURCE)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("data")
    with pytest.raises(BadInputError, match="out exists"):
        lm_jax.save_pretrained(tmp_path / "out", model.cfg, model.params)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["precious"]


def test_a_killed_save_leaves_no_folder_and_the_next_one_works(tmp_path):
    script = f"""
        import os, signal
        from lm_jax.run.files import new_folder
        with new_folder({str(tmp_path / "out")!r}) as draft:
            (draft / "model.safetensors").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert (tmp_path / ".out.tmp").exists()
    model = lm_jax.load_pretrained(SOURCE)
    lm_jax.save_pretrained(tmp_path / "out", model.cfg, model.params)
    again = lm_jax.load_pretrained(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    assert not (tmp_path / ".out.tmp").exists()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(StorageError, match="cannot be written"),
        new_folder(tmp_path / "file" / "out"),
    ):
        pass


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_files_are_as_readable_as_the_umask_allows(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        model = lm_jax.load_pretrained(SOURCE)
        lm_jax.save_pretrained(tmp_path / "out", model.cfg, model.params, model.tokenizer)
        save_checkpoint(tmp_path / "checkpoint", {"a": jnp.ones(3)})
        write_json(tmp_path / "numbers.json", {})
    finally:
        os.umask(before)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {file.name for file in files} > {WEIGHTS, CONFIG, MANIFEST, "numbers.json"}
    modes = {str(file.relative_to(tmp_path)): stat.S_IMODE(file.stat().st_mode) for file in files}
    assert modes == dict.fromkeys(modes, mode)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"score_softcap": 5.0}, "config.score_softcap"),
        ({"embed_scale": 2.0}, "config.embed_scale"),
        ({"windows": (2, None)}, "config.windows"),
        ({"attention_scale": 1.0}, "config.attention_scale"),
        ({"qk_norm": "head"}, "config.qk_norm"),
    ],
)
def test_a_setting_that_the_family_cannot_store(tmp_path, fields, word):
    cfg = lm_jax.DecoderConfig(
        **dict.fromkeys(
            ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size", "mlp_size"), 2
        ),
        vocab_size=5,
        max_length=8,
        **fields,
    )
    params = lm_jax.init_params(jax.random.key(0), cfg)
    with pytest.raises(BadInputError, match=word):
        lm_jax.save_pretrained(tmp_path / "out", cfg, params)
    assert list(tmp_path.iterdir()) == []


def test_two_norms_of_which_the_family_stores_one(tmp_path):
    model = lm_jax.load_pretrained(make_goldens.GOLDEN / "stablelm_parallel_qk_norm")
    blocks = model.params["blocks"]
    np.testing.assert_array_equal(blocks["ln1"]["bias"], blocks["ln2"]["bias"])
    blocks["ln2"] = blocks["ln2"] | {"bias": blocks["ln2"]["bias"] + 1}
    with pytest.raises(BadInputError, match="blocks/ln1/bias differs from blocks/ln2/bias"):
        lm_jax.save_pretrained(tmp_path / "out", model.cfg, model.params)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("case", "windows", "words"),
    [
        ("qwen2_windows", (None, 3, 4), "one window size for all layers"),
        ("mistral", (None, 4, 4), "the same window in all layers"),
    ],
)
def test_windows_that_the_family_cannot_store(tmp_path, case, windows, words):
    model = lm_jax.load_pretrained(make_goldens.GOLDEN / case)
    cfg = dataclasses.replace(model.cfg, windows=windows)
    with pytest.raises(BadInputError, match=words):
        lm_jax.save_pretrained(tmp_path / "out", cfg, model.params)


def test_the_ids_of_the_tokenizer_are_saved(tmp_path):
    words = {f"w{i}": i for i in range(10)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    model = lm_jax.load_pretrained(SOURCE)
    tokenizer = Tokenizer(backend, bos_id=3, eos_id=7)
    lm_jax.save_pretrained(tmp_path / "out", model.cfg, model.params, tokenizer)
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (3, 7)
    again = lm_jax.load_pretrained(tmp_path / "out").tokenizer
    assert (again.bos_id, again.eos_id, again.sha256) == (3, 7, tokenizer.sha256)


# Memory


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.long), 4])
def test_loading_holds_the_weights_and_one_tensor(tmp_path, devices):
    """One file onto one device, and two shards of a checkpoint onto a mesh."""
    cfg = lm_jax.DecoderConfig(
        num_layers=16,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        hidden_size=512,
        mlp_size=1024,
        vocab_size=8192,
        max_length=128,
    )
    script = f"""
        from pathlib import Path
        import resource
        import jax
        import lm_jax
        from lm_jax.parallel import sharding

        def peak():
            # In bytes. On Linux ru_maxrss starts at the peak of the process that forked this one.
            status = Path("/proc/self/status")
            if status.exists():
                return 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        mesh = None if {devices} == 1 else sharding.make_mesh(data=1, fsdp=2, tensor=2)
        # Imports and the first compilation are not what is measured.
        lm_jax.load_pretrained({str(SOURCE)!r}, mesh=mesh)
        before = peak()
        model = lm_jax.load_pretrained({str(tmp_path / "big")!r}, mesh=mesh)
        jax.block_until_ready(model.params)
        print(peak() - before)
    """
    ones = jax.tree.map(
        lambda a: jnp.ones(a.shape, a.dtype), lm_jax.params.abstract(lm_jax.param_spec(cfg))
    )
    lm_jax.save_pretrained(tmp_path / "big", cfg, ones)
    flags = os.environ.get("XLA_FLAGS", "")
    if devices > 1:
        shard(tmp_path / "big")
    env = {
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}",
        # Fixed, so that what is freed goes back: glibc raises it at some of what is freed, and
        # keeps more or less from then on, as threads happen to interleave.
        "MALLOC_MMAP_THRESHOLD_": f"{2**17}",
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=True,
    )
    weights = 4 * lm_jax.count_params(cfg)
    largest = 4 * cfg.vocab_size * cfg.hidden_size
    assert 0.9 * weights < int(done.stdout) < 1.3 * weights + largest
