"""The training benchmark only times results that agree, and says why it does not."""

import dataclasses
import functools
import json
import math
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lm_jax
from lm_jax.console.config_files import load_config
from lm_jax.model.decoder import param_spec
from lm_jax.run.config import from_plain
from lm_jax.train import optim
from lm_jax.train.objective import token_loss
from protot_jax.training import count
from tools.bench import decoding, forward, shapes
from tools.bench import train as bench_train
from tools.bench.in_torch import llama as torch_llama
from tools.bench.shapes import BenchConfig, build, random_params

# Run by `make test-all`.
pytestmark = pytest.mark.long

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


def configured(name="configs/protot/default.py:smoke"):
    return from_plain(load_config(name), BenchConfig)


def shaped(name):
    return configured().with_shapes(from_plain(load_config(name), count.CountConfig))


def test_several_batches_and_the_shapes_of_a_count(tmp_path, capsys, monkeypatch):
    steps = []

    def timed(names, config, repeats, *, rates, against):
        steps.append(config)
        return {"seconds": {name: [1.0] for name in names}, "temporary_bytes": {}}

    monkeypatch.setattr(bench_train, "bench_steps", timed)
    raw = tmp_path / "raw.json"
    argv = [*STEPS, "--shapes=protot/throughput:smoke", "--models", "mamba", f"--json={raw}"]
    assert bench_train.main([*argv, "--batch", "3", "5"]) == 0
    assert [each.batch_size for each in steps] == [3, 5]
    assert {(each.hidden_size, each.corpus.vocab_size, each.tied) for each in steps} == {
        (32, 500, ("mamba",))
    }
    result = json.loads(raw.read_text())
    labels = [f"{name}, batch {batch}" for batch in (3, 5) for name in ("protot", "mamba")]
    assert list(result["step"]["seconds"]) == labels
    wanted = count.count(from_plain(load_config("protot/throughput:smoke"), count.CountConfig))
    wanted = {each.name: each.parameters for each in wanted}
    assert result["parameters"] == {name: wanted[name] for name in ("protot", "mamba")}
    assert f"protot: {wanted['protot']:,} parameters" in capsys.readouterr().out
    # Without the option, as the config says.
    assert bench_train.main([*STEPS, "--models", "protot"]) == 0
    assert steps[-1] == dataclasses.replace(configured(), dtype="float32")


def test_the_shapes_of_table_13_are_untied_but_for_mamba():
    config = shaped("protot/throughput")
    wanted = {"protot": 12_205_266, "llama": 12_938_496, "deltanet": 12_963_456, "mamba": 6_724_352}
    for name, parameters in wanted.items():
        cfg, mixer = shapes.build(name, config)
        assert lm_jax.count_params(cfg, mixer=mixer) == parameters
        assert cfg.tie_embeddings == (name == "mamba")


@pytest.mark.parametrize("name", ["protot", "llama", "mamba", "deltanet"])
def test_every_model_decodes_what_the_parallel_pass_computes(name):
    decoder = decoding.Decoder(configured(), name)
    assert decoder.error(24) <= decoding.TOLERANCE


def test_the_cache_of_attention_alone_grows_with_the_prompt(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_train, "bench_steps", lambda *args, **options: {"seconds": {}})
    monkeypatch.setattr(decoding.Decoder, "error", lambda self, length: 0.0)
    # Two chunks and a rest.
    monkeypatch.setattr(decoding, "ATTENTION_CHUNK", 9)
    raw, names = tmp_path / "raw.json", ["protot", "llama", "mamba", "deltanet"]
    argv = [*SMALL, "--lengths", "--prompts", "8", "20", "--decoded=3", f"--json={raw}"]
    assert bench_train.main([*argv, "--decoders", *names]) == 0
    decoded = json.loads(raw.read_text())["decode"]
    assert list(decoded) == names
    for name, measured in decoded.items():
        assert [len(turns) for turns in measured["tokens_per_second"].values()] == [2, 2]
        short, long = measured["cache_bytes"].values()
        assert (short == long) == (name != "llama")
    # Keys and values in float32 of 2 layers of width 32, at each place; and a count of places.
    places = {8: 8 + 3 + 1, 20: 20 + 3 + 1}
    assert decoded["llama"]["cache_bytes"] == {
        str(length): 2 * 2 * 4 * 32 * places[length] + 4 for length in places
    }
    printed = capsys.readouterr().out
    assert "  llama      after      20" in printed and "  mamba      after       8" in printed


@pytest.mark.slow
def test_prefill_and_decoding_follow(tmp_path, capsys):
    raw = tmp_path / "raw.json"
    argv = [*SMALL, "--models", "protot", "--lengths", "16", "32", "--prompts", "8", "64"]
    assert bench_train.main([*argv, "--decoded=3", f"--json={raw}"]) == 0
    result = json.loads(raw.read_text())
    assert list(result["forward_all_logits"]) == ["16", "32"]
    sizes = result["decode"]["cache_bytes"]
    assert sizes["8"] == sizes["64"]
    assert "decoding at batch 1, 3 tokens after each prompt" in capsys.readouterr().out


def test_the_forward_pass_of_attention_forms_no_whole_scores(monkeypatch):
    """Another mixer has no use for a kernel of softmax, and each timing has its number of calls."""
    given = []

    def call(params, tokens, cfg, *, mixer, attend):
        given.append(attend)
        return SimpleNamespace(hidden=jnp.zeros((*tokens.shape, cfg.hidden_size)))

    monkeypatch.setattr(forward.lm_jax, "forward", call)
    monkeypatch.setattr(forward.jax, "jit", lambda fn: fn)
    config = configured()
    for name, softmax in (("llama", "kernels"), ("llama", "cudnn"), ("protot", "cudnn")):
        forward.forward(name, config, 8, calls=3, softmax=softmax)()
    names = [getattr(attend, "implementation", attend) for attend in given]
    assert names == [*["kernels"] * 3, *["cudnn"] * 3, *[lm_jax.softmax] * 3]


def test_a_forward_pass_ends_in_the_logits_of_all_positions(monkeypatch):
    """In chunks that do not divide the length; the program has no logits of all positions."""
    monkeypatch.setattr(forward, "HEAD_CHUNK", 5)
    config = dataclasses.replace(configured(), dtype="float32")
    cfg, mixer = build("protot", config)
    tokens = jnp.ones((1, 13), jnp.int32)
    found, programs = [], []
    jit = jax.jit

    def recorded(fn):
        run = jit(fn)

        def call(params):
            programs.append(run.lower(params).compile())
            found.append((params, run(params)))
            return found[-1][1]

        return call

    monkeypatch.setattr(forward.jax, "jit", recorded)
    forward.forward("protot", config, 13)()
    ((params, greatest),), (program,) = found, programs
    wanted = lm_jax.forward(params, tokens, cfg, mixer=mixer).logits.max(-1)
    assert greatest.shape == (1, 13)
    # Two programs of float32, of sums of 32 products.
    np.testing.assert_allclose(greatest, wanted, rtol=0, atol=1e-5 * float(abs(wanted).max()))
    text = program.as_text()
    assert f"[13,{cfg.vocab_size}]" not in text and f"[1,13,{cfg.vocab_size}]" not in text
    # The head is there: products of a chunk by the whole vocabulary.
    assert re.search(rf"\[(1,)?5,{cfg.vocab_size}\]", text)


def test_cudnn_is_given_the_attention_of_the_model(monkeypatch):
    """In place of the library, which needs a GPU, its definition in XLA: the same logits."""
    asked = []

    def by_xla(*arrays, implementation, **options):
        asked.append((implementation, frozenset(x.dtype.name for x in arrays)))
        return attention(*arrays, implementation="xla", **options)

    attention = jax.nn.dot_product_attention
    monkeypatch.setattr(forward.jax.nn, "dot_product_attention", by_xla)
    cfg, mixer = build("llama", configured())
    params = random_params(cfg, mixer, "float32")
    tokens = jax.random.randint(jax.random.key(1), (2, 24), 1, cfg.vocab_size)
    run = functools.partial(lm_jax.forward, params, tokens, cfg, mixer=mixer)
    logits = run(attend=lm_jax.fused(lm_jax.softmax, "cudnn")).logits
    # Two softmaxes of at most 24 numbers, in float32.
    np.testing.assert_allclose(logits, run().logits, rtol=0, atol=1e-5 * float(abs(logits).max()))
    assert set(asked) == {("cudnn", frozenset({"float32"}))}


def test_nothing_is_timed_where_a_loss_is_no_number(monkeypatch, capsys):
    config = configured()
    nan = SimpleNamespace(loss=math.nan, guess=1.0)
    monkeypatch.setattr(bench_train, "Step", lambda name, config: nan)
    assert bench_train.bench_steps(["llama"], config, 1, rates=[0.0], against=None) is None
    assert "llama: not timed, as an untrained loss of nan" in capsys.readouterr().out
    # The same of torch's.
    monkeypatch.setattr(torch_llama, "TorchStep", lambda *args, **options: nan)
    assert bench_train.torch_steps(config) is None
    assert "torch llama: not timed, as loss nan on the weights" in capsys.readouterr().out


def test_without_torch_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(torch_llama.importlib.util, "find_spec", lambda name: None)
    assert bench_train.main([*STEPS, "--against=torch"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "torch is not installed; pip install torch" in error


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
    config = configured()
    cfg, mixer = shapes.build("llama", config)
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


def test_rows_of_a_study_are_timed_against_the_first(tmp_path, capsys):
    raw = tmp_path / "raw.json"
    flags = ["--study=protot/mass_and_rank:smoke", "--repeats=2", f"--json={raw}"]
    names = ["no_low_rank", "default"]
    rows = shapes.of_study("protot/mass_and_rank:smoke", names)
    assert [row.prototypes.low_rank for row in rows.values()] == [False, True]
    assert bench_train.main([*flags, "--rows", *names]) == 0
    seconds = json.loads(raw.read_text())["step"]["seconds"]
    assert list(seconds) == names
    assert all(len(series) == 2 and min(series) > 0 for series in seconds.values())
    assert "ratios are over no_low_rank" in capsys.readouterr().out
    assert bench_train.main([*flags, "--rows", "default", "no_mas"]) == 2
    assert "--rows: protot/mass_and_rank:smoke has no row 'no_mas'" in capsys.readouterr().err
    for ignored in (["--rows=default"], [*flags, "--batch=2", "--dtype=float32"]):
        assert bench_train.main(ignored) == 2
    printed = capsys.readouterr().err
    assert "--rows names rows of a study; name it too, by --study" in printed
    assert "--study times the rows as the study has them; leave out --batch, --dtype" in printed
