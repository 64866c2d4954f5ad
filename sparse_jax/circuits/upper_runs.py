"""Patched runs that begin at the layer of their patch.

A patch leaves the layers below it as they are. So the run that is patched is made once, and what
enters each of its layers is kept; a patched run takes up there, and computes the logits of the
positions that the metric reads alone:

    run, records = unpatched(model, batch, batch.clean_BT)
    metric_B = measure_from(model, batch, batch.clean_BT, run, first, edits)

`first` is data: one compiled program serves the patches of all layers, several side by side, which
begin at the lowest layer among theirs (`sweep`).
"""

from collections.abc import Callable, Mapping
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.model.edits import Replace
from lm_jax.model.sites import keep
from sparse_jax.circuits.runs import Batch, CircuitModel, map_in_batches, measure


@struct.dataclass
class UnpatchedRun:
    """A run without patches.

    Attributes:
      stream_LBTD: what enters each layer, and in the last place what the logits read, so that the
        axis L has one place more than the model has layers.
      metric_B: metric of each prompt.
    """

    stream_LBTD: jax.Array
    metric_B: jax.Array

    def effects(self, patched_B: jax.Array, changed_B: jax.Array) -> jax.Array:
        """The change of the metric of each prompt; 0 exactly where the patch changes nothing.

        Args:
          patched_B: metric under a patch.
          changed_B: true where the patch puts another value than the run has.
        """
        return jnp.where(changed_B, patched_B - self.metric_B, 0.0)


def unpatched(
    model: CircuitModel, batch: Batch, tokens_BT: jax.Array, *, record: tuple[str, ...] = ()
) -> tuple[UnpatchedRun, dict[str, Any]]:
    """The run on these tokens, and what it has at further sites.

    Args:
      model: a dense or sparse model.
      batch: the prompts.
      tokens_BT: `batch.clean_BT` or `batch.corrupt_BT`.
      record: names of the further sites.
    """
    names = ("resid_pre", "final_input", *record)
    metric_B, records = measure(model, batch, tokens_BT, record=dict.fromkeys(names, keep))
    stream_LBTD = jnp.concatenate([records["resid_pre"], records["final_input"][None]])
    return UnpatchedRun(stream_LBTD, metric_B), records


def entering(run: UnpatchedRun, first: jax.Array) -> Replace:
    """The edit of the embedding that puts there what enters the layer `first`."""
    return Replace(run.stream_LBTD[first], jnp.ones((1, 1, 1), bool))


def measure_from(
    model: CircuitModel,
    batch: Batch,
    tokens_BT: jax.Array,
    run: UnpatchedRun,
    first: jax.Array,
    edits: Mapping[str, Any],
) -> jax.Array:
    """The metric of each prompt under edits of the layers from `first` on, `[B]`.

    Args:
      model: a dense or sparse model.
      batch: the prompts.
      tokens_BT: the tokens of the run.
      run: the same run without edits.
      first: number of the first layer that is run; L runs none.
      edits: interventions by site, none of them below `first`. One of the embedding takes the
        place of `entering`, and has to do the same.
    """
    edits = {"embed": entering(run, first)} | dict(edits)
    return measure(model, batch, tokens_BT, edits=edits, first_layer=first)[0]


def sweep(
    program: Callable[[jax.Array], jax.Array],
    which_X: np.ndarray,
    first_X: np.ndarray,
    at_once: int,
) -> jax.Array:
    """The effects of all patches, `[X, B]`, those of neighbouring layers side by side.

    Args:
      program: compiled function of some patches, `[W, ...]`, that returns their effects `[W, B]`
        and begins at the lowest layer among them.
      which_X: patches, as an index or several each.
      first_X: the layer that each begins at.
      at_once: patches of one call.

    Raises:
      StoppedError: the command was asked to stop.
    """
    order_X = np.argsort(first_X, kind="stable")
    effects_XB = map_in_batches(program, jnp.asarray(which_X[order_X]), at_once)
    return effects_XB[np.argsort(order_X)]
