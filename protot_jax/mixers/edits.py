"""Edits of single prototypes: gates masked or zeroed, vectors reinitialised.

Prototype Transformer, appendix A.3. `mask_write` and `mask_read` set the logit of one prototype to
minus infinity, so that its share goes to the others, as in the released code. `zero_write` and
`zero_read` set its gate to zero and leave the others as they are, as in the text of the paper. In a
first layer with shared routing the read logits are the write logits, so that `mask_write` masks
both gates there. `scale` multiplies what a layer reads from one prototype, to steer a text: 0 is
`zero_read`, 1 changes nothing. It scales the read gate, for a constant factor of a write gate
cancels in the mean that it is a weight of, where that is divided by the mass. `clamp` holds the
gates of one text to those of another (section 5.2), `released_clamp` as the released code does.

    edits = protot_jax.edit(layer=9, prototype=7, mode="mask_write")
    lm_jax.forward(params, tokens_BT, cfg, mixer=mixer, edits=edits)
"""

from collections.abc import Mapping, Sequence
import math
import re
from typing import Any, Literal, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import UsageError, nearest
from lm_jax.model.edits import Chain, OneLayer, Replace
from lm_jax.model.params import ParamTree
from protot_jax.mixers.routing import gates as normalise

MODES: Mapping[str, tuple[str, float]] = {
    "mask_write": ("mixer.write_logits", -jnp.inf),
    "mask_read": ("mixer.read_logits", -jnp.inf),
    "zero_write": ("mixer.write", 0.0),
    "zero_read": ("mixer.read", 0.0),
}
SCALE = "scale"
_EVERY_MODE = (*MODES, SCALE)
_FORMS = f"L2P5, L2P5:mask_write, L2P5:{SCALE}=2 or layer=2,prototype=5,mode={SCALE},by=2"


@struct.dataclass
class Column:
    """Prototype `prototype` of a site `[B, T, R]` set to `value`; both are scalars `[1, 1, 1]`."""

    prototype: jax.Array
    value: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.where(jnp.arange(x.shape[-1])[None, None] == self.prototype, self.value, x)


@struct.dataclass
class ScaledColumn:
    """Prototype `prototype` of a site `[B, T, R]` times `factor`; both are scalars `[1, 1, 1]`."""

    prototype: jax.Array
    factor: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        on = jnp.arange(x.shape[-1])[None, None] == self.prototype
        return jnp.where(on, x * self.factor.astype(x.dtype), x)


class PrototypeEdit(NamedTuple):
    """What `edit` is called with; `by` is the factor of the mode `scale`, and None for others."""

    layer: int
    prototype: int
    mode: str
    by: float | None = None


def edit(*, layer: int, prototype: int, mode: str, by: float | None = None) -> dict[str, Any]:
    """The edits of one prototype, for `lm_jax.forward`.

    Layer, prototype and factor are traced data: a sweep over them compiles once.

    Args:
      layer: index of the layer, from 0 on.
      prototype: index of the prototype in its layer, from 0 on.
      mode: one of `MODES`, or `scale`.
      by: the factor of `scale`, from 0 on; above 1 the prototype is amplified.

    Raises:
      UsageError: an unknown mode, a negative prototype, or a factor that is missing, negative or of
        another mode. A layer that the model does not have is refused by `forward`, a prototype by
        `check`.
    """
    if prototype < 0:
        raise UsageError(f"prototype = {prototype} must be at least 0")
    check_factor(_known(mode), by)
    at = jnp.full((1, 1, 1), prototype)
    if by is not None:
        factor = jnp.full((1, 1, 1), by, jnp.float32)
        return {"mixer.read": OneLayer(layer, ScaledColumn(at, factor))}
    site, value = MODES[mode]
    return {site: OneLayer(layer, Column(at, jnp.full((1, 1, 1), value, jnp.float32)))}


def edit_in(layer: int, prototype: int, mode: str) -> dict[str, Any]:
    """The edits of one prototype of a layer that is an array, so that a sweep compiles once.

    In layer -1 they change nothing.
    """
    made = edit(layer=0, prototype=prototype, mode=mode)
    return {site: one.replace(layer=np.int32(layer)) for site, one in made.items()}


def parse(text: str) -> PrototypeEdit:
    """Parses the edit of a prototype in one of two forms.

    "L2P5" (mode `zero_write`), "L2P5:mask_write", "L2P5:scale=2", or by names,
    "layer=2,prototype=5,mode=scale,by=2". "L2P5:scale" leaves the factor to a sweep of strengths.

    Raises:
      UsageError: the text has another form, or the mode is unknown.
    """
    if "," in text:
        parts = [part.partition("=") for part in text.replace(" ", "").split(",")]
        named = {name: value for name, _, value in parts}
        if len(named) < len(parts):
            raise UsageError(f"edit = {text!r} names a field twice; name each once")
        if unknown := [name for name in named if name not in PrototypeEdit._fields]:
            fields = ", ".join(PrototypeEdit._fields)
            raise UsageError(f"edit = {text!r}: {unknown[0]!r} is not one of {fields}")
        place = f"L{named.get('layer')}P{named.get('prototype')}"
        mode, by = named.get("mode", "zero_write"), named.get("by")
    else:
        place, _, rest = text.partition(":")
        mode, _, factor = (rest or "zero_write").partition("=")
        by = factor or None
    result = re.fullmatch(r"L(\d+) ?P(\d+)", place.strip())
    if not result:
        raise UsageError(f"edit = {text!r} is not of the form {_FORMS}")
    parsed = PrototypeEdit(int(result[1]), int(result[2]), _known(mode), _number(text, by))
    # Without a factor, it is one of a sweep of strengths, or refused by `edit`.
    if parsed.by is not None:
        check_factor(parsed.mode, parsed.by)
    return parsed


def _number(text: str, by: str | None) -> float | None:
    try:
        return None if by is None else float(by)
    except ValueError:
        raise UsageError(f"edit = {text!r}: {by!r} is not a number") from None


def _known(mode: str) -> str:
    if mode not in _EVERY_MODE:
        raise UsageError(
            f"mode = {mode!r} is not one of {', '.join(_EVERY_MODE)}{nearest(mode, _EVERY_MODE)}"
        )
    return mode


def check_factor(mode: str, by: float | None) -> None:
    """Checks that a factor goes with the mode.

    Raises:
      UsageError: it is missing, of another mode, negative or not finite.
    """
    if mode != SCALE and by is not None:
        raise UsageError(f"by = {by:g} goes with mode = {SCALE!r}, not with {mode!r}; leave it out")
    if mode == SCALE and by is None:
        raise UsageError(
            f"mode = {SCALE!r} needs a factor; write L2P5:{SCALE}=2, or give "
            "factors to generate with, --strengths=0,1,2"
        )
    if by is not None and not 0 <= by < math.inf:
        raise UsageError(f"by = {by} must be a factor from 0 on")


def several(params: ParamTree, chosen: Sequence[PrototypeEdit]) -> dict[str, Chain]:
    """The edits of several prototypes at once.

    Raises:
      UsageError: as `edit`, or a layer or a prototype that the model does not have.
    """
    num_layers = params["blocks"]["mixer"]["prototypes"].shape[0]
    by_site: dict[str, list[Any]] = {}
    for one in chosen:
        check(params, layer=one.layer, prototype=one.prototype)
        for site, change in edit(**one._asdict()).items():
            by_site.setdefault(site, []).append(change.stacked(num_layers))
    return {site: Chain(tuple(edits)) for site, edits in by_site.items()}


GATES = ("mixer.write", "mixer.read")


def clamp(
    gates: Mapping[str, jax.Array],
    source_BT: jax.typing.ArrayLike,
    chosen: Sequence[tuple[int, int]] = (),
) -> dict[str, Replace]:
    """The edits that hold the gates of a text to those of another one.

    Args:
      gates: gates of the other text, recorded at `GATES`, `[L, B, S, R]` each.
      source_BT: the position of the other text whose gates a position takes; -1 leaves it alone.
      chosen: the prototypes that are held, each `(layer, prototype)`; empty for all.
    """
    source_BT = jnp.asarray(source_BT)
    mask_LBTR = _chosen(gates, chosen) & (source_BT >= 0)[None, :, :, None]
    index_LBTR = jnp.maximum(source_BT, 0)[None, :, :, None]
    return {
        site: Replace(jnp.take_along_axis(gates[site], index_LBTR, axis=2), mask_LBTR)
        for site in GATES
    }


def released_clamp(
    gates: Mapping[str, jax.Array],
    source_B: jax.typing.ArrayLike,
    at_BT: jax.typing.ArrayLike,
    *,
    gate: Literal["write", "read"],
    shared_routing: bool,
    heads: int = 1,
    chosen: Sequence[tuple[int, int]] = (),
) -> dict[str, Replace]:
    """The edits that force one gate of a text as the released code does.

    The gate that the last layer has at one token of another text goes through a softmax once more,
    which makes it flatter, and takes the place of the gate in all layers. A forced write gate at
    the last token reaches no output there, since a token reads what earlier ones wrote; but a first
    layer with shared routing reads with its write gate, and so with the forced one.

    Args:
      gates: gates of the other text, recorded at `GATES`, `[L, B, S, R]` each.
      source_B: the position of the other text whose gate is taken.
      at_BT: whether the gate is forced at a position.
      gate: the one that is taken and forced.
      shared_routing: whether the first layer reads with its write gate.
      heads: number of the mixer's heads; each has a softmax of its own.
      chosen: the prototypes that are forced, each `(layer, prototype)`; empty for all.
    """
    site = f"mixer.{gate}"
    L, B, _, R = gates[site].shape
    last_B1R = gates[site][-1, jnp.arange(B), jnp.asarray(source_B)][:, None]
    forced_LB1R = jnp.broadcast_to(normalise(last_B1R, "softmax", heads=heads), (L, B, 1, R))
    mask_LBTR = _chosen(gates, chosen) & jnp.asarray(at_BT)[None, :, :, None]
    edits = {site: Replace(forced_LB1R, mask_LBTR)}
    if shared_routing and gate == "write":
        first_L111 = (jnp.arange(L) == 0)[:, None, None, None]
        edits["mixer.read"] = Replace(forced_LB1R, mask_LBTR & first_L111)
    return edits


def _chosen(gates: Mapping[str, jax.Array], chosen: Sequence[tuple[int, int]]) -> jax.Array:
    """Mask `[L, 1, 1, R]` of the prototypes of `chosen`, each `(layer, prototype)`, or of all."""
    L, _, _, R = gates[GATES[0]].shape
    on_LR = jnp.full((L, R), not chosen)
    for layer, prototype in chosen:
        on_LR = on_LR.at[layer, prototype].set(True)
    return on_LR[:, None, None]


def check(params: ParamTree, *, layer: int, prototype: int) -> None:
    """Checks that the model has this layer and this prototype.

    Raises:
      UsageError: it does not; the message has the range.
    """
    L, R = params["blocks"]["mixer"]["prototypes"].shape[:2]
    for name, index, size in (("layer", layer, L), ("prototype", prototype, R)):
        if not 0 <= index < size:
            raise UsageError(f"{name} = {index} is outside 0..{size - 1} of this model")


def reinitialise(
    params: ParamTree, key: jax.Array, *, layer: int, prototype: int
) -> dict[str, Any]:
    """Parameters with one prototype vector redrawn from N(0, 1 / D), not normalised.

    As in the released code; the prototype vectors of a new model have norm 1.

    Raises:
      UsageError: a layer or a prototype out of range.
    """
    check(params, layer=layer, prototype=prototype)
    mixer = params["blocks"]["mixer"]
    rows_LRD = mixer["prototypes"]
    D = rows_LRD.shape[-1]
    row_D = (jax.random.normal(key, (D,)) / D**0.5).astype(rows_LRD.dtype)
    changed = {**mixer, "prototypes": rows_LRD.at[layer, prototype].set(row_D)}
    return {**params, "blocks": {**params["blocks"], "mixer": changed}}
