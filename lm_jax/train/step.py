"""One update: loss and gradient of a global batch, then the optimizer.

The loss is the mean negative log likelihood over the predicted tokens of the whole batch that are
not padding. With accumulation every micro-batch adds its sum over tokens divided by the number of
tokens of the whole batch, so that the update is that of the batch in one piece (a mean of
micro-batch means would weight a token of a short row more).

Master weights are float32. Under bfloat16 compute the matrices are cast inside the loss, so that
their gradients arrive in float32; vectors and scalars (norms, temperatures, decays) stay float32.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import optax

from lm_jax import params as params_lib
from lm_jax import sharding
from lm_jax.config import DecoderConfig
from lm_jax.decoder import forward, param_spec
from lm_jax.errors import UsageError
from lm_jax.mixers import Mixer
from lm_jax.params import ParamSpec, ParamTree
from lm_jax.train import optim
from lm_jax.train.config import TrainConfig
from lm_jax.train.state import TrainState, state_shardings

PAD = 0
LOSS_WINDOW = 128

Metrics = dict[str, jax.Array]
Step = Callable[[TrainState, jax.Array, jax.Array], tuple[TrainState, Metrics]]
EvalStep = Callable[[ParamTree, jax.Array], tuple[jax.Array, jax.Array]]


def is_cast(path: str, spec: ParamSpec) -> bool:
    """True for what is computed with in the dtype of the run: matrices, and biases added to them.

    The biases of norms, `.../bias`, stay as they are.
    """
    return optim.axes_of_one_layer(spec) >= 2 or path.endswith("_bias")


def cast_params(
    params: ParamTree, spec: ParamTree, dtype: Any, casts: optim.Choice = is_cast
) -> dict[str, Any]:
    """`params` with the chosen leaves in `dtype`."""
    chosen = params_lib.tree_from_paths(optim.choose(casts, spec))
    return jax.tree.map(lambda cast, p: p.astype(dtype) if cast else p, chosen, dict(params))


def token_loss(
    params: ParamTree,
    tokens_BS: jax.Array,
    cfg: DecoderConfig,
    mixer: Mixer,
    *,
    dropout: float = 0.0,
    rng: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The sum of -log p over the tokens to predict that are not padding, and their number.

    Args:
      params: in the dtypes of the computation.
      tokens_BS: ids; each of `[:, 1:]` is predicted from what stands before it.
      cfg: the model.
      mixer: its token mixer.
      dropout: the rate.
      rng: key for dropout and for mixers that draw.
    """
    read_BT, target_BT = tokens_BS[:, :-1], tokens_BS[:, 1:]
    output = forward(
        params, read_BT, cfg, mixer=mixer, dropout=dropout, rng=rng, valid_BT=read_BT != PAD
    )
    loss_BT = optax.softmax_cross_entropy_with_integer_labels(output.logits, target_BT)
    counted_BT = target_BT != PAD
    return jnp.sum(jnp.where(counted_BT, loss_BT, 0.0)), jnp.sum(counted_BT)


def check_batch(rows: int, accumulate: int, mesh: Mesh) -> None:
    """Refuses a batch that does not divide evenly.

    Raises:
      UsageError: with the numbers.
    """
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    if rows % (accumulate * ways):
        raise UsageError(
            f"batch of {rows} does not divide into {accumulate} micro-batches over data x fsdp = "
            f"{ways} devices; make it a multiple of {accumulate * ways}"
        )


def loss_window(config: TrainConfig) -> int:
    """How many losses a state of this config remembers."""
    return 0 if config.skip_sigma is None else LOSS_WINDOW


def is_spike(loss: jax.Array, losses_W: jax.Array, sigma: float) -> jax.Array:
    """Whether a loss stands out above those before it; false until there are W of them."""
    # NaN stands for what is missing, makes the bound NaN, and nothing is greater than that.
    return loss > jnp.mean(losses_W) + sigma * jnp.std(losses_W)


# A second run of the same model in one process, with another seed, compiles nothing.
@functools.lru_cache(maxsize=8)
def make_train_step(
    cfg: DecoderConfig,
    mixer: Mixer,
    mesh: Mesh,
    config: TrainConfig,
    *,
    decays: optim.Choice = optim.is_weight,
    casts: optim.Choice = is_cast,
) -> Step:
    """Compiles `step(state, tokens_BS, key) -> (state, metrics)`, which consumes `state`.

    Step k = 0, 1, ... draws from `fold_in(key, k)`. Metrics are scalars: `loss`, `tokens`
    (predicted ones), `grad_norm` before clipping, `learning_rate`, `finite` (whether loss and norm
    are), and `skipped` (whether the loss was a spike, and the parameters are as before).
    """
    spec = param_spec(cfg, mixer)
    optimizer = optim.adamw(spec, config, decays)
    schedule = optim.cosine_schedule(config)
    state_places = state_shardings(mesh, spec, optimizer, window=loss_window(config))
    everywhere = sharding.replicated(mesh)
    micro_place = NamedSharding(mesh, PartitionSpec(None, *sharding.BATCH))

    def loss_share(params, tokens_BS, count, rng):
        low = cast_params(params, spec, config.dtype, casts)
        total, _ = token_loss(low, tokens_BS, cfg, mixer, dropout=config.dropout, rng=rng)
        return total / count

    def loss_and_gradient(params, tokens_BS, rng):
        # A batch of padding alone has a loss of zero, not of 0 / 0.
        count = jnp.maximum(jnp.sum(tokens_BS[:, 1:] != PAD), 1)
        if config.accumulate == 1:
            return jax.value_and_grad(loss_share)(params, tokens_BS, count, rng)

        def add(sums, given):
            loss_and_grads = jax.value_and_grad(loss_share)(params, given[0], count, given[1])
            return jax.tree.map(jnp.add, sums, loss_and_grads), None

        # Every micro-batch takes rows from all devices, which then send each other none.
        micro_ABS = tokens_BS.reshape(-1, config.accumulate, tokens_BS.shape[1]).swapaxes(0, 1)
        micro_ABS = jax.lax.with_sharding_constraint(micro_ABS, micro_place)
        keys = jax.random.split(rng, config.accumulate)
        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        return jax.lax.scan(add, zeros, (micro_ABS, keys))[0]

    def step(state: TrainState, tokens_BS: jax.Array, key: jax.Array) -> tuple[TrainState, Metrics]:
        rng = jax.random.fold_in(key, state.step)
        loss, grads = loss_and_gradient(state.params, tokens_BS, rng)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        grad_norm = optax.tree.norm(grads)
        # A skipped update is none: the schedule waits for it too.
        taken = optax.tree.get_all_with_path(state.opt_state, "count")[0][1]
        metrics: Metrics = {
            "loss": loss,
            "tokens": jnp.sum(tokens_BS[:, 1:] != PAD),
            "grad_norm": grad_norm,
            "learning_rate": jnp.asarray(schedule(taken)),
            "finite": jnp.isfinite(loss) & jnp.isfinite(grad_norm),
            "skipped": jnp.zeros((), bool),
        }
        params = optax.apply_updates(state.params, updates)
        losses_W = state.losses_W
        if config.skip_sigma is not None:
            metrics["skipped"] = skipped = is_spike(loss, losses_W, config.skip_sigma)
            params, opt_state = jax.tree.map(
                lambda new, old: jnp.where(skipped, old, new),
                (params, opt_state),
                (state.params, state.opt_state),
            )
            # Spikes enter as well: a loss that rose for good is then no spike for long.
            losses_W = losses_W.at[state.step % LOSS_WINDOW].set(loss)
        return TrainState(state.step + 1, params, opt_state, losses_W), metrics

    return jax.jit(
        step,
        in_shardings=(state_places, sharding.batch_sharding(mesh), everywhere),
        out_shardings=(state_places, everywhere),
        donate_argnums=0,
    )


@functools.lru_cache(maxsize=8)
def make_eval_step(
    cfg: DecoderConfig,
    mixer: Mixer,
    mesh: Mesh,
    dtype: str = "float32",
    *,
    casts: optim.Choice = is_cast,
) -> EvalStep:
    """Compiles `step(params, tokens_BS)`: `token_loss` without dropout, in the run's dtype."""
    spec = param_spec(cfg, mixer)

    def step(params: ParamTree, tokens_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        return token_loss(cast_params(params, spec, dtype, casts), tokens_BS, cfg, mixer)

    return jax.jit(
        step,
        in_shardings=(sharding.param_shardings(mesh, spec), sharding.batch_sharding(mesh)),
        out_shardings=sharding.replicated(mesh),
    )
