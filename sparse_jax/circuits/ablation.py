"""Ablations of attention: what takes the place of a head or token edge that a circuit leaves out.

    zero            nothing
    mean            the mean over examples and unpadded tokens, one value a head
    aligned_mean    the mean over examples at the same position
    resample        the head's output on another prompt of the task, at the same position or, beyond
                    the end of a shorter one, at its last token
    counterfactual  its value on the corrupt prompt of the pair

The means and resamples are of clean prompts. The paper takes zero or mean, whichever yields the
smaller circuit (section 4.2); here each is reported under its name. An edge is closed by `zero`,
or has the value contribution of the corrupt run (`counterfactual`).
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from lm_jax.errors import UsageError, nearest
from lm_jax.model.edits import Add, Replace, Scale
from sparse_jax.circuits.patching import Activations

Ablation = Literal["zero", "mean", "aligned_mean", "resample", "counterfactual"]
EDGE_ABLATIONS = ("zero", "counterfactual")


def head_values(
    ablation: str,
    clean: Activations,
    corrupt: Activations,
    valid_BT: jax.Array,
    *,
    key: jax.Array | None = None,
) -> jax.Array:
    """What ablated heads output, `[L, B, T, N, H]` or with axes of length 1.

    Arguments and errors are those of `ablated_values`.
    """
    return ablated_values(ablation, clean.z_LBTNH, corrupt.z_LBTNH, valid_BT, key=key)


def ablated_values(
    ablation: str,
    clean_XBT: jax.Array,
    corrupt_XBT: jax.Array,
    valid_BT: jax.Array,
    *,
    key: jax.Array | None = None,
) -> jax.Array:
    """Values of ablated components, in the shape of `clean_XBT` or with axes of length 1.

    Args:
      ablation: see the head of this file.
      clean_XBT, corrupt_XBT: values of components X on both prompts of each pair, with any further
        axes.
      valid_BT: false where a token is padding, which no mean counts.
      key: draws the other prompt of "resample"; no prompt is its own.

    Raises:
      UsageError: no such ablation, a key that is missing, or one prompt alone to resample.
    """
    valid_1BT = valid_BT.reshape(1, *valid_BT.shape, *[1] * (clean_XBT.ndim - 3))
    total_XBT = jnp.where(valid_1BT, clean_XBT, 0.0)
    if ablation == "zero":
        return jnp.zeros_like(clean_XBT[:, :1, :1])
    if ablation == "mean":
        return total_XBT.sum((1, 2), keepdims=True) / valid_BT.sum()
    if ablation == "aligned_mean":
        return total_XBT.sum(1, keepdims=True) / jnp.maximum(valid_1BT.sum(1, keepdims=True), 1)
    if ablation == "counterfactual":
        return corrupt_XBT
    if ablation != "resample":
        raise UsageError(
            f"there is no ablation {ablation!r}{nearest(ablation, get_args(Ablation))}"
        )
    B = clean_XBT.shape[1]
    if key is None or B < 2:
        raise UsageError("ablation 'resample' needs a random key and two prompts or more")
    # A cycle through the prompts in random order.
    order_B = jax.random.permutation(key, B)
    other_B = jnp.zeros(B, order_B.dtype).at[order_B].set(jnp.roll(order_B, 1))
    last_B = valid_BT.sum(1) - 1
    place_BT = jnp.minimum(jnp.arange(valid_BT.shape[1])[None], last_B[other_B][:, None])
    return clean_XBT[:, other_B[:, None], place_BT]


def keep_heads(keep_LBN: jax.Array, values_LBTNH: jax.Array) -> Mapping[str, Any]:
    """Edits that leave some heads as they are and give the others ablated values.

    Args:
      keep_LBN: true for the heads of the circuit of each prompt.
      values_LBTNH: as `head_values` gives them.
    """
    return {"attn.z": Replace(values_LBTNH, ~keep_LBN[:, :, None, :, None])}


def keep_edges(keep_LBNTS: jax.Array, ablation: str, corrupt: Activations) -> Mapping[str, Any]:
    """Edits that leave some token edges as they are and ablate the others.

    Raises:
      UsageError: the ablation is none of `EDGE_ABLATIONS`.
    """
    if ablation not in EDGE_ABLATIONS:
        raise UsageError(
            f"ablation {ablation!r} is not defined for token edges; choose "
            f"{' or '.join(EDGE_ABLATIONS)}"
        )
    edits: dict[str, Any] = {"attn.pattern": Scale(keep_LBNTS.astype(jnp.float32))}
    if ablation == "counterfactual":
        edits["attn.z"] = Add(corrupt.contributions_LBTNH(~keep_LBNTS))
    return edits
