"""Effects of single prototypes in the model itself: one read gate zeroed, nothing held."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.model.config import DecoderConfig
from lm_jax.model.decoder import forward
from lm_jax.model.layers import unembedding
from lm_jax.model.mixers import Mixer
from lm_jax.model.params import ParamTree
from lm_jax.model.precision import exact_jit, exact_products
from lm_jax.run import stop
from protot_jax.mixers import edits
from protot_jax.training.saved_run import TrainedModel

MODE = "zero_read"


def measured_effects(
    model: TrainedModel, tokens: np.ndarray | list[int], targets: np.ndarray | list[int]
) -> np.ndarray:
    """The fall of each logit where a prototype is not read at any position, `[X, L, R]`.

    Logits are those of `Decomposition.logit_X`. Gates, norms and MLPs above are computed anew, so
    that this differs from the sum of `through` by what they do in response.

    Raises:
      UsageError: the model has no prototypes.
      StoppedError: the command was asked to stop.
    """
    L, R = model.cfg.num_layers, model.prototypes.num_prototypes
    tokens_T, target_X = jnp.asarray(tokens, jnp.int32), jnp.asarray(targets, jnp.int32)

    def logits(layer: int, prototype: int) -> np.ndarray:
        stop.check("while measuring effects")
        edit = edits.edit_in(layer, prototype, MODE)
        logit_X = _logits(model.params, tokens_T, target_X, edit, model.cfg, model.mixer)
        return np.asarray(logit_X, np.float64)

    with exact_products():
        clean_X = logits(-1, 0)
        effects = [clean_X - logits(*at) for at in np.ndindex(L, R)]
    return np.stack(effects, -1).reshape(-1, L, R)


@functools.partial(exact_jit, static_argnums=(4, 5))
def _logits(
    params: ParamTree,
    tokens_T: jax.Array,
    target_X: jax.Array,
    edit: dict[str, Any],
    cfg: DecoderConfig,
    mixer: Mixer,
) -> jax.Array:
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    output = forward(params, tokens_T[None], cfg, mixer=mixer, edits=edit)
    logits_V = unembedding(params, cfg) @ output.hidden[0, -1]
    return logits_V[target_X] - logits_V.mean()
