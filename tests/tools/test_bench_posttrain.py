"""The benchmark of post-training times gates against the dense attention that training uses."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.model import params as params_lib
from lm_jax.train import objective
from tools.bench import posttrain as bench_posttrain

SMALL = dataclasses.replace(bench_posttrain.SHAPE, num_layers=1, vocab_size=64)


def attends(monkeypatch, module, run):
    """The attention of each forward pass that `run` traces through `module`."""
    seen = []
    real = module.forward

    def forward(*args, attend=None, **options):
        seen.append((attend.attend.func, attend.implementation))
        return real(*args, attend=attend, **options)

    monkeypatch.setattr(module, "forward", forward)
    jax.eval_shape(run)
    return seen


def test_the_baseline_attends_as_dense_training_does(monkeypatch):
    tokens_BS = jnp.ones((1, 9), jnp.int32)
    dense, _ = bench_posttrain.tasks(SMALL, "float32")
    ours = objective.LanguageModelling(SMALL)
    key = jax.random.key(0)

    def terms(task, frozen):
        params = params_lib.init(key, task.spec)
        state, normalizers = task.init_state(), task.normalizers(tokens_BS)
        return task.loss_terms(params, frozen, state, tokens_BS, normalizers, key)

    frozen = bench_posttrain.weights(SMALL, "float32")
    got = attends(monkeypatch, bench_posttrain.lm_jax, lambda: terms(dense, frozen))
    want = attends(monkeypatch, objective, lambda: terms(ours, ()))
    assert got == want == [(lm_jax.softmax, "kernels")]


def test_both_steps_are_timed_in_turns(tmp_path, monkeypatch, capsys):
    raw = tmp_path / "raw.json"
    monkeypatch.setattr(bench_posttrain, "SHAPE", SMALL)
    argv = ["--layers=1", "--length=5", "--repeats=2", f"--json={raw}"]
    assert bench_posttrain.main(argv) == 0
    seconds = json.loads(raw.read_text())["step"]["seconds"]
    assert [len(seconds[name]) for name in ("dense", "gated")] == [2, 2]
    assert "training step, batch 1 x 5, float32" in capsys.readouterr().out


@pytest.mark.parametrize("off", [1e-3, math.nan])
def test_other_losses_are_not_timed(off, monkeypatch, capsys):
    monkeypatch.setattr(bench_posttrain, "open_difference", lambda *given: off)
    monkeypatch.setattr(bench_posttrain, "weights", lambda *given: np.zeros(()))
    assert bench_posttrain.main(["--layers=1", "--length=5"]) == 1
    assert "not timed, as with every gate open the loss differs" in capsys.readouterr().out
