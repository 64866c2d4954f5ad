"""Numbers of places that were patched by layer and position, from the rows of one piece."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from lm_jax.statistics import cluster_interval
from sparse_jax.circuits.place_patching import OF_HEADS
from sparse_jax.studies.circuits.measurements import array
from sparse_jax.studies.circuits.results import PlaceEffect, PlaceEffects
from sparse_jax.studies.circuits.settings import CircuitConfig

# Effects of a place that a page names.
NAMED = 5


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
        effects, _ = array(table, axes, quantity="place", component=place)
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
        yield PlaceEffects(place, config.direction, rows, tuple(strongest))
