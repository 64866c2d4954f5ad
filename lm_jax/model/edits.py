"""Interventions as data: pytrees applied at a site of the forward pass.

Which sites are edited is structure and therefore static; what is written there is traced. Sweeping
layers, heads, positions or strengths therefore never recompiles. Leaves have one axis per letter
of the site (`sites.SITES`), length 1 where they broadcast, with a leading L for sites of a layer.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import UsageError
from lm_jax.model.config import DecoderConfig
from lm_jax.model.sites import FunctionEdit


@struct.dataclass
class Replace:
    """`value` where `mask` is true (activation patching); elsewhere the site is untouched."""

    value: jax.Array
    mask: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        # A branch, not a select alone: where nothing is selected the site is passed on untouched,
        # and the compiled arithmetic around it rounds as it does without the edit.
        return jax.lax.cond(
            self.mask.any(),
            lambda: jnp.where(self.mask, self.value.astype(x.dtype), x),
            lambda: x,
        )


@struct.dataclass
class Add:
    """The site plus `value` (steering); the gradient at a zero `value` is the attribution."""

    value: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.value.astype(x.dtype)


@struct.dataclass
class Scale:
    """The site times `value`."""

    value: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.value.astype(x.dtype)


@struct.dataclass
class Freeze:
    """The site as it is, with no gradient through it."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(x)


@struct.dataclass
class ScaleGradient:
    """The site as it is, with the gradient through it times `factor`."""

    factor: float = struct.field(pytree_node=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        return _scale_gradient(x, self.factor)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _scale_gradient(x: jax.Array, factor: float) -> jax.Array:
    del factor
    return x


_scale_gradient.defvjp(lambda x, factor: (x, None), lambda factor, _, g: (g * factor,))


@struct.dataclass
class Quotient(FunctionEdit):
    """Keeps a function's value and replaces its derivative by f(x) / x, a constant quotient.

    Where x is 0, the derivative is f'(0), to which the quotient converges if f(0) = 0.
    """

    def apply(self, function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        return _quotient(function, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _quotient(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return function(x)


def _quotient_forward(
    function: Callable[[jax.Array], jax.Array], x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    y, slope = jax.jvp(function, (x,), (jnp.ones_like(x),))
    zero = x == 0
    return y, jnp.where(zero, slope, y / jnp.where(zero, 1, x))


def _quotient_backward(
    function: Callable[[jax.Array], jax.Array], slope: jax.Array, g: jax.Array
) -> tuple[jax.Array]:
    del function
    return (g * slope,)


_quotient.defvjp(_quotient_forward, _quotient_backward)


@struct.dataclass
class OneLayer:
    """An edit of layer `layer` alone, with leaves without L; `forward` stacks it over layers."""

    layer: jax.Array | int
    edit: Any

    def stacked(self, num_layers: int) -> "Switched":
        """The same for a model of `num_layers`.

        Raises:
          UsageError: the layer is not one of them.
        """
        if not isinstance(self.layer, jax.core.Tracer) and not 0 <= self.layer < num_layers:
            raise UsageError(f"layer = {self.layer} is outside 0..{num_layers - 1}")
        on_L = jnp.arange(num_layers) == self.layer
        ndim = max((jnp.ndim(leaf) for leaf in jax.tree.leaves(self.edit)), default=0)
        return Switched(
            on_L.reshape(-1, *[1] * ndim),
            jax.tree.map(
                lambda leaf: jnp.broadcast_to(leaf, (num_layers, *jnp.shape(leaf))), self.edit
            ),
        )


@struct.dataclass
class Switched:
    """`edit` where `on` is true, nothing where it is not: per layer."""

    on: jax.Array
    edit: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.cond(self.on.any(), lambda: self.edit(x), lambda: x)


@struct.dataclass
class Chain:
    """Several edits of one site, first to last."""

    edits: tuple[Any, ...]

    def __call__(self, x: jax.Array) -> jax.Array:
        for edit in self.edits:
            x = edit(x)
        return x


@struct.dataclass
class OneHead:
    """An edit of one head at a site with the axes `BTNH`; the other heads are untouched.

    `head` is data, as a layer is: a sweep over heads compiles once. Its shape is `[1, 1, 1, 1]`
    (`OneHead.of`).
    """

    head: jax.Array
    edit: Any

    @classmethod
    def of(cls, head: int, edit: Any) -> "OneHead":
        """The edit of head number `head`."""
        return cls(jnp.full((1, 1, 1, 1), head, jnp.int32), edit)

    def __call__(self, x: jax.Array) -> jax.Array:
        here_BTNH = jnp.arange(x.shape[2])[None, None, :, None] == self.head
        return jnp.where(here_BTNH, self.edit(x), x)


def resolve(edits: Mapping[str, Any] | None, cfg: DecoderConfig) -> dict[str, Any]:
    """Edits by site as the layers of a model take them: `OneLayer` stacked, also inside a `Chain`.

    Before a program is compiled, numbers of layers and heads are known and checked; inside of it
    they are data.

    Raises:
      UsageError: a layer or a head does not exist in the model.
    """
    return {site: _resolved(edit, cfg, site) for site, edit in (edits or {}).items()}


def _resolved(edit: Any, cfg: DecoderConfig, site: str) -> Any:
    if isinstance(edit, Chain):
        return Chain(tuple(_resolved(each, cfg, site) for each in edit.edits))
    if not isinstance(edit, OneLayer):
        return edit
    _check_heads(edit.edit, cfg, site, edit.layer)
    return edit.stacked(cfg.num_layers)


def _check_heads(edit: Any, cfg: DecoderConfig, site: str, layer: Any) -> None:
    """Refuses an edit of a head that the model does not have, also inside a `Chain`."""
    if isinstance(edit, Chain):
        for each in edit.edits:
            _check_heads(each, cfg, site, layer)
    if not isinstance(edit, OneHead):
        return
    if site != "attn.z":
        raise UsageError(f"edits[{site!r}]: heads are edited at attn.z")
    if not isinstance(edit.head, jax.core.Tracer):
        head = int(np.asarray(edit.head).item())
        if not 0 <= head < cfg.num_heads:
            raise UsageError(
                f"edits[{site!r}]: head {head} of layer {layer} is outside 0..{cfg.num_heads - 1}"
            )
