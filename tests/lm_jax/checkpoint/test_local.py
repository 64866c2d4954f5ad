"""The local tier holds the shards of one process, and all processes resume from one step."""

import dataclasses

import jax
import numpy as np
import pytest

from lm_jax.checkpoint import local
from lm_jax.checkpoint.manager import saved_steps, step_folder
from lm_jax.run import processes
from tests.lm_jax.checkpoint.test_manager import IDENTITY, flip, numbered, target
from tests.lm_jax.train import tiny_training as tiny


def save(folder, *steps, run=None):
    for step in steps:
        progress = {"last": 0.1 + step}
        local.save(folder, numbered(step), identity=IDENTITY, progress=progress, run=run)


def restore(folder, *, ways=4, identity=IDENTITY, newer_than=0, **limits):
    return local.restore(folder, target(ways), identity, newer_than=newer_than, **limits)


@pytest.fixture
def held(tmp_path):
    """The folder of a process that saved three times."""
    folder = local.own_folder(tmp_path, tmp_path / "run")
    save(folder, 2, 4, 6)
    return folder


def test_the_last_two_steps_stay_and_the_newest_comes_back(held):
    assert saved_steps(held) == [4, 6]
    back = restore(held)
    tiny.assert_bitwise(back.state, numbered(6))
    assert jax.tree.map(lambda a: a.sharding, back.state) == jax.tree.map(
        lambda a: a.sharding, target()
    )
    assert back.notes["progress"] == {"last": 6.1}
    assert restore(held, newer_than=6) is None


def test_replicated_arrays_are_kept_once(held):
    """The files hold the bytes of the state, though two devices hold most of its shards."""
    size = (step_folder(held, 6) / "shards.safetensors").stat().st_size
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(numbered(6)))
    # Besides them, a header of a line for each shard.
    assert state <= size < state + 200 * 2 * len(jax.tree.leaves(numbered(6)))


def test_a_flipped_bit_counts_as_a_missing_step(held, caplog):
    flip(step_folder(held, 6) / "shards.safetensors")
    tiny.assert_bitwise(restore(held).state, numbered(4))
    assert "shards.safetensors does not match its sha256" in caplog.text
    # The run comes to that step again.
    save(held, 6)
    tiny.assert_bitwise(restore(held).state, numbered(6))


def test_other_devices_settings_or_data_are_not_used(held, caplog):
    assert restore(held, ways=1) is None
    for field, value in (("config", {"seed": 2}), ("fingerprint", "other"), ("base_sha256", "c")):
        save(held, 8)
        assert restore(held, identity=dataclasses.replace(IDENTITY, **{field: value})) is None
        assert saved_steps(held) == []
    assert caplog.text.count("is of another run, other settings, data, devices or proc") == 2 + 3


def test_steps_of_another_run_and_after_its_rows_are_not_used(held, caplog):
    assert restore(held, run="this") is None
    assert caplog.text.count("is of another run") == 2
    save(held, 2, 4, run="this")
    tiny.assert_bitwise(restore(held, run="this", up_to=3).state, numbered(2))
    # A folder that has no id takes any.
    tiny.assert_bitwise(restore(held).state, numbered(2))


@pytest.mark.parametrize(("elsewhere", "step"), [((4, 6), 6), ((2, 4), 4), ((-1, -1), None)])
def test_processes_agree_on_the_newest_step_that_all_hold(held, elsewhere, step, monkeypatch):
    def gather(array):
        return np.concatenate([array, np.array(elsewhere, array.dtype)])

    monkeypatch.setattr(processes, "gather", gather)
    back = restore(held)
    if step is None:
        assert back is None
    else:
        tiny.assert_bitwise(back.state, numbered(step))


def test_runs_and_processes_share_a_folder(held, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    others = [local.own_folder(tmp_path, tmp_path / name) for name in ("run", "other")]
    assert len({held, *others}) == 3
    local.remove(others[0])
    assert saved_steps(held) == [4, 6]
    local.remove(held)
    assert saved_steps(held) == []
