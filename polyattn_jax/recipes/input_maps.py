"""Maps that read queries and keys, where the others are functions of scores.

They are the feature maps and the gated delta rule. Whatever runs a map asks here whether it is one
of them, and for its weights as a function of scores.
"""

from collections.abc import Mapping
import functools
from typing import Any

import jax

from iaj_kernels.attention.rows import softmax
from polyattn_jax.recipes.delta_maps import GatedDelta
from polyattn_jax.recipes.feature_maps import FeatureMap

InputMap = FeatureMap | GatedDelta


def with_inputs(
    row_map: Any,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    scale: float,
    matrices: Mapping[str, jax.Array] | None = None,
) -> Any:
    """A row map as it is, or an `InputMap` as a function `(scores, bias) -> weights` of its rows.

    The function reads of the scores which keys are masked and, inside the window of a feature map,
    the scores themselves. Feature maps read no bias.

    Args:
      row_map: any map.
      q_BTNH, k_BSKH: queries and keys as scored.
      scale: factor of the scores.
      matrices: W of Hedgehog (`FeatureMap.scores`).
    """
    if isinstance(row_map, GatedDelta):
        return functools.partial(row_map.weights, q_BTNH, k_BSKH)
    if not isinstance(row_map, FeatureMap):
        return row_map

    def weights(scores_BNTS: jax.Array, bias: Any = 0.0) -> jax.Array:
        del bias
        return softmax(row_map.log_weights(q_BTNH, k_BSKH, scale, scores_BNTS, matrices))

    return weights
