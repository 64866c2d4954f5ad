"""Parameters are the paper's to the last, FLOPs to half a per cent, and the command prints them."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import lm_jax
from lm_jax.console import cli
from lm_jax.console.config_files import load_config
from lm_jax.errors import UsageError
from lm_jax.model.flops import forward_flops
from lm_jax.run.config import from_plain
from protot_jax.mixers import models
from protot_jax.training import count
from tests.traced import products

ROOT = Path(__file__).parents[3]
THROUGHPUT = f"{ROOT}/configs/protot/throughput.py"
# Table 13; DeltaNet's FLOPs are not in it.
PARAMETERS = {
    "protot": 12_205_266,
    "llama": 12_938_496,
    "deltanet": 12_963_456,
    "mamba": 6_724_352,
}
FLOPS = {"protot": 41_583e5, "llama": 49_341.5e5, "mamba": 34_734.9e5}


def counts(**changed):
    config = load_config(THROUGHPUT)
    config.update(changed)
    result = count.count(from_plain(config, count.CountConfig))
    return {each.name: each for each in result}


def test_parameters_of_table_13():
    result = counts()
    assert {name: result[name].parameters for name in PARAMETERS} == PARAMETERS
    assert result["protot"].in_use == 12_205_266 - (256**2 + 1 + 4 * 5 * 128)
    assert all(each.in_use == each.parameters for name, each in result.items() if name != "protot")
    assert counts(tied=("protot", "mamba"))["protot"].parameters == 8_109_266


@pytest.mark.parametrize("name", FLOPS)
def test_flops_of_table_13(name):
    assert counts()[name].flops.total == pytest.approx(FLOPS[name], rel=0.005)


def test_the_matched_mamba_is_level_with_protot():
    result = counts()
    ours, protot = result["mamba_ffn"], result["protot"]
    assert ours.parameters == pytest.approx(protot.parameters, rel=0.005)
    assert ours.flops.total == pytest.approx(protot.flops.total, rel=0.01)


def no_state(x, *rest, initial_state=None, **options):
    """In place of a recurrence: what it reads is what was written."""
    return x, initial_state


# Per token, of a width of 48 (4 heads of 12), 3 layers: what is no product with a weight.
STATES_AND_CONVOLUTIONS = {
    "protot": 3 * 5 * 32 * 24 + 2 * 2 * 5 * 24,
    "llama": 0,
    "deltanet": 3 * (6 * 4 * 12 * 12 + 2 * 3 * 4 * 48),
    "gated_deltanet": 3 * (7 * 4 * 12 * 12 + 2 * 3 * 4 * 48),
    "gated_slots": 3 * 2 * 5 * 4 * 64 * 12,
    "raven": 3 * 2 * 5 * 4 * 64 * 12,
    "mamba": 3 * (6 * 96 * 16 + 2 * 4 * 96),
    "mamba_ffn": 3 * (6 * 96 * 16 + 2 * 4 * 96),
}


@pytest.mark.parametrize("name", models.MODELS)
def test_the_formulae_hold_every_product_of_the_traced_model(name, monkeypatch):
    monkeypatch.setattr("protot_jax.mixers.mamba.selective_scan", no_state)
    monkeypatch.setattr(
        "protot_jax.mixers.deltanet.delta_rule",
        lambda q, k, v, beta, **options: no_state(v, **options),
    )
    monkeypatch.setattr(
        "protot_jax.mixers.slots.gated_slots",
        lambda q, k, v, decay, **options: no_state(v, **options),
    )
    options = {}
    if name == "protot":
        options["prefix"] = lambda w, v, beta, g, **options: v
    shape = {"hidden_size": 48, "num_layers": 3, "vocab_size": 100, "context": 20}
    cfg, mixer = models.build_model(name, **shape, tie_embeddings=False, **options)
    params = lm_jax.params.abstract(lm_jax.param_spec(cfg, mixer))
    tokens_BT = jax.ShapeDtypeStruct((1, 20), jnp.int32)
    traced = jax.make_jaxpr(lambda p, t: lm_jax.forward(p, t, cfg, mixer=mixer).logits)(
        params, tokens_BT
    )
    want = forward_flops(cfg, mixer, 20).total - 20 * STATES_AND_CONVOLUTIONS[name]
    if name == "protot":
        # One program runs all layers: the first also computes the read logits that it discards.
        want += 20 * 2 * (48 * 48 + 48 * 32)
    assert products(traced.jaxpr) == want


def test_the_command_prints_every_model(capsys):
    assert cli.run(count.main, ["count"], config=THROUGHPUT, workdir_required=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    cells = {line.split()[0]: line.split() for line in lines[4:]}
    assert list(cells) == ["protot", "llama", "deltanet", "mamba", "mamba_ffn"]
    for name, parameters in PARAMETERS.items():
        assert cells[name][3] == f"{parameters:,}"
    row = ["no", "688", "12,205,266", "12,137,169", "4,167.7", "447.3", "1,623.2", "2,097.2"]
    assert cells["protot"][1:] == row
    assert cells["mamba"][1:3] == ["yes", "0"]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (
            "--config.models=('protot', 'mambo')",
            "config.models names 'mambo', which is no model; did you mean 'mamba'?",
        ),
        ("--config.models=()", "name at least one"),
        ("--config.hidden_size=12", "multiple of 8"),
        ("--config.num_layers=0", "config.num_layers = 0"),
    ],
)
def test_what_cannot_be_counted_is_one_line(argument, words, capsys):
    argv = ["count", argument]
    assert cli.run(count.main, argv, config=THROUGHPUT, workdir_required=False) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_models_are_made_with_the_options_of_their_mixer():
    shape = {"hidden_size": 64, "num_layers": 2, "vocab_size": 50, "context": 8}
    cfg, mixer = models.build_model("protot", **shape, tie_embeddings=True, num_prototypes=5)
    assert mixer.num_prototypes == 5
    assert (cfg.norm_eps, cfg.max_length, cfg.tie_embeddings) == (2**-23, 8, True)
    cfg, mixer = models.build_model("llama", **shape, tie_embeddings=False)
    assert mixer.pattern_dropout and (cfg.num_heads, cfg.num_kv_heads, cfg.head_dim) == (4, 4, 16)
    assert (cfg.norm_eps, cfg.rope.theta, cfg.mlp_size) == (1e-6, 1e4, 160)
    with pytest.raises(UsageError, match="no model 'mamba2'; did you mean 'mamba'"):
        models.build_model("mamba2", **shape, tie_embeddings=True)
    with pytest.raises(UsageError, match="no option 'prototypes'; did you mean 'num_prototypes'"):
        models.build_model("protot", **shape, tie_embeddings=True, prototypes=5)
