"""The pad row of the embedding starts at zero, and no row teaches it anything as an input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import BadInputError
from lm_jax.train.objective import LanguageModelling
import protot_jax

both_ties = pytest.mark.parametrize("tied", [False, True])


def build(name, tied):
    return protot_jax.build_model(
        name, hidden_size=16, num_layers=2, vocab_size=12, context=8, tie_embeddings=tied
    )


@both_ties
def test_the_pad_row_alone_starts_at_zero(tied):
    spec = lm_jax.param_spec(*build("protot", tied))
    params = lm_jax.params.init(jax.random.key(0), {"embed": spec["embed"]})
    table_VD = np.asarray(params["embed"]["tokens"])
    assert not table_VD[0].any()
    # The others are N(0, 0.02): 176 draws, within four deviations of their estimate.
    assert abs(table_VD[1:].std() / 0.02 - 1) < 4 / np.sqrt(2 * table_VD[1:].size)


@both_ties
@pytest.mark.parametrize("name", ["protot", "llama"])
def test_padding_at_the_end_of_a_row_has_no_gradient_as_an_input(name, tied):
    cfg, mixer = build(name, tied)
    tokens_BS = jnp.asarray([[3, 7, 1, 0, 0, 0], [5, 2, 9, 4, 11, 6]], jnp.int32)
    objective = LanguageModelling(cfg, mixer)
    normalizers = objective.normalizers(tokens_BS)

    @jax.jit
    @jax.grad
    def gradient(params):
        rng = jax.random.key(1)
        return objective.loss_terms(params, (), None, tokens_BS, normalizers, rng)[0]

    params = lm_jax.init_params(jax.random.key(0), cfg, mixer=mixer)
    table_VD = np.asarray(gradient(params)["embed"]["tokens"])
    # Tied, it is also the output row of a class that is never the target, and learns to be none.
    assert bool(table_VD[0].any()) == tied
    assert table_VD[[3, 7, 5, 2, 9, 4, 11]].any(1).all()


def test_padding_before_a_row_is_not_read_where_it_is_marked():
    cfg, mixer = build("protot", tied=False)
    tokens_BT = jnp.asarray([[0, 0, 4, 8, 2], [5, 2, 9, 4, 11]], jnp.int32)
    held_BT = tokens_BT != 0

    @jax.jit
    @jax.grad
    def gradient(params, valid_BT):
        out = lm_jax.forward(params, tokens_BT, cfg, mixer=mixer, valid_BT=valid_BT)
        return jnp.sum(jnp.where(held_BT, jax.nn.log_softmax(out.logits)[..., 1], 0.0))

    params = lm_jax.init_params(jax.random.key(0), cfg, mixer=mixer)
    marked_VD, unmarked_VD = (
        np.asarray(gradient(params, valid_BT)["embed"]["tokens"])
        for valid_BT in (held_BT, jnp.ones_like(held_BT))
    )
    assert not marked_VD[0].any() and unmarked_VD[0].any()


def test_a_pad_id_outside_the_vocabulary_is_refused():
    with pytest.raises(BadInputError, match="pad_id = 12 must be in"):
        lm_jax.DecoderConfig(1, 1, 1, 4, 4, 4, 12, 8, pad_id=12)
