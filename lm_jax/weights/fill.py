"""Parameters from the tensors of a checkpoint.

1. List the checkpoint's tensors, shapes only, and check them against the family's table: one
   error names every difference. Nothing is ever filled with random values.
2. Read one tensor at a time, convert it to our layout, and write it into its slice of the stacked,
   already sharded parameter: at most one tensor is in memory beside the parameters, and parameters
   that are small.
"""

import functools
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import BadInputError
from lm_jax.model import decoder
from lm_jax.model import params as params_lib
from lm_jax.model.config import DecoderConfig
from lm_jax.model.params import ParamSpec
from lm_jax.parallel import sharding
from lm_jax.weights.families import FAMILIES, table

# Numbers of a parameter, over all layers, that are held beside the parameters while they are read.
_SMALL_STACK = 2**20


class Source(Protocol):
    """Where tensors come from: names as the family's table has them, shapes, and a reader."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every stored tensor."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor, whole."""
        ...


def load_params(
    source: Source,
    cfg: DecoderConfig,
    *,
    dtype: Any = jnp.float32,
    mesh: jax.sharding.Mesh | None = None,
) -> dict[str, Any]:
    """Fills the parameters of `cfg` from a source; see `load_pretrained` for what it raises."""
    family = FAMILIES[cfg.family]
    entries = family.entries(cfg)
    _check_source(source, entries, cfg, family)

    specs = dict(params_lib.leaves(decoder.param_spec(cfg)))
    filled: dict[str, jax.Array] = {}
    # Small stacks are filled here and put on the devices whole: nothing is compiled for a shape.
    small: dict[str, np.ndarray] = {}
    bad: list[str] = []
    for entry in entries:
        for layer, names in enumerate(table.names_by_layer(entry, cfg.num_layers)):
            tensors = {name: source.read(name) for name in names}
            bad += [name for name, tensor in tensors.items() if not _is_finite(tensor, dtype)]
            if bad:
                continue
            values = entry.read(*tensors.values())
            for path, value in zip(entry.params, values, strict=True):
                value = np.ascontiguousarray(value, dtype)
                spec = specs[path]
                if not entry.per_layer:
                    filled[path] = _put(value, mesh, spec)
                    continue
                if math.prod(spec.shape) <= _SMALL_STACK:
                    stack = small.setdefault(path, np.zeros(spec.shape, dtype))
                    stack[layer : layer + 1] = value
                    if layer == spec.shape[0] - 1:
                        filled[path] = _put(small.pop(path), mesh, spec)
                    continue
                place = None if mesh is None else sharding.named(mesh, spec)
                if layer == 0:
                    filled[path] = jnp.zeros(spec.shape, dtype, device=place)
                value = _put(value, mesh, ParamSpec(spec.shape[1:], spec.axes[1:]))
                filled[path] = _write_layer(filled[path], value, layer, place)
    if bad:
        raise BadInputError(
            f"checkpoint has NaN or infinite weights, or ones beyond {jnp.dtype(dtype)}, in: "
            f"{', '.join(bad)}; download it again"
        )
    return params_lib.tree_from_paths(filled)


def _is_finite(tensor: np.ndarray, dtype: Any) -> bool:
    """Whether every weight is finite, also in `dtype`; no array of the tensor's size is made."""
    most = float(jnp.finfo(dtype).max)
    # The least and the largest of an array with a NaN are NaN, which no comparison holds for.
    return bool(-most <= float(tensor.min(initial=0)) and float(tensor.max(initial=0)) <= most)


def _check_source(
    source: Source, entries: list[table.Entry], cfg: DecoderConfig, family: table.Family
) -> None:
    """Checks the names and shapes of a source; a stored copy of the tied embedding is allowed."""
    shapes = source.shapes()
    embedding = next(entry.name for entry in entries if entry.params == ("embed/tokens",))
    tied = cfg.tie_embeddings and shapes.get(family.head) == shapes.get(embedding, ())
    if tied:
        del shapes[family.head]
    for name in family.unused(cfg):
        shapes.pop(name, None)
    table.check(entries, cfg, shapes)
    if tied and not np.array_equal(source.read(family.head), source.read(embedding)):
        raise BadInputError(
            f"config.json says tie_word_embeddings, but {family.head} differs from {embedding}; "
            "set tie_word_embeddings to false"
        )


def _put(value: np.ndarray, mesh: jax.sharding.Mesh | None, spec: ParamSpec) -> jax.Array:
    """The array sharded as `spec` says; every device gets only its own part."""
    if mesh is None:
        return jax.device_put(value)
    return jax.make_array_from_callback(
        value.shape, sharding.named(mesh, spec), lambda index: value[index]
    )


@functools.partial(jax.jit, static_argnames="place", donate_argnums=0)
def _write_layer(stack, value, layer, place):
    stack = jax.lax.dynamic_update_index_in_dim(stack, value, layer, 0)
    return stack if place is None else jax.lax.with_sharding_constraint(stack, place)
