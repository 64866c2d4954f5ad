"""How much of MLP outputs a transcoder leaves out: is a file of this model, and read rightly?

Of the tokens of some text but the first ones, for each layer,

    unexplained  sum |y - y'|^2 / sum |y - mean y|^2

with outputs y and reconstructions y'. A wrong hook, a transposed matrix, a forgotten factor or
another model leaves out about everything. `mistakes` are readings of the same tensors that are
often meant. Few tokens say little, since their mean takes much of the variance: `FEWEST` are asked
for.
"""

from collections.abc import Iterator
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import UsageError
from lm_jax.model.precision import exact_jit
from lm_jax.model.sites import keep
from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.transcoders.transcoder import BARE_INPUT, HOOKS, STREAM, Transcoder

# One that leaves out more in most layers is wrong.
WRONG = 0.9
TOKENS, FEWEST = 2_000, 200
# Rows of text at a time: of all layers, features of so many are there at once.
_ROWS = 4


class Fit(NamedTuple):
    """What a transcoder leaves out of some text, and how many of its features are active there.

    Attributes:
      unexplained_L: share of the variance of MLP outputs that is left out, by layer.
      active_L, active_first_L: mean number of active features of a token by layer, after the first
        tokens of rows and at them. Many more at first tokens suggest that these were left out of
        the transcoder's training.
    """

    unexplained_L: np.ndarray
    active_L: np.ndarray
    active_first_L: np.ndarray


def measured(
    model: CircuitModel, transcoder: Transcoder, tokens_BT: np.ndarray, valid_BT: np.ndarray
) -> Fit:
    """How a transcoder fits a model on some text, by one pass over it.

    Args:
      model: a dense or sparse model.
      transcoder: a transcoder of raw activations that fits the model (`Transcoder.for_model`).
      tokens_BT: ids of some text.
      valid_BT: false where a token is padding.

    Raises:
      UsageError: there are fewer than `FEWEST` tokens.
    """
    is_first_T = np.arange(tokens_BT.shape[1]) == 0
    counted_BT = valid_BT & (np.arange(tokens_BT.shape[1]) >= max(transcoder.skip_start, 1))[None]
    total, left_L, whole_L, mean_LD = 0, 0.0, 0.0, 0.0
    active_2L, tokens_2 = [0.0, 0.0], [0, 0]
    for start in range(0, len(tokens_BT), _ROWS):
        at = slice(start, start + _ROWS)
        missing = _ROWS - len(tokens_BT[at])
        rows = [np.pad(x[at], [(0, missing), (0, 0)]) for x in (tokens_BT, valid_BT, counted_BT)]
        count, left, mean, whole, active_LBT = (
            np.asarray(x, np.float64) for x in _sums(model, transcoder, *rows)
        )
        # Sums of squares about two means are joined by the distance of these.
        apart_LD = mean - mean_LD
        joined = total + count
        share = total * count / joined if joined else 0.0
        whole_L = whole_L + whole + share * (apart_LD**2).sum(-1)
        mean_LD = mean_LD + apart_LD * (count / joined if joined else 0.0)
        left_L, total = left_L + left, joined
        for which, own_T in enumerate((~is_first_T, is_first_T)):
            own_BT = rows[1] & own_T[None]
            active_2L[which] = active_2L[which] + (active_LBT * own_BT).sum((1, 2))
            tokens_2[which] += own_BT.sum()
    if total < FEWEST:
        raise UsageError(
            f"text: {int(total)} tokens are too few to try a transcoder on; give {FEWEST} or more"
        )
    active_L, first_L = (
        np.asarray(x) / max(n, 1) for x, n in zip(active_2L, tokens_2, strict=True)
    )
    return Fit(np.asarray(left_L / whole_L), active_L, first_L)


def unexplained(
    model: CircuitModel, transcoder: Transcoder, tokens_BT: np.ndarray, valid_BT: np.ndarray
) -> np.ndarray:
    """The share of the variance of MLP outputs that is left out `[L]`; arguments of `measured`."""
    return measured(model, transcoder, tokens_BT, valid_BT).unexplained_L


def is_wrong(unexplained_L: np.ndarray) -> bool:
    """Whether most layers are left out."""
    # Of what is no number too.
    return bool((~(unexplained_L <= WRONG)).mean() > 0.5)


def mistakes(transcoder: Transcoder, model: CircuitModel) -> Iterator[tuple[str, Transcoder]]:
    """Other readings of the same tensors that fit the model, with what is different about them.

    Args:
      transcoder: a transcoder as it was read, before `Transcoder.for_model`.
      model: the model.
    """
    reads, writes = transcoder.hooks
    for hook in (HOOKS[0], BARE_INPUT, STREAM):
        is_same = model.cfg.norm == "layer" and {hook, reads} <= {HOOKS[0], BARE_INPUT}
        if hook != reads and not is_same and not (hook == STREAM and model.cfg.parallel_residual):
            yield (
                f"feature_input_hook: {hook}",
                dataclasses.replace(transcoder, hooks=(hook, writes)),
            )
    params = dict(transcoder.params)
    shift_LF = jnp.einsum("LFD,LD->LF", params["encoder"], params["decoder_bias"])
    params["encoder_bias"] = params["encoder_bias"] - shift_LF
    yield "b_dec subtracted from the input", dataclasses.replace(transcoder, params=params)


@exact_jit
def _sums(
    model: CircuitModel,
    transcoder: Transcoder,
    tokens_BT: jax.Array,
    valid_BT: jax.Array,
    counted_BT: jax.Array,
) -> tuple[jax.Array, ...]:
    """Count of tokens; sums of squares left out; means; sums of squares about them; by layer.

    Then the numbers of active features `[L, B, T]`.
    """
    record = dict.fromkeys((transcoder.site, "mlp.out"), keep)
    records = model.forward(tokens_BT, valid_BT, record=record).records
    L, B, T, D = records["mlp.out"].shape
    x_LXD, y_LXD = (
        records[name].reshape(L, B * T, D).astype(jnp.float32)
        for name in (transcoder.site, "mlp.out")
    )
    weight_1X1 = counted_BT.reshape(1, B * T, 1).astype(jnp.float32)
    count = weight_1X1.sum()
    mean_L1D = (weight_1X1 * y_LXD).sum(1, keepdims=True) / jnp.maximum(count, 1)
    left_LXD = y_LXD - transcoder.reconstruct(x_LXD)
    whole_LXD = y_LXD - mean_L1D
    left_L, whole_L = ((weight_1X1 * x**2).sum((1, 2)) for x in (left_LXD, whole_LXD))
    # XLA encodes once for both.
    active_LBT = (transcoder.encode(x_LXD) != 0).sum(-1).reshape(L, B, T)
    return count, left_L, mean_L1D[:, 0], whole_L, active_LBT
