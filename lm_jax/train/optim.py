"""AdamW with weight decay on weights alone; schedules of the rate with a linear warm-up.

Loshchilov and Hutter, 2019: decay is subtracted separately from the Adam step, not through the
gradient. As in the code released with Prototype Transformer, betas are 0.9 and 0.999 and nothing is
clipped unless asked.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lm_jax.errors import UsageError
from lm_jax.model import params as params_lib
from lm_jax.model.params import ParamSpec, ParamTree
from lm_jax.train.config import TrainConfig

Choice = Callable[[str, ParamSpec], bool]
# The name of the group of a parameter, of its path.
Group = Callable[[str], str]

WARMUP_START = 1e-8
FLOOR_SHARE = 0.1
FLOOR = 1e-6


def axes_of_one_layer(spec: ParamSpec) -> int:
    """How many axes a parameter has in one layer."""
    return len(spec.axes.replace("L", ""))


def is_weight(path: str, spec: ParamSpec) -> bool:
    """True for parameters with weight decay: two or more axes in one layer, no bias and no norm.

    A library with other tables (prototypes, say) passes its own predicate, which may call this one.
    """
    return axes_of_one_layer(spec) >= 2 and not path.endswith(("bias", "scale"))


def choose(choice: Choice, spec: ParamTree) -> dict[str, bool]:
    """Whether a predicate selects each parameter of `spec`, by path."""
    return {path: choice(path, leaf) for path, leaf in params_lib.leaves(spec)}


def group(path: str) -> str:
    """The group of a decoder's parameter, over all layers.

    These are embed, unembed, norms, mlp, and of the mixer every parameter by itself, as
    `mixer/prototypes`.
    """
    parts = [part for part in path.split("/") if part != "blocks" and not part.isdigit()]
    if parts[0] == "mixer":
        return "/".join(parts[:2])
    return "norms" if parts[0].startswith(("ln", "final")) else parts[0]


def norms(grads: ParamTree, group: Group) -> dict[str, jax.Array]:
    """The norm of the gradient of every group."""
    squares: dict[str, jax.Array] = {}
    for path, leaf in params_lib.by_path(grads).items():
        own = jnp.sum(jnp.square(leaf.astype(jnp.float32)))
        squares[group(path)] = squares.get(group(path), 0.0) + own
    return {name: jnp.sqrt(each) for name, each in squares.items()}


def schedule(config: TrainConfig) -> optax.Schedule:
    """The rate of step k = 0, 1, ...: from 1e-8 to the peak, then as `config.schedule` names it.

    "cosine" falls to max(peak / 10, 1e-6), "linear" to zero, and "constant" stays. A peak below the
    first or last rate takes its place, so that the rate never falls in the warm-up and never rises
    after it.
    """
    peak = config.learning_rate
    start, warmup = min(WARMUP_START, peak), round(config.warmup * config.steps)
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(
            init_value=start,
            peak_value=peak,
            warmup_steps=warmup,
            decay_steps=config.steps,
            end_value=min(max(FLOOR_SHARE * peak, FLOOR), peak),
        )
    end = peak if config.schedule == "constant" else 0.0
    return optax.join_schedules(
        [
            optax.linear_schedule(start, peak, warmup),
            optax.linear_schedule(peak, end, config.steps - warmup),
        ],
        [warmup],
    )


def adamw(
    spec: ParamTree, config: TrainConfig, decays: Choice = is_weight
) -> optax.GradientTransformation:
    """The optimizer of a run; `decays` chooses the parameters that weight decay shrinks."""
    decayed = params_lib.tree_from_paths(choose(decays, spec))
    step = optax.adamw(
        schedule(config),
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=lambda _: decayed,
    )
    if config.rate_factors:
        step = optax.chain(step, _scaled(spec, dict(config.rate_factors)))
    if config.clip_norm is not None:
        step = optax.chain(optax.clip_by_global_norm(config.clip_norm), step)
    return in_bfloat16(step) if config.weights_dtype == "bfloat16" else step


def _scaled(spec: ParamTree, factors: dict[str, float]) -> optax.GradientTransformation:
    """A factor of the update of each group of parameters, by the first part of their path."""
    groups = {path: path.partition("/")[0] for path, _ in params_lib.leaves(spec)}
    if unknown := sorted(factors.keys() - set(groups.values())):
        raise UsageError(
            f"rate_factors has {unknown[0]!r}, and no trained parameter is in such a group; known: "
            f"{', '.join(sorted(set(groups.values())))}"
        )
    by_path = {path: factors.get(name, 1.0) for path, name in groups.items()}
    tree = params_lib.tree_from_paths(by_path)
    return optax.stateless(lambda updates, _: jax.tree.map(jnp.multiply, updates, tree))


def in_bfloat16(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer without master weights: what it keeps has the precision of bfloat16.

    Gradients are rounded before an update, weights and moments after it, each once; the arrays stay
    float32, and so does the arithmetic of the update. A step below half a unit in the last place of
    a weight then does nothing, and nor does a decay of the second moment by 0.999, which in
    bfloat16 never falls by itself. Weights are as they were drawn until the first update, and one
    that it moves across powers of two may be a last bit of float32 beside its rounded value until
    the next. The released code of Prototype Transformer keeps weights and moments of its DeltaNet
    in bfloat16, and float32 weights for its other models; torch rounds after each operation of an
    update, and so more often than this.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = optimizer.update(_rounded(updates), state, params)
        rounded = _rounded(optax.apply_updates(params, updates))
        return jax.tree.map(jnp.subtract, rounded, params), _rounded(state)

    return optax.GradientTransformation(optimizer.init, update)


def _rounded(tree: Any) -> Any:
    """The tree with every float at the precision of bfloat16, in its own dtype."""

    # A cast there and back is one that XLA may leave out.
    def one(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)

    return jax.tree.map(one, tree)


def moment_shardings(
    optimizer: optax.GradientTransformation, params: ParamTree, shardings: ParamTree, other: object
) -> object:
    """The shardings of an optimizer's state: a moment is sharded like its parameter.

    Args:
      optimizer: the optimizer of the state.
      params: the parameters, or their `jax.ShapeDtypeStruct`.
      shardings: those of the parameters.
      other: the sharding of all other leaves, such as the count of steps.
    """
    return optax.tree_map_params(
        optimizer.init,
        lambda _, place: place,
        jax.eval_shape(optimizer.init, params),
        shardings,
        transform_non_params=lambda _: other,
    )
