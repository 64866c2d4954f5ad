"""The Mamba mixer is the paper's recurrence, starts as it says, and agrees with transformers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.model.mixers import Layer
from lm_jax.model.sites import Scope
from protot_jax.mixers.mamba import MambaMixer
from tests import rounding, tiny

U = 2.0**-24
CFG = tiny.decoder(num_layers=3, num_heads=1, num_kv_heads=1, head_dim=16, mlp_size=0)


def silu(x):
    return x / (1 + np.exp(-x))


def equations(mixer, p, x_BTD):
    """Section 3.4 of the paper, one step after another, in float64."""
    p = {name: np.asarray(value, np.float64) for name, value in p.items()}
    x_BTD = np.asarray(x_BTD, np.float64)
    B, T, _ = x_BTD.shape
    out_BTD = np.zeros_like(x_BTD)
    for b in range(B):
        state_IJ = np.zeros_like(p["A_log"])
        inputs = [np.zeros(p["in"].shape[1])] * (mixer.conv_kernel - 1)
        for t in range(T):
            inputs.append(x_BTD[b, t] @ p["in"])
            last_CI = np.array(inputs[-mixer.conv_kernel :])
            u_I = silu((p["conv"] * last_CI).sum(0) + p["conv_bias"])
            delta_I = np.log1p(np.exp(u_I @ p["step_down"] @ p["step_up"] + p["step_bias"]))
            decay_IJ = np.exp(-delta_I[:, None] * np.exp(p["A_log"]))
            written_IJ = np.outer(delta_I * u_I, u_I @ p["B"])
            state_IJ = decay_IJ * state_IJ + written_IJ
            y_I = state_IJ @ (u_I @ p["C"]) + p["D"] * u_I
            out_BTD[b, t] = (y_I * silu(x_BTD[b, t] @ p["gate"])) @ p["out"]
    return out_BTD


@pytest.mark.parametrize(
    "mixer",
    [MambaMixer(), MambaMixer(state_size=5, expand=3, conv_kernel=2, dt_rank=7)],
    ids=["default", "unlike"],
)
def test_mixer_is_the_equations(mixer):
    rng = np.random.default_rng(0)
    p = {
        name: jnp.asarray(0.3 * rng.normal(size=spec.shape), jnp.float32)
        for name, spec in lm_jax.params.leaves(mixer.spec(CFG))
    }
    x_BTD = jnp.asarray(rng.normal(size=(2, 11, 16)), jnp.float32)
    text = Layer(jnp.zeros((2, 11), jnp.int32), Scope({}, {}), lm_jax.softmax)
    apply = jax.jit(lambda p, x: mixer.apply(p, x, CFG, text, None)[0])
    exact = rounding.expected(apply, p, x_BTD)
    rounding.assert_within(apply(p, x_BTD), exact)
    want_BTD = equations(mixer, p, x_BTD)
    assert np.abs(want_BTD).max() > 1e-2
    np.testing.assert_allclose(exact.values, want_BTD, rtol=0, atol=1e-12)
    without_state = equations(mixer, p | {"C": 0 * p["C"]}, x_BTD)
    assert np.abs(without_state - want_BTD).max() > 0.1 * np.abs(want_BTD).max()


def test_it_starts_as_the_paper_says():
    cfg = dataclasses.replace(CFG, hidden_size=256, head_dim=256)
    spec = lm_jax.param_spec(cfg, MambaMixer())["blocks"]["mixer"]
    p = lm_jax.params.init(jax.random.key(0), spec)
    # Logarithms up to 2.8, within 4 units of themselves, and their exponentials.
    exp_LIJ = np.exp(np.float64(p["A_log"]))
    np.testing.assert_allclose(exp_LIJ, np.tile(np.arange(1, 17), (3, 512, 1)), rtol=12 * U)
    np.testing.assert_array_equal(p["D"], 1.0)
    step = np.log10(np.log1p(np.exp(np.float64(p["step_bias"]))))
    assert step.min() > -3.001 and step.max() < -0.999
    # Log-uniform: as many steps in each fifth of the range, to six standard errors of 1,536 draws.
    share = np.histogram(step, 5, (-3.001, -0.999))[0] / step.size
    np.testing.assert_allclose(share, 0.2, atol=6 * np.sqrt(0.2 * 0.8 / step.size))
    bounds = {
        "in": 1 / 16,
        "gate": 1 / 16,
        "conv": 1 / 2,
        "conv_bias": 1 / 2,
        "step_up": 1 / 4,
        "step_down": 512**-0.5,
        "out": (512 * 3) ** -0.5,
    }
    for name, bound in bounds.items():
        assert 0.99 * bound < np.abs(p[name]).max() <= bound * (1 + 4 * U), name


@pytest.mark.torch
def test_logits_are_those_of_transformers():
    import torch

    from lm_jax.weights.compat import transformers

    library = transformers()
    torch.manual_seed(0)
    config = library.MambaConfig(
        vocab_size=40, hidden_size=16, state_size=5, num_hidden_layers=3, time_step_rank=3
    )
    model = library.MambaForCausalLM(config).eval()
    weights = {name: value.detach().numpy() for name, value in model.state_dict().items()}

    def stacked(name, turn=np.asarray):
        layers = [turn(weights[f"backbone.layers.{i}.{name}"]) for i in range(3)]
        return jnp.asarray(np.stack(layers))

    def projection(part, start, stop):
        return stacked(f"mixer.{part}.weight", lambda w: w[start:stop].T)

    params = {
        "embed": {"tokens": jnp.asarray(weights["backbone.embeddings.weight"])},
        "final": {"scale": jnp.asarray(weights["backbone.norm_f.weight"])},
        "blocks": {
            "ln1": {"scale": stacked("norm.weight")},
            "mixer": {
                "in": projection("in_proj", 0, 32),
                "gate": projection("in_proj", 32, 64),
                "conv": stacked("mixer.conv1d.weight", lambda w: w[:, 0].T),
                "conv_bias": stacked("mixer.conv1d.bias"),
                "step_down": projection("x_proj", 0, 3),
                "B": projection("x_proj", 3, 8),
                "C": projection("x_proj", 8, 13),
                "step_up": projection("dt_proj", 0, 32),
                "step_bias": stacked("mixer.dt_proj.bias"),
                "A_log": stacked("mixer.A_log"),
                "D": stacked("mixer.D"),
                "out": projection("out_proj", 0, 16),
            },
        },
    }
    cfg = dataclasses.replace(CFG, norm_eps=config.layer_norm_epsilon, tie_embeddings=True)
    mixer = MambaMixer(state_size=5, dt_rank=3)
    lm_jax.params.check(params, lm_jax.param_spec(cfg, mixer))
    assert lm_jax.count_params(cfg, mixer=mixer) == sum(p.numel() for p in model.parameters())

    tokens_BT = np.random.default_rng(0).integers(0, 40, (2, 37))
    with torch.no_grad():
        want = model(torch.from_numpy(tokens_BT)).logits.numpy()

    def run(params):
        return lm_jax.forward(params, jnp.asarray(tokens_BT), cfg, mixer=mixer).logits

    exact = rounding.expected(run, params)
    rounding.assert_within(run(params), exact, "ours")
    rounding.assert_within(want, exact, "torch's")
