"""Biases with which the gates of a dense model start open.

With bias 0 a gate is open where its score is above 0, which scores of a pretrained model are not
made for: more than half of the edges are closed before the first update, and the model is broken.
A bias per head that opens a share of its edges leaves the model as it is.
"""

from collections.abc import Iterable
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import BadInputError, UsageError
from lm_jax.model.config import DecoderConfig
from lm_jax.model.decoder import forward
from lm_jax.model.precision import exact_jit
from lm_jax.parallel import sharding
from lm_jax.parallel.kernels import under_mesh
from lm_jax.train.objective import LMBatch
from sparse_jax.gates.attend import by_kernels, gated

# Biases are looked for between these, to 2^-11: scores of pretrained models are within hundreds,
# also without their scale.
_WIDEST = 2.0**12
_HALVINGS = 24


def open_biases(
    cfg: DecoderConfig,
    params: Any,
    batches: Iterable[LMBatch],
    share: float,
    mesh: jax.sharding.Mesh,
    *,
    raw_gate: bool = False,
) -> np.ndarray:
    """The least bias of each head that opens the share of its edges, float32 `[L, N]`.

    The share is the mean of sigma(e) over visible pairs, the expectation of sampled gates; by rule
    more are open. It is found by bisection. All gates are open meanwhile, so that every layer reads
    what it reads in the dense model.

    Args:
      cfg: the model.
      params: its weights.
      batches: the text; its visible pairs count alike.
      share: share of open edges, above 0 and below 1.
      mesh: the devices.
      raw_gate: whether gates read q.k without its scale (`attend.gated`).

    Raises:
      UsageError: the share is out of range.
      BadInputError: the batches hold no token.
    """
    if not 0 < share < 1:
        raise UsageError(f"open_biases: share = {share} must be above 0 and below 1")
    run = exact_jit(
        under_mesh(functools.partial(_edges, cfg, raw_gate), mesh),
        in_shardings=(None, None, sharding.batch_sharding(mesh)),
        out_shardings=sharding.replicated(mesh),
    )
    given = list(batches)

    def share_LN(bias_LN: np.ndarray) -> np.ndarray:
        counted = [run(params, bias_LN.astype(np.float32), batch) for batch in given]
        expected_LN, pairs_L = (sum(map(np.float64, each)) for each in zip(*counted, strict=True))
        if not np.all(pairs_L):
            raise BadInputError("the text to open gates on has no token; give longer documents")
        return expected_LN / pairs_L[:, None]

    low_LN = np.full((cfg.num_layers, cfg.num_heads), -_WIDEST)
    high_LN = -low_LN
    for _ in range(_HALVINGS):
        middle_LN = (low_LN + high_LN) / 2
        enough_LN = share_LN(middle_LN) >= share
        high_LN = np.where(enough_LN, middle_LN, high_LN)
        low_LN = np.where(enough_LN, low_LN, middle_LN)
    return high_LN.astype(np.float32)


def _edges(
    cfg: DecoderConfig, raw_gate: bool, params: Any, bias_LN: jax.Array, batch: LMBatch
) -> tuple[jax.Array, jax.Array]:
    """Expected open edges `[L, N]` and visible pairs of one head `[L]`, with all gates open."""
    attend = gated(cfg, mode="open", bias=bias_LN, valid_BT=batch.input_mask_BT, raw_gate=raw_gate)
    output = forward(
        params,
        batch.input_BT,
        cfg,
        attend=by_kernels(attend),
        valid_BT=batch.input_mask_BT,
    )
    pairs_LB = output.aux["pairs_B"].astype(jnp.float32)
    return output.aux["expected_edges_BN"].sum(1), pairs_LB.sum(1)
