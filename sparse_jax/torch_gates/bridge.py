"""Gates in the hooks of a bridge of TransformerLens, which computes attention itself.

A `TransformerBridge` (TransformerLens 3 and later) forms scores and pattern of each layer of its
transformers model and calls no attention function. Between both it has two hooks: the first sees
the masked scores, from which the open edges follow, and the second the pattern, whose closed edges
become 0.
"""

from typing import Any

from lm_jax.errors import UsageError
from sparse_jax.torch_gates.gates import (
    NAME,
    Layer,
    TorchGates,
    attention_modules,
    require_torch,
    widened,
)


def add_to_bridge(bridge: Any, gates: TorchGates) -> None:
    """Makes a bridge of TransformerLens sparse: hooks that no `reset_hooks()` takes away.

    Scores are computed in the dtype of the weights there; in bfloat16 gates near the threshold may
    differ from those of the attention function.

    Args:
      bridge: `TransformerBridge.boot_transformers(..., hf_model=gates.model)`.
      gates: gates of that model, from `load_gates`.

    Raises:
      UsageError: the bridge is of another model, has these gates already, or a raw gate needs q.k
        where scores are capped.
    """
    if bridge.original_model is not gates.model:
        raise UsageError(
            "bridge: it holds another model than these gates; boot it with hf_model=gates.model"
        )
    if gates.in_bridge:
        raise UsageError("bridge: these gates are in a bridge already; use that one")
    modules = attention_modules(gates.model, len(gates.bias_LN))
    if gates.raw_gate and any(getattr(x, "attn_logit_softcapping", None) for x in modules):
        raise UsageError(
            "bridge: a raw gate needs q.k, and the scores of this model are capped; run the model "
            "without a bridge"
        )
    # A bridge sets another function. With ours come our masks, in which padding queries nothing.
    gates.model.set_attn_implementation(NAME)
    gates.in_bridge = True
    for index, module in enumerate(modules):
        hooks = _Hooks(getattr(module, NAME), 1.0 / module.scaling if gates.raw_gate else 1.0)
        for site, hook in (("attn_scores", hooks.scores), ("pattern", hooks.pattern)):
            bridge.add_hook(f"blocks.{index}.attn.hook_{site}", hook, is_permanent=True)


class _Hooks:
    """The hooks of one layer: what the first decides, the second does."""

    def __init__(self, layer: Layer, factor: float) -> None:
        self._layer, self._factor, self._open_BNTS = layer, factor, None

    def scores(self, score_BNTS: Any, hook: Any) -> Any:
        # Masked scores are the lowest number, or -inf, or a score more.
        lowest = require_torch().finfo(score_BNTS.dtype).min
        visible_B1TS = (score_BNTS > lowest / 2).any(1, keepdim=True)
        self._open_BNTS = self._layer.opened(widened(score_BNTS) * self._factor, visible_B1TS)
        return score_BNTS

    def pattern(self, pattern_BNTS: Any, hook: Any) -> Any:
        if self._open_BNTS is None:
            raise UsageError(
                "bridge: it forms no scores before its patterns for this model; run the model "
                "without a bridge"
            )
        open_BNTS, self._open_BNTS = self._open_BNTS, None
        return self._layer.closed(pattern_BNTS, open_BNTS).to(pattern_BNTS.dtype)
