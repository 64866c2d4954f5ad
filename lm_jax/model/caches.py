"""A layer's part of the decoding caches, read and written within the arrays of all layers.

The caches of a stack of layers are one tree of arrays with a leading axis L, which the loop over
layers carries. A layer that writes one position of its part then moves one position. Were the parts
taken out of the tree and put back, as inputs and outputs of a scan are, every decoded token would
copy the keys and values of the whole context several times.

XLA for CPUs has no scatter in bfloat16 and converts all of such a cache for one write; decode in
float32 there. A gradient through a pass with a cache keeps the carried caches for every layer.
"""

from typing import Any

from flax import struct
import jax


@struct.dataclass
class LayerSlice:
    """`stacked[layer]`, of an array with a leading axis L: what a mixer with positions gets."""

    stacked: jax.Array
    layer: jax.Array | int

    def read(self) -> jax.Array:
        """The layer's part, without the axis L."""
        return jax.lax.dynamic_index_in_dim(self.stacked, self.layer, keepdims=False)

    def write(self, part: jax.Array) -> "LayerSlice":
        """The same with another part."""
        stacked = jax.lax.dynamic_update_index_in_dim(self.stacked, part, self.layer, 0)
        return LayerSlice(stacked, self.layer)

    def write_at(self, index: tuple[Any, ...], values: jax.Array) -> "LayerSlice":
        """The same with other values at `index` of the part; what lies outside is dropped."""
        stacked = self.stacked.at[self.layer, *index].set(values, mode="drop")
        return LayerSlice(stacked, self.layer)


def _is_slice(leaf: Any) -> bool:
    return isinstance(leaf, LayerSlice)


def of_layer(caches: Any, layer: jax.Array | int) -> Any:
    """The tree of one layer's slices, of a tree of arrays with a leading axis L; None of None."""
    return jax.tree.map(lambda stacked: LayerSlice(stacked, layer), caches)


def arrays(slices: Any) -> Any:
    """What a tree of slices holds, copied out of the arrays of all layers."""
    return jax.tree.map(LayerSlice.read, slices, is_leaf=_is_slice)


def of_all_layers(slices: Any, written: Any) -> Any:
    """The arrays of all layers, after a layer wrote its slices or made new arrays of them."""

    def stacked(before: LayerSlice, after: Any) -> jax.Array:
        return (after if _is_slice(after) else before.write(after)).stacked

    return jax.tree.map(stacked, slices, written, is_leaf=_is_slice)
