"""A checkpoint of a run is restored bit for bit, or one line says what is wrong with it."""

import dataclasses
import logging
import shutil

import jax
import numpy as np
import pytest

import lm_jax
from lm_jax.checkpoint import manager
from lm_jax.checkpoint.folder import MANIFEST
from lm_jax.errors import BadInputError, CorruptError, StorageError, UsageError
from lm_jax.parallel import sharding
from lm_jax.run import files
from lm_jax.train import optim, state
from tests.lm_jax.train import tiny_training as tiny

OPTIMIZER = optim.adamw(tiny.SPEC, tiny.CONFIG)
IDENTITY = manager.Identity(
    config={"train": {"steps": 12}, "seed": 1},
    fingerprint="data",
    mesh={"data": 2, "fsdp": 2, "tensor": 1},
    packages={"jax": "1"},
)


def target(ways=4):
    return state.abstract_state(tiny.mesh(ways), tiny.SPEC, OPTIMIZER)


def numbered(step):
    """A state whose every number depends on the step and the place."""
    rng = np.random.default_rng(step)

    def leaf(a):
        x = rng.normal(size=a.shape) if a.dtype == np.float32 else np.full(a.shape, step)
        return jax.device_put(x.astype(a.dtype), a.sharding)

    return jax.tree.map(leaf, target())


def save(folder, step, *, keep=2, best=None):
    return manager.save(
        folder,
        numbered(step),
        identity=IDENTITY,
        progress={"last": 0.1 + step},
        keep=keep,
        best=best,
    )


def restore(folder, target, identity, **options):
    """The newest checkpoint, as training loads it."""
    step = manager.newest(folder, identity, **options)
    return None if step is None else manager.load(folder, step, target)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    for step in (4, 8):
        save(folder, step)
    return folder


@pytest.fixture
def damaged(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def newest_data(folder):
    files = [p for p in (folder / "step_000008" / "arrays").rglob("*") if p.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 8
    path.write_bytes(data)


def test_state_notes_and_shardings_come_back(saved):
    back = restore(saved, target(), IDENTITY)
    tiny.assert_bitwise(back.state, numbered(8))
    assert jax.tree.map(lambda a: a.sharding, back.state) == jax.tree.map(
        lambda a: a.sharding, target()
    )
    assert back.notes["progress"] == {"last": 8.1}
    assert (back.notes["step"], back.notes["next_batch"]) == (8, 8)
    assert back.notes["config_hash"] == lm_jax.run.config.config_hash(IDENTITY.config)


def test_no_checkpoint_is_none(tmp_path):
    assert restore(tmp_path / "checkpoints", target(), IDENTITY) is None


def test_the_last_ones_and_the_best_stay(tmp_path):
    for step, best in ((1, 1), (2, 2), (3, 2), (4, 2), (5, 2)):
        save(tmp_path, step, best=best)
    assert manager.saved_steps(tmp_path) == [2, 4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"step_00000{step}" for step in (2, 4, 5)
    ]


def test_parameters_alone_load_on_another_mesh(saved):
    params = manager.load_params(saved, 4, sharding.abstract(tiny.SPEC))
    tiny.assert_bitwise(params, numbered(4).params)
    with pytest.raises(BadInputError, match=r"step_000005 is not there; saved steps: 4, 8"):
        manager.load_params(saved, 5, sharding.abstract(tiny.SPEC))


def test_drafts_of_a_killed_save_are_removed_and_the_previous_step_used(damaged):
    (damaged / "step_000008").rename(damaged / ".step_000008.tmp")
    (damaged / ".step_000008.tmp" / MANIFEST).unlink()
    tiny.assert_bitwise(restore(damaged, target(), IDENTITY).state, numbered(4))
    assert [path.name for path in damaged.iterdir()] == ["step_000004"]


@pytest.mark.parametrize("how", ["flipped", "truncated", "missing", "no manifest", "renamed"])
def test_damage_is_named_and_one_step_back_taken_only_where_allowed(damaged, how, caplog):
    file = newest_data(damaged)
    match how:
        case "flipped":
            flip(file)
        case "truncated":
            file.write_bytes(file.read_bytes()[:-1])
        case "missing":
            file.unlink()
        case "no manifest":
            file = damaged / "step_000008" / MANIFEST
            file.unlink()
        case "renamed":
            file = damaged / "step_000009"
            (damaged / "step_000008").rename(file)
    with pytest.raises(CorruptError) as caught:
        restore(damaged, target(), IDENTITY)
    assert caught.value.exit_code == 7
    assert str(file.name) in str(caught.value)
    assert "give --config.allow_fallback to continue from step_000004" in str(caught.value)
    assert "\n" not in str(caught.value)

    with caplog.at_level(logging.WARNING):
        back = restore(damaged, target(), IDENTITY, allow_fallback=True)
    tiny.assert_bitwise(back.state, numbered(4))
    assert "continuing from step_000004" in caplog.text
    # Nothing is lost, and the name is free for the step when it comes again.
    assert len(list(damaged.glob("*.damaged"))) == 1
    assert manager.saved_steps(damaged) == [4]
    save(damaged, 8)
    tiny.assert_bitwise(restore(damaged, target(), IDENTITY).state, numbered(8))


def test_two_damaged_checkpoints_are_one_too_many(damaged):
    flip(newest_data(damaged))
    (damaged / "step_000004" / MANIFEST).unlink()
    with pytest.raises(CorruptError, match="step_000004"):
        restore(damaged, target(), IDENTITY, allow_fallback=True)
    assert manager.saved_steps(damaged) == [4, 8]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config": {"train": {"steps": 13}, "seed": 1}}, "config.train.steps = 12, not 13"),
        ({"fingerprint": "other"}, "data data, not other"),
    ],
)
def test_another_config_or_other_data_are_refused(saved, change, words):
    with pytest.raises(UsageError, match=words) as caught:
        restore(saved, target(), dataclasses.replace(IDENTITY, **change))
    assert "step_000008" in str(caught.value)


@pytest.mark.parametrize(("before", "now"), [("a" * 64, "b" * 64), (None, "b" * 64)])
def test_a_checkpoint_over_other_weights_is_refused(tmp_path, before, now):
    identity = dataclasses.replace(IDENTITY, base_sha256=before)
    manager.save(tmp_path, numbered(4), identity=identity, progress={}, keep=1, best=None)
    tiny.assert_bitwise(restore(tmp_path, target(), identity).state, numbered(4))
    had = before[:12] if before else "none"
    words = rf"step_000004 was .* with weights {had}, not {now[:12]}; put that model back"
    with pytest.raises(BadInputError, match=words):
        restore(tmp_path, target(), dataclasses.replace(identity, base_sha256=now))


def test_another_mesh_goes_on_and_says_that_it_is_not_bitwise(saved, caplog, capsys):
    identity = dataclasses.replace(IDENTITY, mesh={"data": 1, "fsdp": 1, "tensor": 1})
    with caplog.at_level(logging.WARNING):
        back = restore(saved, target(1), identity)
    tiny.assert_bitwise(back.state, numbered(8))
    assert "not bit for bit" in caplog.text
    assert "fsdp = 2, not 1" in caplog.text
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("note: step_000008 was saved with mesh data = 2, not 1, mesh fsdp")


def test_another_model_is_refused_with_every_difference(saved):
    cfg = dataclasses.replace(tiny.CFG, mlp_size=20)
    other = state.abstract_state(tiny.mesh(4), lm_jax.param_spec(cfg), OPTIMIZER)
    with pytest.raises(BadInputError, match=r"\(9 differences\).*mlp/up has shape"):
        restore(saved, other, IDENTITY)


def test_a_failed_save_leaves_the_checkpoints_before_it(damaged, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "file_digest", full)
    with pytest.raises(StorageError, match="No space left"):
        save(damaged, 12)
    monkeypatch.undo()
    assert sorted(path.name for path in damaged.iterdir()) == ["step_000004", "step_000008"]
    tiny.assert_bitwise(restore(damaged, target(), IDENTITY).state, numbered(8))
