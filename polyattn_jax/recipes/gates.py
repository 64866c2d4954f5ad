"""Gates of a sparse model around any attend of this package.

A model that was post-trained to sparse attention is audited with its gates: whatever map takes the
place of softmax, the weight of a closed edge is then zero. What is reported of rows (S, the change
of a head's output, features of patterns, dead rows) is of the map itself, as if all edges were
open, though of the scores that the model has with its gates.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lm_jax.errors import UsageError
from lm_jax.model import decoder
from lm_jax.model.attention import (
    Fused,
    LayerAttend,
    PerLayer,
    as_pytree,
    fused,
    kernel_of,
    register_fused,
    softmax,
)
from lm_jax.model.config import DecoderConfig
from lm_jax.model.decoder import Output
from lm_jax.weights.gates import StoredGates
from polyattn_jax.recipes.input_maps import with_inputs
from polyattn_jax.recipes.probe import DENSE
from polyattn_jax.recipes.substitute import GlobalRowMap, PerHeadRowMap, bound_to, on_scores

# Where the parameters of a model hold its gates.
GATES = "gates"


@dataclasses.dataclass(frozen=True)
class Gated:
    """An attend whose closed edges have no weight; `data` of one layer holds it and `bias_N`.

    Attributes:
      factor: what turns a score into that of its gate: 1, or of a raw gate one over the scale.
      renormalise: whether the weights of the open edges are divided by their share of a row, by
        their sizes where they have both signs; so they keep its mass.
    """

    factor: float
    renormalise: bool

    def __call__(
        self, scores_BNTS: jax.Array, data: dict[str, Any]
    ) -> tuple[jax.Array, dict[str, Any]]:
        result = data["attend"](scores_BNTS)
        pattern_BNTS, aux = result if isinstance(result, tuple) else (result, {})
        visible_BNTS = scores_BNTS > -jnp.inf
        own_BNTS = jnp.where(visible_BNTS, scores_BNTS, 0.0) * self.factor
        open_BNTS = visible_BNTS & (own_BNTS + data["bias_N"][None, :, None, None] > 0)
        opened_BNTS = jnp.where(open_BNTS, pattern_BNTS, 0.0)
        if self.renormalise:
            whole_BNT1, kept_BNT1 = (
                jnp.abs(each).sum(-1, keepdims=True) for each in (pattern_BNTS, opened_BNTS)
            )
            opened_BNTS *= whole_BNT1 / jnp.where(kept_BNT1 == 0, 1.0, kept_BNT1)
        return opened_BNTS, aux


def gated(attend: Any, params: dict[str, Any], cfg: DecoderConfig) -> Any:
    """The attend with the gates that the parameters hold; the attend itself without any.

    Args:
      attend: an attend on scores, or one computed as `DENSE`.
      params: parameters of a model; `GATES` may hold a `StoredGates`.
      cfg: the model.

    Raises:
      UsageError: a raw gate of a model whose scores are capped, which hide q.k.
    """
    gates: StoredGates | None = params.get(GATES)
    if gates is None:
        return attend
    if gates.raw_gate and cfg.score_softcap is not None:
        raise UsageError(
            "the model has raw gates, which read q.k, and capped scores; audit it without its gates"
        )
    dense = isinstance(attend, Fused)
    inner = attend.attend if dense else attend
    L = cfg.num_layers
    if isinstance(inner, PerLayer):
        inner = LayerAttend(inner.fn, inner.data)
    else:
        inner = jax.tree.map(lambda x: jnp.broadcast_to(x, (L, *jnp.shape(x))), as_pytree(inner))
    fn: Any = Gated(1.0 / cfg.scale if gates.raw_gate else 1.0, gates.renormalise)
    whole = PerLayer(fn, {"attend": inner, "bias_N": jnp.asarray(gates.bias_LN)})
    return fused(whole, DENSE) if dense else whole


def forward(
    params: dict[str, Any],
    tokens_BT: jax.Array,
    cfg: DecoderConfig,
    *,
    attend: Any = softmax,
    **options: Any,
) -> Output:
    """`lm_jax.forward` with the gates that the parameters hold.

    Args:
      params, tokens_BT, cfg, attend: arguments of `gated` and of `lm_jax.forward`.
      **options: other arguments of `lm_jax.forward`.
    """
    attend = gated(attend, params, cfg)
    own = {name: each for name, each in params.items() if name != GATES}
    return decoder.forward(own, tokens_BT, cfg, attend=attend, **options)


def _dense(attend: LayerAttend, q_BTNH, k_BSKH, v_BSKH, *, visibility, scale, cap):
    inner, rest = attend.data["attend"], (q_BTNH, k_BSKH, v_BSKH)
    around = {"visibility": visibility, "scale": scale, "cap": cap}
    if isinstance(inner, LayerAttend) and isinstance(inner.fn, PerHeadRowMap):
        own = LayerAttend(bound_to(inner.fn, q_BTNH, k_BSKH, scale), inner.data)
        bound = LayerAttend(attend.fn, attend.data | {"attend": own})
        return on_scores(bound, *rest, visibility, scale, cap)
    if isinstance(inner, GlobalRowMap):
        own = dataclasses.replace(inner, map=with_inputs(inner.map, q_BTNH, k_BSKH, scale))
        bound = LayerAttend(attend.fn, attend.data | {"attend": own})
        return on_scores(bound, *rest, visibility, scale, cap)
    # Any other reports on softmax, which it leaves in place.
    _, aux = kernel_of(inner, DENSE)(inner, *rest, **around)
    plain = LayerAttend(attend.fn, attend.data | {"attend": as_pytree(softmax)})
    z_BTNH, _ = on_scores(plain, *rest, visibility, scale, cap)
    return z_BTNH, aux


register_fused(Gated, DENSE, _dense)
