"""Edits change the named gate of one prototype only, and compile once for all prototypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import UsageError
import protot_jax
from protot_jax.mixers.edits import MODES
from tests import rounding, tiny

CFG = tiny.decoder(num_layers=3, num_heads=1, num_kv_heads=1, head_dim=16)
MIXER = protot_jax.PrototypeMixer(num_prototypes=5)
GATES = dict.fromkeys(("mixer.write", "mixer.read"), lm_jax.keep)


@pytest.fixture(scope="module")
def model():
    return lm_jax.init_params(jax.random.key(0), CFG, mixer=MIXER)


@pytest.fixture(scope="module")
def tokens_BT():
    return jax.random.randint(jax.random.key(1), (2, 12), 0, 40)


@pytest.fixture(scope="module")
def relative(model, tokens_BT):
    """How far a gate of the unedited model may be off, of itself."""
    _, *gates = rounding.expected(lambda params: run(params, tokens_BT, {}), model).bounds
    _, *values = run(model, tokens_BT, {})
    return max(float(np.max(bound / value)) for bound, value in zip(gates, values, strict=True))


@jax.jit
def run(params, tokens_BT, edits):
    out = lm_jax.forward(params, tokens_BT, CFG, mixer=MIXER, edits=edits, record=GATES)
    return out.logits, out.records["mixer.write"], out.records["mixer.read"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer", [0, 2])
def test_an_edit_zeroes_one_gate_of_one_layer(model, tokens_BT, relative, mode, layer):
    unedited = run(model, tokens_BT, {})
    edits = protot_jax.edit(layer=layer, prototype=3, mode=mode)
    logits, *gates = run(model, tokens_BT, edits)
    edited = 1 if mode.endswith("write") else 2
    gate, was = np.asarray(gates[edited - 1]), np.asarray(unedited[edited])
    assert not gate[layer, ..., 3].any()
    others = np.delete(np.arange(5), 3)
    share = was[layer][..., others]
    if mode.startswith("mask"):
        share = share / share.sum(-1, keepdims=True)
    # Earlier layers are unchanged; in the layer itself the others share the masked gate.
    if layer:
        np.testing.assert_allclose(gate[:layer], was[:layer], rtol=2 * relative)
    # A gate and the sum of the others, on either side.
    np.testing.assert_allclose(gate[layer][..., others], share, rtol=4 * relative)
    assert np.abs(np.asarray(logits) - np.asarray(unedited[0])).max() > 1e-5


def test_the_first_layer_masks_both_gates_by_its_write(model, tokens_BT):
    edits = protot_jax.edit(layer=0, prototype=1, mode="mask_write")
    _, write, read = run(model, tokens_BT, edits)
    assert not np.asarray(write)[0, ..., 1].any()
    np.testing.assert_array_equal(write[0], read[0])


def test_sweeping_layers_and_prototypes_compiles_once(model, tokens_BT):
    def sweep(layer, prototype):
        edits = protot_jax.edit(layer=0, prototype=0, mode="mask_write")
        (site,) = edits
        column = edits[site].edit.replace(prototype=prototype.reshape(1, 1, 1))
        moved = {site: lm_jax.OneLayer(layer, column)}
        out = lm_jax.forward(model, tokens_BT, CFG, mixer=MIXER, edits=moved, record=GATES)
        return out.logits

    swept, pairs_P2 = jax.jit(sweep), jnp.array([(0, 1), (1, 4), (2, 0)])
    exact = rounding.expected(jax.vmap(sweep), *pairs_P2.T)
    for (layer, prototype), *one in zip(pairs_P2, *exact, strict=True):
        edits = protot_jax.edit(layer=int(layer), prototype=int(prototype), mode="mask_write")
        for logits in (run(model, tokens_BT, edits)[0], swept(layer, prototype)):
            rounding.assert_within(logits, rounding.Expected(*one))
    assert swept._cache_size() == 1


def test_a_prototype_drawn_anew_differs_alone(model):
    changed = protot_jax.reinitialise(model, jax.random.key(5), layer=1, prototype=2)
    was, now = (
        {k: np.asarray(v) for k, v in lm_jax.params.by_path(tree).items()}
        for tree in (model, changed)
    )
    name = "blocks/mixer/prototypes"
    rows = (was[name] != now[name]).any(-1)
    np.testing.assert_array_equal(np.argwhere(rows), [[1, 2]])
    assert all((was[k] == now[k]).all() for k in was if k != name)


def test_lengths_of_vectors_drawn_anew():
    """N(0, 1 / D) has length sqrt(1 -+ 1 / 2D) on average, not 1 exactly."""
    rows = {"blocks": {"mixer": {"prototypes": jnp.zeros((1, 1, 256))}}}
    drawn = [
        protot_jax.reinitialise(rows, jax.random.key(i), layer=0, prototype=0) for i in range(64)
    ]
    lengths = np.array([np.linalg.norm(d["blocks"]["mixer"]["prototypes"]) for d in drawn])
    assert abs(np.mean(lengths**2) - 1.0) < 5 * np.sqrt(2 / 256 / 64)
    assert lengths.std() > 0.02


def test_bad_edits_are_refused(model, tokens_BT):
    with pytest.raises(UsageError, match=r"mode = 'mask_wirte' is not one of.*mask_write"):
        protot_jax.edit(layer=0, prototype=0, mode="mask_wirte")
    with pytest.raises(UsageError, match="prototype = -1 must be at least 0"):
        protot_jax.edit(layer=0, prototype=-1, mode="mask_read")
    edits = protot_jax.edit(layer=3, prototype=0, mode="mask_read")
    with pytest.raises(UsageError, match=r"layer = 3 is outside 0\.\.2"):
        lm_jax.forward(model, tokens_BT, CFG, mixer=MIXER, edits=edits)
    with pytest.raises(UsageError, match=r"prototype = 5 is outside 0\.\.4"):
        protot_jax.reinitialise(model, jax.random.key(0), layer=0, prototype=5)
