"""A step with a reset begins anew: a row with resets is its parts, each from an empty state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iaj_kernels.core import cases
from iaj_kernels.gated_slots.cases import SUITE as GATED_SLOTS
from iaj_kernels.prefix_mean.cases import SUITE as PREFIX_MEAN
from tests import rounding

SIZES = {"B": 1, "T": 39, "R": 4, "N": 2, "M": 4, "H": 6, "E": 3}
# The first part continues the initial state; two parts are of one step.
STARTS = (0, 7, 16, 17, 30, 38)
STATE = ("total", "mass", "slot_keys", "slot_values")


def parts(suite, case, arrays):
    """What the reference makes of each part, the state after the last of them."""
    results = []
    for first, last in zip(STARTS, (*STARTS[1:], SIZES["T"]), strict=True):
        own = {name: x if x.ndim == 1 else x[:, first:last] for name, x in arrays.items()}
        # An empty state is what the operation begins with if it is given none.
        own = {name: x for name, x in own.items() if name not in STATE}
        if first == 0:
            own |= {name: arrays[name] for name in STATE if name in arrays}
        results.append(suite.call(case, own, "reference"))
    out = jnp.concatenate([each["out"] for each in results], 1)
    return results[-1] | {"out": out}


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("suite", [PREFIX_MEAN, GATED_SLOTS], ids=lambda suite: suite.op)
def test_a_row_with_resets_is_its_parts(suite, implementation):
    case = cases.Case("parts", SIZES, options={"initial_state": True})
    arrays = suite.make(case, jax.random.key(0))
    resets_BT = np.isin(np.arange(SIZES["T"]), STARTS[1:])[None]

    run = jax.jit(functools.partial(suite.call, case, implementation=implementation))
    got = run(arrays | {"resets": resets_BT})
    rounding.assert_within(got, rounding.expected(functools.partial(parts, suite, case), arrays))
    assert np.abs(run(arrays)["out"] - got["out"])[:, 7:].max() > 0.1


@pytest.mark.parametrize("suite", [PREFIX_MEAN, GATED_SLOTS], ids=lambda suite: suite.op)
def test_resets_of_another_dtype_are_refused(suite):
    case = cases.Case("parts", SIZES)
    arrays = suite.make(case, jax.random.key(0))
    with pytest.raises(TypeError, match="resets is int32; cast it to bool"):
        suite.call(case, arrays | {"resets": np.zeros((1, 39), np.int32)}, "xla")
