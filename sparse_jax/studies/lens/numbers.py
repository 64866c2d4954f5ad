"""Numbers of the lens study, from its rows and the lens."""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from lm_jax.inspect.jacobian_lens import JacobianLens
from sparse_jax.studies.lens.results import LENSES, LayerResult


def layers(table: pa.Table, lens: JacobianLens) -> tuple[LayerResult, ...]:
    """The results of every layer.

    Args:
      table: rows of `results.COMPARISONS`.
      lens: the lens that they are of.
    """
    sums: dict[tuple[int, str], np.ndarray] = {}
    for row in table.to_pylist():
        key = row["layer"], row["lens"]
        values = np.array([row["tokens"], row["divergence"], row["agreeing"]], np.float64)
        sums[key] = sums.get(key, np.zeros(3)) + values
    return tuple(
        LayerResult(
            layer=layer,
            divergence=_over(sums, layer, 1),
            agreeing=_over(sums, layer, 2),
            spread=_spread(lens, layer),
            change=_change(lens, layer),
        )
        for layer in range(lens.layers)
    )


def tokens(table: pa.Table) -> int:
    """The number of tokens that were compared."""
    first = (row for row in table.to_pylist() if (row["layer"], row["lens"]) == (0, LENSES[0]))
    return sum(row["tokens"] for row in first)


def first_layer(results: tuple[LayerResult, ...], lens: str, share: float) -> int | None:
    """The first layer from which on a lens agrees with the model at this share of tokens."""
    good = [each.agreeing[lens] >= share for each in results]
    if not good[-1]:
        return None
    return results[max((i + 1 for i, one in enumerate(good) if not one), default=0)].layer


def _over(sums: Mapping[tuple[int, str], np.ndarray], layer: int, place: int) -> dict[str, float]:
    return {lens: float(sums[layer, lens][place] / sums[layer, lens][0]) for lens in LENSES}


def _spread(lens: JacobianLens, layer: int) -> float | None:
    if layer == lens.layers - 1:
        return 0.0
    spread = float(lens.spread_S[layer])
    return None if np.isnan(spread) else spread


def _change(lens: JacobianLens, layer: int) -> float:
    if layer == lens.layers - 1:
        return 0.0
    matrix_DD = lens.matrix_SDD[layer].astype(np.float64)
    return float(np.linalg.norm(matrix_DD - np.eye(len(matrix_DD))) / np.linalg.norm(matrix_DD))
