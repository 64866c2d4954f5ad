"""A small sparse autoencoder with TopK, trained on activations that fit in memory.

After Gao et al., "Scaling and evaluating sparse autoencoders" (2024), section 2:

1. Activations are centred and scaled to a mean squared length of D.
2. f = TopK(relu(W_e (x - b) + c)) keeps the `active` largest features of a token; x' = W_d f + b.
   Rows of W_d have length 1, and W_e starts as its transpose.
3. Adam minimises the mean of |x - x'|^2.

It has as many features as there are units to compare it with, so that each is read; that is far
fewer than an autoencoder has that is to explain a model.
"""

import dataclasses
import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax

from lm_jax.errors import UsageError
from lm_jax.model.precision import exact_products
from lm_jax.run import progress, stop

ACTIVE = 8
# Texts of the training split to train on.
TEXTS = 4_000
STEPS = 2_000
BATCH = 512
RATE = 2e-3
# Steps of one call, between which the command can be stopped.
_STRIDE = 100


@struct.dataclass
class SparseAutoencoder:
    """Weights of F features of D numbers, with the mean and the scale of the activations."""

    mean_1D: jax.Array
    scale: jax.Array
    encoder_DF: jax.Array
    threshold_1F: jax.Array
    decoder_FD: jax.Array
    offset_1D: jax.Array
    active: int = struct.field(pytree_node=False)

    def encode(self, x_MD: jax.Array) -> jax.Array:
        """Features `[M, F]` of activations `[M, D]`; all but the largest are 0."""
        with exact_products():
            return _features(self, (x_MD - self.mean_1D) * self.scale)

    def decode(self, f_MF: jax.Array) -> jax.Array:
        """Activations `[M, D]` of features `[M, F]`."""
        with exact_products():
            return _activations(self, f_MF) / self.scale + self.mean_1D


def _features(sae: SparseAutoencoder, x_MD: jax.Array) -> jax.Array:
    f_MF = jax.nn.relu((x_MD - sae.offset_1D) @ sae.encoder_DF + sae.threshold_1F)
    least_M1 = jax.lax.top_k(f_MF, sae.active)[0][:, -1:]
    return jnp.where(f_MF >= least_M1, f_MF, 0.0)


def _activations(sae: SparseAutoencoder, f_MF: jax.Array) -> jax.Array:
    return f_MF @ sae.decoder_FD + sae.offset_1D


def train(
    x_MD: ArrayLike, *, features: int, seed: int, active: int = ACTIVE, steps: int = STEPS
) -> SparseAutoencoder:
    """Trains an autoencoder on M activations.

    Args:
      x_MD: activations.
      features: how many.
      seed: seed of the initial weights and of the batches.
      active: the most features of a token.
      steps: updates of `BATCH` activations.

    Raises:
      UsageError: there are fewer features than are to be active.
      StoppedError: the command was asked to stop.
    """
    if features < active:
        raise UsageError(f"{features} features are fewer than the {active} that are active")
    given_MD = jnp.asarray(x_MD, jnp.float32)
    D = given_MD.shape[1]
    mean_1D = given_MD.mean(0, keepdims=True)
    scale = jnp.sqrt(D / jnp.square(given_MD - mean_1D).sum(1).mean())
    start, order = jax.random.split(jax.random.key(seed))
    decoder_FD = _unit_rows(jax.random.normal(start, (features, D)))
    zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
    sae = SparseAutoencoder(
        mean_1D, scale, decoder_FD.T, zeros((1, features)), decoder_FD, zeros((1, D)), active
    )
    scaled_MD, state = (given_MD - mean_1D) * scale, _OPTIMISER.init(_weights(sae))
    with progress.track("train the autoencoder", steps, unit="steps") as advance:
        for first in range(0, steps, _STRIDE):
            stop.check("while training the autoencoder")
            numbers = jnp.arange(first, min(first + _STRIDE, steps))
            sae, state = _updates(sae, state, scaled_MD, order, numbers)
            advance(len(numbers))
    return sae


_OPTIMISER = optax.adam(RATE)


def _weights(sae: SparseAutoencoder) -> tuple[jax.Array, ...]:
    return sae.encoder_DF, sae.threshold_1F, sae.decoder_FD, sae.offset_1D


def _with_weights(sae: SparseAutoencoder, weights: tuple[jax.Array, ...]) -> SparseAutoencoder:
    encoder_DF, threshold_1F, decoder_FD, offset_1D = weights
    return dataclasses.replace(
        sae,
        encoder_DF=encoder_DF,
        threshold_1F=threshold_1F,
        decoder_FD=_unit_rows(decoder_FD),
        offset_1D=offset_1D,
    )


def _unit_rows(x_FD: jax.Array) -> jax.Array:
    return x_FD / jnp.linalg.norm(x_FD, axis=1, keepdims=True)


@jax.jit
def _updates(
    sae: SparseAutoencoder,
    state: optax.OptState,
    x_MD: jax.Array,
    order: jax.Array,
    numbers: jax.Array,
) -> tuple[SparseAutoencoder, optax.OptState]:
    """The updates of those numbers, each on activations drawn by its number."""

    def loss(weights: tuple[jax.Array, ...], x_BD: jax.Array) -> jax.Array:
        own = _with_weights(sae, weights)
        return jnp.square(x_BD - _activations(own, _features(own, x_BD))).sum(1).mean()

    def update(carry: tuple, number: jax.Array) -> tuple[tuple, None]:
        weights, state = carry
        drawn = jax.random.randint(jax.random.fold_in(order, number), (BATCH,), 0, len(x_MD))
        changes, state = _OPTIMISER.update(jax.grad(loss)(weights, x_MD[drawn]), state, weights)
        changed: Any = optax.apply_updates(weights, changes)
        return (_weights(_with_weights(sae, changed)), state), None

    (weights, state), _ = jax.lax.scan(update, (_weights(sae), state), numbers)
    return _with_weights(sae, weights), state


def unexplained(sae: SparseAutoencoder, x_MD: jax.Array) -> float:
    """Share of the variance of activations that the autoencoder leaves unexplained."""
    rest = jnp.square(x_MD - sae.decode(sae.encode(x_MD))).sum()
    return float(rest / jnp.square(x_MD - x_MD.mean(0, keepdims=True)).sum())
