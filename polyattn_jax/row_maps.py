"""Pointwise row maps that may stand in for softmax, and the recipes of the paper's Table 2.

From "When Does Polynomial Attention Concentrate?", Eq. 2, Algorithm 1 and section 5.1. A row map
takes scores `[..., S]`, where a masked key has score -inf, and a bias, and returns weights
`[..., S]`:

    softmax              e^z / sum e^z                              (the bias cancels, Theorem 4.1)
    relu, p              r^p / sum r^p            r = max(z + b, 0)
    sigmoid              s(z + b) / sum s(z + b)
    ramapuram            s(z + b - log n)         n unmasked keys (arXiv:2409.04431), or s(z + b)
    relu_over_length     r^p / n^alpha            (Wortsman et al., arXiv:2309.08586)

The last two are not normalised. Arithmetic is in float32, or in the scores' dtype if that is
wider. Masked keys get weight 0; a row whose weights sum to 0 (a dead row, or one with no key) is
all zeros. Gradients are finite; those of the relu maps are 0 at the threshold and below it.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
import types
from typing import Any, Literal

import jax
import jax.numpy as jnp

from kernels.row_map_attention import maps
from lm_jax.errors import UsageError, nearest
from lm_jax.model import attention

Bias = jax.Array | float


@dataclasses.dataclass(frozen=True)
class RowMap:
    """A named row map `fn(*args, scores, bias)`; hashable, so it may be static under `jit`.

    `kernel` is the same map as `kernels.row_map_attention` knows it, None where it does not.
    """

    name: str
    fn: Callable[..., jax.Array]
    args: tuple[float, ...] = ()
    normalised: bool = True
    degree: float | None = None  # of the active branch, for maps that have one
    kernel: maps.RowMap | None = None

    def __call__(self, scores: Any, bias: Bias = 0.0) -> jax.Array:
        """Weights of `scores[..., S]`; `bias` is a scalar or broadcasts to `scores`."""
        scores = jnp.asarray(scores)
        dtype = jnp.promote_types(scores.dtype, jnp.float32)
        bias = jnp.asarray(bias, dtype)
        if bias.ndim:
            bias = jnp.broadcast_to(bias, scores.shape)
        return self.fn(*self.args, scores.astype(dtype), bias)


def _softmax(z, b):
    del b  # softmax is invariant to a shift of its row
    return attention.softmax(z)


def _relu_power(p, z, b):
    r = _active_branch(z, b)
    # The map does not depend on the scale of r, so the peak needs no gradient; without it r^16
    # leaves float32 from r = 256 on.
    peak = jax.lax.stop_gradient(r.max(-1, keepdims=True))
    weight = _power(r / jnp.where(peak > 0, peak, 1), p)
    total = weight.sum(-1, keepdims=True)
    return weight / jnp.where(total == 0, 1, total)


def _sigmoid(z, b):
    keep = z != -jnp.inf
    # In the log domain, because s(z + b) is 0 in float32 below -104 though the ratios are not.
    log_weight = jax.nn.log_sigmoid(jnp.where(keep, z, 0) + b)
    return attention.softmax(jnp.where(keep, log_weight, -jnp.inf))


def _ramapuram(minus_log_n, z, b):
    keep = z != -jnp.inf
    u = jnp.where(keep, z, 0) + b
    if minus_log_n:
        u = u - jnp.log(_length(keep, z.dtype))
    return jnp.where(keep, jax.nn.sigmoid(u), 0)


def _relu_over_length(p, alpha, z, b):
    return _power(_active_branch(z, b), p) / _length(z != -jnp.inf, z.dtype) ** alpha


def _active_branch(z, b):
    """max(z + b, 0) with slope 0 at the threshold; a NaN score stays NaN."""
    u = z + b
    return jnp.where(u <= 0, 0, u)


def _length(keep, dtype):
    return jnp.maximum(keep.sum(-1, keepdims=True), 1).astype(dtype)


def _power(x, p):
    if p == int(p):
        return x ** int(p)
    # The slope of x^p at 0 is inf or 0 * inf; inactive keys have none.
    return jnp.where(x == 0, 0, jnp.where(x == 0, 1, x) ** p)


softmax = RowMap("softmax", _softmax, kernel=maps.softmax())
sigmoid = RowMap("sigmoid", _sigmoid, kernel=maps.sigmoid())


def relu_power(p: float) -> RowMap:
    """`r^p / sum r^p`, computed from r / r_max: right at p = 16 for scores of any size."""
    _check_positive("p", p)
    name = f"relu_p{_text(p)}"
    return RowMap(name, _relu_power, (p,), degree=p, kernel=maps.relu_power(p))


def ramapuram_sigmoid(minus_log_n: bool = True) -> RowMap:
    """`s(z + b - log n)` for n unmasked keys, not normalised; `s(z + b)` without `minus_log_n`."""
    name = "ramapuram" if minus_log_n else "ramapuram_plain"
    kernel = maps.ramapuram_sigmoid(minus_log_n)
    return RowMap(name, _ramapuram, (minus_log_n,), normalised=False, kernel=kernel)


def relu_over_length(p: float, alpha: float) -> RowMap:
    """`r^p / n^alpha` for n unmasked keys (the causal, not the padded length), not normalised."""
    _check_positive("p", p)
    name = f"relu_p{_text(p)}_over_{_length_text(alpha)}"
    kernel = maps.relu_over_length(p, alpha)
    return RowMap(name, _relu_over_length, (p, alpha), normalised=False, degree=p, kernel=kernel)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A row map with its bias: one row of Table 2. `spec` parses back to an equal recipe."""

    name: str
    spec: str
    map: RowMap
    bias: float | Literal["auto"]

    @property
    def degree(self) -> int | float | None:
        """p of S_p, an int where it is whole; None for a map that is no normalised power."""
        p = self.map.degree
        if p is None or not self.map.normalised:
            return None
        return int(p) if p == int(p) else p

    @property
    def bias_kind(self) -> str:
        """The bias as `rows.parquet` names it: `auto`, `zero`, or the number itself."""
        return "zero" if self.bias == 0 else _text(self.bias)


def resolve_bias(recipe: Recipe, calibrated: float | None) -> float:
    """The bias to run `recipe` with, given the model's b_auto.

    Raises:
      UsageError: if the recipe asks for b_auto and there is none.
    """
    if recipe.bias != "auto":
        return recipe.bias
    if calibrated is None:
        raise UsageError(
            f"recipe {recipe.spec!r}: b=auto needs a calibrated bias; pass one or write b=<number>"
        )
    return calibrated


def _relu_recipe(p: float, b: float | Literal["auto"]) -> Recipe:
    spec = f"relu:p={_text(p)},b={_text(b)}"
    return Recipe(f"relu_p{_text(p)}_b{_text(b)}", spec, relu_power(p), b)


def _sigmoid_recipe(b: float | Literal["auto"]) -> Recipe:
    return Recipe(f"sigmoid_b{_text(b)}", f"sigmoid:b={_text(b)}", sigmoid, b)


def _ramapuram_recipe(b: float | Literal["auto", "-logn"]) -> Recipe:
    row_map = ramapuram_sigmoid(b == "-logn")
    name = "ramapuram" if b == "-logn" else f"ramapuram_b{_text(b)}"
    return Recipe(name, f"ramapuram:b={_text(b)}", row_map, 0.0 if b == "-logn" else b)


def _over_length_recipe(p: float, alpha: float, b: float | Literal["auto"]) -> Recipe:
    suffix = "" if b == 0 else f"_b{_text(b)}"
    spec = f"relu_over_length:p={_text(p)},alpha={_text(alpha)},b={_text(b)}"
    row_map = relu_over_length(p, alpha)
    return Recipe(row_map.name + suffix, spec, row_map, b)


def _text(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return str(int(value)) if value == int(value) else repr(float(value))


def _length_text(alpha: float) -> str:
    return {1.0: "L", 0.5: "sqrtL"}.get(float(alpha), f"L{_text(alpha)}")


def _check_positive(field: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise UsageError(f"{field}: {value} must be a positive number")


SOFTMAX = Recipe("softmax", "softmax", softmax, 0.0)

_TABLE_2 = (
    *(_relu_recipe(p, b) for p in (2.0, 4.0, 8.0, 16.0) for b in (0.0, "auto")),
    *(_sigmoid_recipe(b) for b in (0.0, "auto")),
    *(_over_length_recipe(p, alpha, 0.0) for alpha in (1.0, 0.5) for p in (1.0, 2.0)),
)
RECIPES: Mapping[str, Recipe] = types.MappingProxyType({r.name: r for r in _TABLE_2})
"""The 14 recipes of Table 2 by name, in its order."""

# Each kind: what builds it, and its options with their defaults (None: must be given).
_KINDS: dict[str, tuple[Callable[..., Recipe], dict[str, float | str | None]]] = {
    "softmax": (lambda: SOFTMAX, {}),
    "relu": (_relu_recipe, {"p": None, "b": 0.0}),
    "sigmoid": (_sigmoid_recipe, {"b": 0.0}),
    "ramapuram": (_ramapuram_recipe, {"b": "-logn"}),
    "relu_over_length": (_over_length_recipe, {"p": None, "alpha": 1.0, "b": 0.0}),
}


def parse_recipe(text: str) -> Recipe:
    """Reads a recipe: a name of `RECIPES`, or `kind:option=value,...`.

    Kinds and options: `softmax`; `relu:p=,b=`; `sigmoid:b=`; `ramapuram:b=` (`-logn` by default);
    `relu_over_length:p=,alpha=,b=`. b is a number or `auto` and 0 by default; p is positive.

    Raises:
      UsageError: naming what cannot be read and the nearest thing that can.
    """
    text = text.strip()
    if text in RECIPES:
        return RECIPES[text]
    kind, _, options = text.partition(":")
    if kind not in _KINDS:
        hint = nearest(kind, [*_KINDS, *RECIPES])
        raise UsageError(f"recipe {text!r}: no recipe or kind {kind!r}{hint}")
    build, defaults = _KINDS[kind]
    values = dict(defaults)
    visited = set()
    for option in filter(None, options.split(",")):
        key, equals, value = (part.strip() for part in option.partition("="))
        if key not in defaults:
            raise UsageError(f"recipe {text!r}: {kind} has no option {key!r}{_hint(key, defaults)}")
        if not equals or key in visited:
            raise UsageError(f"recipe {text!r}: write {key}=<value> once")
        visited.add(key)
        values[key] = _value(text, kind, key, value)
    missing = [key for key, value in values.items() if value is None]
    if missing:
        raise UsageError(f"recipe {text!r}: {kind} needs {missing[0]}; write {kind}:{missing[0]}=4")
    return build(**values)


def _hint(key: str, options: Mapping[str, Any]) -> str:
    return nearest(key, options) if options else "; it has none"


def _value(text: str, kind: str, key: str, value: str) -> float | str:
    words = {"b": ("auto", "-logn") if kind == "ramapuram" else ("auto",)}.get(key, ())
    if value in words:
        return value
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or (key != "b" and number <= 0):
        wanted = " or ".join(("a number" if key == "b" else "a positive number", *words))
        raise UsageError(f"recipe {text!r}: {key}={value} must be {wanted}")
    return number
