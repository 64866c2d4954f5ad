"""Numbers of places that were patched by layer and position, from the rows of one piece."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from lm_jax.statistics import cluster_interval
from sparse_jax.circuits.agreement import ROUNDING, rank_correlation
from sparse_jax.circuits.place_patching import OF_HEADS
from sparse_jax.studies.circuits.measurements import array, select
from sparse_jax.studies.circuits.results import PlaceAgreement, PlaceEffect, PlaceEffects
from sparse_jax.studies.circuits.settings import CircuitConfig

# Effects of a place that a page names.
NAMED = 5
# Estimates of effects, in the order in which they are compared with exact patching.
METHODS = ("atp", "atp_star", "graddrop")


def places(config: CircuitConfig, table: pa.Table, prompt_B: np.ndarray) -> Iterator[PlaceEffects]:
    """Mean effects of every place of the settings, and the largest with their intervals.

    Args:
      config: settings of the study.
      table: rows of one model on one task.
      prompt_B: number of each pair's clean prompt, from 0.
    """
    for place in config.patch:
        heads = ["head"] * (place in OF_HEADS)
        axes = ["layer", *heads, "query", "prompt"]
        own = select(table, quantity="place", component=place)
        effects, _ = array(own, axes, method="exact")
        effect_LNTB = effects if heads else effects[:, None]
        mean_LNT = effect_LNTB.mean(-1)
        order = np.argsort(-np.abs(mean_LNT), axis=None, kind="stable")[:NAMED]
        strongest = []
        for layer, head, position in np.stack(np.unravel_index(order, mean_LNT.shape), 1).tolist():
            effect = cluster_interval(
                effect_LNTB[layer, head, position],
                prompt_B,
                resamples=config.resamples,
                seed=config.seed,
            )
            strongest.append(PlaceEffect(layer, head if heads else None, position, effect))
        largest_L1T = np.abs(mean_LNT).argmax(1)[:, None]
        mean_LT = np.take_along_axis(mean_LNT, largest_L1T, 1)[:, 0]
        rows = tuple(map(tuple, mean_LT.tolist()))
        found = tuple(_agreements(own, axes, effect_LNTB))
        yield PlaceEffects(place, config.direction, rows, tuple(strongest), found)


def _agreements(
    table: pa.Table, axes: list[str], effect_LNTB: np.ndarray
) -> Iterator[PlaceAgreement]:
    """How every estimate in the rows of a place agrees with its exact effects."""
    some_T = effect_LNTB.any((0, 1, 3))
    if not some_T.any():
        return
    # Before the first token in which prompts differ, everything is 0.
    first = int(np.argmax(some_T))
    exact_X = _sizes(effect_LNTB, first)
    for method in METHODS:
        own = select(table, method=method)
        if not len(own):
            continue
        estimates, _ = array(own, axes)
        estimate_X = _sizes(estimates.reshape(effect_LNTB.shape), first)
        # With all that are ranked alike: half of the places or more may have an estimate of 0.
        lower_X = estimate_X <= np.quantile(estimate_X, 0.5, method="lower")
        yield PlaceAgreement(
            method=method,
            compared=len(exact_X),
            spearman=rank_correlation(estimate_X, exact_X),
            lower=float(lower_X.mean()),
            missed=float(exact_X[lower_X].max() / exact_X.max()),
        )


def _sizes(effect_LNTB: np.ndarray, first: int) -> np.ndarray:
    """Mean absolute effects `[X]` of all places from a position on, without rounding."""
    size_X = np.abs(effect_LNTB[:, :, first:]).mean(-1).ravel()
    return np.where(size_X <= ROUNDING * size_X.max(), 0.0, size_X)
