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

Only derivatives differ; every value of the forward pass is the same. Under all rules the gates of a
sparse model are constants, open or closed as in the run. Names in `RULES`: `exact`;
`frozen`, norms and attention alone; `half`, norms and products; `relp`, all rules of RelP (Jafari
et al. 2025), for norms, attention, products and activations, under which a model without biases is
linear in its embeddings: embedding times gradient sums to the logits; `gim`, all of Edin et al.
2025, where q and k get a quarter of their gradient: half for q.k and half for pattern times values.
"""

from collections.abc import Collection, Mapping
import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from iaj_kernels.attention.rows import over_sum
from lm_jax.errors import UsageError, nearest
from lm_jax.model.attention import PerLayer, softmax
from lm_jax.model.config import DecoderConfig
from lm_jax.model.edits import Freeze, Quotient, ScaleGradient
from lm_jax.model.sites import HEAD_INPUT_SITES
from sparse_jax.gates.attend import Gated

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

    def attend(self, gated: PerLayer | None) -> Any:
        """The attend with the softmax's Jacobian at the temperature, and gates that are constants.

        Args:
          gated: the attend of a model's gates; None where it has none.
        """
        if gated is None:
            exact = self.softmax_temperature == 1.0
            return softmax if exact else _Tempered(self.softmax_temperature)
        assert isinstance(gated.fn, Gated), "only models with gates have an attend of their own"
        return PerLayer(_ConstantGates(gated.fn, self.softmax_temperature), gated.data)


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
    """The softmax with its derivative at another temperature."""

    temperature: float

    def __call__(self, scores_BNTS: jax.Array) -> jax.Array:
        return _softmax(scores_BNTS, self.temperature)


@dataclasses.dataclass(frozen=True)
class _ConstantGates:
    """Gated weights whose derivative is that of the softmax at a temperature on the open edges.

    Training differentiates straight through the gates, as if they were their probability. The
    metric has no such slope: a small step opens and closes no gate.
    """

    gated: Gated
    temperature: float

    def __call__(self, scores_BNTS: jax.Array, data: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        constant_BNTS = jax.lax.stop_gradient(scores_BNTS)
        pattern_BNTS, aux = self.gated(constant_BNTS, data)
        opened_BNTS, _ = dataclasses.replace(self.gated, renormalise=False)(constant_BNTS, data)
        softmax_BNTS = softmax(constant_BNTS)
        gate_BNTS = jnp.where(softmax_BNTS > 0, opened_BNTS / softmax_BNTS, 0.0)
        weights_BNTS = gate_BNTS * _softmax(scores_BNTS, self.temperature)
        if self.gated.renormalise:
            weights_BNTS = over_sum(weights_BNTS)
        return pattern_BNTS + (weights_BNTS - jax.lax.stop_gradient(weights_BNTS)), aux


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _softmax(scores_BNTS: jax.Array, temperature: float) -> jax.Array:
    del temperature
    return softmax(scores_BNTS)


@_softmax.defjvp
def _softmax_tangent(
    temperature: float, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (scores_BNTS,), (tangent_BNTS,) = primals, tangents
    # Masked scores stay -inf over any temperature.
    weights_BNTS = softmax(scores_BNTS / temperature)
    mean_BNT1 = (weights_BNTS * tangent_BNTS).sum(-1, keepdims=True)
    return softmax(scores_BNTS), weights_BNTS * (tangent_BNTS - mean_BNT1)
