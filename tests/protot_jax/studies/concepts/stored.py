"""Losses and gates of texts in float64, and how far what a report keeps of them may be off."""

import jax
import jax.numpy as jnp
import numpy as np

import lm_jax
from lm_jax.model import sites
from protot_jax.studies.concepts import collect
from tests import rounding

U = 2.0**-24


def expected(model, token_NT):
    """Losses `[N, T - 1]`, computed in float32, and gates `[L, N, T, R]`, stored in float16."""
    token_NT = jnp.asarray(token_NT)
    valid_NT = None if (token_NT != 0).all() else token_NT != 0
    record = {f"mixer.{gate}": sites.keep for gate in collect.GATES}

    def run(params):
        out = lm_jax.forward(
            params, token_NT, model.cfg, mixer=model.mixer, valid_BT=valid_NT, record=record
        )
        log_p_NTV = jax.nn.log_softmax(out.logits[:, :-1])
        loss_NT = -jnp.take_along_axis(log_p_NTV, token_NT[:, 1:, None], axis=-1)[..., 0]
        return loss_NT, {gate: out.records[f"mixer.{gate}"] for gate in collect.GATES}

    values, (loss_bound, bounds) = rounding.expected(run, model.params)
    kept = {gate: bounds[gate] + _half_a_place(values[1][gate], bounds[gate]) for gate in bounds}
    return rounding.Expected(values, (loss_bound, kept))


def gates(path, texts, layers):
    """Both gates of all layers out of a file, `[L, N, T, R]`."""
    return {
        gate: np.stack([collect.gates_of_layer(path, texts, gate, i) for i in range(layers)])
        for gate in collect.GATES
    }


def _half_a_place(value, bound):
    """How far float16 is from what it stores: eleven bits, of 2^-14 at least, and 0 is exact."""
    size = np.abs(value) + bound
    return np.where(size == 0, 0.0, 2.0**-11 * np.maximum(size, 2.0**-14))


def perplexity(loss_M, bound_M):
    """exp of the mean of losses, whose errors are independent, by numpy in float32.

    numpy adds 16 numbers in a row at most, eight rows side by side, and then sums in pairs: fewer
    than 32 roundings for each number.
    """
    mean = loss_M.mean()
    off = np.linalg.norm(bound_M) / bound_M.size + U * (32 * mean + 4)
    return rounding.Expected(np.exp(mean), np.exp(mean) * off)
