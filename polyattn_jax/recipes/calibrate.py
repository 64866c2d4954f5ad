"""The calibrated bias b_auto: the 5 % mass rule, solved exactly, with what it depends on.

From "When Does Polynomial Attention Concentrate?", Appendices B and J: b_auto is the smallest b for
which the average softmax row places at most 5 % of its mass on keys whose score lies below -b.

Let M(t) be the mass strictly below t, averaged over all rows. M is a step function that rises just
above each score, so the largest t with M(t) <= budget is itself a score, the weighted quantile of
all (score, softmax weight) pairs, and b_auto = -t. A model has too many pairs to keep, so
`calibrate`

1. numbers the float32 values in order (zero and the normal numbers, 4.26e9 of them);
2. keeps a bracket of two numbers with M(low) <= budget < M(high), at first all of them;
3. measures M at `num_thresholds` numbers spread evenly inside it, in one pass over the model;
4. keeps the piece in which M crosses the budget, and repeats 3 until the ends are neighbours.

So no grid error is left, only the rounding of M itself: masses are summed in the scores' dtype
within a layer and in float64 across layers.

b_auto depends on the text and on its length. Attention is causal, so the rows of a text's first
tokens are those of the shorter text, and one pass measures M for every text and every length.
`calibrate_texts` therefore brackets b_auto of all of them in one pass, evaluates an even grid over
these brackets in a second, which gives a curve over length with an interval that resamples texts,
and solves for the audited length on all texts together inside the grid's piece.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import BadInputError, UsageError
from lm_jax.model import attention

_TINY_BITS = int(np.float32(np.finfo(np.float32).tiny).view(np.int32))
_LAST = int(np.float32(np.finfo(np.float32).max).view(np.int32)) - _TINY_BITS + 1


class MassBelow(NamedTuple):
    """Softmax mass strictly below each threshold, summed over rows, and the number of rows."""

    total_M: Any
    rows: Any


@dataclasses.dataclass(frozen=True)
class Solution:
    """A bias, the average mass strictly below -bias, passes over the model and score rows."""

    bias: float
    mass: float
    passes: int
    rows: int


@dataclasses.dataclass(frozen=True)
class AtLength:
    """b_auto of the first `length` tokens of all texts, to the step of the grid.

    `low` and `high` are the ends of its 95 % interval over texts; `least` and `most` the smallest
    and the largest b_auto of a single text.
    """

    length: int
    bias: float
    low: float
    high: float
    least: float
    most: float


@dataclasses.dataclass(frozen=True)
class Calibration:
    """b_auto at one length, and how it depends on length and text.

    Attributes:
      bias: the exact solution on all texts at `length`; `low` and `high` are its interval.
      mass: the average softmax mass strictly below -bias.
      length: tokens of each text.
      texts: number of texts.
      rows: score rows behind the average.
      passes: number of passes over the model.
      step: step of the grid that intervals and curve are read off.
      curve: points of b_auto, ascending by length.
      budget: share of the mass that was allowed; null where a file does not say.
      model_sha256: identity of the model (`ModelIdentity.text`); empty where not recorded, as is
        `dtype`, the dtype of its weights.
      text: digest of a text of the user; empty for the shipped ones.
      documents: number of texts that they are pieces of; 0 where each is a text of its own. Pieces
        of one text are not independent, and the interval over them is too narrow.
    """

    bias: float
    low: float
    high: float
    mass: float
    length: int
    texts: int
    rows: int
    passes: int
    step: float
    curve: tuple[AtLength, ...]
    budget: float | None = None
    model_sha256: str = ""
    dtype: str = ""
    text: str = ""
    documents: int = 0


def mass_below(
    scores_BNTS: jax.Array, thresholds_M: jax.Array, lengths: Sequence[int]
) -> MassBelow:
    """Reduces scores to the mass below each of the ascending `thresholds_M`, by text and length.

    `total_M` is `[B, C, M]` and `rows` `[B, C]`: entry c is over the first `lengths[c]` query rows.
    A key of score -inf is masked; a row with no key is not counted. It can be the record reducer
    of `attn.scores`: it holds a few arrays `[T, S]` and one `[T, M + 1]`, because it loops over
    texts and heads. Sums run over keys, then rows, then heads, which keeps each of them short.
    """
    B, N, T, S = scores_BNTS.shape
    M = thresholds_M.shape[0]
    prefix_CT = jnp.arange(T)[None, :] < jnp.asarray(lengths)[:, None]

    def of_one(scores_TS):
        below_TM = _below(scores_TS, thresholds_M)
        prefix = prefix_CT.astype(below_TM.dtype)
        return jnp.einsum("CT,TM->CM", prefix, below_TM, precision="highest")

    by_head = jax.lax.map(of_one, scores_BNTS.reshape(-1, T, S))
    some_BNT = (scores_BNTS != -jnp.inf).any(-1)
    rows_BC = (some_BNT[:, :, None, :] & prefix_CT[None, None]).sum((1, 3))
    return MassBelow(by_head.reshape(B, N, -1, M).sum(1), rows_BC)


def mass_below_by_head(scores_BNTS: jax.Array, thresholds_NM: jax.Array) -> MassBelow:
    """`mass_below` over all rows, with thresholds of each head: `[B, N, M]` and `[B, N]`."""
    shape_BNM = (*scores_BNTS.shape[:2], thresholds_NM.shape[1])
    thresholds_BNM = jnp.broadcast_to(thresholds_NM, shape_BNM)
    flat = tuple(x.reshape(-1, *x.shape[2:]) for x in (scores_BNTS, thresholds_BNM))
    total = jax.lax.map(lambda one: _below(*one).sum(0), flat)
    some_BNT = (scores_BNTS != -jnp.inf).any(-1)
    return MassBelow(total.reshape(shape_BNM), some_BNT.sum(-1))


def _below(scores_TS: jax.Array, thresholds_M: jax.Array) -> jax.Array:
    """The softmax mass of each row strictly below each threshold, `[T, M]`."""
    M = thresholds_M.shape[0]
    scores_TS = scores_TS.astype(jnp.promote_types(scores_TS.dtype, jnp.float32))
    weight_TS = attention.softmax(scores_TS)
    slot_TS = jnp.searchsorted(thresholds_M, scores_TS, side="right", method="scan_unrolled")
    # A NaN counts as below everything, so that `calibrate` sees it.
    slot_TS = jnp.where(jnp.isnan(scores_TS), 0, slot_TS)
    empty_TM = jnp.zeros((scores_TS.shape[0], M + 1), scores_TS.dtype)
    histogram_TM = jax.vmap(lambda h, slot, w: h.at[slot].add(w))(empty_TM, slot_TS, weight_TS)
    return histogram_TM.cumsum(-1)[:, :M]


class Bracket(NamedTuple):
    """Two thresholds with M(low) <= budget < M(high), M(low), and the rows behind it."""

    ends: tuple[float, float]
    mass: float
    rows: int


def calibrate(
    measure: Callable[[np.ndarray], MassBelow],
    *,
    budget: float = 0.05,
    num_thresholds: int = 256,
    bracket: Bracket | None = None,
) -> Solution:
    """The smallest bias under which the average row has at most `budget` of its mass below -bias.

    Args:
      measure: one pass over the calibration text. Takes ascending float32 thresholds `[M]`, always
        `num_thresholds` of them, so that a compiled pass is reused. Returns a `MassBelow` whose
        `total_M` may be `[..., M]` and `rows` `[...]`, for example one entry per layer: they are
        added up here in float64.
      budget: share of mass in [0, 1).
      bracket: an interval that contains the solution; all float32 values by default.

    Scores that are not zero but below the smallest normal float32 count as zero.

    Raises:
      UsageError: a budget outside [0, 1), or fewer than one threshold.
      BadInputError: no rows, or masses that are not finite.
    """
    if not 0 <= budget < 1:
        raise UsageError(f"budget: {budget} must be at least 0 and below 1")
    if num_thresholds < 1:
        raise UsageError(f"num_thresholds: {num_thresholds} must be at least 1")
    low, high, mass, rows = -_LAST - 1, _LAST + 1, 0.0, 0
    if bracket is not None:
        (low, high), mass, rows = _to_order(bracket.ends), bracket.mass, bracket.rows

    def pooled(thresholds: np.ndarray) -> MassBelow:
        measured = measure(thresholds)
        total = np.asarray(measured.total_M, np.float64)
        total = total.reshape(-1, total.shape[-1]).sum(0)
        return MassBelow(total, np.asarray(measured.rows).sum(dtype=np.int64))

    solved = _solve(pooled, (low, high, mass, rows), (), budget, num_thresholds)
    return Solution(float(solved.bias), float(solved.mass), solved.passes, int(solved.rows))


class Solutions(NamedTuple):
    """Biases, the average mass below each, the score rows behind it, and passes over the model."""

    bias: np.ndarray
    mass: np.ndarray
    rows: np.ndarray
    passes: int


def calibrate_each(
    measure: Callable[[np.ndarray], MassBelow],
    shape: tuple[int, ...],
    *,
    budget: float = 0.05,
    num_thresholds: int = 256,
) -> Solutions:
    """`calibrate` of many sets of rows at once, such as those of every head, each on its own.

    Args:
      measure: one pass over the calibration text. Takes ascending float32 thresholds `[*shape, M]`
        and returns masses `[*shape, M]` and numbers of rows of this shape.
      shape: shape of the sets.
      budget, num_thresholds: the arguments of `calibrate`.

    Raises:
      BadInputError: as `calibrate`, for any of the sets.
    """
    return _solve(measure, (-_LAST - 1, _LAST + 1, 0.0, 0), shape, budget, num_thresholds)


def _solve(
    measure: Callable[[np.ndarray], MassBelow],
    bracket: tuple[int, int, float, int],
    shape: tuple[int, ...],
    budget: float,
    num_thresholds: int,
) -> Solutions:
    """Narrows brackets (low, high, M(low), rows), in the order of `_from_order`, of this shape."""
    low, high = (np.full(shape, end, np.int64) for end in bracket[:2])
    mass, rows, passes = np.full(shape, bracket[2]), np.full(shape, bracket[3]), 0
    steps = np.arange(1, num_thresholds + 1, dtype=np.int64)
    while (high - low > 1).any():
        width = (high - low)[..., None]
        ceiling = -(-steps * width // (num_thresholds + 1))
        numbers = np.minimum(low[..., None] + ceiling, high[..., None])
        inside = numbers < high[..., None]
        measured = measure(_from_order(np.minimum(numbers, _LAST)))
        total, rows = np.asarray(measured.total_M, np.float64), np.asarray(measured.rows)
        _check(total, rows)
        average = total / rows[..., None]
        passes += 1
        count = (inside & (np.maximum.accumulate(average, -1) <= budget)).sum(-1)

        def at(values: np.ndarray, place: np.ndarray) -> np.ndarray:
            place = np.clip(place, 0, num_thresholds - 1)
            return np.take_along_axis(values, place[..., None], -1)[..., 0]

        high = np.where(count < inside.sum(-1), at(numbers, count), high)
        low = np.where(count > 0, at(numbers, count - 1), low)
        mass = np.where(count > 0, at(average, count - 1), mass)
    return Solutions(0.0 - _from_order(low).astype(np.float64), mass, rows, passes)


def _check(total: np.ndarray, rows: np.ndarray) -> None:
    if not rows.all():
        raise BadInputError("calibration: no row has an unmasked key; give a longer text")
    if not np.isfinite(total).all():
        raise BadInputError("calibration: the softmax mass is not finite; check the model's scores")


def calibrate_texts(
    measure: Callable[[np.ndarray], MassBelow],
    lengths: Sequence[int],
    at: int,
    *,
    budget: float = 0.05,
    num_thresholds: int = 512,
    resamples: int = 1000,
    seed: int = 0,
) -> Calibration:
    """b_auto of several texts at the length `at`, with its curve over `lengths` and its intervals.

    The interval is a percentile bootstrap over whole texts. With few texts it is too narrow, so
    the range over single texts is reported too.

    Args:
      measure: the function that `calibrate` takes, with `total_M` `[..., text, length, M]` and
        `rows` `[..., text, length]` as `mass_below` gives them.
      lengths: the lengths, ascending; `at` is among them.
      at: the length to solve b_auto for exactly.
      budget, num_thresholds: the arguments of `calibrate`.
      resamples, seed: number and seed of the bootstrap's resamples.

    Raises:
      BadInputError: no rows, or masses that are not finite.
    """

    def average(thresholds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        total_UCM, rows_UC = _by_text(measure(thresholds))
        return np.maximum.accumulate(total_UCM / rows_UC[..., None], axis=-1), rows_UC

    spread = np.linspace(-_LAST, _LAST, num_thresholds).astype(np.int64)
    coarse = _from_order(spread)
    mass_UCM, _ = average(coarse)
    inside = (mass_UCM <= budget).sum(-1)
    ends = coarse[max(inside.min() - 1, 0)], coarse[min(inside.max(), num_thresholds - 1)]
    grid = np.linspace(*ends, num_thresholds, dtype=np.float32)
    mass_UCM, rows_UC = average(grid)
    weight_UC = rows_UC / rows_UC.sum(0)
    # How often each text is drawn in each resample.
    texts = len(mass_UCM)
    drawn = np.random.default_rng(seed).multinomial(texts, np.full(texts, 1 / texts), resamples)
    curve = []
    for c, length in enumerate(lengths):
        share_RU = drawn * weight_UC[:, c]
        share_RU = share_RU / share_RU.sum(1, keepdims=True)
        pooled = _crossing(weight_UC[:, c] @ mass_UCM[:, c], grid, budget)
        low, high = np.quantile(_crossing(share_RU @ mass_UCM[:, c], grid, budget), (0.025, 0.975))
        single = _crossing(mass_UCM[:, c], grid, budget)
        # b_auto = -t, which swaps the ends.
        numbers = (pooled, high, low, single.max(), single.min())
        curve.append(AtLength(length, *(0.0 - float(t) for t in numbers)))
    place = list(lengths).index(at)
    pooled_M = weight_UC[:, place] @ mass_UCM[:, place]
    last = int((pooled_M <= budget).sum()) - 1
    rows = int(rows_UC[:, place].sum())
    bracket = None
    if 0 <= last < num_thresholds - 1:
        piece = float(grid[last]), float(grid[last + 1])
        bracket = Bracket(piece, float(pooled_M[last]), rows)

    def at_length(thresholds: np.ndarray) -> MassBelow:
        total_UCM, rows_UC = _by_text(measure(thresholds))
        return MassBelow(total_UCM[:, place], rows_UC[:, place])

    solution = calibrate(at_length, budget=budget, num_thresholds=num_thresholds, bracket=bracket)
    return Calibration(
        bias=solution.bias,
        low=curve[place].low,
        high=curve[place].high,
        mass=solution.mass,
        length=at,
        texts=texts,
        rows=rows,
        passes=2 + solution.passes,
        step=float(grid[-1] - grid[0]) / (num_thresholds - 1),
        curve=tuple(curve),
        budget=budget,
    )


def _by_text(measured: MassBelow) -> tuple[np.ndarray, np.ndarray]:
    """Sums over layers in float64: `[text, length, M]` and `[text, length]`."""
    total = np.asarray(measured.total_M, np.float64)
    rows = np.asarray(measured.rows).astype(np.int64)
    total, rows = total.reshape(-1, *total.shape[-3:]).sum(0), rows.reshape(-1, *rows.shape[-2:])
    rows = rows.sum(0)
    _check(total, rows)
    return total, rows


def _crossing(mass: np.ndarray, grid: np.ndarray, budget: float) -> np.ndarray:
    """Where each ascending row of `mass[..., M]` crosses the budget, linear between grid points."""
    last = np.clip((mass <= budget).sum(-1) - 1, 0, len(grid) - 2)
    low, high = (np.take_along_axis(mass, (last + i)[..., None], -1)[..., 0] for i in (0, 1))
    part = np.clip((budget - low) / np.where(high > low, high - low, 1), 0, 1)
    grid = grid.astype(np.float64)
    return grid[last] + part * (grid[last + 1] - grid[last])


def _to_order(values: Sequence[float]) -> tuple[int, ...]:
    """The place of float32 values in the order of `_from_order`; subnormal numbers count as 0."""
    array = np.asarray(values, np.float32)
    bits = np.abs(array).view(np.int32).astype(np.int64)
    size = np.where(bits < _TINY_BITS, 0, bits - (_TINY_BITS - 1))
    return tuple(int(n) for n in np.where(array < 0, -size, size))


def _from_order(numbers: np.ndarray) -> np.ndarray:
    """The float32 at each place in the order of zero (0) and the normal numbers (+-1, +-2, ...)."""
    size = np.abs(numbers)
    bits = np.where(size == 0, 0, size + (_TINY_BITS - 1)).astype(np.int32)
    return np.copysign(bits.view(np.float32), np.where(numbers < 0, -1, 1).astype(np.float32))


def exact_bias(scores: np.ndarray, *, budget: float = 0.05) -> float:
    """The same rule for scores `[..., S]` that fit in memory: sort all keys, in float64."""
    z = np.asarray(scores, np.float64).reshape(-1, scores.shape[-1])
    z = z[(z > -np.inf).any(-1)]
    weight = np.exp(z - z.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    values, place = np.unique(z[z > -np.inf], return_inverse=True)
    below = np.bincount(place, weight[z > -np.inf]).cumsum() / len(z)
    # The first value with more than the budget at or below it is the last with less below it.
    return 0.0 - float(values[np.argmax(below > budget)])
