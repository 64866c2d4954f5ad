"""Low-rank adapters: frozen weights, each with a trained update of few parameters.

LoRA (Hu et al., 2021): with a weight W of inputs I and outputs O, rank r and strength alpha,

    y = x W + (alpha / r) (x down) up          down [I, r] drawn at random, up [r, O] zero

so that a fresh adapter changes nothing. Adapters are a tree of their own, declared like any
parameters (`adapter_spec`), and laid over the frozen ones for a forward pass (`attach`); `merge`
adds them in for good.

    settings = LoraConfig(rank=16, alpha=32.0, targets=("q", "k", "v", "o"))
    adapters = lm_jax.params.init(key, adapter_spec(param_spec(cfg), settings))
    forward(attach(params, adapters, settings), tokens, cfg)
"""

from collections.abc import Callable, Iterator
import dataclasses
import fnmatch
import math
import re
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from lm_jax.errors import BadInputError, UsageError, nearest
from lm_jax.model import params as params_lib
from lm_jax.model.params import ParamSpec, ParamTree

# What opens the path of a weight in a block: where layers differ in shape, with their stack.
_STACK = re.compile(r"^blocks/(\d+/)?")


@struct.dataclass
class Adapted:
    """A weight with its update; `layers.project` takes it in place of the weight."""

    weight: jax.Array
    down: jax.Array
    up: jax.Array
    strength: float = struct.field(pytree_node=False)


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """LoRA configuration: the adapted weights, their rank and strength.

    Attributes:
      rank: rank r of the two factors of an update.
      alpha: scale of the update, which is multiplied by alpha / r.
      targets: patterns, as of a shell, of names (`q`) or of paths in a block (`mlp/*`).

    Raises:
      UsageError: listing every field that cannot be used.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ("mixer/*", "mlp/*")

    def __post_init__(self) -> None:
        problems = []
        if self.rank < 1:
            problems.append(f"rank = {self.rank} must be at least 1")
        if not (self.alpha > 0 and math.isfinite(self.alpha)):
            problems.append(f"alpha = {self.alpha} must be above 0")
        if not self.targets:
            problems.append("targets must name at least one weight, such as 'q'")
        if problems:
            raise UsageError("LoRA: " + "; ".join(problems))

    @property
    def strength(self) -> float:
        """alpha / r."""
        return self.alpha / self.rank


def adapter_spec(spec: ParamTree, settings: LoraConfig) -> dict[str, Any]:
    """Declares `down` and `up` for every weight in the blocks that a target names.

    Raises:
      UsageError: a target names no weight; the nearest names are listed.
    """
    weights = dict(_weights(spec))
    chosen: dict[str, ParamSpec] = {}
    for target in settings.targets:
        results = [path for path in weights if _matches(path, target)]
        if not results:
            names = sorted({path.rpartition("/")[2] for path in weights})
            raise UsageError(f"LoRA: no weight matches {target!r}{nearest(target, names)}")
        chosen |= {path: weights[path] for path in results}
    adapters: dict[str, ParamSpec] = {}
    for path, weight in chosen.items():
        inputs = _inputs(weight)
        layers, shape, axes = weight.shape[0], weight.shape[1:], weight.axes[1:]
        width = math.prod(shape[:inputs])
        down = ParamSpec((*shape[:inputs], settings.rank), axes[:inputs] + "r", _uniform(width))
        up = params_lib.zeros((settings.rank, *shape[inputs:]), "r" + axes[inputs:])
        adapters |= {f"{path}/down": down.stacked(layers), f"{path}/up": up.stacked(layers)}
    return params_lib.tree_from_paths(dict(sorted(adapters.items())))


def _weights(spec: ParamTree) -> Iterator[tuple[str, ParamSpec]]:
    """The matrices of the blocks: what `layers.project` multiplies with."""
    for path, leaf in params_lib.leaves(spec):
        name = path.rpartition("/")[2]
        # Stacked over layers, a matrix has three axes; biases and norms by head have three as well.
        matrix = len(leaf.axes) >= 3 and not name.endswith(("bias", "scale"))
        if _STACK.sub("", path, 1).startswith(("mixer/", "mlp/")) and matrix:
            yield path, leaf


def _matches(path: str, target: str) -> bool:
    inside = _STACK.sub("", path, 1)
    names = (path.removeprefix("blocks/"), inside, inside.rpartition("/")[2])
    return any(fnmatch.fnmatchcase(name, target) for name in names)


def _inputs(weight: ParamSpec) -> int:
    """How many of a weight's axes, after L, are summed over: all but D where it ends in D."""
    axes = weight.axes[1:]
    return len(axes) - 1 if axes.endswith("D") and len(axes) > 1 else 1


def _uniform(width: int) -> params_lib.Initializer:
    """U(-1/sqrt(width), 1/sqrt(width)), the usual initialisation of a linear layer."""
    bound = 1.0 / math.sqrt(width)

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def attach(params: ParamTree, adapters: ParamTree, settings: LoraConfig) -> dict[str, Any]:
    """`params` with every adapted weight and its update as one `Adapted`.

    Raises:
      BadInputError: the adapters are of another model.
    """
    return _over(params, adapters, settings, Adapted)


def merge(
    params: ParamTree, adapters: ParamTree, settings: LoraConfig, *, dtype: Any = None
) -> dict[str, Any]:
    """The weights with their updates added in float32, then rounded once.

    Args:
      params: the weights that the adapters were trained over.
      adapters: the adapters that `adapter_spec` declares.
      settings: the configuration of the adapters.
      dtype: dtype of the returned weights; None keeps those of `params`.

    Raises:
      BadInputError: the adapters are of another model.
    """
    merged = _over(params, adapters, settings, _added)
    dtypes = jax.tree.map(lambda x: x.dtype if dtype is None else dtype, params)
    return jax.tree.map(lambda x, dtype: x.astype(dtype), merged, dtypes)


def rounding(
    params: ParamTree, adapters: ParamTree, settings: LoraConfig, *, dtype: Any = None
) -> jax.Array:
    """The share of the update that `merge` into this dtype rounds away, of its Euclidean norm.

    |round(W + U) - (W + U)| / |U| over all adapted weights W and their updates U, in float32. It is
    1 where every sum is rounded back to W, and 0 without an update.
    """

    weights = params_lib.by_path(params)
    lost, whole = jnp.zeros(()), jnp.zeros(())
    for path, (down, up) in _pairs(params, adapters).items():
        weight = weights[path]
        added = _added(weight, down, up, settings.strength)
        rounded = added.astype(weight.dtype if dtype is None else dtype)
        lost += jnp.sum(jnp.square(rounded.astype(jnp.float32) - added))
        whole += jnp.sum(jnp.square(_update(down, up, settings.strength)))
    return jnp.sqrt(lost / jnp.where(whole == 0.0, 1.0, whole))


def _over(
    params: ParamTree, adapters: ParamTree, settings: LoraConfig, join: Callable[..., Any]
) -> dict[str, Any]:
    """`params`, with `join(weight, down, up, strength)` in place of every adapted weight."""
    pairs = _pairs(params, adapters)
    joined = {
        path: join(weight, *pairs[path], settings.strength) if path in pairs else weight
        for path, weight in params_lib.by_path(params).items()
    }
    return params_lib.tree_from_paths(joined)


def _added(weight: jax.Array, down: jax.Array, up: jax.Array, strength: float) -> jax.Array:
    """The weight with its update, in float32."""
    return weight.astype(jnp.float32) + _update(down, up, strength)


def _update(down: jax.Array, up: jax.Array, strength: float) -> jax.Array:
    return strength * jax.vmap(lambda d, u: jnp.tensordot(d, u, axes=1, precision="highest"))(
        down.astype(jnp.float32), up.astype(jnp.float32)
    )


def _pairs(params: ParamTree, adapters: ParamTree) -> dict[str, tuple[Any, Any]]:
    weights, leaves = params_lib.by_path(params), params_lib.by_path(adapters)
    pairs = {
        path.removesuffix("/down"): (leaf, leaves.get(path.removesuffix("down") + "up"))
        for path, leaf in leaves.items()
        if path.endswith("/down")
    }
    for path, (down, up) in pairs.items():
        weight = weights.get(path)
        fits = up is not None and down.shape[-1] == up.shape[1]
        shape = (*down.shape[:-1], *up.shape[2:]) if fits else None
        if weight is None or shape != weight.shape:
            has = "not there" if weight is None else f"of shape {weight.shape}"
            raise BadInputError(
                f"LoRA: the adapter of {path} gives {shape}, and that weight is {has}; use the "
                "adapter with the model it was trained on"
            )
    return pairs
