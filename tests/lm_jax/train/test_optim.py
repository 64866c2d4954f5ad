"""The schedule has its closed form, and decay shrinks weights and nothing else."""

import math

from hypothesis import given
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lm_jax.errors import UsageError
from lm_jax.model import params as params_lib
from lm_jax.model.params import ParamSpec
from lm_jax.train import optim
from lm_jax.train.config import CheckpointPolicy, TrainConfig

SPEC = {
    "embed": ParamSpec((5, 4), "VD"),
    "blocks": {
        "weight": ParamSpec((2, 4, 3), "LDF"),
        "q_bias": ParamSpec((2, 3, 2), "LNH"),
        "norm": {"scale": ParamSpec((2, 4), "LD")},
        "alpha": ParamSpec((2,), "L"),
        "prototypes": ParamSpec((2, 3, 4), "LRD"),
    },
}


@pytest.mark.parametrize(("peak", "steps"), [(1e-3, 200), (4e-6, 150), (1e-3, 3)])
def test_schedule_has_its_closed_form(peak, steps):
    schedule = optim.schedule(TrainConfig(steps=steps, learning_rate=peak))
    warm, end = round(0.02 * steps), max(0.1 * peak, 1e-6)
    for k in range(steps + 1):
        if k < warm:
            want = 1e-8 + (peak - 1e-8) * k / warm
        else:
            turn = math.pi * (k - warm) / (steps - warm)
            want = end + (peak - end) * (1 + math.cos(turn)) / 2
        # Optax forms the warm-up from its end, in float32: an error of the rounding of the peak.
        assert float(schedule(k)) == pytest.approx(want, rel=2e-6, abs=1e-7 * peak), k


@pytest.mark.parametrize(("name", "last"), [("constant", 1.0), ("linear", 0.0)])
def test_other_schedules_have_their_closed_forms(name, last):
    config = TrainConfig(steps=50, learning_rate=0.5, warmup=0.2, schedule=name)
    schedule = optim.schedule(config)
    for k in range(51):
        warm = 1e-8 + (0.5 - 1e-8) * k / 10
        want = warm if k < 10 else 0.5 * (1 - (1 - last) * (k - 10) / 40)
        assert float(schedule(k)) == pytest.approx(want, rel=2e-6, abs=1e-7), k


@given(
    peak=st.floats(-12, 0).map(lambda exponent: 10.0**exponent),
    steps=st.integers(1, 120),
    warmup=st.sampled_from([0.0, 0.02, 0.3]),
)
def test_the_rate_rises_to_its_peak_and_never_after(peak, steps, warmup):
    config = TrainConfig(steps=steps, learning_rate=peak, warmup=warmup)
    # One shape for all lengths, so that one compilation is enough.
    places = jnp.minimum(jnp.arange(121), steps)
    rates = np.asarray(optim.schedule(config)(places), np.float64)
    top = round(warmup * steps)
    # A rate is at most the peak and takes some ten float32 operations of 2^-24 each; two differ.
    slack = 2.0**-19 * peak
    assert np.all(np.diff(rates[: top + 1]) >= -slack)
    assert np.all(np.diff(rates[top:]) <= slack)
    assert abs(rates[top] - peak) <= slack and rates.max() <= peak + slack


def moved(config, decays, gradient=0.0):
    """How one update from parameters of 1 changes each."""
    optimizer = optim.adamw(SPEC, config, decays)
    ones = params_lib.tree_map(lambda s: jnp.ones(s.shape), SPEC)
    grads = jax.tree.map(lambda p: jnp.full_like(p, gradient), ones)
    updates, _ = optimizer.update(grads, optimizer.init(ones), ones)
    after = params_lib.by_path(optax.apply_updates(ones, updates))
    return {name: 1.0 - np.mean(np.asarray(p, np.float64)) for name, p in after.items()}


def test_decay_shrinks_the_chosen_parameters_and_no_other():
    config = TrainConfig(steps=10, learning_rate=0.5, warmup=0.0)

    def decays(path, spec):
        return optim.is_weight(path, spec) and not path.endswith("prototypes")

    for choice, decayed in (
        (optim.is_weight, {"embed", "blocks/weight", "blocks/prototypes"}),
        (decays, {"embed", "blocks/weight"}),
    ):
        change = moved(config, choice)
        assert {name for name, by in change.items() if by} == decayed
        # Decoupled: rate times decay, without a gradient.
        assert all(change[name] == pytest.approx(0.5 * 0.1, abs=1e-7) for name in decayed)


def test_first_adam_step_is_the_rate_and_clipping_shortens_the_gradient():
    no_decay = TrainConfig(steps=10, learning_rate=0.5, warmup=0.0, weight_decay=0.0)
    assert moved(no_decay, optim.is_weight, 3.0)["embed"] == pytest.approx(0.5, rel=1e-5)
    # At a gradient of Adam's epsilon the step is half the rate.
    tiny = TrainConfig(
        steps=10,
        learning_rate=0.5,
        warmup=0.0,
        weight_decay=0.0,
        clip_norm=1e-8 * math.sqrt(params_lib.count(SPEC)),
    )
    assert moved(tiny, optim.is_weight, 3.0)["embed"] == pytest.approx(0.25, rel=1e-3)


def test_every_bad_field_is_named():
    with pytest.raises(UsageError, match=r"steps = 0 .*; learning_rate = -1.0 .*; eval_every = -1"):
        TrainConfig(steps=0, learning_rate=-1.0, eval_every=-1)
    with pytest.raises(UsageError, match=r"log_every = 0 must be at least 1; keep = 0"):
        CheckpointPolicy(log_every=0, keep=0)
