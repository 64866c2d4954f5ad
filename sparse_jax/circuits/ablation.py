"""Ablations of attention: what takes the place of a head or token edge that a circuit leaves out.

    zero            nothing
    mean            the mean over examples and unpadded tokens, one value a head
    aligned_mean    the mean over examples at the same position
    resample        the head's output on another prompt of the task, at the same position or, beyond
                    the end of a shorter one, at its last token
    counterfactual  its value on the corrupt prompt of the pair

The means and resamples are of clean prompts. The paper takes zero or mean, whichever yields the
smaller circuit (section 4.2); here each is reported under its name.

What a token edge contributes is its value contribution (`patching`): nothing (`zero`), its mean
over examples and all visible edges of the head (`mean`), or over the examples with an edge at the
same query and key (`aligned_mean`), or that of the corrupt run (`counterfactual`). It has no
`resample`: beyond the end of a shorter prompt no edge has the same query and key.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import UsageError, nearest
from lm_jax.model.edits import Add, Replace, Scale
from sparse_jax.circuits.patching import Activations

Ablation = Literal["zero", "mean", "aligned_mean", "resample", "counterfactual"]
EDGE_ABLATIONS = ("zero", "mean", "aligned_mean", "counterfactual")


@struct.dataclass
class SharedContributions:
    """Value contributions that edges have in all prompts, `[L, N, T, S, H]`; T and S may be 1."""

    value_LNTSH: jax.Array

    def contributions_LBTNH(self, mask_LBNTS: jax.Array) -> jax.Array:
        """Sums of contributions over the edges in a mask, by head and query."""
        L, _, N, T, S = mask_LBNTS.shape
        value = jnp.broadcast_to(self.value_LNTSH, (L, N, T, S, self.value_LNTSH.shape[-1]))
        return jnp.einsum("LBNTS,LNTSH->LBTNH", mask_LBNTS.astype(value.dtype), value)


def head_values(
    ablation: str,
    clean: Activations,
    corrupt: Activations,
    valid_BT: jax.Array,
    *,
    key: jax.Array | None = None,
    prompt_B: np.ndarray | None = None,
) -> jax.Array:
    """What ablated heads output, `[L, B, T, N, H]` or with axes of length 1.

    It has the arguments and errors of `ablated_values`.
    """
    return ablated_values(
        ablation, clean.z_LBTNH, corrupt.z_LBTNH, valid_BT, key=key, prompt_B=prompt_B
    )


def ablated_values(
    ablation: str,
    clean_XBT: jax.Array,
    corrupt_XBT: jax.Array,
    valid_BT: jax.Array,
    *,
    key: jax.Array | None = None,
    prompt_B: np.ndarray | None = None,
) -> jax.Array:
    """Values of ablated components, in the shape of `clean_XBT` or with axes of length 1.

    Args:
      ablation: the ablation, one of those at the head of this file.
      clean_XBT, corrupt_XBT: values of components X on both prompts of each pair, with any further
        axes.
      valid_BT: false where a token is padding, which no mean counts.
      key: random key that draws the other prompt of "resample"; no prompt is its own.
      prompt_B: number of each pair's clean prompt, from 0, for "resample"; None where no two pairs
        share one.

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
    prompt_B = np.arange(clean_XBT.shape[1]) if prompt_B is None else prompt_B
    first_P = np.unique(prompt_B, return_index=True)[1]
    if key is None or len(first_P) < 2:
        raise UsageError("ablation 'resample' needs a random key and two prompts or more")
    # A cycle through the prompts in random order, each as in its first pair.
    order_P = jax.random.permutation(key, len(first_P))
    next_P = jnp.zeros(len(first_P), order_P.dtype).at[order_P].set(jnp.roll(order_P, 1))
    other_B = jnp.asarray(first_P)[next_P[prompt_B]]
    last_B = valid_BT.sum(1) - 1
    place_BT = jnp.minimum(jnp.arange(valid_BT.shape[1])[None], last_B[other_B][:, None])
    return clean_XBT[:, other_B[:, None], place_BT]


def keep_heads(keep_LBN: jax.Array, values_LBTNH: jax.Array) -> Mapping[str, Any]:
    """Edits that leave some heads as they are and give the others ablated values.

    Args:
      keep_LBN: true for the heads of the circuit of each prompt.
      values_LBTNH: the ablated values, from `head_values`.
    """
    return {"attn.z": Replace(values_LBTNH, ~keep_LBN[:, :, None, :, None])}


def edge_values(
    ablation: str, clean: Activations, corrupt: Activations, visible_LBNTS: jax.Array
) -> Activations | SharedContributions:
    """What ablated token edges contribute.

    Args:
      ablation: one of `EDGE_ABLATIONS`.
      clean, corrupt: activations of both prompts of each pair.
      visible_LBNTS: the edges that there are, which means count (`discover.visible_edges`).

    Raises:
      UsageError: the ablation is not one of `EDGE_ABLATIONS`.
    """
    L, B, S, K, H = clean.v_LBSKH.shape
    N, T = clean.pattern_LBNTS.shape[2:4]
    if ablation == "counterfactual":
        return corrupt
    if ablation == "zero":
        return SharedContributions(jnp.zeros((L, N, 1, 1, H)))
    if ablation == "mean":
        total_LNH = clean.contributions_LBTNH(visible_LBNTS).sum((1, 2))
        mean_LNH = total_LNH / visible_LBNTS.sum((1, 3, 4))[..., None]
        return SharedContributions(mean_LNH[:, :, None, None])
    if ablation != "aligned_mean":
        raise UsageError(
            f"ablation {ablation!r} is not defined for token edges; choose "
            f"{' or '.join(EDGE_ABLATIONS)}"
        )
    weights = (clean.pattern_LBNTS * visible_LBNTS).reshape(L, B, K, N // K, T, S)
    total = jnp.einsum("LBKGTS,LBSKH->LKGTSH", weights, clean.v_LBSKH).reshape(L, N, T, S, H)
    return SharedContributions(total / jnp.maximum(visible_LBNTS.sum(1), 1)[..., None])


def keep_edges(
    keep_LBNTS: jax.Array, values: Activations | SharedContributions, visible_LBNTS: jax.Array
) -> Mapping[str, Any]:
    """Edits that leave some token edges as they are and ablate the others.

    Args:
      keep_LBNTS: true for the edges of the circuit of each prompt.
      values: the ablated contributions, from `edge_values`.
      visible_LBNTS: the edges that there are.
    """
    return {
        "attn.pattern": Scale(keep_LBNTS.astype(jnp.float32)),
        "attn.z": Add(values.contributions_LBTNH(visible_LBNTS & ~keep_LBNTS)),
    }
