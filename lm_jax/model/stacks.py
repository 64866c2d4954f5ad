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
