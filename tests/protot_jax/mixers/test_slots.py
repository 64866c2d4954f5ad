"""Mixers of slots equal their recurrences; Raven writes to its top slots alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import lm_jax
from lm_jax.model.mixers import Layer
from lm_jax.model.sites import Scope
from protot_jax.mixers import slots
from protot_jax.mixers.slots import GatedSlotMixer, RavenMixer
from tests import rounding, tiny

U = 2.0**-24
CFG = tiny.decoder(norm_eps=1e-6)
UNLIKE = dataclasses.replace(CFG, num_heads=1, num_kv_heads=1, head_dim=6)


def silu(x):
    return x * special.expit(x)


def rms(x, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def equations(mixer, cfg, p, x_BTD):
    """What the file's docstrings say, one step after another, in float64."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), p)
    x_BTD = np.asarray(x_BTD, np.float64)
    B, T, _ = x_BTD.shape
    M, H = mixer.num_slots, cfg.head_dim
    out_BTD = np.zeros_like(x_BTD)
    for b, n in np.ndindex(B, cfg.num_heads):
        keys, values = np.zeros((M, H)), np.zeros((M, H))
        for t in range(T):
            x = x_BTD[b, t]
            q, k, v = (x @ p[name][:, n] for name in "qkv")
            logits = x @ p["slots"][:, n]
            if isinstance(mixer, RavenMixer):
                q, k = (
                    rms(each, cfg.norm_eps) * p[f"{name}_norm"]["scale"]
                    for name, each in (("q", q), ("k", k))
                )
                router = special.expit(logits)
                router[np.argsort(router)[: M - mixer.top()]] = 0.0
                step = np.log1p(np.exp(x @ p["step"][:, n] + p["step_bias"][n]))
                alpha = np.exp(-np.exp(p["A_log"][n]) * step * router / router.sum())
                scale = H**-0.5
            else:
                q, k, v, scale = silu(q), silu(k), silu(v), 1.0
                alpha = special.expit(logits) ** (1 / mixer.damping)
            keys = alpha[:, None] * keys + np.outer(1 - alpha, k)
            values = alpha[:, None] * values + np.outer(1 - alpha, v)
            o = special.softmax(scale * keys @ q) @ values
            out_BTD[b, t] += rms(o, cfg.norm_eps) * p["norm"]["scale"] @ p["o"][n]
    return out_BTD


def block(cfg, mixer, seed=0):
    rng = np.random.default_rng(seed)

    def draw(spec):
        return jnp.asarray(0.3 * rng.normal(size=spec.shape), jnp.float32)

    p = lm_jax.params.tree_map(draw, mixer.spec(cfg))
    return p, jnp.asarray(rng.normal(size=(2, 11, 16)), jnp.float32)


def context(T=11):
    return Layer(jnp.zeros((2, T), jnp.int32), Scope({}, {}), lm_jax.softmax)


@pytest.mark.parametrize(
    ("cfg", "mixer"),
    [
        (CFG, GatedSlotMixer(num_slots=5)),
        (UNLIKE, GatedSlotMixer(num_slots=3, damping=1.0)),
        (CFG, RavenMixer(num_slots=5, written=2)),
        (UNLIKE, RavenMixer(num_slots=9)),
    ],
    ids=["slots", "slots_unlike", "raven", "raven_unlike"],
)
def test_mixer_is_the_equations(cfg, mixer):
    p, x_BTD = block(cfg, mixer)
    apply = jax.jit(lambda p, x: mixer.apply(p, x, cfg, context(), None)[0])
    exact = rounding.expected(apply, p, x_BTD)
    rounding.assert_within(apply(p, x_BTD), exact)
    want_BTD = equations(mixer, cfg, p, x_BTD)
    # Its epsilons and the factor of its scores are float32.
    np.testing.assert_allclose(exact.values, want_BTD, rtol=0, atol=8 * U * np.abs(want_BTD).max())


def test_raven_writes_to_its_top_slots_and_leaves_the_others_to_the_bit():
    mixer = RavenMixer(num_slots=8, written=3)
    p, x_BTD = block(CFG, mixer)
    empty = mixer.init_cache(CFG, 2, 0, jnp.float32)
    _, before = mixer.apply(p, x_BTD[:, :10], CFG, context(10), empty)
    _, after = mixer.apply(p, x_BTD[:, 10:], CFG, context(1), before)
    logits_BNM = jnp.einsum("BD,DNM->BNM", x_BTD[:, 10], p["slots"])
    chosen_BNM = np.argsort(np.argsort(logits_BNM)) >= 5
    for held, now in zip(before["state"], after["state"], strict=True):
        changed_BNM = np.asarray((held != now).any(-1))
        np.testing.assert_array_equal(changed_BNM, chosen_BNM)
    log_decay_BTNM = mixer.log_decay(p, x_BTD)
    assert np.isfinite(log_decay_BTNM).all()
    assert ((log_decay_BTNM < 0).sum(-1) == 3).all() and (log_decay_BTNM <= 0).all()


def test_the_router_has_a_gradient_at_the_chosen_slots_alone():
    mixer = RavenMixer(num_slots=3, written=2)
    p, x_BTD = block(CFG, mixer)

    def total(slots_DNM):
        return jnp.sum(mixer.log_decay(p | {"slots": slots_DNM}, x_BTD[:1, :1])[..., :1] ** 2)

    slope_NM = np.abs(jax.grad(total)(p["slots"])).sum(0)
    decay_NM = np.asarray(mixer.log_decay(p, x_BTD[:1, :1])[0, 0])
    # Slot 0 depends on the chosen slots alone, through the sum, and on nothing if it is not one.
    wanted_NM = (decay_NM < 0) & (decay_NM[:, :1] < 0)
    assert wanted_NM.any()
    np.testing.assert_array_equal(slope_NM > 0, wanted_NM)


def test_of_equal_entries_the_first_are_the_largest():
    x = jnp.array([[1.0, 3.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
    np.testing.assert_array_equal(slots.among_largest(x, 2), [[0, 1, 1, 0, 0], [1, 1, 0, 0, 0]])


def test_a_router_without_any_weight_writes_nothing():
    mixer = RavenMixer(num_slots=4, written=2)
    p, x_BTD = block(CFG, mixer)
    p["slots"] = jnp.full_like(p["slots"], -1e3)
    log_decay_BTNM = mixer.log_decay(p, jnp.ones_like(x_BTD))
    np.testing.assert_array_equal(log_decay_BTNM, 0.0)


def test_a_written_share_of_an_eighth_by_default():
    assert [RavenMixer(num_slots=M).top() for M in (256, 64, 15, 4)] == [32, 8, 1, 1]
    assert RavenMixer(num_slots=64, written=3).top() == 3
