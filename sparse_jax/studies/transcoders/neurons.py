"""The neurons of the MLPs at the transcoder's sparsity, as a control.

Of each token those neurons are kept that write most, by |activation| times the norm of the row of
W_down, over all layers together: as many as the transcoder has active features at that token. What
the others write is the error.
"""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.model.precision import exact_jit
from lm_jax.model.sites import keep
from lm_jax.parallel import sharding
from lm_jax.train.objective import LMBatch
from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.graphs.neurons import Neurons
from sparse_jax.studies.transcoders.results import Reconstruction
from sparse_jax.transcoders.inputs import INPUT, read_activations
from sparse_jax.transcoders.objective import Frozen
from sparse_jax.transcoders.transcoder import Transcoder

HIDDEN = "mlp.post"


def largest_neurons(model: CircuitModel, transcoder: Transcoder) -> Callable[[np.ndarray], Neurons]:
    """A function from the ids of a prompt to the features of its graph (`scores.score_prompts`).

    Args:
      model: dense or sparse, on one device.
      transcoder: transcoder of the model's raw activations, whose number of active features is
        matched.
    """

    def of_prompt(tokens_T: np.ndarray) -> Neurons:
        tokens_BT = jnp.asarray(tokens_T, jnp.int32)[None]
        _, kept_LTF = _jitted_hidden(model, transcoder, tokens_BT, jnp.ones_like(tokens_BT, bool))
        return dataclasses.replace(Neurons.of(model), kept_LTF=kept_LTF)

    return of_prompt


def reconstruct(
    frozen: Frozen,
    transcoder: Transcoder,
    batches: Iterable[LMBatch],
    *,
    skip_start: int,
    outlier: float,
) -> Reconstruction:
    """How well the kept neurons reconstruct MLP outputs, with outputs scaled as in training.

    Args:
      frozen: the model and the scales.
      transcoder: transcoder of the model's raw activations.
      batches: batches of text.
      skip_start, outlier: limits of `inputs.read_activations`.
    """
    limits = {"skip_start": skip_start, "outlier": outlier}
    each = [sharding.fetch(_sums(frozen, transcoder, batch, **limits)) for batch in batches]
    sums = {name: np.sum([part[name].astype(np.float64) for part in each], 0) for name in each[0]}
    return Reconstruction.of_sums(sums, int(sums["tokens"]))


def keep_largest(size_LXF: jax.Array, count_X: jax.Array) -> jax.Array:
    """Whether an entry is one of the `count_X` largest of its token, over layers and neurons."""
    ordered_XS = jnp.sort(size_LXF.swapaxes(0, 1).reshape(len(count_X), -1), axis=-1)
    total = ordered_XS.shape[-1]
    at_X1 = total - jnp.clip(count_X, 1, total)[:, None]
    least_X = jnp.take_along_axis(ordered_XS, at_X1, axis=-1)[:, 0]
    return (size_LXF >= least_X[None, :, None]) & (count_X > 0)[None, :, None]


def _hidden(
    model: CircuitModel, transcoder: Transcoder, tokens_BT: jax.Array, valid_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Activations of all neurons, and which of them are kept, `[L, B T, F]`."""
    records = model.forward(tokens_BT, valid_BT, record={INPUT: keep, HIDDEN: keep}).records
    x_LXD, h_LXF = (
        jnp.asarray(each.reshape(len(each), -1, each.shape[-1]), jnp.float32)
        for each in (records[INPUT], records[HIDDEN])
    )
    count_X = (transcoder.encode(x_LXD) != 0).sum((0, 2))
    norms_LF = jnp.linalg.norm(_down(model), axis=-1)
    return h_LXF, keep_largest(jnp.abs(h_LXF) * norms_LF[:, None], count_X)


def _down(model: CircuitModel) -> jax.Array:
    return model.params["blocks"]["mlp"]["down"].astype(jnp.float32)


_jitted_hidden = exact_jit(_hidden)


@functools.partial(exact_jit, static_argnames=("skip_start", "outlier"))
def _sums(
    frozen: Frozen, transcoder: Transcoder, batch: LMBatch, **limits: Any
) -> Mapping[str, jax.Array]:
    """Sums like those of `Transcoding.evaluate`."""
    acts = read_activations(frozen.model, frozen.scales, batch, **limits)
    h_LXF, kept_LXF = _hidden(frozen.model, transcoder, batch.input_BT, batch.input_mask_BT)
    missed_LXF = jnp.where(kept_LXF, 0.0, h_LXF)
    error_LXD = jnp.einsum("LXF,LFD->LXD", missed_LXF, _down(frozen.model))
    error_LXD *= frozen.scales.output_L[:, None, None]
    mask_1X1 = acts.mask_X[None, :, None]
    error_LXD, output_LXD = (
        jnp.where(mask_1X1, each, 0.0) for each in (error_LXD, acts.output_LXD)
    )
    return {
        "tokens": acts.mask_X.sum(),
        "error_L": jnp.sum(error_LXD**2, (1, 2)),
        "output_LD": output_LXD.sum(1),
        "square_L": jnp.sum(output_LXD**2, (1, 2)),
        "active_L": jnp.sum(kept_LXF & (h_LXF != 0) & mask_1X1, (1, 2)),
    }
