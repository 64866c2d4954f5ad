"""The gates of a torch model, those of one layer, and what they did in the last pass."""

from collections.abc import Sequence
import dataclasses
from types import ModuleType
from typing import Any

import numpy as np

from lm_jax.errors import UsageError

# The name of the attention function, and of the attribute of an attention module with its gates.
NAME = "sparse_gates"


class TorchGates:
    """The gates of one torch model, and what they did in its last pass.

    Attributes:
      model: causal language model of transformers that the gates are of.
      bias_LN: bias of the gate logits by layer and head, float32.
      raw_gate: whether the gate logit is q.k + bias, without scale and cap of the scores.
      renormalise: whether the weights of the open edges are divided by their sum.
      keep_masks: whether passes from now on keep every edge, for `open_LBNTS`, and not only how
        many are open; false at first.
      in_bridge: whether hooks of a bridge close the edges, and not the attention function.
    """

    def __init__(self, model: Any, bias_LN: np.ndarray, raw_gate: bool, renormalise: bool) -> None:
        self.model = model
        self.bias_LN, self.raw_gate, self.renormalise = bias_LN, raw_gate, renormalise
        self.keep_masks = self.in_bridge = False
        self._passed: list[_Passed | None] = [None] * len(bias_LN)

    def __repr__(self) -> str:
        """The sizes, and when a gate is open."""
        L, N = self.bias_LN.shape
        score = "q.k" if self.raw_gate else "score"
        return f"TorchGates({L} layers of {N} heads; open where {score} + bias > 0)"

    @property
    def open_edges_LBN(self) -> Any:
        """The number of open edges of the last pass, by layer, row and head: int64, on the CPU.

        Raises:
          UsageError: there was no pass, or the model has another attention function by now.
        """
        return _stacked([each.open_BN for each in self._last()])

    @property
    def pairs_LB(self) -> Any:
        """The number of pairs of a query and a key that it sees: int64, on the CPU.

        A head has so many edges, and the share of open ones is of this. Errors as of
        `open_edges_LBN`.
        """
        return _stacked([each.pairs_B for each in self._last()])

    @property
    def open_LBNTS(self) -> tuple[Any, ...]:
        """The open edges of the last pass: for each layer a bool tensor `[B, N, T, S]`.

        With the cache of a sliding window, layers differ in the number of their keys.

        Raises:
          UsageError: as `open_edges_LBN`, or `keep_masks` was false in the last pass.
        """
        masks = [each.open_BNTS for each in self._last()]
        if any(mask is None for mask in masks):
            raise UsageError("keep_masks was false in the last pass; set it and run the model")
        return tuple(masks)

    def passed(self, layer: int, open_BNTS: Any, visible_B1TS: Any) -> None:
        """Notes what a layer did; `visible_B1TS` are the pairs of which some are open."""
        mask = open_BNTS if self.keep_masks else None
        counts = open_BNTS.sum((2, 3)), visible_B1TS.sum((1, 2, 3))
        self._passed[layer] = _Passed(*counts, mask)

    def _last(self) -> list["_Passed"]:
        found = implementation(self.model)
        if found != NAME:
            raise UsageError(
                f"attn_implementation = {found!r} of the model ignores its gates; call "
                f"model.set_attn_implementation({NAME!r}) and run it"
            )
        passed = [each for each in self._passed if each is not None]
        if len(passed) < len(self._passed):
            raise UsageError("the gates have seen no whole pass; run the model on tokens first")
        return passed


@dataclasses.dataclass(frozen=True)
class _Passed:
    """What one layer did in the last pass; `open_BNTS` is None where masks are not kept."""

    open_BN: Any
    pairs_B: Any
    open_BNTS: Any


class Layer:
    """The gates of one layer, which its attention module holds as `NAME`."""

    def __init__(self, gates: TorchGates, index: int) -> None:
        self.gates, self.index = gates, index
        # Not a buffer, which would be rounded with the weights.
        self._bias_N = require_torch().from_numpy(gates.bias_LN[index].copy())

    def opened(self, own_BNTS: Any, visible_B1TS: Any) -> Any:
        """The open edges; `own_BNTS` are the gate logits without their bias."""
        self._bias_N = self._bias_N.to(own_BNTS.device)
        open_BNTS = (own_BNTS.detach() + self._bias_N[:, None, None] > 0) & visible_B1TS
        self.gates.passed(self.index, open_BNTS, visible_B1TS)
        return open_BNTS

    def closed(self, pattern_BNTS: Any, open_BNTS: Any) -> Any:
        """The pattern of a softmax over all visible keys, without its closed edges."""
        pattern_BNTS = pattern_BNTS * open_BNTS
        if not self.gates.renormalise:
            return pattern_BNTS
        total_BNT1 = pattern_BNTS.sum(-1, keepdim=True)
        return pattern_BNTS / total_BNT1.masked_fill(total_BNT1 == 0, 1.0)


def attention_modules(model: Any, layers: int) -> list[Any]:
    """The attention modules of a model in the order of its layers.

    Raises:
      UsageError: they are not as many as `layers`.
    """
    found = {
        module.layer_idx: module
        for module in model.modules()
        if type(module).__name__.endswith("Attention") and hasattr(module, "layer_idx")
    }
    if sorted(found) != list(range(layers)):
        raise UsageError(
            f"model: the gates are of {layers} attention layers, and this {type(model).__name__} "
            f"has {len(found)}; load the causal language model of the folder of the gates"
        )
    return [found[index] for index in range(layers)]


def implementation(model: Any) -> str | None:
    """The name of the attention function of a model."""
    return getattr(model.config, "_attn_implementation", None)


def widened(x: Any) -> Any:
    """A tensor of at least float32."""
    torch = require_torch()
    return x.to(torch.promote_types(x.dtype, torch.float32))


def require_torch() -> ModuleType:
    """Imports torch.

    Raises:
      UsageError: it is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise UsageError("torch_gates needs torch; run: pip install torch") from error
    return torch


def _stacked(parts: Sequence[Any]) -> Any:
    if len({tuple(part.shape) for part in parts}) > 1:
        raise UsageError("the last pass ended before its last layer; run the model again")
    return require_torch().stack([part.cpu() for part in parts])
