"""Values by which circuits are ranked, against means written out."""

import numpy as np
import pytest

from sparse_jax.circuits.piece import _rank_values

# Three components in two prompts, of which the second is shorter: it lacks the last component.
IMPORTANCE = np.array([[[3.0, -4.0, 1.0], [-2.0, -2.0, -np.inf]]])
REAL = np.isfinite(IMPORTANCE)


@pytest.mark.parametrize(
    ("ranking", "scope", "values"),
    [
        ("signed", "prompt", [[3.0, -4.0, 1.0], [-2.0, -2.0, -np.inf]]),
        ("absolute", "prompt", [[3.0, 4.0, 1.0], [2.0, 2.0, -np.inf]]),
        # The mean of the prompts that have a component, and the absolute value of that mean.
        ("signed", "task", [[0.5, -3.0, 1.0], [0.5, -3.0, -np.inf]]),
        ("absolute", "task", [[0.5, 3.0, 1.0], [0.5, 3.0, -np.inf]]),
    ],
)
def test_values_of_every_ranking_are_those_written_out(ranking, scope, values):
    result = _rank_values(IMPORTANCE, REAL, ranking, scope)
    np.testing.assert_array_equal(result, [values])
