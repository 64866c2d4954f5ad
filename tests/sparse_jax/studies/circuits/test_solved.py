"""When a model is said to solve a task."""

import numpy as np
import pyarrow as pa
import pytest

from sparse_jax.studies.circuits.measurements import rows
from sparse_jax.studies.circuits.numbers import task_result
from sparse_jax.studies.circuits.settings import CircuitConfig

PROMPTS = 20
CONFIG = CircuitConfig(dense="model", components=("heads",))


def result(clean_B, corrupt_B):
    """The result of these metrics; nothing else was measured."""
    labels = {"task": "copy", "model": "dense"}
    at = {"prompt": np.arange(PROMPTS)}
    table = pa.concat_tables(
        [
            rows(np.asarray(clean_B), at, quantity="metric", method="clean", **labels),
            rows(np.asarray(corrupt_B), at, quantity="metric", method="corrupt", **labels),
            rows(np.full(PROMPTS, 4.0), at, quantity="open", component="heads", **labels),
        ]
    )
    return task_result(CONFIG, table, "copy", "dense", np.arange(PROMPTS))


@pytest.mark.parametrize(
    ("clean_B", "corrupt_B", "solved"),
    [
        (np.full(PROMPTS, 2.0), np.linspace(-2, -1, PROMPTS), True),
        # Right in 15 of 20, below the bar of 80 %.
        (np.repeat([2.0, -1.0], [15, 5]), np.full(PROMPTS, -2.0), False),
        # Right in all, for a reason that the corrupt prompt has too.
        (np.full(PROMPTS, 2.0), np.full(PROMPTS, 2.0), False),
        # Right in all, and as often higher on the corrupt prompt as lower.
        (np.full(PROMPTS, 2.0), 2.0 + np.tile([1.0, -1.0], PROMPTS // 2), False),
    ],
)
def test_a_task_is_solved_by_right_answers_that_depend_on_what_is_corrupted(
    clean_B, corrupt_B, solved
):
    found = result(clean_B, corrupt_B)
    assert found.solved == solved
    assert found.change.estimate == pytest.approx(np.mean(clean_B - corrupt_B), abs=1e-12)
    assert found.accuracy.estimate == np.mean(np.asarray(clean_B) > 0)
