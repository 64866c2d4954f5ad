"""A checkpoint is restored bit for bit on any mesh, or the error names the damaged file."""

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import lm_jax
from lm_jax.checkpoint.folder import (
    ARRAYS,
    MANIFEST,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from lm_jax.errors import BadInputError, CorruptError
from lm_jax.parallel import sharding
from lm_jax.run.files import content_digest

CFG = lm_jax.DecoderConfig(
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    hidden_size=20,
    mlp_size=28,
    vocab_size=40,
    max_length=32,
)
SPEC = lm_jax.param_spec(CFG)


def random_bits(mesh, dtype):
    """Finite numbers whose every bit counts, subnormal and negative zero among them."""
    rng = np.random.default_rng(0)

    def leaf(a):
        x = rng.normal(size=a.shape).astype(np.float32)
        x.flat[:3] = [-0.0, 1e-44, -3e38]
        return jax.device_put(x.astype(dtype), a.sharding)

    return jax.tree.map(leaf, sharding.abstract(SPEC, dtype, mesh))


def bits(tree):
    unsigned = {2: np.uint16, 4: np.uint32}
    return {
        name: np.asarray(leaf).view(unsigned[leaf.dtype.itemsize])
        for name, leaf in lm_jax.params.by_path(tree).items()
    }


def mesh_of(sizes):
    return (
        None
        if sizes is None
        else sharding.make_mesh(**dict(zip(sharding.AXES, sizes, strict=True)))
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    params = random_bits(None, jnp.float32)
    manifest = save_checkpoint(
        folder, params, notes={"step": 3}, beside=lambda f: (f / "readme").write_text("beside")
    )
    return folder, params, manifest


@pytest.fixture
def damaged(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def load(folder, dtype=jnp.float32, **options):
    return load_checkpoint(folder, sharding.abstract(SPEC, dtype), **options)


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, (1, 2, 2)), ((1, 4, 1), None), ((1, 2, 2), (2, 1, 2))],
    ids=["one to four", "four to one", "mesh to mesh"],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_bit_comes_back_on_another_mesh(tmp_path, before, after, dtype):
    params = random_bits(mesh_of(before), dtype)
    save_checkpoint(tmp_path / "out", params)
    target = sharding.abstract(SPEC, dtype, mesh_of(after))
    loaded = load_checkpoint(tmp_path / "out", target)
    jax.tree.map(np.testing.assert_array_equal, bits(loaded), bits(params))
    for name, leaf in lm_jax.params.by_path(loaded).items():
        assert leaf.sharding == lm_jax.params.by_path(target)[name].sharding
        assert leaf.dtype == dtype


def test_the_manifest_describes_the_folder(saved):
    folder, _, manifest = saved
    assert manifest["notes"] == {"step": 3}
    assert manifest["parameters"] == lm_jax.count_params(CFG)
    assert manifest["arrays"]["unembed"] == {"shape": [20, 40], "dtype": "float32"}
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert files == {*manifest["files"], MANIFEST}
    assert "readme" in files
    assert verify_checkpoint(folder) == manifest
    stored = json.loads((folder / MANIFEST).read_text())
    assert stored == manifest | {"sha256": content_digest(manifest)}


def test_twenty_flipped_bits_are_all_detected(damaged):
    files = sorted(path for path in damaged.rglob("*") if path.is_file() and path.stat().st_size)
    ends = np.cumsum([8 * path.stat().st_size for path in files])
    for bit in np.random.default_rng(0).integers(0, ends[-1], 20):
        which = int(np.searchsorted(ends, bit, side="right"))
        path, at = files[which], int(ends[which] - 1 - bit)
        whole = path.read_bytes()
        changed = bytearray(whole)
        changed[at // 8] ^= 1 << at % 8
        path.write_bytes(changed)
        with pytest.raises(CorruptError) as caught:
            load(damaged)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
        path.write_bytes(whole)
    load(damaged)


def test_every_single_file_is_needed_whole(damaged):
    for path in sorted(path for path in damaged.rglob("*") if path.is_file()):
        whole = path.read_bytes()
        error = BadInputError if path.name == MANIFEST else CorruptError
        path.unlink()
        with pytest.raises(error, match=path.name):
            load(damaged)
        path.write_bytes(whole[:-2] if whole else b"x")
        with pytest.raises(CorruptError, match=path.name):
            load(damaged)
        path.write_bytes(whole)


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        (lambda m: m["files"].update({"../../outside": m["files"]["readme"]}), CorruptError, ".."),
        (lambda m: m["files"].update({"/etc/passwd": m["files"]["readme"]}), CorruptError, "/etc"),
        (lambda m: m.update(format=2), BadInputError, "format 2 is not 1"),
    ],
)
def test_a_manifest_that_was_written_elsewhere(damaged, change, error, word):
    manifest = json.loads((damaged / MANIFEST).read_text())
    del manifest["sha256"]
    change(manifest)
    manifest["sha256"] = content_digest(manifest)
    (damaged / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(error, match=word):
        verify_checkpoint(damaged)


@pytest.mark.parametrize("content", ["[]", "{}", "3", "{"])
def test_a_manifest_that_is_none(damaged, content):
    (damaged / MANIFEST).write_text(content)
    with pytest.raises(CorruptError, match=MANIFEST):
        verify_checkpoint(damaged)


def test_another_dtype_is_converted_only_when_asked(saved):
    folder, params, _ = saved
    with pytest.raises(BadInputError, match="is float32, not bfloat16; pass cast=True"):
        load(folder, jnp.bfloat16)
    cast = bits(load(folder, jnp.bfloat16, cast=True))
    for name, leaf in lm_jax.params.by_path(params).items():
        nearest = np.asarray(leaf).astype(ml_dtypes.bfloat16).view(np.uint16)
        np.testing.assert_array_equal(cast[name], nearest, err_msg=name)


def test_another_tree_is_refused_with_every_difference(saved):
    target = sharding.abstract(SPEC)
    target["final"] = {"bias": target["final"]["scale"]}
    target["unembed"] = jax.ShapeDtypeStruct((20, 41), jnp.float32)
    with pytest.raises(BadInputError) as caught:
        load_checkpoint(saved[0], target)
    for word in (
        "3 differences",
        "missing final/bias",
        "unused final/scale",
        "unembed has shape (20, 40), not (20, 41)",
    ):
        assert word in str(caught.value)


def test_an_existing_target_and_a_failed_save(saved, tmp_path):
    folder, params, _ = saved
    with pytest.raises(BadInputError, match="exists"):
        save_checkpoint(folder, params)

    def fail(draft):
        assert (draft / ARRAYS).is_dir()
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        save_checkpoint(tmp_path / "out", params, beside=fail)
    assert list(tmp_path.iterdir()) == []
