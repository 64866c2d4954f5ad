"""Folders in circuit-tracer's layout, against a reader and a writer that know the layout alone."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
import yaml

from lm_jax.errors import BadInputError, CorruptError, UsageError
from sparse_jax.transcoders import files, transcoder
from sparse_jax.transcoders.files import Origin
from tests import tiny

L, D, F = 3, 16, 8


@pytest.fixture(scope="module")
def model():
    drawn = transcoder.init(
        jax.random.key(0), tiny.decoder(num_layers=L, hidden_size=D), features=F
    )
    return drawn.folded(np.full(L, 2.0), np.full(L, 3.0))


@pytest.fixture
def folder(model, tmp_path):
    files.save(tmp_path / "clt", model, Origin("tiny", "a" * 64, {"l0": 3.5}))
    return tmp_path / "clt"


def read_layout(folder):
    """z and y of one token by the layout's description: inputs and outputs of all layers."""
    layers = len(list(folder.glob("W_enc_*.safetensors")))
    enc = [load_file(folder / f"W_enc_{i}.safetensors") for i in range(layers)]
    dec = [load_file(folder / f"W_dec_{i}.safetensors")[f"W_dec_{i}"] for i in range(layers)]

    def run(x_LD):
        z, y = [], []
        for i in range(layers):
            pre = enc[i][f"W_enc_{i}"].astype(np.float64) @ x_LD[i] + enc[i][f"b_enc_{i}"]
            z.append(np.where(pre > enc[i][f"threshold_{i}"], pre, 0.0))
        for to in range(layers):
            y.append(enc[to][f"b_dec_{to}"] + sum(z[i] @ dec[i][:, to - i] for i in range(to + 1)))
        return np.stack(y)

    return run


def test_an_independent_reader_computes_the_same(model, folder):
    x_LD = np.random.default_rng(0).normal(size=(L, D))
    y_LD = read_layout(folder)(x_LD)
    ours = model.decode(model.encode(x_LD[:, None].astype(np.float32)))[:, 0]
    # 24 products of features, each of 16 products; numbers below 1.
    np.testing.assert_allclose(ours, y_LD, atol=64 * 2.0**-24)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["model_kind"] == "cross_layer_transcoder" and config["model_name"] == "tiny"
    # What they read of an MLP has the norm's weights in it, as the module's input has.
    hooks = config["feature_input_hook"], config["feature_output_hook"]
    assert hooks == ("mlp.hook_in", "hook_mlp_out")


def test_axis_1_of_a_decoder_begins_at_its_own_layer(model, folder):
    for source in range(L):
        stored = load_file(folder / f"W_dec_{source}.safetensors")[f"W_dec_{source}"]
        assert stored.shape == (F, L - source, D)
        for k in range(L - source):
            np.testing.assert_array_equal(stored[:, k], model.decoder(source, source + k))


@pytest.mark.parametrize("window", [None, 1, 2])
def test_it_is_read_back_to_the_bit(tmp_path, window):
    cfg = tiny.decoder(num_layers=L, hidden_size=D)
    drawn = transcoder.init(jax.random.key(1), cfg, features=F, window=window)
    model = drawn.folded(np.full(L, 0.7), np.full(L, 1.3))
    files.save(tmp_path / "clt", model, Origin("tiny", "b" * 64, {"l0": 3.5}))
    again, origin = files.load(tmp_path / "clt")
    assert again.cfg == model.cfg and origin == Origin("tiny", "b" * 64, {"l0": 3.5})
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    files.save(tmp_path / "second", again, origin)
    for file in (tmp_path / "clt").iterdir():
        assert file.read_bytes() == (tmp_path / "second" / file.name).read_bytes()


def write_config(folder, **hooks):
    """config.yaml of a folder from elsewhere, with hooks."""
    described = {"model_kind": "cross_layer_transcoder", "model_name": "gpt2", "scan": "gpt2"}
    (folder / "config.yaml").write_text(yaml.safe_dump(described | hooks))


def hooks_of(reads="mlp.hook_in", writes="hook_mlp_out"):
    return {"feature_input_hook": reads, "feature_output_hook": writes}


def test_a_folder_from_elsewhere_is_read(model, tmp_path):
    """Written here from the description of the layout, without thresholds: ReLU."""
    rng = np.random.default_rng(3)
    write_config(tmp_path, **hooks_of())
    for i in range(L):
        f32 = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
        encoder = {f"W_enc_{i}": f32(F, D), f"b_enc_{i}": f32(F), f"b_dec_{i}": f32(D)}
        save_file(encoder, tmp_path / f"W_enc_{i}.safetensors")
        save_file({f"W_dec_{i}": f32(F, L - i, D)}, tmp_path / f"W_dec_{i}.safetensors")
    read, origin = files.load(tmp_path)
    assert (read.cfg.kind, read.cfg.window, origin.model_name) == ("relu", None, "gpt2")
    assert origin.model_sha256 == ""
    stored = load_file(tmp_path / "W_dec_0.safetensors")["W_dec_0"]
    np.testing.assert_array_equal(read.decoder(0, 2), stored[:, 2])


@pytest.mark.parametrize(
    ("hooks", "said"),
    [
        (
            hooks_of(reads="hook_resid_mid"),
            r"config.yaml: feature_input_hook is 'hook_resid_mid'.* mlp.hook_in or .* its norm",
        ),
        (hooks_of(writes="hook_resid_post"), r"feature_output_hook is 'hook_resid_post', and"),
        ({"feature_output_hook": "hook_mlp_out"}, r"feature_input_hook is None"),
    ],
)
def test_features_of_other_places_are_refused(folder, hooks, said):
    write_config(folder, **hooks)
    with pytest.raises(BadInputError, match=said):
        files.load(folder)
    # From elsewhere, without a note.
    (folder / "transcoder.json").unlink()
    with pytest.raises(BadInputError, match=said):
        files.load(folder)


@pytest.mark.parametrize(
    ("hooks", "fits", "not_fits", "said"),
    [
        (
            hooks_of(reads="ln2.hook_normalized"),
            {"norm_weights": False},
            {},
            r"it reads ln2\.hook_normalized, .* divide W_enc by these weights",
        ),
        (
            hooks_of(writes="mlp.hook_out"),
            {},
            {"post_norms": True},
            r"it writes mlp\.hook_out, which passes a norm in this model; give one with",
        ),
    ],
)
def test_some_hooks_are_those_of_mlps_in_some_models_alone(
    folder, tmp_path, hooks, fits, not_fits, said
):
    write_config(folder, **hooks)
    read, origin = files.load(folder)
    sizes = {"num_layers": L, "hidden_size": D}
    read.check(tiny.decoder(**sizes, **fits))
    for again in (read, read.folded(np.ones(L), np.ones(L)), transcoder.shuffled(read, 0)):
        with pytest.raises(UsageError, match=said):
            again.check(tiny.decoder(**sizes, **not_fits))
    # A copy names them too.
    files.save(tmp_path / "second", read, origin)
    assert files.load(tmp_path / "second")[0].hooks == read.hooks


def test_the_first_format_named_another_input_than_it_read(folder):
    write_config(folder, **hooks_of(reads="ln2.hook_normalized"))
    note = json.loads((folder / "transcoder.json").read_text())
    (folder / "transcoder.json").write_text(json.dumps(note | {"format": 1}))
    assert files.load(folder)[0].hooks == ("mlp.hook_in", "hook_mlp_out")


def damage(folder, name):
    if name == "config":
        (folder / "config.yaml").write_text("model_kind: transcoder_set\n")
    elif name == "missing":
        (folder / "W_dec_1.safetensors").unlink()
    elif name == "encoder":
        (folder / "W_enc_1.safetensors").unlink()
    elif name == "version":
        note = json.loads((folder / "transcoder.json").read_text())
        (folder / "transcoder.json").write_text(json.dumps(note | {"format": 99}))
    else:
        file = folder / "W_enc_0.safetensors"
        tensors = load_file(file)
        if name == "nan":
            tensors["W_enc_0"][0, 0] = np.nan
        elif name == "shape":
            tensors["b_enc_0"] = tensors["b_enc_0"][:-1]
        elif name == "threshold":
            tensors["threshold_0"][0] = 0.0
        save_file(tensors, file)


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("config", BadInputError, "model_kind is 'transcoder_set'"),
        ("version", BadInputError, "format 99 is not 2"),
        ("missing", CorruptError, r"W_dec_1.safetensors is missing; copy the whole folder"),
        ("encoder", CorruptError, r"encoders of layers \[0, 2\]"),
        ("nan", CorruptError, "W_enc_0 has values that are not finite"),
        ("shape", CorruptError, r"b_enc_0 is of shape \(7,\); it must be \(8,\)"),
        ("threshold", CorruptError, "thresholds must be above 0"),
    ],
)
def test_damage_is_named(folder, name, error, said):
    damage(folder, name)
    with pytest.raises(error, match=said):
        files.load(folder)


def test_another_folder_is_no_transcoder(tmp_path):
    with pytest.raises(BadInputError, match=r"has no config\.yaml, so it is no transcoder"):
        files.load(tmp_path)
