"""Numbers of features that depend on data: initial biases, and thresholds after BatchTopK."""

from collections.abc import Iterable
import functools

import jax
import jax.numpy as jnp

from lm_jax.model.params import ParamTree
from lm_jax.model.precision import exact_jit
from sparse_jax.transcoders.activations import batch_topk, largest
from sparse_jax.transcoders.inputs import Activations
from sparse_jax.transcoders.transcoder import Transcoder


def initial_biases(
    transcoder: Transcoder, batches: Iterable[Activations], rate: float
) -> ParamTree:
    """Parameters whose encoder biases make each feature active at a share `rate` of tokens.

    The quantile of a feature's pre-activations is the mean of those of the batches (App. F).
    """
    quantiles = [_quantile_LF(transcoder, acts, rate) for acts in batches]
    mean_LF = sum(quantiles) / len(quantiles)
    return dict(transcoder.params) | {"encoder_bias": transcoder.theta_LF - mean_LF}


@functools.partial(exact_jit, static_argnums=2)
def _quantile_LF(transcoder: Transcoder, acts: Activations, rate: float) -> jax.Array:
    pre_LXF = transcoder.pre_activations(acts.input_LXD)
    pre_LXF = jnp.where(acts.mask_X[None, :, None], pre_LXF, jnp.nan)
    return jnp.nanquantile(pre_LXF, 1.0 - rate, axis=1)


def from_batch_topk(
    transcoder: Transcoder, batches: Iterable[Activations], active: float
) -> Transcoder:
    """The transcoder with one threshold per layer, in place of the largest entries of a batch.

    A layer's threshold leaves as many features active on a batch as BatchTopK does with `active`
    features per token and layer: its L0 stays, by layer. It is the mean over batches.
    """
    each = [_thresholds_L(transcoder, acts, active) for acts in batches]
    theta_L = sum(each) / len(each)
    shape = transcoder.theta_LF.shape
    log_LF = jnp.broadcast_to(jnp.log(theta_L)[:, None], shape)
    return Transcoder(dict(transcoder.params) | {"log_threshold": log_LF}, transcoder.cfg)


@functools.partial(exact_jit, static_argnums=2)
def _thresholds_L(transcoder: Transcoder, acts: Activations, active: float) -> jax.Array:
    pre_LXF = transcoder.pre_activations(acts.input_LXD)
    pre_LXF = jnp.where(acts.mask_X[None, :, None], pre_LXF, 0.0)
    count = active * pre_LXF.shape[0] * acts.mask_X.sum()
    counts_L = (batch_topk(pre_LXF, count)[0] > 0).sum((1, 2))
    return jax.vmap(largest)(pre_LXF, counts_L)
