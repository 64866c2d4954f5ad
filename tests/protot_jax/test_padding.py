"""The pad row of the embedding starts at zero, and no input teaches it anything."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import BadInputError
from lm_jax.train.objective import LanguageModelling
import protot_jax
from protot_jax import models


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", models.MODELS)
def test_the_pad_row_starts_at_zero_and_has_no_gradient_as_an_input(name, tied):
    cfg, mixer = protot_jax.build_model(
        name, hidden_size=16, num_layers=2, vocab_size=12, context=8, tie_embeddings=tied
    )
    params = lm_jax.init_params(jax.random.key(0), cfg, mixer=mixer)
    table_VD = np.asarray(params["embed"]["tokens"])
    assert not table_VD[0].any()
    # The others are N(0, 0.02): 176 draws, within four deviations of their estimate.
    assert abs(table_VD[1:].std() / 0.02 - 1) < 4 / np.sqrt(2 * table_VD[1:].size)

    tokens_BS = jnp.asarray([[3, 7, 1, 0, 0, 0], [5, 2, 9, 4, 11, 6]], jnp.int32)
    objective = LanguageModelling(cfg, mixer)
    normalizers = objective.normalizers(tokens_BS)
    gradient = jax.grad(
        lambda p: objective.loss_terms(p, (), None, tokens_BS, normalizers, jax.random.key(1))[0]
    )(params)
    row_D = np.asarray(gradient["embed"]["tokens"])[0]
    # Tied, it is also the output row of a class that is never the target, and learns to be none.
    assert bool(row_D.any()) == tied


def test_a_pad_id_outside_the_vocabulary_is_refused():
    with pytest.raises(BadInputError, match="pad_id = 12 must be in"):
        lm_jax.DecoderConfig(1, 1, 1, 4, 4, 4, 12, 8, pad_id=12)
