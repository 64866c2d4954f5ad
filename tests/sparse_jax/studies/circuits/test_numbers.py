"""Ratios of circuit sizes from constructed rows: which are claimed, and why others are not."""

import numpy as np
import pyarrow as pa
import pytest

from sparse_jax.circuits.discover import Curve
from sparse_jax.studies.circuits import numbers
from sparse_jax.studies.circuits.measurements import rows
from sparse_jax.studies.circuits.settings import CircuitConfig

PROMPTS = np.arange(8)
SIZES = np.array([0, 1, 2, 3, 4, 8, 16])
CONFIG = CircuitConfig(components=("heads",), resamples=200)
# Explained effect at each size.
DENSE = np.array([0.0, 0.2, 0.3, 0.4, 0.5, 1.0, 1.0])
SPARSE = np.array([0.0, 0.8, 1.0, 1.0, 1.0, 1.0, 1.0])
# Of random orders.
DENSE_BY_CHANCE = np.array([0.0, 0.0, 0.1, 0.2, 0.3, 0.8, 1.0])
SPARSE_BY_CHANCE = np.array([0.0, 0.0, 0.5, 0.8, 1.0, 1.0, 1.0])


def piece(model, explained_K, change_B, corrupt=-1.0, chance=None):
    """Rows of one model whose metric is 2, and 2 minus the change with every head ablated."""
    names = {"task": "ioi", "model": model}
    whole_B = np.full(len(change_B), 2.0)
    prompts = np.arange(len(change_B))
    if chance is None:
        chance = {"dense": DENSE_BY_CHANCE, "sparse": SPARSE_BY_CHANCE}[model]
    metric_KB, chance_KB = (
        whole_B - (1 - f.reshape(len(SIZES), -1)) * change_B for f in (explained_K, chance)
    )
    kind = {"component": "heads", "ablation": "counterfactual"}
    return [
        rows(whole_B, {"prompt": prompts}, quantity="metric", method="clean", **names),
        rows(
            np.full(len(prompts), corrupt),
            {"prompt": prompts},
            quantity="metric",
            method="corrupt",
            **names,
        ),
        rows(
            np.full(len(prompts), 16),
            {"prompt": prompts},
            quantity="open",
            component="heads",
            **names,
        ),
        *(
            rows(
                values_KB[None],
                {"draw": [0], "size": SIZES, "prompt": prompts},
                quantity="curve",
                scope="prompt",
                ranking=ranking,
                **kind,
                **names,
            )
            for ranking, values_KB in (("signed", metric_KB), ("random", chance_KB))
        ),
    ]


def ratio(*pieces):
    table = pa.concat_tables([part for each in pieces for part in each])
    results = [
        numbers.task_result(CONFIG, numbers.select(table, model=model), "ioi", model)
        for model in ("dense", "sparse")
    ]
    (result,) = numbers.ratios(CONFIG, table, results)
    return result


# Of either sign, with a mean of 0.05 above 0: three prompts in eight become better by ablation.
NOISE_B = np.array([1.0, -0.9, 0.8, -0.7, 0.6, -0.8, 0.3, 0.1])


def test_a_ratio_is_that_of_the_crossings():
    steady_B = np.linspace(2.5, 3.5, len(PROMPTS))
    result = ratio(piece("dense", DENSE, steady_B), piece("sparse", SPARSE, steady_B))
    # Between sizes 4 and 8, and 1 and 2, linear in the logarithm.
    assert result.ratio.estimate == pytest.approx(2 ** (2 + 0.4 / 0.5 - 0.5)) and result.why == ""
    assert result.ratio.n == len(PROMPTS)
    # Between sizes 8 and 16, and 3 and 4.
    assert result.random.estimate == pytest.approx(2**3.5 / np.sqrt(12))


def test_no_ratio_is_claimed_to_the_least_circuit_there_is():
    steady_B = np.linspace(2.5, 3.5, len(PROMPTS))
    least = np.array([0.0, 0.95, 0.97, 1.0, 1.0, 1.0, 1.0])
    result = ratio(piece("dense", DENSE, steady_B), piece("sparse", least, steady_B))
    assert result.ratio is None
    assert result.why == "the circuit of sparse is one component, the least there is"


@pytest.mark.parametrize("by_chance", [("dense",), ("sparse",), ("dense", "sparse")])
def test_no_ratio_is_claimed_of_a_ranking_that_is_no_better_than_random_order(by_chance):
    """The ratio would be that of how many components carry weight, which both orders take first."""
    # Of the same sizes, but for what differs by prompt.
    noise_KB = 0.3 * np.isin(SIZES, SIZES[1:-1])[:, None] * NOISE_B
    steady_B = np.linspace(2.5, 3.5, len(PROMPTS))
    pieces = [
        piece(name, f_K, steady_B, chance=f_K[:, None] + noise_KB if name in by_chance else None)
        for name, f_K in (("dense", DENSE), ("sparse", SPARSE))
    ]
    result = ratio(*pieces)
    assert result.ratio is None and result.random is not None
    wanted = f"the circuit of {' and '.join(by_chance)} is not reliably smaller than that of random"
    assert result.why.startswith(wanted)


def test_no_ratio_is_claimed_of_too_few_prompts():
    steady_B = np.linspace(2.5, 3.5, 4)
    result = ratio(piece("dense", DENSE, steady_B), piece("sparse", SPARSE, steady_B))
    assert result.ratio is None and result.why == "4 prompts allow no interval, which needs 5"


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


@pytest.mark.parametrize(
    ("short", "by_chance", "reason"),
    [
        (("dense",), (), "the circuit of dense"),
        (("dense", "sparse"), ("dense",), "the circuit of dense and sparse"),
        ((), ("sparse",), "random orders of sparse"),
    ],
)
def test_no_ratio_is_claimed_of_a_curve_that_some_sample_does_not_bring_to_the_fraction(
    short, by_chance, reason
):
    """The whole explains 0.93 of the effect over all prompts, of the first of them 0.86."""
    steady_B = np.full(len(PROMPTS), 3.0)

    def shortened(f_K):
        return np.minimum(f_K[:, None], np.where(PROMPTS < 4, 0.86, 1.0))

    pieces = []
    for name, f_K, chance_K in (
        ("dense", DENSE, DENSE_BY_CHANCE),
        ("sparse", SPARSE, SPARSE_BY_CHANCE),
    ):
        chance = shortened(chance_K) if name in by_chance else chance_K
        pieces.append(
            piece(name, shortened(f_K) if name in short else f_K, steady_B, chance=chance)
        )
    result = ratio(*pieces)
    assert result.ratio is None
    assert result.why.startswith(f"{reason} explained less than 0.9 of the effect at every size")


def test_the_interval_of_a_size_stays_among_the_sizes():
    """Student's interval of the logarithm would go below one component, and above all of them."""
    few = np.array([0.0, 0.85, 1.0, 1.0, 1.0, 1.0, 1.0])[:, None] + 0.08 * (PROMPTS % 2)
    many = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.80, 1.0])[:, None] + 0.09 * (PROMPTS % 2)
    whole_B, empty_B = np.ones(len(PROMPTS)), np.zeros(len(PROMPTS))
    for f_KB, least, most in ((few, 1, 2), (many, 8, 16)):
        size = numbers.crossings(CONFIG, [Curve(SIZES[1:], f_KB[1:], empty_B, whole_B)])
        assert least <= size.low <= size.estimate <= size.high <= most
