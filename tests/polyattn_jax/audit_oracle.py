"""What an audit writes, by definition: in float64, and between which numbers rounding leaves it.

Of the model only its scores and its pattern are taken, in float64 with the errors that float32 may
have there (`tests/rounding.py`). Statistics of a row follow from both by interval arithmetic: each
is monotone in every score, so its least and its greatest value are those at the ends.
"""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq

import lm_jax
from polyattn_jax.audit import head_sets, measure, model_calibration
from polyattn_jax.audit.audit_suites import build_suites
from polyattn_jax.audit.audited_model import AuditedModel
from polyattn_jax.recipes import calibrate
from polyattn_jax.recipes.diagnostic import Status, relative_error_bound, softmax_error_bound
from polyattn_jax.recipes.row_maps import parse_recipe
from polyattn_jax.suites import batches
from tests import rounding

U = 2.0**-24
TINY, HUGE = (float(getattr(np.finfo(np.float32), name)) for name in ("tiny", "max"))
DEGREES = (2, 4, 8, 16)

Limits = dict[str, tuple[float, float]]


class Row(NamedTuple):
    """One row of scores and of the pattern in float64, and how far float32 may be off in each."""

    scores_S: np.ndarray
    errors_S: np.ndarray
    pattern_S: np.ndarray
    pattern_errors_S: np.ndarray


def rows_of(audited: AuditedModel, suite: str) -> dict[tuple[str, int, int], Row]:
    """The row of the last query by prompt, layer and head."""
    prompts = build_suites(audited)[suite].prompts
    tokens_BT = jnp.asarray([prompt.tokens for prompt in prompts])

    def last_rows() -> Any:
        record = dict.fromkeys(("attn.scores", "attn.pattern"), lambda x: x[..., -1, :])
        return lm_jax.forward(
            audited.model.params, tokens_BT, audited.model.cfg, record=record
        ).records

    values, bounds = rounding.expected(last_rows)
    parts = [tree[f"attn.{name}"] for name in ("scores", "pattern") for tree in (values, bounds)]
    L, B, N, _ = parts[0].shape
    return {
        (prompts[b].id, layer, head): Row(*(part[layer, b, head] for part in parts))
        for layer, b, head in np.ndindex(L, B, N)
    }


def limits(row: Row, bias: float, target: int) -> Limits:
    """The least and the greatest value of every statistic of a row, by its column."""
    z, e = row.scores_S, row.errors_S
    others = np.arange(len(z)) != target
    low, high = _rounded((z - e) + bias, (z + e) + bias)
    r_low, r_high = np.maximum(low, 0.0), np.maximum(high, 0.0)
    margin = _rounded(
        z[target] - e[target] - (z + e)[others].max(),
        z[target] + e[target] - (z - e)[others].max(),
    )
    active = (low[others] > 0).sum(), (high[others] > 0).sum()
    bounds = {
        "u_star": (low[target], high[target]),
        "r_star": (r_low[target], r_high[target]),
        "margin": margin,
        "s_softmax": _softmax(z, e, target, others),
        "sink": _entry(row, 0),
    }
    if high[target] <= 0:
        dead = {f"s_{p}": (np.inf, np.inf) for p in DEGREES}
        return bounds | dead | {"active": (0, 0), "relative_margin": (0, 0)}
    if low[target] <= 0:
        # Rounding decides whether the row is dead, and so over all that divides by r_*.
        return bounds
    bounds["active"] = active
    ends = [end / r for end in margin for r in (low[target], high[target])]
    # A quotient may be a product with a reciprocal.
    least, greatest = _rounded(min(ends), max(ends), 3)
    bounds["relative_margin"] = (least, min(greatest, 1.0) if active[0] else greatest)
    for p in DEGREES:
        error = relative_error_bound(p, len(z))
        # What is below the smallest normal number may be flushed to 0.
        flushed = len(z) * ((TINY / low[target]) ** p + TINY)
        bounds[f"s_{p}"] = (
            ((r_low[others] / r_high[target]) ** p).sum() * (1 - error) - flushed,
            ((r_high[others] / r_low[target]) ** p).sum() * (1 + error) + flushed,
        )
    return bounds


def _rounded(low: Any, high: Any, units: float = 1.0) -> tuple[Any, Any]:
    """Both ends, rounded outwards by so many units."""
    return low - units * U * np.abs(low), high + units * U * np.abs(high)


def _entry(row: Row, key: int) -> tuple[float, float]:
    value, error = row.pattern_S[key], row.pattern_errors_S[key]
    return value - error, value + error


def _softmax(z: np.ndarray, e: np.ndarray, target: int, others: np.ndarray) -> tuple[float, float]:
    """S of softmax: sums of e^(z_j - z_*), as quotients of weights that may be flushed to 0."""
    low = np.exp((z - e)[others] - (z + e)[target]).sum()
    high = np.exp((z + e)[others] - (z - e)[target]).sum()
    # The difference to the greatest score is rounded before the exponential.
    error = np.expm1(softmax_error_bound(len(z)) + 2 * U * np.ptp(z))
    weight = np.exp(z[target] - z.max())
    if weight < 2 * len(z) * TINY:
        return 0.0, np.inf
    flushed = len(z) * TINY / weight
    return low * (1 - error) - flushed, high * (1 + error) + flushed


def is_argmax(row: Row, key: int) -> bool:
    """Whether the key may be the one of greatest score."""
    return bool((row.scores_S + row.errors_S)[key] >= (row.scores_S - row.errors_S).max())


def assert_row(result: dict[str, Any], row: Row) -> bool:
    """Asserts that a line of `rows.parquet` is within its limits; whether its status is sure."""
    target = result["argmax"] if result["target"] == "argmax" else result["answer"]
    ends = limits(row, result["bias"], target)
    if result["answer"] >= 0:
        ends["on_answer"] = _entry(row, result["answer"])
    for name, (low, high) in ends.items():
        # Above the largest float32 there is infinity alone.
        value = min(result[name], HUGE)
        assert min(low, HUGE) <= value <= high, (name, low, high, result)
    assert is_argmax(row, result["argmax"])
    assert is_argmax(row, result["query"] - result["distance"])
    assert result["r_star"] == (result["u_star"] if result["status"] == Status.ACTIVE else 0.0)
    low, high = ends["u_star"]
    possible = {Status.ACTIVE} if low > 0 else {Status.DEAD}
    if low <= 0 < high:
        possible = {Status.ACTIVE, Status.DEAD}
    assert result["status"] in possible
    assert_degree(result)
    return len(possible) == 1


def assert_degree(result: dict[str, Any]) -> None:
    """p* = log A / -log(1 - rho) of the row's own A and rho."""
    active, rho = result["active"], result["relative_margin"]
    if result["status"] != Status.ACTIVE:
        return
    if active < 2 and rho >= 0:
        assert result["p_star"] == 0.0
    elif rho <= 0:
        assert result["p_star"] == np.inf
    else:
        # Two logarithms within 8 ulp each, and a quotient.
        want = np.log(active) / -np.log1p(-np.float64(rho))
        np.testing.assert_allclose(result["p_star"], want, rtol=35 * U)


class Cell(NamedTuple):
    """One cell of `answers.parquet`: a recipe at a bias in some heads, by their flat numbers."""

    recipe: str
    bias: float
    heads: tuple[int, ...]


class Answers:
    """What `measure.answer` gives on a suite in each of some cells; asked twice, computed once."""

    def __init__(self, audited: AuditedModel):
        self.audited = audited
        self.shape = audited.model.cfg.num_layers, audited.model.cfg.num_heads
        self.expected = functools.cache(self._expected)

    def _expected(
        self, suite: str, cells: tuple[Cell, ...]
    ) -> tuple[tuple[str, ...], rounding.Expected]:
        """The ids of the prompts, and arrays `[cell, prompt]`."""
        built = build_suites(self.audited)[suite]
        (batch,) = batches(built, len(built.prompts))
        recipes = [parse_recipe(cell.recipe) for cell in cells]
        maps = tuple(dict.fromkeys(recipe.map for recipe in recipes))
        run = functools.partial(
            measure.evaluate,
            self.audited.model.params,
            jnp.asarray(batch.tokens_BT),
            jnp.asarray(batch.lengths_B),
            jnp.asarray(batch.target_B),
            cfg=self.audited.model.cfg,
            maps=maps,
        )
        index = jnp.asarray([maps.index(recipe.map) for recipe in recipes])
        bias = jnp.asarray([cell.bias for cell in cells], jnp.float32)
        masks = [head_sets.mask(np.array(cell.heads, int), self.shape) for cell in cells]
        return batch.ids, rounding.expected(jax.vmap(run), index, bias, jnp.asarray(masks))

    def assert_within(self, folder: Path) -> None:
        """Every answer of an audit is the model's, at the audit's bias and in its sets of heads."""
        sets = head_sets.read(folder / "head_sets.parquet", self.shape)
        heads = {name: tuple(np.flatnonzero(mask).tolist()) for name, mask in sets.items()}
        everywhere = tuple(range(self.shape[0] * self.shape[1]))
        table = pq.read_table(folder / "answers.parquet").to_pylist()
        for suite in {row["suite"] for row in table}:
            rows = [row for row in table if row["suite"] == suite]
            cells = {
                (row["stage"], row["cell"]): Cell(
                    row["recipe"],
                    row["bias"],
                    everywhere if row["stage"] == "sweep" else heads.get(row["cell"], ()),
                )
                for row in rows
            }
            ids, (values, bounds) = self.expected(suite, tuple(cells.values()))
            cell = np.array([[*cells].index((row["stage"], row["cell"])) for row in rows])
            prompt = np.array([ids.index(row["prompt"]) for row in rows])
            for name in ("predicted", "loss"):
                wanted = rounding.Expected(values[name][cell, prompt], bounds[name][cell, prompt])
                result = np.array([row[name] for row in rows])
                rounding.assert_within(result, wanted, f"{suite} {name}")


def bias_limits(audited: AuditedModel) -> tuple[float, float]:
    """The least and the greatest b_auto with rounded scores and masses.

    Scores that are off by e at most move the mass below t to that below t +- e, and each weight by
    less than e^2e; the budget is met by a mass that is off by as much.
    """
    texts_UT, lengths, _ = model_calibration.calibration_tokens(audited)
    at = audited.config.calibrated_at
    assert lengths[-1] == at

    def scores() -> Any:
        record = {"attn.scores": lm_jax.keep}
        return lm_jax.forward(
            audited.model.params, jnp.asarray(texts_UT), audited.model.cfg, record=record
        ).records["attn.scores"]

    scores_LBNTS, errors = rounding.expected(scores)
    e = errors[np.isfinite(scores_LBNTS)].max()
    # Sums over keys, thresholds, rows and heads, and the roundings of a weight.
    share = np.expm1(2 * e + (2 * at + 512 + 100) * U)
    budget = audited.config.budget
    return (
        calibrate.exact_bias(scores_LBNTS, budget=budget * (1 + share)) - e,
        calibrate.exact_bias(scores_LBNTS, budget=budget / (1 + share)) + e,
    )
