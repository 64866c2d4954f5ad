"""Data by stack: a tree for each run of equal layers, which a model of equal layers holds bare."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lm_jax.errors import UsageError
from lm_jax.model.config import DecoderConfig, Stack


def by_stack(cfg: DecoderConfig, build: Callable[[Stack], Any]) -> Any:
    """What `build` makes of the one stack of a model, or of each of several, by its name."""
    runs = cfg.stacks
    return build(runs[0]) if len(runs) == 1 else {run.name: build(run) for run in runs}


def of_stack(tree: Any, cfg: DecoderConfig, stack: Stack) -> Any:
    """The part of one stack of a tree that `by_stack` made."""
    return tree if tree is None or len(cfg.stacks) == 1 else tree[stack.name]


def layers_of(per_layer: Any, cfg: DecoderConfig, stack: Stack) -> Any:
    """The data of the layers of one stack."""
    if len(cfg.stacks) == 1:
        return per_layer
    return jax.tree.map(lambda a: a[stack.layers.start : stack.layers.stop], per_layer)


def scanned_from(
    first: jax.Array | int,
    run_layer: Callable[..., Any],
    carry: Any,
    per_layer: Any,
    visited: set[str],
    remat: bool,
) -> tuple[Any, dict[str, Any]]:
    """What the layers from number `first` on carry on; they put out nothing.

    A layer below is neither computed nor read. `first` may be traced, so that one program serves
    every layer; the gradient by the carry, parameters and edits is that of the layers that run.

    Args:
      first: number of the first layer that runs.
      run_layer: function `(carry, inputs of the layer, visited) -> (carry, outputs)`.
      carry: what enters the first layer that runs.
      per_layer: inputs of all layers, with a leading axis L.
      visited: the sites that the layers pass through, which is filled.
      remat: whether only the carry of each layer is kept for the backward pass.
    """

    def run(carry: Any, index: jax.Array) -> Any:
        inputs = jax.tree.map(
            lambda a: jax.lax.dynamic_index_in_dim(jnp.asarray(a), index, keepdims=False), per_layer
        )
        return run_layer(carry, inputs, visited)[0]

    run = jax.checkpoint(run) if remat else run

    def layer(carry: Any, index: jax.Array) -> tuple[Any, None]:
        return jax.lax.cond(index >= first, run, lambda carry, _: carry, carry, index), None

    num_layers = jax.tree.leaves(per_layer)[0].shape[0]
    carry, _ = jax.lax.scan(layer, carry, jnp.arange(num_layers))
    return carry, {"records": {}, "aux": {}}


def joined(outputs: Sequence[Any], part: str) -> dict[str, Any]:
    """What the layers of all stacks give, by name, joined along L.

    Raises:
      UsageError: layers differ in the shape of one of them.
    """

    def one(name: str) -> Any:
        stacks = [out[part][name] for out in outputs]
        shapes = {tuple(a.shape[1:] for a in jax.tree.leaves(stack)) for stack in stacks}
        if len(shapes) > 1:
            raise UsageError(
                f"record: {name} has other shapes in other layers of this model "
                f"({', '.join(map(str, sorted(shapes)))}); reduce the axes that differ"
            )
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *stacks)

    return outputs[0][part] if len(outputs) == 1 else {n: one(n) for n in outputs[0][part]}
