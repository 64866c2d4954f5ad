"""Strengths on their limits are counted and said, and a swing is told from a rise."""

import dataclasses

import numpy as np
import pytest

from sparse_jax.gates.geco import Strength
from sparse_jax.studies.posttrain.limits import PATIENCE, StrengthWatch, at_limits, swing

SETTINGS = Strength(start=1.0, least=0.1, most=10.0)


def watched(strengths, settings=SETTINGS):
    watch = StrengthWatch("target_3.5000", settings)
    for step, strength in enumerate(strengths, 1):
        watch.add(step, {"train/loss": 3.0, "train/strength": strength})
        watch.add(step, {"validation/loss": 3.0})
    watch.flush()
    watch.close()


@pytest.mark.parametrize(("limit", "value"), [("least", 0.1), ("most", 10.0)])
def test_a_stay_of_fifty_updates_is_said_once_and_names_the_setting(limit, value, capsys):
    # As the strength is read back: the exponential of a logarithm in float32.
    on = float(np.exp(np.float32(np.log(value))))
    watched([1.0] + [on] * (PATIENCE - 1) + [1.0] + [on] * (PATIENCE - 1))
    assert capsys.readouterr().err == ""
    watched([1.0, 1.0] + [on] * (2 * PATIENCE))
    (line,) = capsys.readouterr().err.splitlines()
    assert f"target_3.5000: the strength was at config.strength.{limit} = {value:g}" in line
    assert f"for {PATIENCE} updates, up to update {PATIENCE + 2}:" in line
    assert ("config.open_at_start" in line) == (limit == "least")


def test_two_stays_are_said_twice_and_a_fixed_strength_never(capsys):
    watched([0.1] * PATIENCE + [1.0] + [0.1] * PATIENCE)
    assert len(capsys.readouterr().err.splitlines()) == 2
    watched([1.0] * PATIENCE, Strength(least=1.0, most=1.0))
    assert capsys.readouterr().err == ""


def test_updates_on_a_limit_are_counted_wherever_they_are():
    assert at_limits([0.1, 1.0, 0.1, 10.0, 0.1 * (1 + 1e-4)], SETTINGS) == (2, 1)
    assert at_limits([1.0], dataclasses.replace(SETTINGS, least=1.0, most=1.0)) == (0, 0)


def test_a_swing_is_how_far_a_strength_falls_again():
    assert swing([0.25, 0.5, 1.0, 8.0]) == 1.0
    assert swing([0.25, 8.0, 2.0, 1.0, 4.0, 2.0]) == 8.0
    # From 4 to 2 and from 8 to 4: the widest fall, whichever peak is higher.
    assert swing([4.0, 2.0, 8.0, 4.0]) == 2.0
