"""A command that was run before compiles nothing, and computes the same."""

import json
import os
from pathlib import Path
import subprocess
import sys

import jax
import pytest

from lm_jax.console import compilation
from lm_jax.run import user_cache

ROOT = Path(__file__).parents[3]
# Trains in a new folder, and prints the requests and hits of JAX's cache.
TRAIN = """
import collections, hashlib, json, pathlib, sys, tempfile
import jax
from lm_jax.console import cli
from lm_jax.train import loop
from tests.lm_jax.train import tiny_training as tiny

events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name.split("/")[-1]]))

def main(arguments):
    with tempfile.TemporaryDirectory() as folder:
        trained = loop.train(
            pathlib.Path(folder),
            loop.TrainRun(
                objective=tiny.OBJECTIVE, config=tiny.CONFIG, batches=tiny.BATCHES,
                validation=tiny.VALIDATION, seed=1,
            ),
            tiny.mesh(4),
        )
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(trained.state.params):
            digest.update(jax.device_get(leaf).tobytes())
    names = ("compile_requests_use_cache", "cache_hits", "cache_misses")
    print(json.dumps([*(events[name] for name in names), digest.hexdigest()]))

sys.exit(cli.run(main, sys.argv, workdir_required=False))
"""
SMALL = """
import collections, sys, jax
from lm_jax.console import cli

events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name.split("/")[-1]]))

def main(arguments):
    print(float(jax.jit(lambda x: jax.numpy.tanh(x @ x).sum())(jax.numpy.eye(5))))
    print(events["cache_hits"], events["cache_misses"])

sys.exit(cli.run(main, sys.argv, workdir_required=False))
"""


def run(script, cache, *flags):
    env = {name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name}
    env |= {user_cache.CACHE_VARIABLE: str(cache), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script, *flags], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1], done.stderr


def entries(cache):
    return sorted((cache / "compiled" / compilation.machine()).glob("*-cache"))


@pytest.mark.slow
def test_a_second_start_compiles_nothing_and_ends_in_the_same_bits(tmp_path):
    requests, hits, misses, cold = json.loads(run(TRAIN, tmp_path)[0][0])
    assert misses > 0 and hits + misses == requests
    assert any(entry.name.startswith("jit_step-") for entry in entries(tmp_path))
    (line,), error = run(TRAIN, tmp_path)
    requests, hits, misses, warm = json.loads(line)
    assert misses == 0 and hits == requests > 0
    assert cold == warm
    # Progress alone.
    assert all(line.startswith("train: ") for line in error.splitlines())


def test_a_damaged_entry_is_written_again_without_a_word(tmp_path):
    (value, counts), error = run(SMALL, tmp_path)
    kept = entries(tmp_path)
    assert counts == f"0 {len(kept)}" and error == ""
    for entry in kept:
        entry.write_bytes(entry.read_bytes()[:100])
    assert run(SMALL, tmp_path) == ([value, f"0 {len(kept)}"], "")
    assert entries(tmp_path) == kept
    assert run(SMALL, tmp_path) == ([value, f"{len(kept)} 0"], "")


def test_what_the_environment_says_of_the_cache_holds(tmp_path, monkeypatch):
    monkeypatch.setenv(user_cache.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.delenv("JAX_ENABLE_COMPILATION_CACHE")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "mine"))
    before = dict(jax.config.values)
    with compilation.cache() as folder:
        assert folder is None and dict(jax.config.values) == before
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    with compilation.cache() as folder:
        assert folder == tmp_path / "compiled" / compilation.machine()
        assert jax.config.values["jax_compilation_cache_dir"] == str(folder)
    assert dict(jax.config.values) == before and "JAX_COMPILATION_CACHE_DIR" not in os.environ


def test_the_entries_that_were_used_last_stay(tmp_path):
    for age in range(6):
        entry = tmp_path / f"jit_{age}-00-cache"
        entry.write_bytes(bytes(100))
        os.utime(entry, (1e9 - age, 1e9 - age))
    (tmp_path / "other").write_bytes(bytes(10_000))
    compilation.prune(tmp_path, 350)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["jit_0-00-cache", "jit_1-00-cache", "jit_2-00-cache", "other"]
