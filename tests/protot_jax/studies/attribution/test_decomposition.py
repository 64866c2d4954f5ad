"""Parts of logits in float64 against removal, sums and gradients; float32 within rounding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.model.edits import Add, Chain, Freeze
from lm_jax.model.layers import unembedding
from lm_jax.model.sites import keep
from protot_jax.mixers import edits, models
from protot_jax.mixers.reference_code import released_prefix_mean
from protot_jax.studies import attribution
from protot_jax.studies.attribution import decomposition, effects
from tests import rounding
from tests.protot_jax.rotations import turned
from tests.protot_jax.studies.interventions.small_models import drawn

TOKENS, TARGETS = (3, 9, 14, 9, 30, 22), (5, 17)
L, R, T = 3, 4, len(TOKENS)
# Of sums of some hundred terms in float64, relative to their size.
EXACT = 1e-12
VARIANTS = {
    "paper": {},
    "moving average": {"mass_normalisation": False, "shared_routing": False},
    "released": {"prefix": released_prefix_mean, "low_rank": False, "conv_layers": 3},
    "rotary": {"rotary_queries": True, "rotary_values": True, "rotary_theta": 256.0},
}


@functools.cache
def model(variant="paper"):
    """A model whose parts are all far from zero, with a convolution that matters."""
    base = drawn()
    mixer = dataclasses.replace(base.mixer, **VARIANTS[variant])
    spec = lm_jax.model.decoder.param_spec(base.cfg, mixer)
    fresh = lm_jax.model.params.init(jax.random.key(4), spec, jnp.float32)
    params = jax.tree.map(
        lambda own, new: own if own.shape == new.shape else 6.0 * new, base.params, fresh
    )
    blocks = params["blocks"]["mixer"]
    blocks["conv"] = 4.0 * blocks["conv"]
    blocks["alpha"] = jnp.array([0.7, 1.3, 0.9])
    return dataclasses.replace(base, mixer=mixer, params=params)


def parts_of(params, variant="paper"):
    subject = model(variant)
    tokens_T, target_X = jnp.array(TOKENS), jnp.array(TARGETS)
    run = decomposition.freeze(params, tokens_T, subject.cfg, subject.mixer)
    return run, decomposition.decompose(run, target_X)


@functools.cache
def expected(variant="paper"):
    """The frozen model and its parts in float64, with bounds of float32."""
    return rounding.expected(functools.partial(parts_of, variant=variant), model(variant).params)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_account_sums_to_the_logit_of_the_forward_pass(variant):
    _, parts = expected(variant).values
    assert {name: error.shape for name, error in parts.certificate().items()} == {
        "sources": (2,),
        "direct": (2,),
        "layers": (2, L),
    }
    for error in parts.certificate().values():
        assert error.max() <= EXACT
    # And every part is in them: without any one, the sums miss.
    for field in dataclasses.fields(parts):
        if field.name in ("logit_X", "constant_X", "direct_constant_X"):
            continue
        without = parts.replace(**{field.name: np.zeros_like(getattr(parts, field.name))})
        missed = max(error.max() for error in without.certificate().values())
        assert missed > 1e6 * EXACT, field.name


@pytest.mark.parametrize("variant", VARIANTS)
def test_parts_in_float32_are_within_rounding(variant):
    wanted = rounding.Expected(*(each[1] for each in expected(variant)))
    got = attribution.attribute(model(variant), TOKENS, targets=TARGETS)
    rounding.assert_within(got, wanted)
    assert max(error.max() for error in got.certificate().values()) <= 1e-5


def logits_without(run, pattern_BLNTS, token_TD, mlp_LTD, turn):
    """Demeaned logits `[B, X]` of frozen models with other patterns: a pass written out."""
    layers, mixer = run.layers, run.layers.mixer
    x_BTD = np.broadcast_to(token_TD, (len(pattern_BLNTS), *token_TD.shape)).copy()
    for layer in range(L):
        v_BTE = (x_BTD * layers.norm_LTD[layer]) @ mixer.value_LDE[layer]
        mixed_BTE = np.zeros_like(v_BTE)
        taps_CE = mixer.taps_LCE[layer]
        for t in range(T):
            for c in range(len(taps_CE)):
                if t - c >= 0:
                    mixed_BTE[:, t] += taps_CE[len(taps_CE) - 1 - c] * v_BTE[:, t - c]
        mixed_BTE = turn(mixed_BTE, np.arange(T))
        z_BTE = np.einsum("bnts,bse->bte", pattern_BLNTS[:, layer], mixed_BTE)
        z_BTE = turn(z_BTE, -np.arange(T))
        x_BTD = x_BTD + z_BTE @ mixer.output_LED[layer] + mlp_LTD[layer]
    logits_BV = (x_BTD[:, -1] * run.final_TD[-1]) @ run.unembedding_VD.T
    return logits_BV[:, list(TARGETS)] - logits_BV.mean(-1, keepdims=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_share_is_what_removal_of_its_entry_takes_from_the_logit(variant):
    run, parts = expected(variant).values
    pattern_LNTS = run.layers.mixer.pattern_LNTS
    sources = run.token_TD, run.mlp_LTD
    mixer = model(variant).mixer

    def turn(x_XTE, place_T):
        return turned(x_XTE, place_T, mixer.rotary_theta) if mixer.rotary_values else x_XTE

    without_any = functools.partial(logits_without, run, turn=turn)
    whole_X = without_any(pattern_LNTS[None], *sources)[0]
    size = np.abs(parts.through_XLNTS).sum()
    np.testing.assert_allclose(whole_X, parts.logit_X, rtol=0, atol=EXACT * size)
    entries = np.indices(pattern_LNTS.shape).reshape(4, -1)
    removed = np.broadcast_to(pattern_LNTS, (entries.shape[1], *pattern_LNTS.shape)).copy()
    removed[np.arange(len(removed)), *entries] = 0.0
    share_BX = whole_X - without_any(removed, *sources)
    got_XB = parts.through_XLNTS.reshape(len(TARGETS), -1)
    np.testing.assert_allclose(got_XB, share_BX.T, rtol=0, atol=EXACT * size)
    # Every entry but those of the last layer at other positions than the last reaches the logits.
    assert np.count_nonzero(share_BX) >= 2 * R * ((L - 1) * T * (T - 1) // 2 + T - 1)
    # A whole prototype, at all positions at once: paths pass a layer once.
    for layer, prototype in np.ndindex(L, R):
        without = pattern_LNTS.copy()
        without[layer, prototype] = 0.0
        fall_X = whole_X - without_any(without[None], *sources)[0]
        got_X = parts.through_XLNTS[:, layer, prototype].sum((1, 2))
        np.testing.assert_allclose(got_X, fall_X, rtol=0, atol=EXACT * size)
    # Tokens and MLPs likewise.
    for t in range(T):
        token_TD = run.token_TD.copy()
        token_TD[t] = 0.0
        fall_X = whole_X - without_any(pattern_LNTS[None], token_TD, run.mlp_LTD)[0]
        np.testing.assert_allclose(parts.token_XT[:, t], fall_X, rtol=0, atol=EXACT * size)
        for layer in range(L):
            mlp_LTD = run.mlp_LTD.copy()
            mlp_LTD[layer, t] = 0.0
            fall_X = whole_X - without_any(pattern_LNTS[None], run.token_TD, mlp_LTD)[0]
            got_X = parts.mlp_XLT[:, layer, t]
            np.testing.assert_allclose(got_X, fall_X, rtol=0, atol=EXACT * size)


@pytest.mark.parametrize("variant", ["paper", "rotary"])
@pytest.mark.parametrize("positions", [T, 4])
def test_the_maps_downwards_are_the_transposes_of_those_upwards(variant, positions):
    """In float64, of all positions and of the first alone."""
    run, _ = expected(variant).values
    rng = np.random.default_rng(0)
    x_LTD, c_LTD = rng.normal(size=(2, L, positions, run.token_TD.shape[1]))

    @jax.vmap
    def products(layer, x_TD, c_TD):
        x_XTD, c_XTD = x_TD[None], c_TD[None]
        up, down = layer.apply(x_XTD), layer.transpose(c_XTD)
        shares = layer.mixer.shares(layer.values(x_XTD), layer.cotangents(c_XTD))
        return up[0], (c_XTD * up).sum(), (down * x_XTD).sum(), shares.sum()

    with jax.enable_x64(True):
        layers = jax.tree.map(jnp.asarray, run.layers)
        up_LTD, *sums = products(layers.first(positions), jnp.asarray(x_LTD), jnp.asarray(c_LTD))
        padded_LTD = np.pad(x_LTD, ((0, 0), (0, T - positions), (0, 0)))
        whole_LTD = jax.vmap(lambda layer, x_TD: layer.apply(x_TD[None])[0])(layers, padded_LTD)
    for each in sums[1:]:
        np.testing.assert_allclose(each, sums[0], rtol=0, atol=EXACT * np.abs(sums[0]).max())
    # What comes later is not read.
    np.testing.assert_allclose(up_LTD, whole_LTD[:, :positions], rtol=EXACT, atol=EXACT)
    assert np.abs(up_LTD).max() > 0.1


def test_direct_parts_are_entries_of_the_last_row_read_by_the_logit_alone():
    run, parts = expected().values
    mixer = run.layers.mixer
    direction_XD = run.unembedding_VD[list(TARGETS)] - run.unembedding_VD.mean(0)
    with jax.enable_x64(True):
        x_LTD = np.asarray(decomposition.block_inputs(jax.tree.map(jnp.asarray, run)))
    for layer in range(L):
        values_TE = mixer_values(run, layer, x_LTD[layer])
        # The value that each earlier token has in store, as the logit would read it.
        read_XS = (direction_XD * run.final_TD[-1]) @ mixer.output_LED[layer].T @ values_TE.T
        wanted_XNS = read_XS[:, None] * mixer.pattern_LNTS[layer, :, -1][None]
        got_XNS = parts.direct_XLNS[:, layer]
        size = np.abs(parts.direct_XLNS).sum()
        np.testing.assert_allclose(got_XNS, wanted_XNS, rtol=0, atol=EXACT * size)
        assert np.abs(got_XNS).max() > 1e-2


def mixer_values(run, layer, x_TD):
    v_TE = (x_TD * run.layers.norm_LTD[layer]) @ run.layers.mixer.value_LDE[layer]
    taps_CE = run.layers.mixer.taps_LCE[layer]
    C = len(taps_CE)
    return np.array(
        [sum(taps_CE[C - 1 - c] * v_TE[t - c] for c in range(min(C, t + 1))) for t in range(T)]
    )


@pytest.mark.parametrize("variant", ["paper", "moving average", "rotary"])
def test_gradients_of_the_model_with_all_sites_held_give_the_same_parts(variant):
    """By autodiff of the model's own forward pass: tokens, MLPs, and reads of each prototype."""
    subject, (_, parts) = model(variant), expected(variant).values
    held = ("mixer.write", "mixer.read", "mlp.out", "ln1.scale", "ln2.scale", "final.scale")
    names = ("embed", "mixer.read", "mlp.out")

    def logits(added, params):
        edit = {name: Freeze() for name in held}
        for name, value in added.items():
            edit[name] = Chain((Freeze(), Add(value))) if name in held else Add(value)
        output = lm_jax.forward(
            params,
            jnp.array(TOKENS)[None],
            subject.cfg,
            mixer=subject.mixer,
            edits=edit,
            record=dict.fromkeys(names, keep),
        )
        w_VD = unembedding(params, subject.cfg)
        direction_XD = w_VD[jnp.array(TARGETS)] - w_VD.mean(0, keepdims=True)
        return direction_XD @ output.hidden[0, -1], output.records

    shapes = {"embed": (1, T, 16), "mixer.read": (L, 1, T, R), "mlp.out": (L, 1, T, 16)}

    def products(params):
        """Gradient by each site times its value."""
        zeros = {name: jnp.zeros(shape) for name, shape in shapes.items()}
        _, pull, records = jax.vjp(lambda added: logits(added, params), zeros, has_aux=True)
        slopes = [pull(jnp.eye(len(TARGETS))[x])[0] for x in range(len(TARGETS))]
        return [{name: slope[name] * records[name] for name in names} for slope in slopes]

    size = np.abs(parts.through_XLNTS).sum()
    for x, wanted in enumerate(rounding.expected(products, subject.params).values):
        found = {
            "embed": parts.token_XT[x],
            "mlp.out": parts.mlp_XLT[x],
            # Over keys: the whole memory that the prototype is read from.
            "mixer.read": parts.through_XLNTS[x].sum(-1).swapaxes(1, 2),
        }
        for name, got in found.items():
            by_site = wanted[name].squeeze(0 if name == "embed" else 1)
            by_site = by_site if name == "mixer.read" else by_site.sum(-1)
            np.testing.assert_allclose(got, by_site, rtol=0, atol=EXACT * size, err_msg=name)
            assert np.abs(got).max() > 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_token_is_read_at_or_before_its_own_position(variant):
    run = decomposition.frozen_run(model(variant), TOKENS)
    parts = attribution.attribute(model(variant), TOKENS, targets=TARGETS)
    later = np.triu(np.ones((T, T), bool))
    assert not np.asarray(run.layers.mixer.pattern_LNTS)[..., later].any()
    assert not np.asarray(parts.through_XLNTS)[..., later].any()
    assert not np.asarray(parts.direct_XLNS)[..., -1].any()
    assert (np.asarray(run.layers.mixer.pattern_LNTS)[..., ~later] > 0).all()


def test_weights_of_a_prototype_are_its_read_gate_shared_out_over_the_past():
    subject = model()

    def read_gates(params):
        return lm_jax.forward(
            params,
            jnp.array(TOKENS)[None],
            subject.cfg,
            mixer=subject.mixer,
            record={"mixer.read": keep},
        ).records["mixer.read"][:, 0]

    read_LTR = rounding.expected(read_gates, subject.params).values
    run, _ = expected().values
    got_LTR = run.layers.mixer.pattern_LNTS.sum(-1).swapaxes(1, 2)
    np.testing.assert_allclose(got_LTR[:, 1:], read_LTR[:, 1:], rtol=EXACT)
    assert not got_LTR[:, 0].any()


def test_measured_effects_are_those_of_the_prototype_left_out():
    """With mass normalisation, a prototype that nothing is written to is not read either."""
    subject = model()
    measured_XLR = effects.measured_effects(subject, TOKENS, TARGETS)
    assert measured_XLR.shape == (2, L, R)

    def logits(params, edit):
        output = lm_jax.forward(
            params, jnp.array(TOKENS)[None], subject.cfg, mixer=subject.mixer, edits=edit
        )
        logits_V = unembedding(params, subject.cfg) @ output.hidden[0, -1]
        return logits_V[jnp.array(TARGETS)] - logits_V.mean()

    def falls(params, chosen):
        return jax.lax.map(lambda edit: logits(params, {}) - logits(params, edit), chosen)

    places = ((0, 1), (2, 3))
    chosen = [edits.edit(layer=at[0], prototype=at[1], mode="zero_write") for at in places]
    chosen = jax.tree.map(lambda *x: jnp.stack(x), *chosen)
    wanted = rounding.expected(falls, subject.params, chosen)
    rounding.assert_within(np.stack([measured_XLR[:, *at] for at in places]), wanted)
    assert (np.abs(wanted.values) > wanted.bounds).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": []}, "tokens: shape"),
        ({"tokens": [1, 80]}, "tokens: id 80 is outside the vocabulary"),
        ({"tokens": [1] * 33}, "33 tokens are more than the training context of 32"),
        ({"targets": []}, "targets: shape"),
        ({"targets": [-1]}, "targets: id -1 is outside"),
    ],
)
def test_ids_that_cannot_be_used_are_refused(changes, message):
    arguments = {"tokens": list(TOKENS), "targets": list(TARGETS)} | changes
    with pytest.raises(UsageError, match=message):
        attribution.attribute(model(), arguments["tokens"], targets=arguments["targets"])


def test_models_that_are_not_linear_with_their_gates_held_are_refused():
    subject = model()
    cfg, mixer = models.build_model(
        "mamba", hidden_size=16, num_layers=2, vocab_size=80, context=32, tie_embeddings=True
    )
    other = dataclasses.replace(subject, cfg=cfg, mixer=mixer)
    with pytest.raises(UsageError, match="MambaMixer is not linear"):
        decomposition.frozen_run(other, list(TOKENS))
    with pytest.raises(UsageError, match="no prototypes"):
        attribution.attribute(other, list(TOKENS), targets=list(TARGETS))
