"""The training benchmark only times results that agree, and says why it does not."""

import dataclasses
import json
import math
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

import lm_jax
from lm_jax.model.decoder import param_spec
from lm_jax.run.config import from_plain
from lm_jax.run.config_files import load_config
from lm_jax.train import optim
from lm_jax.train.objective import token_loss
from protot_jax.config import PretrainConfig
from tools import bench_train
from tools.bench import torch_llama

SMALL = ["--config=configs/protot/default.py:smoke", "--dtype=float32", "--repeats=2"]
STEPS = [*SMALL, "--lengths", "--prompts"]


def test_rates_are_timed_in_turns(tmp_path, capsys):
    raw = tmp_path / "raw.json"
    argv = [*STEPS, "--models", "protot", "--dropout", "0", "0.1", f"--json={raw}"]
    assert bench_train.main(argv) == 0
    labels = ["protot, dropout 0", "protot, dropout 0.1"]
    result = json.loads(raw.read_text())["step"]
    assert list(result["seconds"]) == list(result["temporary_bytes"]) == labels
    assert all(len(series) == 2 and min(series) > 0 for series in result["seconds"].values())
    # Dropout masks are sampled again for the gradient or stored, either at a cost.
    memory = result["temporary_bytes"]
    assert memory["protot, dropout 0.1"] > memory["protot, dropout 0"]
    printed = capsys.readouterr().out
    assert "ratios are over protot, dropout 0" in printed
    assert "protot, dropout 0       " in printed and "time ratio 1.00 (1.00 to 1.00)" in printed


@pytest.mark.slow
def test_prefill_and_decoding_follow(tmp_path, capsys):
    raw = tmp_path / "raw.json"
    argv = [*SMALL, "--models", "protot", "--lengths", "16", "32", "--prompts", "8", "64"]
    assert bench_train.main([*argv, "--decoded=3", f"--json={raw}"]) == 0
    result = json.loads(raw.read_text())
    assert list(result["forward"]) == ["16", "32"]
    sizes = result["decode"]["cache_bytes"]
    assert sizes["8"] == sizes["64"]
    assert "decoding at batch 1, 3 tokens after each prompt" in capsys.readouterr().out


def test_the_forward_pass_has_the_softmax_of_training(monkeypatch):
    """LLaMA's forms no whole scores on a CPU, and another mixer has no use for it."""
    given = {}

    def forward(params, tokens, cfg, *, mixer, attend, logits_at):
        given[type(mixer).__name__] = attend
        return SimpleNamespace(logits=tokens)

    monkeypatch.setattr(bench_train.lm_jax, "forward", forward)
    config = from_plain(load_config("configs/protot/default.py:smoke"), PretrainConfig)
    for name in ("llama", "protot"):
        bench_train.forward(name, config, 8)()
    fused = given.pop("AttentionMixer")
    assert fused.implementation == "kernels" and list(given.values()) == [lm_jax.softmax]


def test_nothing_is_timed_where_a_loss_is_off(monkeypatch, capsys):
    monkeypatch.setattr(bench_train.math, "log", lambda x: 2.0)
    assert bench_train.main([*STEPS, "--models", "protot"]) == 1
    printed = capsys.readouterr().out
    assert "protot: an untrained loss of" in printed and "time ratio" not in printed


def test_nothing_is_timed_where_a_loss_is_no_number(monkeypatch, capsys):
    config = from_plain(load_config("configs/protot/default.py:smoke"), PretrainConfig)
    nan = SimpleNamespace(loss=math.nan, guess=1.0)
    monkeypatch.setattr(bench_train, "Step", lambda name, config: nan)
    assert bench_train.bench_steps(["llama"], config, 1, rates=[0.0], against=None) is None
    assert "llama: an untrained loss of nan" in capsys.readouterr().out
    # The same of torch's.
    monkeypatch.setattr(torch_llama, "TorchStep", lambda *args, **options: nan)
    assert bench_train.torch_steps(config) is None
    assert "torch llama: loss nan on the weights" in capsys.readouterr().out


@pytest.mark.parametrize(("error", "shown"), [(0.5, "5.0e-01"), (math.nan, "nan")])
def test_nothing_is_timed_where_decoding_is_off(error, shown, monkeypatch, capsys):
    monkeypatch.setattr(bench_train.Decoder, "error", lambda self, length: error)
    argv = [*SMALL, "--models", "protot", "--lengths", "--prompts", "8"]
    assert bench_train.main(argv) == 1
    assert f"decoding is {shown} from the parallel pass" in capsys.readouterr().out


def test_without_torch_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(torch_llama.importlib.util, "find_spec", lambda name: None)
    assert bench_train.main([*STEPS, "--against=torch"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "torch is not installed; pip install torch" in error


def test_torch_is_compared_in_float32_alone(monkeypatch, capsys):
    monkeypatch.setattr(torch_llama, "missing", lambda: "")
    assert bench_train.main([*STEPS, "--dtype=bfloat16", "--against=torch"]) == 2
    assert "add --dtype float32" in capsys.readouterr().err


@pytest.mark.torch
# torch warns of itself when it first compiles.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torch_is_timed_from_our_weights(tmp_path):
    raw = tmp_path / "raw.json"
    argv = [*STEPS, "--models", "protot", "llama", "--dropout", "0", "--against=torch"]
    assert bench_train.main([*argv, f"--json={raw}"]) == 0
    seconds = json.loads(raw.read_text())["step"]["seconds"]
    assert list(seconds) == ["protot", "llama", "torch llama", "torch.compile llama"]


@pytest.mark.torch
def test_updates_of_torch_are_those_of_our_optimizer():
    """From the same weights, the loss falls equally over six updates."""
    config = from_plain(load_config("configs/protot/default.py:smoke"), PretrainConfig)
    cfg, mixer = bench_train.build("llama", config)
    params = lm_jax.init_params(jax.random.key(0), cfg, mixer=mixer)
    tokens_BS = bench_train.random_batch(config, cfg.vocab_size)
    settings = dataclasses.replace(bench_train.SETTINGS, warmup=0.0, steps=1_000_000)
    theirs = torch_llama.TorchStep(cfg, params, tokens_BS, settings, compiled=False)

    def mean(params):
        total, count = token_loss(params, tokens_BS, cfg, mixer)
        return total / count

    optimizer = optim.adamw(param_spec(cfg, mixer), settings)
    state, losses = optimizer.init(params), []
    differentiate = jax.jit(jax.value_and_grad(mean))
    for _ in range(6):
        loss, gradient = differentiate(params)
        change, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, change)
        losses.append(float(loss))
    fall = losses[0] - losses[-1]
    assert fall > 0.01 * losses[0]
    # An entry of the gradient near zero has any sign, and so any first update.
    np.testing.assert_allclose([theirs() for _ in range(6)], losses, rtol=0, atol=0.01 * fall)
