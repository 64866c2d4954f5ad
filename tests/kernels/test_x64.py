"""What an operation returns has the same dtypes where 64-bit types are on."""

import jax
import jax.numpy as jnp
import pytest

from iaj_kernels.core.cases import outputs_and_gradients
from iaj_kernels.suites import SUITES


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("op", SUITES)
def test_no_result_is_wider_with_x64(op, implementation):
    suite = SUITES[op]
    case = min(suite.using("test"), key=lambda case: max(case.sizes.values()))
    arrays = suite.make(case, jax.random.key(0))
    cotangents = suite.call(case, arrays, "reference")
    run = outputs_and_gradients(suite, case, implementation)

    def dtypes():
        return {name: x.dtype for name, x in jax.eval_shape(run, arrays, cotangents).items()}

    wanted = dtypes()
    with jax.enable_x64(True):
        assert dtypes() == wanted
    assert all(jnp.dtype(dtype).itemsize <= 4 for dtype in wanted.values())
