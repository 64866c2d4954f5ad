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
# Explained effect at each size, and of random orders.
SHARES = {
    "dense": {
        "signed": np.array([0.0, 0.2, 0.3, 0.4, 0.5, 1.0, 1.0]),
        "random": np.array([0.0, 0.0, 0.1, 0.2, 0.3, 0.8, 1.0]),
    },
    "sparse": {
        "signed": np.array([0.0, 0.8, 1.0, 1.0, 1.0, 1.0, 1.0]),
        "random": np.array([0.0, 0.0, 0.5, 0.8, 1.0, 1.0, 1.0]),
    },
}
# Metric minus that with every head ablated, of each prompt.
STEADY_B = np.linspace(2.5, 3.5, len(PROMPTS))


def piece(model, change_B=STEADY_B, corrupt=-1.0, **shares):
    """Rows of one model whose metric is 2, and 2 minus the change with every head ablated."""
    names = {"task": "ioi", "model": model}
    kind = {"component": "heads", "ablation": "counterfactual"}
    whole_B, at = np.full(len(change_B), 2.0), {"prompt": np.arange(len(change_B))}
    curves = [
        rows(
            (whole_B - (1 - f.reshape(len(SIZES), -1)) * change_B)[None],
            {"draw": [0], "size": SIZES, **at},
            quantity="curve",
            scope="prompt",
            ranking=ranking,
            **kind,
            **names,
        )
        for ranking, f in (SHARES[model] | shares).items()
    ]
    corrupt_B, open_B = np.full(len(change_B), corrupt), np.full(len(change_B), 16)
    return [
        rows(whole_B, at, quantity="metric", method="clean", **names),
        rows(corrupt_B, at, quantity="metric", method="corrupt", **names),
        rows(open_B, at, quantity="open", component="heads", **names),
        *curves,
    ]


def ratio(*pieces, prompt_B=None):
    table = pa.concat_tables([part for each in pieces for part in each])
    if prompt_B is None:
        prompt_B = np.unique(table["prompt"].drop_null())
    results = [
        numbers.task_result(CONFIG, numbers.select(table, model=model), "ioi", model, prompt_B)
        for model in ("dense", "sparse")
    ]
    (result,) = numbers.ratios(CONFIG, table, results, {"ioi": prompt_B})
    return result


# Of either sign, with a mean of 0.05 above 0: three prompts in eight become better by ablation.
NOISE_B = np.array([1.0, -0.9, 0.8, -0.7, 0.6, -0.8, 0.3, 0.1])


def test_a_ratio_is_that_of_the_crossings():
    result = ratio(piece("dense"), piece("sparse"))
    # Between sizes 4 and 8, and 1 and 2, linear in the logarithm.
    assert result.ratio.estimate == pytest.approx(2 ** (2 + 0.4 / 0.5 - 0.5)) and result.why == ""
    assert result.ratio.n == len(PROMPTS)
    # Between sizes 8 and 16, and 3 and 4.
    assert result.random.estimate == pytest.approx(2**3.5 / np.sqrt(12))


# Explained at once, and as much by random orders but for what differs by prompt.
LEAST = np.array([0.0, 0.95, 0.97, 1.0, 1.0, 1.0, 1.0])
NOISE_KB = 0.3 * np.isin(SIZES, SIZES[1:-1])[:, None] * NOISE_B


def by_chance(model):
    """Of a ranking as good as random orders: the ratio would be that of what carries weight."""
    return {"random": SHARES[model]["signed"][:, None] + NOISE_KB}


def short(model, *rankings):
    """The whole explains 0.93 of the effect over all prompts, of the first of them 0.86."""
    most_B = np.where(PROMPTS < 4, 0.86, 1.0)
    return {name: np.minimum(SHARES[model][name][:, None], most_B) for name in rankings}


FEW, NOISY = {"change_B": STEADY_B[:4]}, {"change_B": NOISE_B}
WORSE = "is not reliably smaller than that of random"
LEFT = "does not reliably lower the metric"
SHORT = "explained less than 0.9 of the effect at every size"


@pytest.mark.parametrize(
    ("dense", "sparse", "reason"),
    [
        ({}, {"signed": LEAST}, "the circuit of sparse is one component, the least there is"),
        ({}, {"corrupt": 2.0}, "sparse did not solve the task"),
        (FEW, FEW, "4 prompts allow no interval, which needs 5"),
        (by_chance("dense"), {}, f"the circuit of dense {WORSE}"),
        ({}, by_chance("sparse"), f"the circuit of sparse {WORSE}"),
        (by_chance("dense"), by_chance("sparse"), f"the circuit of dense and sparse {WORSE}"),
        (NOISY, {}, f"ablating all components of dense {LEFT}"),
        ({}, NOISY, f"ablating all components of sparse {LEFT}"),
        (NOISY, NOISY, f"ablating all components of dense and sparse {LEFT}"),
        (short("dense", "signed"), {}, f"the circuit of dense {SHORT}"),
        (
            short("dense", "signed", "random"),
            short("sparse", "signed"),
            f"the circuit of dense and sparse {SHORT}",
        ),
        ({}, short("sparse", "random"), f"random orders of sparse {SHORT}"),
    ],
)
def test_no_ratio_is_claimed_without_the_reason_to(dense, sparse, reason):
    assert NOISE_B.mean() > 0
    result = ratio(piece("dense", **dense), piece("sparse", **sparse))
    assert result.ratio is None and result.why.startswith(reason)
    assert WORSE not in reason or result.random is not None


def test_the_interval_of_a_size_stays_among_the_sizes():
    """Student's interval of the logarithm would go below one component, and above all of them."""
    few = np.array([0.0, 0.85, 1.0, 1.0, 1.0, 1.0, 1.0])[:, None] + 0.08 * (PROMPTS % 2)
    many = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.80, 1.0])[:, None] + 0.09 * (PROMPTS % 2)
    whole_B, empty_B = np.ones(len(PROMPTS)), np.zeros(len(PROMPTS))
    for f_KB, least, most in ((few, 1, 2), (many, 8, 16)):
        size = numbers.crossings(CONFIG, [Curve(SIZES[1:], f_KB[1:], empty_B, whole_B)], PROMPTS)
        assert least <= size.low <= size.estimate <= size.high <= most


def test_pairs_that_repeat_a_prompt_add_nothing_to_an_interval():
    """All pairs three times over: the estimates and intervals are those of the prompts alone."""

    def three(**given):
        return {name: np.concatenate([each] * 3, -1) for name, each in given.items()}

    signed = SHARES["dense"]["signed"][:, None] + NOISE_KB / 10
    alone = ratio(piece("dense", signed=signed), piece("sparse"))
    repeated = ratio(
        piece("dense", **three(change_B=STEADY_B, signed=signed)),
        piece("sparse", **three(change_B=STEADY_B)),
        prompt_B=np.concatenate([PROMPTS] * 3),
    )
    assert repeated.ratio.n == alone.ratio.n == len(PROMPTS)
    for one in ("estimate", "low", "high"):
        assert getattr(repeated.ratio, one) == pytest.approx(getattr(alone.ratio, one), rel=1e-12)
    assert alone.ratio.low < alone.ratio.estimate


def test_a_prompt_is_right_if_it_is_in_all_of_its_pairs():
    clean_B = np.array([2.0, 2.0, -1.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    prompt_B = np.array([0, 0, 1, 1, 2, 3, 4, 5])
    names = {"quantity": "metric", "method": "clean", "task": "ioi", "model": "dense"}
    table = pa.concat_tables([rows(clean_B, {"prompt": PROMPTS}, **names), *piece("dense")[1:]])
    result = numbers.task_result(CONFIG, table, "ioi", "dense", prompt_B)
    assert (result.accuracy.estimate, result.accuracy.n) == (5 / 6, 6)
    # The mean is over pairs, and its interval over prompts.
    assert (result.clean.estimate, result.clean.n) == (clean_B.mean(), 6)
