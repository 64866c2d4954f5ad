"""Circuits of heads, token edges or component edges: keep the highest ranks, ablate the rest.

    importance = -head_effects(model, batch).swapaxes(1, 2)        # [L, B, N], by noising
    curve = head_curve(model, batch, ranks(importance), "counterfactual")
    crossing(curve.sizes, curve.explained)

Each prompt has a ranking, or all prompts share one (`whole_task`): then importance is the mean over
prompts, and a token edge is identified by its positions in all of them.

    importance = -component_attributions(model, batch)             # [U, B, R]
    importance = jnp.where(component_edges(model, batch), importance, -jnp.inf)
    curve = component_curve(model, batch, ranks(importance), "counterfactual")

`random_importance` ranks at random, which every curve is to be compared with.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.model.precision import exact_jit
from sparse_jax.circuits import curves
from sparse_jax.circuits.ablation import (
    SharedContributions,
    ablated_values,
    edge_values,
    head_values,
    keep_edges,
    keep_heads,
)
from sparse_jax.circuits.component_ablation import ablate_edges
from sparse_jax.circuits.component_graph import ComponentGraph
from sparse_jax.circuits.components import writer_values
from sparse_jax.circuits.patching import Activations, activations, metric_and_activations
from sparse_jax.circuits.runs import Batch, CircuitModel, map_in_batches, measure, metric


@dataclasses.dataclass(frozen=True)
class Curve:
    """The metric of circuits of growing size.

    Attributes:
      sizes: numbers of components kept, `[K]`.
      metric_KB: the metric of each prompt in each circuit.
      empty_B: the metric of each prompt with every component ablated.
      whole_B: the metric of each prompt in the untouched model.
    """

    sizes: np.ndarray
    metric_KB: np.ndarray
    empty_B: np.ndarray
    whole_B: np.ndarray

    @property
    def explained(self) -> np.ndarray:
        """f at each size, `[K]` (`curves.explained`)."""
        return curves.explained(self.metric_KB, self.empty_B, self.whole_B)


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
    """What all curves of heads and token edges of a model on some prompts need of its own runs.

    Attributes:
      clean, corrupt: attention on both prompts of each pair.
      whole_B: metric on the clean prompts.
    """

    clean: Activations
    corrupt: Activations
    whole_B: jax.Array

    @classmethod
    def of(cls, model: CircuitModel, batch: Batch) -> "Recorded":
        """Records them in two runs."""
        whole_B, clean = metric_and_activations(model, batch, batch.clean_BT)
        return cls(clean, activations(model, batch, batch.corrupt_BT), whole_B)


def ranks(importance_LBX: np.ndarray, *, whole_task: bool = False) -> np.ndarray:
    """Rank of every component in each prompt, 0 for the most important, `[L, B, ...]` int32.

    Args:
      importance_LBX: `[L, B, N]` of heads or `[L, B, N, T, S]` of token edges; -inf where there is
        no component (masked pairs), which ranks last.
      whole_task: whether to rank by the mean over prompts.
    """
    importance = np.asarray(importance_LBX, np.float64)
    if whole_task:
        mean = importance.mean(1, keepdims=True)
        importance = np.broadcast_to(mean, importance.shape)
    by_prompt = np.moveaxis(importance, 1, 0)
    flat = by_prompt.reshape(len(by_prompt), -1)
    order = np.argsort(-flat, axis=1, kind="stable")
    result = np.empty(order.shape, np.int32)
    np.put_along_axis(result, order, np.arange(order.shape[1], dtype=np.int32)[None], 1)
    return np.moveaxis(result.reshape(by_prompt.shape), 0, 1)


def visible_edges(model: CircuitModel, batch: Batch) -> np.ndarray:
    """Which token edges there are, `[L, B, N, T, S]`: no later key, no padding, within windows."""
    valid_BT = np.asarray(batch.valid_BT)
    T = valid_BT.shape[1]
    distance = np.arange(T)[:, None] - np.arange(T)
    layers = [(distance >= 0) & (distance < (window or T)) for window in model.cfg.layer_windows]
    both_BTS = valid_BT[:, :, None] & valid_BT[:, None, :]
    mask_LBTS = np.stack(layers)[:, None] & both_BTS
    shape = (len(layers), len(valid_BT), model.cfg.num_heads, T, T)
    return np.broadcast_to(mask_LBTS[:, :, None], shape)


def component_edges(model: CircuitModel, batch: Batch) -> np.ndarray:
    """Which component edges there are, in each prompt alike, `[U, B, R]`."""
    mask_UR = ComponentGraph.of(model.cfg).mask_UR
    return np.broadcast_to(mask_UR[:, None], (len(mask_UR), len(batch.clean_BT), mask_UR.shape[1]))


def random_importance(mask_LBX: np.ndarray, seed: int) -> np.ndarray:
    """Uniform draws for `ranks` where the mask is true, -inf elsewhere.

    Args:
      mask_LBX: the components there are: of heads, `visible_edges` or `component_edges`.
      seed: seed of the draws.
    """
    draws = np.random.default_rng(seed).random(mask_LBX.shape)
    return np.where(mask_LBX, draws, -np.inf)


def head_curve(
    model: CircuitModel,
    batch: Batch,
    ranks_LBN: np.ndarray,
    ablation: str,
    *,
    sizes: Sequence[int] | np.ndarray | None = None,
    key: jax.Array | None = None,
    at_once: int = 4,
    recorded: Recorded | None = None,
) -> Curve:
    """The metric with the heads of highest rank kept and the others ablated.

    Args:
      model: a dense or sparse model.
      batch: the prompts.
      ranks_LBN: the heads' ranks, from `ranks`.
      ablation: one of `ablation.Ablation`.
      sizes: numbers of heads to keep; None takes every number.
      key: random key of the ablation "resample".
      at_once: circuits run side by side.
      recorded: attention on both prompts, where other curves have it; None records it.
    """
    count = ranks_LBN.shape[0] * ranks_LBN.shape[2]
    taken = np.arange(1, count + 1) if sizes is None else np.asarray(sizes)
    own = Recorded.of(model, batch) if recorded is None else recorded
    drawn = _drawn(batch, ablation, key)
    values = head_values(ablation, own.clean, own.corrupt, batch.valid_BT, **drawn)
    return _curve(model, batch, ranks_LBN, taken, at_once, _keep_heads, values, own.whole_B)


def edge_curve(
    model: CircuitModel,
    batch: Batch,
    ranks_LBNTS: np.ndarray,
    ablation: str,
    *,
    sizes: Sequence[int] | np.ndarray | None = None,
    at_once: int = 4,
    recorded: Recorded | None = None,
) -> Curve:
    """The metric with the token edges of highest rank kept and the others ablated.

    Args:
      model: a dense or sparse model.
      batch: the prompts.
      ranks_LBNTS: the edges' ranks, from `ranks`.
      ablation: one of `ablation.EDGE_ABLATIONS`.
      sizes: numbers of edges to keep in each prompt; None takes `curves.sizes`.
      at_once: circuits run side by side.
      recorded: attention on both prompts, where other curves have it; None records it.
    """
    visible = visible_edges(model, batch)
    count = int(visible.sum((0, 2, 3, 4)).max())
    taken = curves.sizes(count) if sizes is None else np.asarray(sizes)
    own = Recorded.of(model, batch) if recorded is None else recorded
    visible = jnp.asarray(visible)
    values = edge_values(ablation, own.clean, own.corrupt, visible), visible
    return _curve(model, batch, ranks_LBNTS, taken, at_once, _keep_token_edges, values, own.whole_B)


def component_curve(
    model: CircuitModel,
    batch: Batch,
    ranks_UBR: np.ndarray,
    ablation: str,
    *,
    sizes: Sequence[int] | np.ndarray | None = None,
    key: jax.Array | None = None,
    at_once: int = 2,
) -> Curve:
    """The metric with the component edges of highest rank kept and the others ablated.

    A reader reads the ablated value of every writer whose edge is not kept, and the value that the
    circuit gives the others. Keys and values that query heads share count once.

    Args:
      model: a dense or sparse model.
      batch: the prompts.
      ranks_UBR: the edges' ranks, from `ranks`.
      ablation: one of `ablation.Ablation`.
      sizes: numbers of edges to keep in each prompt; None takes `curves.sizes`.
      key: random key of the ablation "resample".
      at_once: circuits run side by side; each holds the values of all writers.
    """
    graph = ComponentGraph.of(model.cfg)
    taken = curves.sizes(graph.num_edges) if sizes is None else np.asarray(sizes)
    values = component_values(model, batch, ablation, key=key)
    whole_B = metric(model, batch, batch.clean_BT)
    return _curve(model, batch, ranks_UBR, taken, at_once, _keep_component_edges, values, whole_B)


def component_values(
    model: CircuitModel, batch: Batch, ablation: str, *, key: jax.Array | None = None
) -> jax.Array:
    """Ablated values of all writers, as `ablation.ablated_values` gives them of `writer_values`."""
    clean, corrupt = (
        writer_values(model, batch, tokens) for tokens in (batch.clean_BT, batch.corrupt_BT)
    )
    return ablated_values(ablation, clean, corrupt, batch.valid_BT, **_drawn(batch, ablation, key))


def _drawn(batch: Batch, ablation: str, key: jax.Array | None) -> dict[str, Any]:
    """What the ablation "resample" draws other prompts by."""
    return {"key": key, "prompt_B": batch.prompt_B} if ablation == "resample" else {}


# Edits of a circuit: of the model, which components are kept, and what the others have instead.
_Keep = Callable[[CircuitModel, jax.Array, Any], Mapping[str, Any]]


def _keep_heads(model: CircuitModel, keep_LBN: jax.Array, values: jax.Array) -> Mapping[str, Any]:
    del model
    return keep_heads(keep_LBN, values)


def _keep_token_edges(
    model: CircuitModel,
    keep_LBNTS: jax.Array,
    values: tuple[Activations | SharedContributions, jax.Array],
) -> Mapping[str, Any]:
    del model
    return keep_edges(keep_LBNTS, *values)


def _keep_component_edges(
    model: CircuitModel, keep_UBR: jax.Array, values: jax.Array
) -> Mapping[str, Any]:
    return ablate_edges(model, ~keep_UBR, values)


def _curve(
    model: CircuitModel,
    batch: Batch,
    ranks_XBX: np.ndarray,
    taken: np.ndarray,
    at_once: int,
    keep: _Keep,
    values: Any,
    whole_B: jax.Array,
) -> Curve:
    ranks, sizes = jnp.asarray(ranks_XBX), jnp.asarray([0, *taken])
    program = functools.partial(_metrics, model, batch, ranks, values, keep=keep)
    metric_KB = np.asarray(map_in_batches(program, sizes, at_once), np.float64)
    return Curve(taken, metric_KB[1:], metric_KB[0], np.asarray(whole_B, np.float64))


@functools.partial(exact_jit, static_argnames="keep")
def _metrics(
    model: CircuitModel,
    batch: Batch,
    ranks_XBX: jax.Array,
    values: Any,
    sizes_K: jax.Array,
    keep: _Keep,
) -> jax.Array:
    def kept(size: jax.Array) -> jax.Array:
        edits = keep(model, ranks_XBX < size, values)
        return measure(model, batch, batch.clean_BT, edits=edits)[0]

    return jax.vmap(kept)(sizes_K)
