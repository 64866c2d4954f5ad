"""Counts in int32 stop at the largest one."""

import jax.numpy as jnp
import numpy as np
import pytest

from iaj_kernels.core import counts

HALF = 2**30


@pytest.mark.parametrize(
    ("each", "wanted"),
    [
        ([3, 4], 7),
        ([HALF, HALF - 1], counts.LARGEST),
        ([HALF, HALF - 2], counts.LARGEST - 1),
        ([HALF, HALF], counts.LARGEST),
        ([HALF] * 4, counts.LARGEST),
        ([HALF] * 5, counts.LARGEST),
        ([counts.LARGEST] * 7, counts.LARGEST),
    ],
)
def test_a_total_stops_where_it_would_wrap(each, wanted):
    result = counts.total(jnp.array([each], jnp.int32), 1)
    assert result.dtype == jnp.int32 and int(result[0]) == wanted
    running = jnp.int32(0)
    for count in each:
        running = counts.add(running, jnp.int32(count))
    assert int(running) == wanted


def test_a_mask_is_counted_over_several_axes():
    mask = np.random.default_rng(0).random((2, 3, 5)) < 0.5
    np.testing.assert_array_equal(counts.total(jnp.asarray(mask), (1, 2)), mask.sum((1, 2)))
