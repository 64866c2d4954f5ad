"""Sets of per-layer transcoders in circuit-tracer's layout, against the formulas in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
import yaml

import lm_jax
from lm_jax.errors import BadInputError, CorruptError, UsageError
from sparse_jax import graphs
from sparse_jax.transcoders import files
from sparse_jax.transcoders.files import Origin
from tests import tiny
from tests.sparse_jax.graphs.small_graphs import LAYERS, small_model, small_tokens

L, D, F, X = 3, 16, 8, 5


def write_set(
    folder, *, layers=L, width=D, threshold=False, skip=False, reads="mlp.hook_in", **more
):
    """A set as another program would write it."""
    rng = np.random.default_rng(3)

    def f32(*shape):
        return rng.normal(size=shape).astype(np.float32)

    folder.mkdir(exist_ok=True)
    for layer in range(layers):
        tensors = {
            "W_enc": f32(F, width),
            "W_dec": f32(F, width),
            "b_enc": f32(F),
            "b_dec": f32(width),
        }
        if threshold:
            tensors["activation_function.threshold"] = np.abs(f32(F))
        if skip:
            tensors["W_skip"] = f32(width, width)
        save_file(tensors, folder / f"layer_{layer}.safetensors")
    described = {
        "model_kind": "transcoder_set",
        "model_name": "gpt2",
        "feature_input_hook": reads,
        "feature_output_hook": "hook_mlp_out",
        "scan": "gpt2",
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(described | more))
    return folder


def by_formula(folder, x_LXD, k=0):
    """Outputs in float64, and the sums of absolute values that they add."""
    outputs, sizes = [], []
    for layer, x_XD in enumerate(x_LXD.astype(np.float64)):
        t = load_file(folder / f"layer_{layer}.safetensors")
        t = {name: value.astype(np.float64) for name, value in t.items()}
        pre_XF = x_XD @ t["W_enc"].T + t["b_enc"]
        size_XF = np.abs(x_XD) @ np.abs(t["W_enc"]).T + np.abs(t["b_enc"])
        theta_F = t.get("activation_function.threshold", 0.0)
        open_XF = pre_XF > theta_F
        if k:
            open_XF = pre_XF >= np.sort(pre_XF, axis=1)[:, -k:].min(1, keepdims=True)
        y_XD = np.where(open_XF, pre_XF, 0) @ t["W_dec"] + t["b_dec"]
        size_XD = np.where(open_XF, size_XF, 0) @ np.abs(t["W_dec"]) + np.abs(t["b_dec"])
        if "W_skip" in t:
            y_XD += x_XD @ t["W_skip"].T
            size_XD += np.abs(x_XD) @ np.abs(t["W_skip"]).T
        outputs.append(y_XD)
        sizes.append(size_XD)
    return np.stack(outputs), np.stack(sizes)


def inputs():
    return np.random.default_rng(0).normal(size=(L, X, D)).astype(np.float32)


@pytest.mark.parametrize(
    ("options", "kind", "k"),
    [
        ({}, "relu", 0),
        ({"threshold": True}, "jumprelu", 0),
        ({"skip": True}, "relu", 0),
        ({"activation": "topk", "k": 6, "skip": True}, "topk", 6),
    ],
)
def test_a_set_is_the_function_of_its_formulas(tmp_path, options, kind, k):
    read, origin = files.load(write_set(tmp_path / "set", **options))
    assert (read.cfg.kind, read.cfg.window, read.cfg.k, origin) == (kind, 1, k, Origin("gpt2"))
    y_LXD, size_LXD = by_formula(tmp_path / "set", inputs(), k)
    # D products and a bias in a feature, F in an output, D more by W_skip.
    bound = (D + 2 + F + 2 + D) * 2.0**-24 * size_LXD
    assert (np.abs(np.asarray(read.reconstruct(inputs())) - y_LXD) <= bound).all()
    # Some of the k largest are below 0, which circuit-tracer keeps.
    below = bool((np.asarray(read.encode(inputs())) < 0).any())
    assert below == read.signed == (kind == "topk")


@pytest.mark.parametrize(
    "options", [{}, {"threshold": True}, {"activation": "topk", "k": 3, "skip": True}]
)
def test_a_set_is_written_as_it_was_read(tmp_path, options):
    first = write_set(tmp_path / "first", **options)
    read, origin = files.load(first)
    files.save(tmp_path / "second", read, origin)
    for layer in range(L):
        name = f"layer_{layer}.safetensors"
        jax.tree.map(
            np.testing.assert_array_equal,
            load_file(first / name),
            load_file(tmp_path / "second" / name),
        )
    described = [
        yaml.safe_load((each / "config.yaml").read_text()) for each in (first, tmp_path / "second")
    ]
    assert described[0] == described[1] | {"scan": "gpt2"}
    again, _ = files.load(tmp_path / "second")
    assert again.cfg == read.cfg and again.hooks == read.hooks
    assert files.identity(first).weights == files.identity(tmp_path / "second").weights


def test_the_k_largest_of_some_features_are_those_of_all(tmp_path):
    read, _ = files.load(write_set(tmp_path / "set", activation="topk", k=3))
    every = np.asarray(read.encode(inputs()))
    assert ((every != 0).sum(-1) == 3).all()
    layer, feature = np.array([0, 2, 1]), np.array([1, 7, 4])
    np.testing.assert_array_equal(
        read.encode_some(inputs(), layer, feature), every[layer, :, feature].T
    )
    # sparsify and SAELens leave out what is below 0.
    rectified = dataclasses.replace(read, cfg=dataclasses.replace(read.cfg, rectified=True))
    np.testing.assert_array_equal(rectified.encode(inputs()), every.clip(0))
    assert not rectified.signed


def change(folder, name, value):
    file = folder / "layer_1.safetensors"
    tensors = load_file(file)
    tensors = (
        tensors | {name: value}
        if value is not None
        else {n: t for n, t in tensors.items() if n != name}
    )
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("name", "value", "error", "said"),
    [
        (
            "W_gate",
            np.zeros(F, np.float32),
            BadInputError,
            r"layer_1\.safetensors: W_gate has no part in a relu",
        ),
        ("W_skip", np.zeros((D, D), np.float32), BadInputError, "the W_skip is there, and that of"),
        (
            "W_dec",
            np.zeros((F + 1, D), np.float32),
            CorruptError,
            r"W_dec is of shape \(9, 16\); it must be \(8, 16\)",
        ),
        ("b_dec", None, CorruptError, r"b_dec is missing; it must be \(16,\)"),
        (
            "b_enc",
            np.full(F, np.nan, np.float32),
            CorruptError,
            "b_enc has values that are not finite",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, name, value, error, said):
    folder = write_set(tmp_path / "set")
    change(folder, name, value)
    with pytest.raises(error, match=said):
        files.load(folder)


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        ({"activation": "topk"}, BadInputError, r"k is None, and activation topk needs the number"),
        ({"activation": "topk", "k": 9}, BadInputError, r"k is 9 in config\.yaml, and there are 8"),
        ({"activation": "topk", "k": True}, BadInputError, "k is True, and activation topk needs"),
        ({"activation": "jumprelu"}, BadInputError, "and the files have no thresholds; copy"),
        ({"activation": "gelu"}, BadInputError, "activation is 'gelu'; give a transcoder of topk"),
    ],
)
def test_what_config_yaml_lacks_is_named(tmp_path, more, error, said):
    with pytest.raises(error, match=said):
        files.load(write_set(tmp_path / "set", **more))


def test_k_of_the_tensors_and_of_the_settings_are_one(tmp_path):
    folder = write_set(tmp_path / "set", activation="topk", k=3)
    change(folder, "k", np.array(3, np.int64))
    assert files.load(folder)[0].cfg.k == 3
    change(folder, "k", np.array(4, np.int64))
    with pytest.raises(CorruptError, match=r"layer_1\.safetensors: k is 4, and 3 in config\.yaml"):
        files.load(folder)


def test_a_missing_layer_is_named(tmp_path):
    folder = write_set(tmp_path / "set")
    (folder / "layer_1.safetensors").unlink()
    with pytest.raises(CorruptError, match=r"encoders of layers \[0, 2\]; copy the whole folder"):
        files.load(folder)


def test_a_cross_layer_transcoder_with_a_skip_cannot_be_written(tmp_path):
    read, origin = files.load(write_set(tmp_path / "set", skip=True))
    wide = dataclasses.replace(read, cfg=dataclasses.replace(read.cfg, window=2))
    with pytest.raises(UsageError, match="no place for W_skip; save one with window=1"):
        files.save(tmp_path / "wide", wide, origin)
    assert not (tmp_path / "wide").exists()


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("blocks", ["gpt2", "llama"])
def test_inputs_before_the_weights_of_a_norm_are_had_from_those_after(tmp_path, blocks, skip):
    """What the features read is the same, and so is their graph.

    TransformerLens' layer norm has weights and bias before that place, its RMS norm behind it.
    """
    model = small_model(blocks)
    options = {"layers": LAYERS, "width": model.cfg.hidden_size, "skip": skip}
    bare, _ = files.load(write_set(tmp_path / "set", reads="ln2.hook_normalized", **options))
    with pytest.raises(UsageError, match=r"pass transcoder\.for_model"):
        bare.check(model.cfg)
    own = bare.for_model(model.params, model.cfg)
    own.check(model.cfg)
    norm = {
        name: np.asarray(leaf, np.float64)[:, None]
        for name, leaf in model.params["blocks"]["ln2"].items()
    }
    before_LXD = np.random.default_rng(1).normal(size=(LAYERS, X, model.cfg.hidden_size))
    is_layer = model.cfg.norm == "layer"
    assert is_layer == (blocks == "gpt2")
    after_LXD = before_LXD if is_layer else before_LXD * norm["scale"]
    pre = np.asarray(own.pre_activations(after_LXD.astype(np.float32)))
    wanted = np.asarray(bare.pre_activations(before_LXD.astype(np.float32)))
    np.testing.assert_allclose(pre, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())
    graph = graphs.attribute(model, bare, small_tokens())
    assert graph.certificate().max() <= 1e-5


def test_weights_of_a_norm_in_bfloat16_are_read_as_float32(tmp_path):
    """Of Gemma, whose norms multiply by 1 + w: the sum has more digits than bfloat16 has."""
    model = small_model("gemma")
    options = {"layers": LAYERS, "width": model.cfg.hidden_size}
    bare, _ = files.load(write_set(tmp_path / "set", reads="ln2.hook_normalized", **options))
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)
    own = bare.for_model(narrow, model.cfg)
    scale_LD = np.asarray(narrow["blocks"]["ln2"]["scale"].astype(jnp.float32), np.float64)
    wanted = np.asarray(bare.params["encoder"], np.float64) / (1 + scale_LD)[:, None]
    np.testing.assert_allclose(own.params["encoder"], wanted, rtol=1e-6)


def test_a_model_without_a_norm_before_its_mlps_has_no_such_input(tmp_path):
    model = small_model("olmo2")
    options = {"layers": LAYERS, "width": model.cfg.hidden_size}
    bare, _ = files.load(write_set(tmp_path / "set", reads="ln2.hook_normalized", **options))
    with pytest.raises(UsageError, match="this model has no norm before its MLPs"):
        bare.for_model(model.params, model.cfg)


def test_an_input_that_a_weight_of_zero_loses_is_refused(tmp_path):
    model = small_model("llama")
    options = {"layers": LAYERS, "width": model.cfg.hidden_size}
    bare, _ = files.load(write_set(tmp_path / "set", reads="ln2.hook_normalized", **options))
    params = jax.tree.map(lambda x: x, model.params)
    params["blocks"]["ln2"] = {"scale": params["blocks"]["ln2"]["scale"].at[1, 3].set(0.0)}
    with pytest.raises(UsageError, match="a weight of the norms of this model is 0"):
        bare.for_model(params, model.cfg)
    # Of a model without such weights it is read as it is.
    cfg = tiny.decoder(num_layers=LAYERS, hidden_size=model.cfg.hidden_size, norm_weights=False)
    assert bare.for_model(lm_jax.init_params(jax.random.key(0), cfg), cfg) is bare
