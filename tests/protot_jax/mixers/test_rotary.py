"""Places of rotary positions: numbers of tokens in their documents, without padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.model.mixers import Layer
from lm_jax.model.sites import Scope
from protot_jax import PrototypeMixer
from protot_jax.mixers.rotary import places
from tests import rounding, tiny

CFG = tiny.decoder(num_heads=1, num_kv_heads=1, head_dim=16)


def counted(valid_T, document_T, held):
    """The same by a loop."""
    result, count = [], held
    for t, valid in enumerate(valid_T):
        if t and document_T[t] != document_T[t - 1]:
            count = 0
        count += int(valid)
        result.append(count - 1)
    return result


@pytest.mark.parametrize("held", [None, 0, 7])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("documents", [False, True])
def test_places_are_those_of_a_loop(held, padded, documents):
    rng = np.random.default_rng(0)
    B, T = 5, 30
    valid_BT = rng.random((B, T)) > 0.4 if padded else np.ones((B, T), bool)
    # A document is many tokens or one, and may begin with padding.
    document_BT = np.cumsum(rng.random((B, T)) > 0.7, 1) if documents else np.zeros((B, T), int)
    layer = Layer(
        positions_BT=jnp.zeros((B, T), jnp.int32),
        scope=Scope({}, {}),
        attend=lm_jax.softmax,
        valid_BT=jnp.asarray(valid_BT) if padded else None,
        document_BT=jnp.asarray(document_BT) if documents else None,
    )
    place_BT, tokens_B = places(layer, None if held is None else jnp.full(B, held))
    wanted = [
        counted(valid_T, document_T, held or 0)
        for valid_T, document_T in zip(valid_BT, document_BT, strict=True)
    ]
    # Tokens of a cache are of the first document.
    np.testing.assert_array_equal(place_BT, wanted)
    if not documents:
        np.testing.assert_array_equal(tokens_B, valid_BT.sum(1) + (held or 0))


@pytest.mark.parametrize(("name", "heads"), [("queries", 1), ("values", 2)])
def test_a_row_padded_on_the_left_is_read_as_the_row_alone(name, heads):
    """Queries know the place itself, so that padding would be felt if it were counted."""
    fields = {f"rotary_{name}": True, "rotary_theta": 256.0}
    mixer = PrototypeMixer(num_prototypes=6, heads=heads, **fields)
    params = lm_jax.init_params(jax.random.key(0), CFG, mixer=mixer)
    # Gates that depend on what is read.
    params["blocks"]["mixer"]["read"] *= 10.0
    tokens_BT = jax.random.randint(jax.random.key(1), (2, 9), 1, 40)

    def alone(params):
        return lm_jax.forward(params, tokens_BT, CFG, mixer=mixer).logits

    @jax.jit
    def padded(params):
        padded_BT = jnp.pad(tokens_BT, ((0, 0), (4, 0)))
        valid_BT = jnp.broadcast_to(jnp.arange(13) >= 4, padded_BT.shape)
        return lm_jax.forward(params, padded_BT, CFG, mixer=mixer, valid_BT=valid_BT).logits[:, 4:]

    wanted = rounding.expected(alone, params)
    rounding.assert_within(padded(params), wanted)
    plain = PrototypeMixer(num_prototypes=6, heads=heads)
    unturned = lm_jax.forward(params, tokens_BT, CFG, mixer=plain).logits
    assert (np.abs(unturned - wanted.values) > 10 * wanted.bounds).any()
