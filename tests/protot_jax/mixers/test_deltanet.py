"""DeltaNet and Gated DeltaNet equal their recurrences; a memory returns what a key was given."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.model.mixers import Layer
from lm_jax.model.sites import Scope
from protot_jax.mixers.deltanet import DeltaNetMixer
from protot_jax.mixers.gated_deltanet import GatedDeltaNetMixer
from tests import rounding, tiny

U = 2.0**-24
CFG = tiny.decoder(norm_eps=1e-6)


def silu(x):
    return x / (1 + np.exp(-x))


def equations(mixer, cfg, p, x_BTD):
    """What the files' heads say, one step after another, in float64."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), p)
    x_BTD = np.asarray(x_BTD, np.float64)
    B, T, _ = x_BTD.shape
    out_BTD = np.zeros_like(x_BTD)
    for b in range(B):
        for n in range(cfg.num_heads):
            memory_HE = np.zeros((cfg.head_dim, cfg.head_dim))
            projected = {name: x_BTD[b] @ p[name][:, n] for name in "qkv"}
            for t in range(T):
                qkv = {}
                for name in "qkv":
                    qkv[name] = np.zeros(cfg.head_dim)
                    for c in range(mixer.conv_kernel):
                        if t - c >= 0:
                            tap_H = p[f"{name}_conv"][mixer.conv_kernel - 1 - c, n]
                            qkv[name] += tap_H * projected[name][t - c]
                    qkv[name] = silu(qkv[name])
                q_H, k_H = (qkv[name] / np.sqrt((qkv[name] ** 2).sum() + 1e-6) for name in "qk")
                beta = 1 / (1 + np.exp(-x_BTD[b, t] @ p["beta"][:, n]))
                if "A_log" in p:
                    step = np.log1p(np.exp(x_BTD[b, t] @ p["step"][:, n] + p["step_bias"][n]))
                    memory_HE *= np.exp(-np.exp(p["A_log"][n]) * step)
                memory_HE += beta * np.outer(k_H, qkv["v"] - k_H @ memory_HE)
                o_H = q_H @ memory_HE / np.sqrt(cfg.head_dim)
                o_H = o_H / np.sqrt((o_H**2).mean() + cfg.norm_eps) * p["norm"]["scale"]
                if "gate" in p:
                    o_H = o_H * silu(x_BTD[b, t] @ p["gate"][:, n])
                out_BTD[b, t] += o_H @ p["o"][n]
    return out_BTD


@pytest.mark.parametrize(
    ("cfg", "mixer"),
    [
        (CFG, DeltaNetMixer()),
        (dataclasses.replace(CFG, num_heads=1, num_kv_heads=1, head_dim=6), DeltaNetMixer(2)),
        (CFG, GatedDeltaNetMixer()),
    ],
    ids=["default", "unlike", "gated"],
)
def test_mixer_is_the_equations(cfg, mixer):
    rng = np.random.default_rng(0)

    def draw(spec):
        return jnp.asarray(0.3 * rng.normal(size=spec.shape), jnp.float32)

    p = lm_jax.params.tree_map(draw, mixer.spec(cfg))
    x_BTD = jnp.asarray(rng.normal(size=(2, 11, 16)), jnp.float32)
    text = Layer(jnp.zeros((2, 11), jnp.int32), Scope({}, {}), lm_jax.softmax)
    apply = jax.jit(lambda p, x: mixer.apply(p, x, cfg, text, None)[0])
    exact = rounding.expected(apply, p, x_BTD)
    rounding.assert_within(apply(p, x_BTD), exact)
    want_BTD = equations(mixer, cfg, p, x_BTD)
    # Its epsilons are float32.
    np.testing.assert_allclose(exact.values, want_BTD, rtol=0, atol=U * np.abs(want_BTD).max())


def test_rates_and_steps_of_the_decay_start_as_in_mamba_2():
    cfg = dataclasses.replace(CFG, num_heads=1000, num_kv_heads=1000, head_dim=2)
    p = lm_jax.init_params(jax.random.key(0), cfg, mixer=GatedDeltaNetMixer())["blocks"]["mixer"]
    rates, steps = np.exp(p["A_log"]), np.log1p(np.exp(np.float64(p["step_bias"])))
    # 2,000 draws: of the range, a 2,000th part is beyond the extremes on average, 1 % with 1e-8.
    for values, low, high in ((rates, 1.0, 16.0), (np.log(steps), np.log(1e-3), np.log(1e-1))):
        near = 0.01 * (high - low)
        assert low - 1e-5 <= values.min() <= low + near
        assert high - near <= values.max() <= high + 1e-5


def test_a_key_written_again_holds_its_last_value():
    """With one tap, beta near 1 and two keys at right angles, a query reads what its key held."""
    cfg = dataclasses.replace(CFG, num_heads=1, num_kv_heads=1, head_dim=16)
    mixer = DeltaNetMixer(conv_kernel=1)
    far = 12.0
    key_DH = jnp.zeros((16, 16)).at[0, 0].set(far).at[1, 1].set(far)
    value_DH = jnp.zeros((16, 16)).at[2, 2].set(far).at[3, 3].set(far)
    ones = jnp.ones((1, 1, 16))
    p = {
        "q": key_DH[:, None],
        "k": key_DH[:, None],
        "v": value_DH[:, None],
        **{f"{name}_conv": ones for name in "qkv"},
        "beta": jnp.zeros((16, 1)).at[4, 0].set(20.0),
        "norm": {"scale": jnp.ones((16,))},
        "o": jnp.eye(16)[None],
    }
    # Key 0 is given value 2, key 1 value 2, key 0 value 3; then both are only read.
    steps = [(0, 2, 4), (1, 2, 4), (0, 3, 4), (0,), (1,)]
    x_BTD = np.zeros((1, 5, 16), np.float32)
    for t, hot in enumerate(steps):
        x_BTD[0, t, list(hot)] = 1.0
        x_BTD[0, t, 4] = 1.0 if 4 in hot else -1.0
    text = Layer(jnp.zeros((1, 5), jnp.int32), Scope({}, {}), lm_jax.softmax)

    def apply(p, x_BTD):
        return mixer.apply(p, x_BTD, cfg, text, None)[0]

    exact = rounding.expected(apply, p, x_BTD)
    rounding.assert_within(apply(p, jnp.asarray(x_BTD)), exact)
    # A value of one coordinate leaves the norm as the root of the width.
    want = np.zeros((5, 16))
    want[[0, 1, 4], 2] = want[[2, 3], 3] = 4.0
    # The norm adds 1e-6 to a mean square of 9 / 16, and beta is 2e-9 off 0 and 1.
    np.testing.assert_allclose(exact.values[0], want, rtol=0, atol=4e-6)
