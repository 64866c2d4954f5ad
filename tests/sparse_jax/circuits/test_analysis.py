"""Ratios of circuit sizes from constructed rows: which are claimed, and why others are not."""

import numpy as np
import pyarrow as pa
import pytest

from sparse_jax.circuits import analysis
from sparse_jax.circuits.config import CircuitConfig
from sparse_jax.circuits.measurements import rows

PROMPTS = np.arange(8)
SIZES = np.array([0, 1, 2, 4])
CONFIG = CircuitConfig(components=("heads",), resamples=200)
# Explained effect at each size.
DENSE, SPARSE = np.array([0.0, 0.2, 0.5, 1.0]), np.array([0.0, 0.95, 0.97, 1.0])


def piece(model, explained_K, change_B, corrupt=-1.0):
    """Rows of one model whose metric is 2, and 2 minus the change with every head ablated."""
    names = {"task": "ioi", "model": model}
    whole_B = np.full(len(PROMPTS), 2.0)
    metric_KB = whole_B - (1 - explained_K[:, None]) * change_B
    kind = {"component": "heads", "ablation": "counterfactual", "ranking": "signed"}
    return [
        rows(whole_B, {"prompt": PROMPTS}, quantity="metric", method="clean", **names),
        rows(
            np.full(len(PROMPTS), corrupt),
            {"prompt": PROMPTS},
            quantity="metric",
            method="corrupt",
            **names,
        ),
        rows(
            np.full(len(PROMPTS), 4),
            {"prompt": PROMPTS},
            quantity="open",
            component="heads",
            **names,
        ),
        rows(
            metric_KB[None],
            {"draw": [0], "size": SIZES, "prompt": PROMPTS},
            quantity="curve",
            scope="prompt",
            **kind,
            **names,
        ),
    ]


def ratio(*pieces):
    table = pa.concat_tables([part for each in pieces for part in each])
    results = [
        analysis.task_result(CONFIG, analysis.select(table, model=model), "ioi", model)
        for model in ("dense", "sparse")
    ]
    (result,) = analysis.ratios(CONFIG, table, results)
    return result


# Of either sign, with a mean of 0.05 above 0: three prompts in eight become better by ablation.
NOISE_B = np.array([1.0, -0.9, 0.8, -0.7, 0.6, -0.8, 0.3, 0.1])


def test_a_ratio_is_that_of_the_crossings():
    steady_B = np.linspace(2.5, 3.5, len(PROMPTS))
    result = ratio(piece("dense", DENSE, steady_B), piece("sparse", SPARSE, steady_B))
    # Between sizes 2 and 4, linear in the logarithm; and the first size.
    assert result.ratio.estimate == pytest.approx(2 ** (1 + 0.4 / 0.5)) and result.why == ""


@pytest.mark.parametrize("noisy", [("dense",), ("sparse",), ("dense", "sparse")])
def test_no_ratio_is_claimed_of_a_metric_that_ablating_everything_leaves(noisy):
    assert NOISE_B.mean() > 0
    changes = {name: NOISE_B if name in noisy else NOISE_B + 3 for name in ("dense", "sparse")}
    result = ratio(
        piece("dense", DENSE, changes["dense"]), piece("sparse", SPARSE, changes["sparse"])
    )
    assert result.ratio is None
    wanted = f"ablating all components of {' and '.join(noisy)} does not reliably lower the metric"
    assert result.why.startswith(wanted)


def test_no_ratio_is_claimed_of_a_task_that_is_not_solved():
    steady_B = np.full(len(PROMPTS), 3.0)
    unsolved = piece("sparse", SPARSE, steady_B, corrupt=2.0)
    result = ratio(piece("dense", DENSE, steady_B), unsolved)
    assert result.ratio is None and result.why == "sparse did not solve the task"
