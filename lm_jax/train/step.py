"""Training step: loss and gradient of a global batch, then the optimizer.

The `Objective` defines the loss. With accumulation every micro-batch adds its term, divided by the
normalizers of the whole batch, so that the update is that of the undivided batch (a mean of
micro-batch means would weight a token of a short row more).
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import optax

from lm_jax.errors import UsageError
from lm_jax.model.params import ParamTree
from lm_jax.model.precision import exact_jit
from lm_jax.parallel import sharding
from lm_jax.parallel.kernels import under_mesh
from lm_jax.train import optim
from lm_jax.train.config import TrainConfig
from lm_jax.train.objective import Numbers, Objective
from lm_jax.train.state import LOSS_WINDOW, StateLayout, TrainState

Metrics = dict[str, Any]
Step = Callable[[TrainState, Any, jax.Array, jax.Array], tuple[TrainState, Metrics]]
EvalStep = Callable[[ParamTree, Any, jax.Array], Numbers]


def check_batch(rows: int, accumulate: int, mesh: Mesh) -> None:
    """Checks that a batch divides evenly over micro-batches and devices.

    Raises:
      UsageError: with the numbers.
    """
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    if rows % (accumulate * ways):
        raise UsageError(
            f"batch of {rows} does not divide into {accumulate} micro-batches over data x fsdp = "
            f"{ways} devices; make it a multiple of {accumulate * ways}"
        )


def is_spike(loss: jax.Array, losses_W: jax.Array, sigma: float) -> jax.Array:
    """Whether a loss stands out above those before it; false until there are W of them."""
    # A missing loss is NaN and makes the bound NaN, and no loss is greater than NaN.
    return loss > jnp.mean(losses_W) + sigma * jnp.std(losses_W)


# A second run of the same job in one process, with another seed, compiles nothing.
@functools.lru_cache(maxsize=8)
def make_train_step(
    objective: Objective,
    mesh: Mesh,
    config: TrainConfig,
    *,
    decays: optim.Choice = optim.is_weight,
    group: optim.Group | None = None,
) -> Step:
    """Compiles `step(state, frozen, tokens_BS, key) -> (state, metrics)`, which consumes `state`.

    Step k = 0, 1, ... has the random key `fold_in(key, k)`. Metrics are scalars: `loss`, `tokens`
    (predicted ones), `grad_norm` before clipping, `learning_rate`, `finite` (whether loss and norm
    are), `skipped` (whether the loss was a spike, and the parameters are as before), the
    objective's `columns`, and with `group` the `grad_norms` by the name of a group.
    """
    layout = StateLayout.of(objective, mesh, config, decays)
    optimizer, state_places = layout.optimizer, layout.shardings()
    schedule = optim.schedule(config)
    everywhere = sharding.replicated(mesh)
    micro_place = NamedSharding(mesh, PartitionSpec(None, *sharding.BATCH))
    differentiate = jax.value_and_grad(objective.loss_terms, has_aux=True)

    def terms_and_gradient(params, frozen, aux_state, tokens_BS, rng):
        normalizers = objective.normalizers(tokens_BS)
        if config.accumulate == 1:
            return differentiate(params, frozen, aux_state, tokens_BS, normalizers, rng)

        def one(tokens_BS, rng):
            return differentiate(params, frozen, aux_state, tokens_BS, normalizers, rng)

        def add(sums, micro_batch):
            return jax.tree.map(jnp.add, sums, one(*micro_batch)), None

        # Every micro-batch takes rows from all devices, so that no rows move between devices.
        micro_ABS = tokens_BS.reshape(-1, config.accumulate, tokens_BS.shape[1]).swapaxes(0, 1)
        micro_ABS = jax.lax.with_sharding_constraint(micro_ABS, micro_place)
        keys = jax.random.split(rng, config.accumulate)
        shapes = jax.eval_shape(one, micro_ABS[0], keys[0])
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.scan(add, zeros, (micro_ABS, keys))[0]

    def step(
        state: TrainState, frozen: Any, tokens_BS: jax.Array, key: jax.Array
    ) -> tuple[TrainState, Metrics]:
        rng = jax.random.fold_in(key, state.step)
        (minimised, parts), grads = terms_and_gradient(
            state.params, frozen, state.aux_state, tokens_BS, rng
        )
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            grad_norm = optax.tree.norm(grads)
        # A skipped update does not count in the schedule either.
        taken = optax.tree.get_all_with_path(state.opt_state, "count")[0][1]
        metrics: Metrics = dict(parts) | {
            "tokens": objective.normalizers(tokens_BS)["tokens"],
            "grad_norm": grad_norm,
            "learning_rate": jnp.asarray(schedule(taken)),
            "finite": jnp.isfinite(minimised) & jnp.isfinite(grad_norm),
            "skipped": jnp.zeros((), bool),
        }
        if group is not None:
            metrics["grad_norms"] = optim.norms(grads, group)
        aux_state, columns = objective.update(state.aux_state, metrics)
        metrics |= columns
        losses_W = state.losses_W
        if config.skip_sigma is not None:
            loss = metrics["loss"]
            metrics["skipped"] = skipped = is_spike(loss, losses_W, config.skip_sigma)
            params, opt_state, aux_state = jax.tree.map(
                lambda new, old: jnp.where(skipped, old, new),
                (params, opt_state, aux_state),
                (state.params, state.opt_state, state.aux_state),
            )
            # Spikes are kept as well, so that a loss that rose for good soon is no spike.
            losses_W = losses_W.at[state.step % LOSS_WINDOW].set(loss)
        return TrainState(state.step + 1, params, opt_state, losses_W, aux_state), metrics

    return jax.jit(
        under_mesh(step, mesh),
        in_shardings=(state_places, None, sharding.batch_sharding(mesh), everywhere),
        out_shardings=(state_places, everywhere),
        donate_argnums=0,
    )


@functools.lru_cache(maxsize=8)
def make_eval_step(objective: Objective, mesh: Mesh) -> EvalStep:
    """Compiles `step(params, frozen, tokens_BS)`: the sums of `objective.evaluate`."""
    return exact_jit(
        under_mesh(objective.evaluate, mesh),
        in_shardings=(
            sharding.param_shardings(mesh, objective.spec),
            None,
            sharding.batch_sharding(mesh),
        ),
        out_shardings=sharding.replicated(mesh),
    )
