"""Inputs and outputs of a model's MLPs: what a transcoder reads and what it is to write.

They are computed from tokens whenever they are needed; nothing is stored. A token is left out where
it is padding, among the first of its row (attention sinks have norms far above all others), or an
outlier: in some layer its input has many times the mean norm.
"""

from collections.abc import Iterable
import functools

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import UsageError
from lm_jax.model.precision import exact_jit
from lm_jax.model.sites import keep
from lm_jax.parallel import sharding
from lm_jax.train.objective import LMBatch
from sparse_jax.circuits.runs import CircuitModel

INPUT, OUTPUT = "mlp.in", "mlp.out"


@struct.dataclass
class Scales:
    """Factors that bring the mean norm over tokens to sqrt(D), by layer, and that mean input norm.

    Attributes:
      input_L, output_L: factors of inputs and outputs.
      norm_L: mean norm of the inputs, before scaling, to which outliers are compared.
    """

    input_L: jax.Array
    output_L: jax.Array
    norm_L: jax.Array

    @classmethod
    def none(cls, num_layers: int) -> "Scales":
        """No scaling, and no outliers."""
        one_L = jnp.ones(num_layers, jnp.float32)
        return cls(one_L, one_L, jnp.full(num_layers, jnp.inf, jnp.float32))


@struct.dataclass
class Activations:
    """Scaled activations of the X = B T tokens of a batch.

    Attributes:
      input_LXD, output_LXD: what the MLPs read, after their norm, and add to the residual stream.
      mask_X: false for tokens that are left out.
    """

    input_LXD: jax.Array
    output_LXD: jax.Array
    mask_X: jax.Array


def read_activations(
    model: CircuitModel, scales: Scales, batch: LMBatch, *, skip_start: int, outlier: float
) -> Activations:
    """The activations of a batch.

    Args:
      model: a dense or sparse model.
      scales: scales of the activations.
      batch: tokens and their masks; the targets are not read.
      skip_start: first tokens of each row to leave out.
      outlier: a multiple of `scales.norm_L`; tokens whose input has that norm or more are left out.
    """
    record = {INPUT: keep, OUTPUT: keep}
    records = model.forward(batch.input_BT, batch.input_mask_BT, record=record).records
    L, B, T, D = records[INPUT].shape
    input_LXD = records[INPUT].reshape(L, B * T, D).astype(jnp.float32)
    output_LXD = records[OUTPUT].reshape(L, B * T, D).astype(jnp.float32)
    mask_X = (batch.input_mask_BT & (jnp.arange(T) >= skip_start)[None]).reshape(-1)
    norms_LX = jnp.linalg.norm(input_LXD, axis=-1)
    mask_X &= (norms_LX < outlier * scales.norm_L[:, None]).all(0)
    return Activations(
        input_LXD * scales.input_L[:, None, None],
        output_LXD * scales.output_L[:, None, None],
        mask_X,
    )


def measure_scales(model: CircuitModel, batches: Iterable[LMBatch], *, skip_start: int) -> Scales:
    """The scales of a model's activations, from a few batches.

    Of a model on the devices of several processes, all of them call it with the same batches.

    Raises:
      UsageError: the batches hold no token.
    """
    sums = [sharding.fetch(_norm_sums(model, batch, skip_start)) for batch in batches]
    tokens = sum(int(count) for _, count in sums)
    if not tokens:
        raise UsageError("the batches to measure scales on hold no token; give longer documents")
    input_L, output_L = np.sum([norms.astype(np.float64) for norms, _ in sums], 0) / tokens
    root = np.sqrt(model.cfg.hidden_size)
    wide = root / input_L, root / output_L, input_L
    return Scales(*(jnp.asarray(each_L, jnp.float32) for each_L in wide))


@functools.partial(exact_jit, static_argnums=2)
def _norm_sums(model: CircuitModel, batch: LMBatch, skip_start: int) -> tuple[jax.Array, jax.Array]:
    """Sums over tokens of the norms of inputs and outputs `[2, L]`, and the number of tokens."""
    none = Scales.none(model.cfg.num_layers)
    acts = read_activations(model, none, batch, skip_start=skip_start, outlier=1.0)
    norms_2LX = jnp.linalg.norm(jnp.stack([acts.input_LXD, acts.output_LXD]), axis=-1)
    return jnp.where(acts.mask_X, norms_2LX, 0.0).sum(-1), acts.mask_X.sum()
