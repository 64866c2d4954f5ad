"""Gradient rules: local derivatives of one backward pass that make attributions more faithful.

Attribution patching multiplies a change of activation with a gradient. Where the model is far from
linear over that change, another local derivative estimates the effect better:

    frozen_norms          the divisor of every norm is a constant
    frozen_patterns       attention weights are constants, so queries and keys get no gradient
    half_products         a product of two activations gives each factor half of its gradient: q.k,
                          pattern times values, gate times up. With both factors changing from zero
                          the halves sum to the change. Under frozen patterns the values are the
                          only factor that changes, and have their whole gradient.
    linear_activations    the MLP's activation function f has the derivative f(x) / x: x times a
                          constant, so that its change from zero is estimated exactly
    softmax_temperature   the softmax's Jacobian is that at this temperature, so that saturated
                          weights pass gradients on

Only derivatives differ; every value of the forward pass is the same. Names in `RULES`: `exact`;
`frozen`, norms and attention alone; `half`, norms and products; `relp`, all rules of RelP (Jafari
et al. 2025), for norms, attention, products and activations, under which a model without biases is
linear in its embeddings: embedding times gradient sums to the logits; `gim`, all of Edin et al.
2025, where q and k get a quarter of their gradient: half for q.k and half for pattern times values.
"""

from collections.abc import Callable, Collection, Mapping
import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from lm_jax.errors import UsageError, nearest
from lm_jax.model.attention import PerLayer, softmax
from lm_jax.model.config import DecoderConfig
from lm_jax.model.edits import Freeze, Quotient, ScaleGradient
from lm_jax.model.sites import HEAD_INPUT_SITES

_ATTENTION_PRODUCTS = ["attn.rot_q", "attn.rot_k", "attn.v", "attn.pattern"]


@dataclasses.dataclass(frozen=True)
class GradientRules:
    """Which local derivatives a backward pass takes; the default is the true gradient.

    Raises:
      UsageError: the temperature is not above zero.
    """

    frozen_norms: bool = False
    frozen_patterns: bool = False
    half_products: bool = False
    linear_activations: bool = False
    softmax_temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.softmax_temperature > 0:
            raise UsageError(
                f"softmax_temperature = {self.softmax_temperature} must be above 0; 1 is the true "
                "gradient"
            )

    def edits(self, cfg: DecoderConfig, touched: Collection[str] = ()) -> dict[str, Any]:
        """Edits that give these derivatives, by site.

        Args:
          cfg: the model.
          touched: other sites that are edited or recorded; with the inputs of single heads among
            them, the norms of those are frozen.
        """
        edits: dict[str, Any] = {}
        if self.frozen_norms:
            split = not HEAD_INPUT_SITES.isdisjoint(touched)
            first = [f"{name}_input" for name in ("q", "k", "v")] if split else ["ln1"]
            blocks = [first if name == "ln1" else [name] for name in cfg.norm_names]
            names = [f"{name}.scale" for name in itertools.chain(*blocks, ["final"])]
            names += ["attn.q_norm.scale", "attn.k_norm.scale"] if cfg.qk_norm != "none" else []
            edits |= {name: Freeze() for name in names}
        if self.half_products:
            products = [] if self.frozen_patterns else _ATTENTION_PRODUCTS
            # Half of the product's gradient is half of each factor's.
            products = [*products, "mlp.post"] if cfg.gated_mlp else products
            edits |= {name: ScaleGradient(0.5) for name in products}
        if self.linear_activations:
            edits["mlp.act"] = Quotient()
        if self.frozen_patterns:
            edits["attn.pattern"] = Freeze()
        return edits

    def attend(self, attend: Any) -> Any:
        """The attend with the softmax's Jacobian at the temperature; other attends as they are."""
        if self.softmax_temperature == 1.0:
            return attend
        if isinstance(attend, PerLayer):
            return PerLayer(_Tempered(attend.fn, self.softmax_temperature), attend.data)
        return _Tempered(attend, self.softmax_temperature)


EXACT = GradientRules()
RULES: Mapping[str, GradientRules] = {
    "exact": EXACT,
    "frozen": GradientRules(frozen_norms=True, frozen_patterns=True),
    "half": GradientRules(frozen_norms=True, half_products=True),
    "relp": GradientRules(
        frozen_norms=True, frozen_patterns=True, half_products=True, linear_activations=True
    ),
    "gim": GradientRules(frozen_norms=True, half_products=True, softmax_temperature=2.0),
}


def find_rules(name: str) -> GradientRules:
    """The rules of this name.

    Raises:
      UsageError: there are none; naming the nearest.
    """
    if name not in RULES:
        raise UsageError(f"there are no gradient rules {name!r}{nearest(name, RULES)}")
    return RULES[name]


@dataclasses.dataclass(frozen=True)
class _Tempered:
    """An attend whose weights have the softmax's derivative at another temperature.

    What an attend makes of the softmax, such as closed gates, is a constant factor of it.
    """

    attend: Callable[..., Any]
    temperature: float

    def __call__(self, scores_BNTS: jax.Array, *data: Any) -> Any:
        result = self.attend(scores_BNTS, *data)
        pattern_BNTS, aux = result if isinstance(result, tuple) else (result, {})
        pattern_BNTS = jax.lax.stop_gradient(pattern_BNTS)
        weights_BNTS = _softmax(scores_BNTS, self.temperature)
        softmax_BNTS = jax.lax.stop_gradient(weights_BNTS)
        factor_BNTS = jnp.where(softmax_BNTS > 0, pattern_BNTS / softmax_BNTS, 0.0)
        slope_BNTS = factor_BNTS * (weights_BNTS - softmax_BNTS)
        return pattern_BNTS + slope_BNTS, aux


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _softmax(scores_BNTS: jax.Array, temperature: float) -> jax.Array:
    del temperature
    return softmax(scores_BNTS)


def _softmax_forward(scores_BNTS: jax.Array, temperature: float) -> tuple[jax.Array, jax.Array]:
    # Masked scores stay -inf over any temperature.
    return softmax(scores_BNTS), softmax(scores_BNTS / temperature)


def _softmax_backward(
    temperature: float, weights_BNTS: jax.Array, g_BNTS: jax.Array
) -> tuple[jax.Array]:
    del temperature
    mean_BNT1 = (weights_BNTS * g_BNTS).sum(-1, keepdims=True)
    return (weights_BNTS * (g_BNTS - mean_BNT1),)


_softmax.defvjp(_softmax_forward, _softmax_backward)
