"""Recipes of the paper's Table 2: a row map that may replace softmax, with its bias.

From "When Does Polynomial Attention Concentrate?", Eq. 2, Algorithm 1 and section 5.1. The maps are
those of `iaj_kernels.row_map_attention.maps`: functions of scores `[..., S]`, where a masked key
has score -inf, and of a bias, that return weights `[..., S]`. `field_maps` has those of other
papers, `feature_maps` those of linear attention and `delta_maps` the gated delta rule, which read
queries and keys in place of scores.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import math
from pathlib import Path
import types
from typing import Any

from iaj_kernels.row_map_attention import maps
from iaj_kernels.row_map_attention.maps import (
    RowMap,
    ramapuram_sigmoid,
    relu_over_length,
    relu_power,
)
from lm_jax.errors import UsageError, nearest
from polyattn_jax.recipes.delta_maps import GatedDelta
from polyattn_jax.recipes.feature_maps import FeatureMap
from polyattn_jax.recipes.field_maps import FieldMap
from polyattn_jax.recipes.input_maps import InputMap

Map = RowMap | FieldMap | InputMap

softmax, sigmoid = maps.softmax(), maps.sigmoid()


# A number; "auto", "auto_head", "auto_layer"; the path of a .json file of `bias_tables`; -logn.
# Of a delta rule: a number; "distance"; the path of another .json file of `bias_tables`.
Bias = float | str
Calibrated = float | None | Mapping[str, Any]
_CALIBRATED = ("auto", "auto_head", "auto_layer")
# The bias of a delta rule whose mean distances are measured.
DISTANCE = "distance"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A row map with its bias: one row of Table 2. `spec` parses back to an equal recipe."""

    name: str
    spec: str
    map: Map
    bias: Bias

    @property
    def tabled(self) -> bool:
        """Whether every head, or every layer, has a bias of its own."""
        return isinstance(self.bias, str) and self.bias != "auto"

    @property
    def degree(self) -> int | float | None:
        """p of S_p at one bias; None for no normalised power, or a bias of each head or layer."""
        return None if self.tabled else self.power

    @property
    def power(self) -> int | float | None:
        """p of a normalised power, an int where it is whole; None for any other map."""
        p = self.map.degree
        if p is None or not self.map.normalised:
            return None
        return int(p) if p == int(p) else p

    @property
    def unmeasured(self) -> str:
        """Why rows of a recipe without a degree have no measured S."""
        if not isinstance(self.map, RowMap) and self.map.signed:
            return "S is not defined for this map, whose weights may be negative"
        return "S_p is not measured for this map"

    @property
    def option(self) -> str:
        """The bias by its name in a spec: `distance` of a delta rule, `b` of any other map."""
        return DISTANCE if isinstance(self.map, GatedDelta) else "b"

    @property
    def bias_kind(self) -> str:
        """The bias as `rows.parquet` names it: `auto`, `zero`, the number, or the table's name."""
        return "zero" if self.bias == 0 else _bias_name(self.bias)


def resolve_bias(recipe: Recipe, calibrated: Calibrated) -> Any:
    """The bias to run `recipe` with: a number, or numbers `[L, N]` of all heads.

    Args:
      recipe: the recipe, the bias of which may be calibrated.
      calibrated: the model's b_auto, or all calibrated biases by their name in a recipe
        (`bias_tables.calibrated`).

    Raises:
      UsageError: if the recipe asks for a bias that is not there.
    """
    if not isinstance(recipe.bias, str):
        return recipe.bias
    known = calibrated if isinstance(calibrated, Mapping) else {"auto": calibrated}
    value = known.get(recipe.bias)
    if value is None:
        wanted = f"b={recipe.bias} needs a calibrated bias; pass one"
        if recipe.option == DISTANCE:
            wanted = "the mean distances of the heads are not known; pass them as bias"
        raise UsageError(f"recipe {recipe.spec!r}: {wanted} or write {recipe.option}=<number>")
    return value


def _relu_recipe(p: float, b: Bias) -> Recipe:
    spec = f"relu:p={_text(p)},b={_text(b)}"
    return Recipe(f"relu_p{_text(p)}_b{_bias_name(b)}", spec, relu_power(p), b)


def _sigmoid_recipe(b: Bias) -> Recipe:
    return Recipe(f"sigmoid_b{_bias_name(b)}", f"sigmoid:b={_text(b)}", sigmoid, b)


def _ramapuram_recipe(b: Bias) -> Recipe:
    row_map = ramapuram_sigmoid(b == "-logn")
    name = "ramapuram" if b == "-logn" else f"ramapuram_b{_bias_name(b)}"
    return Recipe(name, f"ramapuram:b={_text(b)}", row_map, 0.0 if b == "-logn" else b)


def _over_length_recipe(p: float, alpha: float, b: Bias) -> Recipe:
    suffix = "" if b == 0 else f"_b{_bias_name(b)}"
    spec = f"relu_over_length:p={_text(p)},alpha={_text(alpha)},b={_text(b)}"
    name = f"relu_p{_text(p)}_over_{_length_text(alpha)}{suffix}"
    return Recipe(name, spec, relu_over_length(p, alpha), b)


def _softpick_recipe(b: Bias) -> Recipe:
    return Recipe(f"softpick_b{_bias_name(b)}", f"softpick:b={_text(b)}", FieldMap("softpick"), b)


def _scaled_softmax_recipe(n0: float) -> Recipe:
    if n0 <= 1:
        raise UsageError(f"recipe softmax_logn: n0={_text(n0)} must be above 1, as log n0 divides")
    text = _text(n0)
    return Recipe(
        f"softmax_logn_{text}", f"softmax_logn:n0={text}", FieldMap("softmax_logn", n0=n0), 0.0
    )


def _poly_recipe(p: float, b: Bias) -> Recipe:
    spec = f"poly:p={_text(p)},b={_text(b)}"
    row_map = FieldMap("poly", p=_whole("poly", p))
    return Recipe(f"poly_p{_text(p)}_b{_bias_name(b)}", spec, row_map, b)


def _poly_over_length_recipe(p: float, alpha: float, b: Bias) -> Recipe:
    row_map = FieldMap("poly_over_length", p=_whole("poly_over_length", p), alpha=alpha)
    suffix = "" if b == 0 else f"_b{_bias_name(b)}"
    spec = f"poly_over_length:p={_text(p)},alpha={_text(alpha)},b={_text(b)}"
    return Recipe(f"poly_p{_text(p)}_over_{_length_text(alpha)}{suffix}", spec, row_map, b)


def _taylor_recipe(b: Bias, w: float, sinks: float, gamma: float) -> Recipe:
    plain = Recipe(f"taylor2_b{_bias_name(b)}", f"taylor2:b={_text(b)}", FieldMap("taylor2"), b)
    return _with_window(plain, w, sinks, gamma)


def _window_recipe(w: float, sinks: float) -> Recipe:
    row_map = FieldMap("window", w=_whole("window", w, "w"), sinks=_whole("window", sinks, "sinks"))
    name, spec = f"window_w{row_map.w}", f"window:w={row_map.w}"
    if row_map.sinks:
        name, spec = f"{name}_sinks{row_map.sinks}", f"{spec},sinks={row_map.sinks}"
    return Recipe(name, spec, row_map, 0.0)


def _with_window(plain: Recipe, w: float, sinks: float, gamma: float, default: float = 1) -> Recipe:
    """The recipe with softmax in a window, or as it is with w = 0; gamma 0 is the default."""
    kind = plain.spec.partition(":")[0]
    if not w and not sinks and not gamma:
        return plain
    if not w:
        option = "sinks" if sinks else "gamma"
        raise UsageError(
            f"recipe {kind}: {option} belongs to a window and there is none; write "
            f"{kind}:w=64,{option}={_text(sinks or gamma)}, or leave {option} out"
        )
    gamma = float(gamma or default)
    window = {"w": _whole(kind, w, "w"), "sinks": _whole(kind, sinks, "sinks")}
    shown: dict[str, float] = {name: value for name, value in window.items() if value}
    if gamma != default:
        shown["gamma"] = gamma
    options = ",".join(f"{name}={_text(value)}" for name, value in shown.items())
    row_map: Any = plain.map
    return dataclasses.replace(
        plain,
        name="_".join([plain.name, *(f"{name}{_text(value)}" for name, value in shown.items())]),
        spec=f"{plain.spec}{',' if ':' in plain.spec else ':'}{options}",
        map=dataclasses.replace(row_map, **window, gamma=gamma),
    )


def _performer_recipe(m: float, seed: float, w: float, sinks: float, gamma: float) -> Recipe:
    for name, value in (("m", m), ("seed", seed)):
        if value != int(value):
            raise UsageError(f"recipe performer: {name}={_text(value)} must be a whole number")
    row_map = FeatureMap("performer", m=int(m), seed=int(seed))
    name, spec = f"performer_m{row_map.m}", f"performer:m={row_map.m}"
    if row_map.seed:
        name, spec = f"{name}_seed{row_map.seed}", f"{spec},seed={row_map.seed}"
    return _with_window(Recipe(name, spec, row_map, 0.0), w, sinks, gamma)


def _gdn_recipe(distance: Bias) -> Recipe:
    if distance == DISTANCE:
        return Recipe("gdn", "gdn", GatedDelta(), DISTANCE)
    prefix = "" if isinstance(distance, str) else DISTANCE
    name = f"gdn_{prefix}{_bias_name(distance)}"
    return Recipe(name, f"gdn:distance={_text(distance)}", GatedDelta(), distance)


def _whole(kind: str, value: float, option: str = "p") -> int:
    if value != int(value):
        why = ", as scores may be negative" if option == "p" else ""
        raise UsageError(f"recipe {kind}: {option}={_text(value)} must be a whole number{why}")
    return int(value)


def _bias_name(b: Bias) -> str:
    """A bias in the name of a recipe: the stem of a file, else as in its spec."""
    return Path(b).stem if isinstance(b, str) and b.endswith(".json") else _text(b)


def _text(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return str(int(value)) if value == int(value) else repr(float(value))


def _length_text(alpha: float) -> str:
    return {1.0: "L", 0.5: "sqrtL"}.get(float(alpha), f"L{_text(alpha)}")


SOFTMAX = Recipe("softmax", "softmax", softmax, 0.0)
_ENTMAX = Recipe("entmax15", "entmax15", FieldMap("entmax15"), 0.0)
_ELU1 = Recipe("elu1", "elu1", FeatureMap("elu1"), 0.0)
_HEDGEHOG = Recipe("hedgehog", "hedgehog", FeatureMap("hedgehog"), 0.0)

_TABLE_2 = (
    *(_relu_recipe(p, b) for p in (2.0, 4.0, 8.0, 16.0) for b in (0.0, "auto")),
    *(_sigmoid_recipe(b) for b in (0.0, "auto")),
    *(_over_length_recipe(p, alpha, 0.0) for alpha in (1.0, 0.5) for p in (1.0, 2.0)),
)
RECIPES: Mapping[str, Recipe] = types.MappingProxyType({r.name: r for r in _TABLE_2})
"""The 14 recipes of Table 2 by name, in its order."""

# Softmax in a window and the map outside it (LoLCATs, arXiv:2410.10254); gamma 0 is the kind's own.
_WINDOW: dict[str, float | str | None] = {"w": 0.0, "sinks": 0.0, "gamma": 0.0}
_GAMMA = 0.1  # where the window factors of LoLCATs start, at sigmoid(-2.1972)

# Each kind: what builds it, and its options with their defaults (None: must be given).
_KINDS: dict[str, tuple[Callable[..., Recipe], dict[str, float | str | None]]] = {
    "softmax": (lambda: SOFTMAX, {}),
    "relu": (_relu_recipe, {"p": None, "b": 0.0}),
    "sigmoid": (_sigmoid_recipe, {"b": 0.0}),
    "ramapuram": (_ramapuram_recipe, {"b": "-logn"}),
    "relu_over_length": (_over_length_recipe, {"p": None, "alpha": 1.0, "b": 0.0}),
    "softpick": (_softpick_recipe, {"b": 0.0}),  # arXiv:2504.20966
    "entmax15": (lambda: _ENTMAX, {}),  # arXiv:1905.05702
    "softmax_logn": (_scaled_softmax_recipe, {"n0": 1024.0}),  # arXiv:2501.19399
    "poly": (_poly_recipe, {"p": None, "b": 0.0}),  # arXiv:2310.01655
    "poly_over_length": (
        _poly_over_length_recipe,
        {"p": None, "alpha": 0.5, "b": 0.0},
    ),  # 2410.18613
    "taylor2": (_taylor_recipe, {"b": 0.0, **_WINDOW}),  # arXiv:2402.18668
    "window": (_window_recipe, {"w": None, "sinks": 0.0}),  # arXiv:2309.17453
    "elu1": (functools.partial(_with_window, _ELU1, default=_GAMMA), _WINDOW),  # arXiv:2006.16236
    "hedgehog": (
        functools.partial(_with_window, _HEDGEHOG, default=_GAMMA),
        _WINDOW,
    ),  # arXiv:2402.04347
    "performer": (
        _performer_recipe,
        {"m": 256.0, "seed": 0.0, **_WINDOW},
    ),  # arXiv:2009.14794
    "gdn": (_gdn_recipe, {DISTANCE: DISTANCE}),  # arXiv:2412.06464
}


def names_map(text: str) -> bool:
    """Whether a text begins as a recipe does, right or not in its options."""
    return text in RECIPES or text.partition(":")[0].strip() in _KINDS


def parse_recipe(text: str) -> Recipe:
    """Reads a recipe: a name of `RECIPES`, or `kind:option=value,...`.

    Kinds and options: `softmax`; `relu:p=,b=`; `sigmoid:b=`; `ramapuram:b=` (`-logn` by default);
    `relu_over_length:p=,alpha=,b=`; of `field_maps`, `softpick:b=`, `entmax15`, `softmax_logn:n0=`,
    `poly:p=,b=`, `poly_over_length:p=,alpha=,b=`, `taylor2:b=` and `window:w=,sinks=`; of
    `feature_maps`, `elu1`, `hedgehog` and `performer:m=,seed=`. b is a number or `auto` and 0 by
    default; p is positive, that of `poly` whole. `auto_head` and `auto_layer` calibrate a bias of
    every head or layer, and `b=FILE.json` reads one (`bias_tables`); the recipe's name has the
    file's without its folder. Feature maps and `taylor2` take `w=,sinks=,gamma=` as well: softmax,
    times gamma, on the last w keys and the first few, and the map on the others.

    `gdn:distance=`, of `delta_maps`, is the gated delta rule. Its distance, in tokens, is 0, a
    positive number of all heads or a FILE.json (`bias_tables`); without one the mean distance
    of every head is measured.

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


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _hint(key: str, options: Mapping[str, Any]) -> str:
    return nearest(key, options) if options else "; it has none"


def _value(text: str, kind: str, key: str, value: str) -> float | str:
    words = ()
    if key == "b":
        words = (*_CALIBRATED, "-logn") if kind == "ramapuram" else _CALIBRATED
    if value in words:
        return value
    if key in ("b", DISTANCE) and value.endswith(".json"):
        stem = Path(value).stem
        own = stem.removeprefix(DISTANCE) if key == DISTANCE else stem
        if own in ("", *_CALIBRATED, "zero", "-logn") or _number(own) is not None:
            raise UsageError(
                f"recipe {text!r}: the name of its file reads as the bias {stem}; rename the file"
            )
        return value
    number = _number(value)
    if number is None:
        number = math.nan
    least_is_zero = number == 0 and (
        key in ("sinks", DISTANCE) or (key == "w" and kind != "window")
    )
    if not math.isfinite(number) or (key != "b" and number <= 0 and not least_is_zero):
        wanted = {"b": "a number", DISTANCE: "0, a positive number or a FILE.json"}
        allowed = " or ".join((wanted.get(key, "a positive number"), *words))
        raise UsageError(f"recipe {text!r}: {key}={value} must be {allowed}")
    return number
