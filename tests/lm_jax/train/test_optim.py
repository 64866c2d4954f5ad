"""The schedule has its closed form, and decay shrinks weights and nothing else."""

import dataclasses
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


def test_a_group_has_its_own_factor_of_the_rate():
    config = TrainConfig(
        steps=10, learning_rate=1e-2, warmup=0.0, weight_decay=0.5, rate_factors=(("embed", 4.0),)
    )
    plain = dataclasses.replace(config, rate_factors=())
    params = jax.tree.map(jnp.ones_like, params_lib.init(jax.random.key(0), SPEC))
    updates = []
    for each in (config, plain):
        optimizer = optim.adamw(SPEC, each)
        updates.append(optimizer.update(params, optimizer.init(params), params)[0])
    faster, slower = updates
    # A product by a power of two is exact.
    np.testing.assert_array_equal(faster["embed"], 4 * slower["embed"])
    for path, leaf in params_lib.by_path(faster["blocks"]).items():
        np.testing.assert_array_equal(leaf, params_lib.by_path(slower["blocks"])[path])
    unknown = dataclasses.replace(config, rate_factors=(("gate_bias", 4.0),))
    with pytest.raises(UsageError, match=r"has 'gate_bias', and no .* known: blocks, embed"):
        optim.adamw(SPEC, unknown)
    with pytest.raises(UsageError, match=r"rate_factors = .* must be factors above 0"):
        dataclasses.replace(config, rate_factors=(("embed", 0.0),))


def test_a_gradient_small_beside_eps_is_not_scaled_up_to_the_rate():
    """The first step of Adam is rate g / (|g| + eps): whole steps of the sign, or as of SGD."""
    params = jax.tree.map(jnp.ones_like, params_lib.init(jax.random.key(0), SPEC))
    small = jax.tree.map(lambda x: 1e-5 * x, params)
    for eps, wanted in ((1e-8, 1 / (1 + 1e-3)), (1e-3, 1e-2 / (1 + 1e-2))):
        config = TrainConfig(
            steps=10, learning_rate=1e-2, warmup=0.0, weight_decay=0.0, eps=eps, schedule="constant"
        )
        optimizer = optim.adamw(SPEC, config)
        update = optimizer.update(small, optimizer.init(params), params)[0]
        # Moments, their corrections, a root and a quotient: some ten roundings.
        for leaf in jax.tree.leaves(update):
            np.testing.assert_allclose(leaf, -1e-2 * wanted, rtol=2e-5)


def test_every_bad_field_is_named():
    with pytest.raises(UsageError, match=r"steps = 0 .*learning_rate = -1.0 .*eval_every = -1"):
        TrainConfig(steps=0, learning_rate=-1.0, eval_every=-1)
    with pytest.raises(UsageError, match=r"log_every = 0 must be at least 1; .*\.keep = 0"):
        CheckpointPolicy(log_every=0, keep=0)
    with pytest.raises(UsageError, match="weights_dtype = 'float16' must be one of float32, bfl"):
        TrainConfig(steps=1, learning_rate=1.0, weights_dtype="float16")


def after(weights_dtype: str, weight: float, gradients: list[float], rate: float = 1e-3):
    """The state of the optimizer and one weight after an update for each gradient, compiled."""
    config = TrainConfig(
        steps=1_000,
        learning_rate=rate,
        warmup=0.0,
        weight_decay=0.0,
        schedule="constant",
        weights_dtype=weights_dtype,
    )
    optimizer = optim.adamw({"w": ParamSpec((1,), "D")}, config)

    @jax.jit
    def step(params, state, gradient):
        updates, state = optimizer.update({"w": gradient}, state, params)
        return optax.apply_updates(params, updates), state

    params = {"w": jnp.full((1,), weight)}
    state = optimizer.init(params)
    for gradient in gradients:
        params, state = step(params, state, jnp.full((1,), gradient))
    return params["w"], state


def rounded(x: float) -> float:
    """The nearest number of bfloat16."""
    return float(jnp.bfloat16(x))


def test_without_master_weights_gradients_weights_and_moments_are_rounded_once_an_update():
    gradients, rate = list(np.random.default_rng(0).normal(size=12)), 0.05
    weight, first, second = float(np.float32(0.1)), 0.0, 0.0
    for t, gradient in enumerate(map(rounded, gradients), start=1):
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        step = first / (1 - 0.9**t) / (math.sqrt(second / (1 - 0.999**t)) + 1e-8)
        weight, first, second = map(rounded, (weight - rate * step, first, second))

    ours, state = after("bfloat16", 0.1, gradients, rate)
    assert float(ours[0]) == weight and ours.dtype == jnp.float32
    moments = {name: optax.tree.get_all_with_path(state, name)[0][1]["w"] for name in ("mu", "nu")}
    assert {name: float(x[0]) for name, x in moments.items()} == {"mu": first, "nu": second}


def test_a_step_below_half_a_unit_in_the_last_place_does_nothing_without_master_weights():
    # Below 1 bfloat16 has a number every 2^-8, so that 1.9e-3 is lost and 2.1e-3 is not.
    assert float(after("bfloat16", 1.0, [1.0] * 5, rate=1.9e-3)[0][0]) == 1.0
    assert float(after("bfloat16", 1.0, [1.0], rate=2.1e-3)[0][0]) == 1.0 - 2.0**-8
    moved = float(after("float32", 1.0, [1.0] * 5, rate=1.9e-3)[0][0])
    assert moved == pytest.approx(1.0 - 5 * 1.9e-3, rel=1e-5)


def test_the_second_moment_never_falls_without_master_weights():
    def second_moment(weights_dtype: str) -> float:
        _, state = after(weights_dtype, 1.0, [1.0] + [0.0] * 100)
        return float(optax.tree.get_all_with_path(state, "nu")[0][1]["w"][0])

    assert second_moment("float32") == pytest.approx(1e-3 * 0.999**100, rel=1e-4)
    assert second_moment("bfloat16") == rounded(1e-3)


def test_no_schedule_is_no_name_of_one():
    """Files refused it, and Python took it for a constant one."""
    with pytest.raises(UsageError, match=r"schedule = None must be one of cosine, constant, lin"):
        TrainConfig(steps=10, learning_rate=1e-3, schedule=None)
