"""Biases with which the gates of a dense model start open.

With bias 0 a gate is open where its score is above 0, which the scores of a pretrained model are
not made for: more than half of the edges are closed before the first update, and the model is
broken. A share of open edges is not enough: a head may give most of its weight to few edges, and
the first token, which sees itself alone, often has a low score; where its edge is closed, all later
tokens read a token that the model does not know. So two shares count, of the edges and of the
weight of the softmax that passes the gates at each position.

Most edges of a pretrained model carry next to no weight. The share of the weight alone leaves them
closed from the start (`results/posttrain/stories15m` has what that costs a Llama of 15 million
parameters).
"""

import functools
from typing import Any, Literal

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import BadInputError, UsageError
from lm_jax.model.attention import PerLayer, softmax
from lm_jax.model.config import DecoderConfig
from lm_jax.model.decoder import forward
from lm_jax.model.precision import exact_jit
from lm_jax.parallel import sharding
from lm_jax.parallel.kernels import under_mesh
from lm_jax.train.objective import LMBatch

# Biases are looked for between these, to 2^-11: scores of pretrained models are within hundreds,
# also without their scale.
_WIDEST = 2.0**12
_HALVINGS = 24

# What has the share that is open: edges and, at each position, attention weight; or weight alone.
Opened = Literal["edges", "weight"]


def open_biases(
    cfg: DecoderConfig,
    params: Any,
    batch: LMBatch,
    share: float,
    mesh: jax.sharding.Mesh,
    *,
    raw_gate: bool = False,
    opened: Opened = "edges",
) -> np.ndarray:
    """The least bias of each head with which its gates are open, float32 `[L, N]`.

    They are open if the expectation over sampled gates is at least `share`, both of the share of
    open edges among all visible pairs, which "weight" leaves out, and at every position of the
    share of the softmax weight that open edges have, a mean over the windows. The bias is found by
    bisection in a forward pass of the dense model.

    Args:
      cfg: the model.
      params: weights of the model.
      batch: the text; windows are at the beginning of their rows.
      share: share that is open, above 0 and below 1.
      mesh: the devices.
      raw_gate: whether gates read q.k without its scale (`attend.gated`).
      opened: the quantities that have the share: "edges" with the weight, or "weight" alone.

    Raises:
      UsageError: the share is out of range, or a gate cannot read q.k because scores are capped.
      BadInputError: the batch holds no token.
    """
    if not 0 < share < 1:
        raise UsageError(f"open_biases: share = {share} must be above 0 and below 1")
    if raw_gate and cfg.score_softcap is not None:
        raise UsageError(
            "open_biases: a raw gate needs q.k, and this model's scores are capped "
            "(score_softcap); set raw_gate to False"
        )
    if not np.any(sharding.fetch(batch.input_mask_BT)):
        raise BadInputError("the text to open gates on has no token; give longer documents")
    run = exact_jit(
        under_mesh(functools.partial(_biases, cfg, share, raw_gate, opened), mesh),
        in_shardings=(None, sharding.batch_sharding(mesh)),
        out_shardings=sharding.replicated(mesh),
    )
    return np.asarray(run(params, batch))


def _biases(
    cfg: DecoderConfig,
    share: float,
    raw_gate: bool,
    opened: Opened,
    params: Any,
    batch: LMBatch,
) -> jax.Array:
    L = cfg.num_layers
    valid_LBT = jnp.broadcast_to(batch.input_mask_BT, (L, *batch.input_mask_BT.shape))
    find = functools.partial(_attend, share, cfg.scale if raw_gate else 1.0, opened)
    output = forward(
        params,
        batch.input_BT,
        cfg,
        attend=PerLayer(find, {"valid_BT": valid_LBT}),
        valid_BT=batch.input_mask_BT,
    )
    return output.aux["bias_N"]


def _attend(
    share: float,
    scale: float,
    opened: Opened,
    scores_BNTS: jax.Array,
    data: dict[str, jax.Array],
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Dense attention of a layer, and the biases that open its gates."""
    pattern_BNTS = softmax(scores_BNTS)
    valid_B1T1 = data["valid_BT"][:, None, :, None]
    visible_BNTS = (scores_BNTS > -jnp.inf) & valid_B1T1
    score_BNTS = jnp.where(visible_BNTS, scores_BNTS / scale, 0.0)
    weight_BNTS = jnp.where(visible_BNTS, pattern_BNTS, 0.0)
    pairs_N = visible_BNTS.sum((0, 2, 3), dtype=jnp.float32)
    windows_1T = data["valid_BT"].sum(0, dtype=jnp.float32)[None]
    has_windows_1T, windows_1T = windows_1T > 0, jnp.maximum(windows_1T, 1.0)

    def open_N(bias_N: jax.Array) -> jax.Array:
        gate_BNTS = jax.nn.sigmoid(score_BNTS + bias_N[None, :, None, None])
        edges_N = jnp.where(visible_BNTS, gate_BNTS, 0.0).sum((0, 2, 3)) / pairs_N
        passed_NT = (weight_BNTS * gate_BNTS).sum((0, 3))
        passed_NT = jnp.where(has_windows_1T, passed_NT / windows_1T, 1.0)
        weight_N = passed_NT.min(1)
        return weight_N if opened == "weight" else jnp.minimum(edges_N, weight_N)

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low_N, high_N = ends
        middle_N = (low_N + high_N) / 2
        enough_N = open_N(middle_N) >= share
        return jnp.where(enough_N, low_N, middle_N), jnp.where(enough_N, middle_N, high_N)

    ends = jnp.full_like(pairs_N, -_WIDEST), jnp.full_like(pairs_N, _WIDEST)
    return pattern_BNTS, {"bias_N": lax.fori_loop(0, _HALVINGS, halve, ends)[1]}
