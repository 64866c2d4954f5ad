"""Edits of a component by its name, for `model.run(..., edits=...)` and for `lm_jax.forward`."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import UsageError
from lm_jax.inspect import names
from lm_jax.model.config import DecoderConfig
from lm_jax.model.edits import Add, Chain, OneHead, OneLayer, Replace, Scale, resolve
from lm_jax.model.sites import SITES

Edits = Mapping[str, Any]


class Ran(Protocol):
    """What `patch` takes values from: a `Run`."""

    @property
    def ids(self) -> tuple[tuple[int, ...], ...]: ...

    def whole(self, site: str) -> jax.Array:
        """All values of a site."""
        ...


def ablate(*components: str) -> dict[str, Any]:
    """Edits that set what components write to zero.

    Args:
      components: names such as `L7H3` (a head), `L7.attn`, `L7.mlp`, or sites of a layer.

    Raises:
      UsageError: a name is of no component.
    """
    return merged([_zeroed(names.component(each)) for each in components])


def patch(run: Ran, *components: str, at: int | Sequence[int] | None = None) -> dict[str, Any]:
    """Edits that give components the values that they had in another run (activation patching).

    Args:
      run: the run to take the values from, with as many tokens as the run to patch.
      components: names, as of `ablate`.
      at: positions to patch, negative ones counted from the end of each text; None for all. At a
        site of queries and keys they are the queries'.

    Raises:
      UsageError: a name is of no component of the model, or a position is outside of the text.
    """
    edits = []
    for name in components:
        place = names.component(name)
        value, dims = run.whole(place.site), SITES[place.site].dims
        if place.layer is not None:
            value = value[_within(place.layer, len(value), name, "layer")]
        axis = dims.find("T") if "T" in dims else dims.find("S")
        mask = np.full([1] * value.ndim, at is None or axis < 0)
        if at is not None and axis >= 0:
            rows_BT = _chosen(at, [len(row) for row in run.ids], value.shape[axis])
            mask = np.expand_dims(rows_BT, [a for a in range(1, value.ndim) if a != axis])
        if place.head is not None:
            chosen = np.arange(value.shape[2]) == _within(place.head, value.shape[2], name, "head")
            mask = mask & chosen[:, None]
        edits.append(_at(place, Replace(value, jnp.asarray(mask))))
    return merged(edits)


def steer(vector_D: Any, layer: int) -> dict[str, Any]:
    """Edits that add a vector to the residual stream that leaves a layer, at every position.

    Args:
      vector_D: the vector, of the width of the residual stream.
      layer: the number of the layer, from 0.

    Raises:
      UsageError: it is no vector.
    """
    vector_D = jnp.asarray(vector_D)
    if vector_D.ndim != 1:
        raise UsageError(
            f"steer: vector has shape {vector_D.shape}; give one vector [D], such as "
            "run.cache['resid_post'][7, 0, -1]"
        )
    return {"resid_post": OneLayer(layer, Add(vector_D[None, None]))}


def merged(edits: Sequence[Edits]) -> dict[str, Any]:
    """Several edits as one, those of a site one after the other."""
    by_site: dict[str, list[Any]] = {}
    for each in edits:
        for site, edit in each.items():
            by_site.setdefault(site, []).append(edit)
    return {
        site: several[0] if len(several) == 1 else Chain(tuple(several))
        for site, several in by_site.items()
    }


def by_site(edits: Edits | Sequence[Edits] | None, cfg: DecoderConfig) -> dict[str, Any]:
    """Edits under our names of the sites, with an axis of layers where the site has one.

    Args:
      edits: edits by a name of either style, or several of them, made one after the other. Under
        the name of a layer, leaves have the axes of the site without L.
      cfg: configuration of the model.

    Raises:
      UsageError: a site, layer or head does not exist, or it is no such mapping.
    """
    several = [edits or {}] if isinstance(edits, Mapping | None) else list(edits)
    if not all(isinstance(each, Mapping) for each in several):
        raise UsageError(
            "edits: give what ablate, patch or steer return, a dict of edits by site, or a list of "
            "them"
        )
    placed = [_at(names.site(name), edit) for each in several for name, edit in each.items()]
    return resolve(merged(placed), cfg)


def _zeroed(place: names.Place) -> dict[str, Any]:
    """The edit that writes zeros at a place."""
    zero = Scale(jnp.zeros([1] * len(SITES[place.site].dims)))
    return _at(place, zero if place.head is None else OneHead.of(place.head, zero))


def _at(place: names.Place, edit: Any) -> dict[str, Any]:
    return {place.site: edit if place.layer is None else OneLayer(place.layer, edit)}


def _within(index: int, count: int, name: str, what: str) -> int:
    if not 0 <= index < count:
        raise UsageError(f"{name!r}: {what} {index} is outside 0..{count - 1}")
    return index


def _chosen(at: int | Sequence[int], lengths: Sequence[int], longest: int) -> np.ndarray:
    """Which positions of each text are named, `[B, T]`; negative ones are from its own end."""
    at = [at] if isinstance(at, int) else list(at)
    result = np.zeros((len(lengths), longest), bool)
    for row, length in zip(result, lengths, strict=True):
        for each in at:
            if not -length <= each < length:
                raise UsageError(f"at = {each} is outside of the {length} tokens of a text")
            row[each % length] = True
    return result
