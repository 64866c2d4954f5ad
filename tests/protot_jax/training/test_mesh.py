"""On a mesh every mixer's kernel computes its own rows and channels, and the model is the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.parallel import sharding
from lm_jax.parallel.kernels import under_mesh
from protot_jax.mixers.gated_deltanet import GatedDeltaNetMixer
from protot_jax.mixers.mamba import MambaMixer
from protot_jax.mixers.prototypes import PrototypeMixer
from protot_jax.mixers.slots import RavenMixer
from tests import rounding, tiny

CFG = tiny.decoder()
TOKENS_BT = np.random.default_rng(0).integers(0, CFG.vocab_size, (4, 11))
MIXERS = {
    "protot": PrototypeMixer(num_prototypes=6),
    "mamba": MambaMixer(state_size=5, dt_rank=3),
    "gated_deltanet": GatedDeltaNetMixer(),
    "raven": RavenMixer(num_slots=5, written=2),
}

# One as training compiles it as well: to do so takes half a minute.
AS_IN_TRAINING = pytest.param(
    MIXERS["protot"],
    id="protot as training compiles it",
    marks=[pytest.mark.optimised, pytest.mark.slow, pytest.mark.nightly],
)


# Half a minute each; the nightly run has all four.
SLOW = ("gated_deltanet", "raven")


@pytest.mark.parametrize(
    "mixer",
    [
        *(
            pytest.param(mixer, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
            for name, mixer in MIXERS.items()
        ),
        AS_IN_TRAINING,
    ],
)
def test_loss_and_gradients_are_those_of_one_device(mixer):
    spec = lm_jax.param_spec(CFG, mixer)
    params = lm_jax.params.init(jax.random.key(0), spec)

    def loss(params, tokens_BT):
        logits = lm_jax.forward(params, tokens_BT, CFG, mixer=mixer).logits
        return jnp.mean(jax.nn.log_softmax(logits)[..., 0])

    differentiate = jax.value_and_grad(loss)
    mesh = sharding.make_mesh(data=2, tensor=2)
    places = (sharding.param_shardings(mesh, spec), sharding.batch_sharding(mesh))
    lowered = jax.jit(under_mesh(differentiate, mesh), in_shardings=places)
    assert "shard_map" in str(jax.make_jaxpr(lowered)(params, TOKENS_BT))
    got = lowered(jax.device_put(params, places[0]), sharding.shard_batch(mesh, TOKENS_BT))
    rounding.assert_within(got, rounding.expected(differentiate, params, TOKENS_BT))
