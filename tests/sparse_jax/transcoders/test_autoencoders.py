"""Autoencoders of SAELens against the formulas of each architecture in float64."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import lm_jax
from lm_jax.errors import BadInputError, CorruptError, UsageError
from lm_jax.model.sites import keep
from sparse_jax.transcoders import load_autoencoder
from tests.sparse_jax.circuits.small_models import circuit_model

F, X = 10, 7


@pytest.fixture(scope="module")
def model():
    return circuit_model("llama", num_layers=2)


def write(folder, width, architecture, *, hook="blocks.1.hook_resid_post", old=False, **more):
    """An autoencoder of SAELens; returns its tensors in float64."""
    rng = np.random.default_rng(4)

    def f32(*shape):
        return rng.normal(size=shape).astype(np.float32)

    tensors = {"W_enc": f32(width, F), "W_dec": f32(F, width), "b_dec": f32(width)}
    if architecture == "gated":
        tensors |= {"b_gate": f32(F), "b_mag": f32(F), "r_mag": f32(F)}
    else:
        tensors["b_enc"] = f32(F)
    if architecture == "jumprelu":
        tensors["threshold"] = f32(F)
    place = {"model_name": "tiny", "hook_point" if old else "hook_name": hook}
    sizes = {"d_in": width, "d_sae": F, "dtype": "float32"}
    if old:
        config = sizes | place | more
    else:
        config = {"architecture": architecture, "normalize_activations": "none"} | sizes
        config |= {"apply_b_dec_to_input": True} | more
        config["metadata"] = place | {"sae_lens_version": "6.20.0"}
    folder.mkdir()
    (folder / "cfg.json").write_text(json.dumps(config))
    save_file(tensors, folder / "sae_weights.safetensors")
    return {name: value.astype(np.float64) for name, value in tensors.items()}


def by_formula(t, architecture, x_XD, *, subtracts=True, k=0, scales=False):
    """Features and reconstructions."""
    x_XD = x_XD - t["b_dec"] if subtracts else x_XD
    norm_F = np.linalg.norm(t["W_dec"], axis=1) if scales else np.ones(F)
    if architecture == "gated":
        value = np.maximum(x_XD @ (t["W_enc"] * np.exp(t["r_mag"])) + t["b_mag"], 0.0)
        z_XF = np.where(x_XD @ t["W_enc"] + t["b_gate"] > 0, value, 0.0)
    else:
        p_XF = (x_XD @ t["W_enc"] + t["b_enc"]) * norm_F
        z_XF = np.maximum(p_XF, 0.0)
        if architecture == "jumprelu":
            z_XF = np.where(p_XF > t["threshold"], z_XF, 0.0)
        if architecture == "topk":
            z_XF = np.where(p_XF >= np.sort(p_XF, 1)[:, -k:].min(1, keepdims=True), z_XF, 0.0)
    return z_XF, (z_XF / norm_F) @ t["W_dec"] + t["b_dec"]


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("standard", {}),
        ("standard", {"apply_b_dec_to_input": False}),
        ("jumprelu", {}),
        ("topk", {"k": 4}),
        ("topk", {"k": 4, "rescale_acts_by_decoder_norm": True}),
        ("gated", {}),
    ],
)
def test_features_are_those_of_the_formulas(tmp_path, architecture, more, model):
    D = model.cfg.hidden_size
    t = write(tmp_path / "sae", D, architecture, **more)
    sae = load_autoencoder(tmp_path / "sae")
    x_XD = np.random.default_rng(0).normal(size=(X, D)).astype(np.float32)
    options = {
        "subtracts": more.get("apply_b_dec_to_input", True),
        "k": more.get("k", 0),
        "scales": more.get("rescale_acts_by_decoder_norm", False),
    }
    z_XF, y_XD = by_formula(t, architecture, x_XD.astype(np.float64), **options)
    z = np.asarray(sae.encode(x_XD))
    np.testing.assert_array_equal(z != 0, z_XF != 0)
    assert 0 < (z != 0).mean() < 0.8
    np.testing.assert_allclose(z, z_XF, rtol=0, atol=2e-5 * z_XF.max())
    np.testing.assert_allclose(sae.decode(z), y_XD, rtol=0, atol=2e-5 * np.abs(y_XD).max())
    assert (sae.site, sae.layer, sae.model_name) == ("resid_post", 1, "tiny")


def test_of_a_centred_model_encoders_read_the_stream_less_its_mean(tmp_path, model):
    D = model.cfg.hidden_size
    kwargs = {"model_from_pretrained_kwargs": {"center_writing_weights": True}}
    t = write(tmp_path / "sae", D, "standard", **kwargs)
    sae = load_autoencoder(tmp_path / "sae")
    x_XD = 3 + np.random.default_rng(0).normal(size=(X, D)).astype(np.float32)
    centred_XD = x_XD.astype(np.float64) - x_XD.astype(np.float64).mean(1, keepdims=True)
    z_XF, _ = by_formula(t, "standard", centred_XD)
    np.testing.assert_allclose(sae.encode(x_XD), z_XF, rtol=0, atol=2e-5 * z_XF.max())
    write(tmp_path / "other", D, "standard", hook="blocks.1.hook_mlp_out", **kwargs)
    with pytest.raises(BadInputError, match="hook_mlp_out holds something else than in the check"):
        load_autoencoder(tmp_path / "other")


def test_the_older_flat_settings_are_read(tmp_path, model):
    """There b_dec is subtracted where nothing is said, and TopK is an activation function."""
    D = model.cfg.hidden_size
    options = {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": 3}}
    t = write(tmp_path / "sae", D, "standard", old=True, **options)
    sae = load_autoencoder(tmp_path / "sae")
    x_XD = np.random.default_rng(0).normal(size=(X, D)).astype(np.float32)
    z_XF, _ = by_formula(t, "topk", x_XD.astype(np.float64), k=3)
    np.testing.assert_allclose(sae.encode(x_XD), z_XF, rtol=0, atol=2e-5 * z_XF.max())


def test_activations_on_text_and_steering_by_a_direction(tmp_path, model):
    D = model.cfg.hidden_size
    write(tmp_path / "sae", D, "standard")
    sae = load_autoencoder(tmp_path / "sae")
    tokens_BT = np.random.default_rng(1).integers(0, model.cfg.vocab_size, (2, 5)).astype(np.int32)
    valid_BT = np.ones((2, 5), bool)
    valid_BT[1, 3:] = False
    found_BTF = np.asarray(sae.activations(model, tokens_BT, valid_BT))
    stream_LBTD = model.forward(
        jnp.asarray(tokens_BT), jnp.asarray(valid_BT), record={"resid_post": keep}
    ).records["resid_post"]
    wanted_XF = np.asarray(sae.encode(stream_LBTD[1].reshape(10, D)))
    np.testing.assert_allclose(found_BTF[0], wanted_XF[:5], atol=1e-5)
    assert not found_BTF[1, 3:].any() and found_BTF[1, :3].any()
    steering = lm_jax.OneLayer(sae.layer, lm_jax.Add(5.0 * sae.decoder_FD[7][None, None]))
    moved_LBTD = model.forward(
        *(jnp.asarray(tokens_BT), jnp.asarray(valid_BT)),
        edits={sae.site: steering},
        record={"resid_post": keep},
    ).records["resid_post"]
    shift = np.asarray(moved_LBTD - stream_LBTD)
    np.testing.assert_allclose(shift[1, 0], np.tile(5.0 * sae.decoder_FD[7], (5, 1)), atol=1e-4)
    assert not shift[0].any()


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"architecture": "matching_pursuit"}, BadInputError, "architecture is 'matching_pursuit'"),
        (
            {"architecture": "transcoder"},
            BadInputError,
            r"read it by sparse_jax\.transcoders\.load",
        ),
        (
            {"architecture": "standard", "hook": "blocks.1.attn.hook_z"},
            BadInputError,
            "is not read here",
        ),
        (
            {"architecture": "standard", "normalize_activations": "expected_average_only_in"},
            BadInputError,
            "a scale that the file does not have; fold it",
        ),
        ({"architecture": "standard", "d_sae": F + 1}, CorruptError, "W_enc is of shape"),
    ],
)
def test_others_are_refused_by_name(tmp_path, options, error, said):
    write(tmp_path / "sae", 16, **options)
    with pytest.raises(error, match=said):
        load_autoencoder(tmp_path / "sae")


def test_a_model_of_another_width_is_refused(tmp_path, model):
    write(tmp_path / "sae", model.cfg.hidden_size + 1, "standard")
    sae = load_autoencoder(tmp_path / "sae")
    with pytest.raises(UsageError, match="give the model that it was trained on"):
        sae.activations(model, np.zeros((1, 2), np.int32), np.ones((1, 2), bool))


def write_learned(folder, kind, *, place="resid_post_layer_1", width=16, k=4, io="out"):
    """An autoencoder of dictionary_learning, and its features and reconstructions of `inputs`."""
    rng = np.random.default_rng(6)

    def f32(*shape):
        return rng.normal(size=shape).astype(np.float32)

    folder.mkdir()
    if kind == "JumpReluAutoEncoder":
        t = {"W_enc": f32(width, F), "b_enc": f32(F), "W_dec": f32(F, width), "b_dec": f32(width)}
        t["threshold"] = f32(F)
    else:
        t = {"encoder.weight": f32(F, width), "decoder.weight": f32(width, F)}
        bias = {"AutoEncoder": "bias", "GatedAutoEncoder": "decoder_bias"}.get(kind, "b_dec")
        t[bias] = f32(width)
        if kind == "GatedAutoEncoder":
            t |= {"gate_bias": f32(F), "mag_bias": f32(F), "r_mag": f32(F)}
        else:
            t["encoder.bias"] = f32(F)
    if kind == "AutoEncoderTopK":
        t |= {"k": np.array(k, np.int64), "threshold": np.array(-1.0, np.float32)}
    if kind == "BatchTopKSAE":
        t |= {"k": np.array(k, np.int64), "threshold": np.array(0.7, np.float32)}
    save_file(t, folder / "ae.safetensors")
    trainer = {"dict_class": kind, "activation_dim": width, "dict_size": F, "k": k}
    trainer |= {"lm_name": "tiny", "submodule_name": place}
    (folder / "config.json").write_text(json.dumps({"trainer": trainer, "buffer": {"io": io}}))
    t = {name: value.astype(np.float64) for name, value in t.items()}
    x_XD = np.random.default_rng(0).normal(size=(X, width))
    if kind == "JumpReluAutoEncoder":
        p_XF = x_XD @ t["W_enc"] + t["b_enc"]
        z_XF = np.where(p_XF > t["threshold"], np.maximum(p_XF, 0), 0)
        return z_XF, z_XF @ t["W_dec"] + t["b_dec"]
    product_XF = (x_XD - t[bias]) @ t["encoder.weight"].T
    if kind == "GatedAutoEncoder":
        value_XF = np.maximum(np.exp(t["r_mag"]) * product_XF + t["mag_bias"], 0)
        z_XF = np.where(product_XF + t["gate_bias"] > 0, value_XF, 0)
    else:
        z_XF = np.maximum(product_XF + t["encoder.bias"], 0)
    if kind == "AutoEncoderTopK":
        z_XF = np.where(z_XF >= np.sort(z_XF, 1)[:, -k:].min(1, keepdims=True), z_XF, 0)
    if kind == "BatchTopKSAE":
        z_XF = np.where(z_XF > t["threshold"], z_XF, 0)
    return z_XF, z_XF @ t["decoder.weight"].T + t[bias]


@pytest.mark.parametrize(
    "kind",
    ["AutoEncoder", "AutoEncoderTopK", "BatchTopKSAE", "JumpReluAutoEncoder", "GatedAutoEncoder"],
)
def test_those_of_dictionary_learning(tmp_path, kind):
    z_XF, y_XD = write_learned(tmp_path / "ae", kind)
    sae = load_autoencoder(tmp_path / "ae")
    z = np.asarray(sae.encode(np.random.default_rng(0).normal(size=(X, 16)).astype(np.float32)))
    np.testing.assert_array_equal(z != 0, z_XF != 0)
    np.testing.assert_allclose(z, z_XF, rtol=0, atol=2e-5 * z_XF.max())
    np.testing.assert_allclose(sae.decode(z), y_XD, rtol=0, atol=2e-5 * np.abs(y_XD).max())
    assert (sae.site, sae.layer, sae.model_name) == ("resid_post", 1, "tiny")


def test_a_pickle_is_refused_with_what_to_do(tmp_path):
    write_learned(tmp_path / "ae", "AutoEncoder")
    (tmp_path / "ae" / "ae.safetensors").rename(tmp_path / "ae" / "ae.pt")
    with pytest.raises(BadInputError, match=r"a pickle, which is never opened here; save its tens"):
        load_autoencoder(tmp_path / "ae")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "CrossCoder"}, "trainer.dict_class is 'CrossCoder'; give an AutoEncoder"),
        ({"kind": "AutoEncoder", "place": "model.layers.3"}, "resid_post_layer_<number> or"),
        ({"kind": "AutoEncoder", "place": "mlp_out_layer_1"}, "resid_post_layer_<number> or"),
        ({"kind": "AutoEncoder", "io": "in_and_out"}, "buffer.io is 'in_and_out', and an autoenc"),
        ({"kind": "AutoEncoderTopK", "k": 11}, "k is 11; it must be 1 to 10"),
    ],
)
def test_others_of_dictionary_learning_are_named(tmp_path, options, said):
    write_learned(tmp_path / "ae", **options)
    with pytest.raises(BadInputError, match=said):
        load_autoencoder(tmp_path / "ae")
