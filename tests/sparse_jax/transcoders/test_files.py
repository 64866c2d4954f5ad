"""Folders in circuit-tracer's layout, against a reader and a writer that know the layout alone."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
import yaml

from lm_jax.errors import BadInputError, CorruptError, UsageError
from lm_jax.run.identity import difference
from sparse_jax.transcoders import files, transcoder
from sparse_jax.transcoders.files import Origin
from tests import tiny

L, D, F = 3, 16, 8


def drawn(window=None):
    """A transcoder of raw activations, with biases other than zero."""
    cfg = tiny.decoder(num_layers=L, hidden_size=D)
    scaled = transcoder.init(jax.random.key(0), cfg, features=F, window=window)
    biases = {
        name: jax.random.normal(jax.random.key(1), scaled.params[name].shape)
        for name in ("encoder_bias", "decoder_bias")
    }
    scaled = scaled.replace(params=dict(scaled.params) | biases)
    return scaled.folded(np.full(L, 2.0), np.full(L, 3.0))


@pytest.fixture(scope="module")
def model():
    return drawn()


@pytest.fixture
def folder(model, tmp_path):
    files.save(tmp_path / "clt", model, Origin("tiny", "a" * 64, {"l0": 3.5}))
    return tmp_path / "clt"


def read_layout(folder):
    """MLP outputs of inputs `[L, X, D]` by the layout's description, in float64.

    Returns:
      function to how far pre-activations are above thresholds `[L, X, F]`, in units of the sum of
      the absolute values that they add; outputs; and such sums of outputs.
    """
    layers = len(list(folder.glob("W_enc_*.safetensors")))
    enc = [load_file(folder / f"W_enc_{i}.safetensors") for i in range(layers)]
    dec = [load_file(folder / f"W_dec_{i}.safetensors")[f"W_dec_{i}"] for i in range(layers)]

    def wide(i, name):
        return enc[i][f"{name}_{i}"].astype(np.float64)

    def run(x_LXD):
        above, z, size = [], [], []
        for i in range(layers):
            x, w = x_LXD[i].astype(np.float64), wide(i, "W_enc")
            pre = x @ w.T + wide(i, "b_enc")
            theta = wide(i, "threshold") if f"threshold_{i}" in enc[i] else np.zeros(len(w))
            sums_XF = abs(x) @ abs(w).T + abs(wide(i, "b_enc"))
            above.append((pre - theta) / sums_XF)
            z.append(np.where(pre > theta, pre, 0.0))
            size.append(np.where(pre > theta, sums_XF, 0.0))
        y, sums = [], []
        for to in range(layers):
            w = [dec[i][:, to - i].astype(np.float64) for i in range(to + 1)]
            y.append(wide(to, "b_dec") + sum(z[i] @ w[i] for i in range(to + 1)))
            sums.append(abs(wide(to, "b_dec")) + sum(size[i] @ abs(w[i]) for i in range(to + 1)))
        return np.stack(above), np.stack(y), np.stack(sums)

    return run


def drawn_inputs():
    return np.random.default_rng(0).normal(size=(L, 5, D)).astype(np.float32)


def assert_same_function(ours, reader, x_LXD):
    """Outputs agree with those of `read_layout` at every token, within what rounding can do."""
    above_LXF, y_LXD, sums_LXD = reader(x_LXD)
    # D products and a bias in a feature, of which rounding opens or closes none; L F in an output.
    u, of_feature, of_output = 2.0**-24, D + 2, L * F + 2
    assert np.abs(above_LXF).min() > u * of_feature and 0.1 < (above_LXF > 0).mean() < 0.9
    difference = np.abs(np.asarray(ours.decode(ours.encode(x_LXD)), np.float64) - y_LXD)
    assert (difference <= u * (of_feature + of_output) * sums_LXD).all()


@pytest.mark.parametrize("window", [None, 2])
def test_an_independent_reader_computes_the_same(tmp_path, window):
    """Of a windowed transcoder too, whose window the layout has no place for."""
    model, folder = drawn(window), tmp_path / "clt"
    files.save(folder, model, Origin("tiny"))
    assert_same_function(model, read_layout(folder), drawn_inputs())
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
    model = drawn(window)
    files.save(tmp_path / "clt", model, Origin("tiny", "b" * 64, {"l0": 3.5}))
    again, origin = files.load(tmp_path / "clt")
    assert again.cfg == model.cfg and origin == Origin("tiny", "b" * 64, {"l0": 3.5})
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    files.save(tmp_path / "second", again, origin)
    for file in (tmp_path / "clt").iterdir():
        assert file.read_bytes() == (tmp_path / "second" / file.name).read_bytes()


def test_a_transcoder_is_known_by_its_settings_too(tmp_path):
    """Tensors alone do not say which first tokens have no features, nor what they read."""
    folder = tmp_path / "clt"
    files.save(folder, drawn(None), Origin("tiny", "b" * 64, {"l0": 3.5}))
    first, note = files.identity(folder), folder / "transcoder.json"
    stored = json.loads(note.read_text())
    note.write_text(json.dumps(dict(reversed(stored.items())) | {"numbers": {"l0": 9.0}}))
    assert files.identity(folder) == first
    config = stored["config"]
    for change in ({"skip_start": 4}, {"config": config | {"kind": "relu"}}):
        note.write_text(json.dumps(stored | change))
        assert files.identity(folder).config != first.config
        assert files.identity(folder).weights == first.weights
    # Earlier versions recorded the digest of the tensors alone.
    assert difference(first.weights, first.text, where="run") == ""
    note.unlink()
    description = yaml.safe_load((folder / "config.yaml").read_text())
    foreign = files.identity(folder)
    changed = description | {"feature_input_hook": "ln2.hook_normalized"}
    (folder / "config.yaml").write_text(yaml.safe_dump(changed))
    assert files.identity(folder).config != foreign.config


def test_decoders_are_zero_beyond_the_window(tmp_path):
    model, folder = drawn(window=2), tmp_path / "clt"
    files.save(folder, model, Origin("tiny"))
    file, note = folder / "W_dec_0.safetensors", folder / "transcoder.json"
    stored = load_file(file)["W_dec_0"]
    assert stored.shape == (F, L, D) and not stored[:, 2].any()
    # The first format left them out.
    save_file({"W_dec_0": np.ascontiguousarray(stored[:, :2])}, file)
    jax.tree.map(np.testing.assert_array_equal, files.load(folder)[0].params, model.params)
    save_file({"W_dec_0": stored + 1}, file)
    with pytest.raises(CorruptError, match=r"W_dec_0 writes beyond the window of 2 in transcod"):
        files.load(folder)
    # Without the note it is a transcoder of all later layers.
    save_file({"W_dec_0": stored}, file)
    note.unlink()
    whole, _ = files.load(folder)
    assert whole.cfg.window is None and not whole.decoder(0, 2).any()
    assert_same_function(whole, read_layout(folder), drawn_inputs())


def write_config(folder, **hooks):
    """config.yaml of a folder from elsewhere, with hooks."""
    described = {"model_kind": "cross_layer_transcoder", "model_name": "gpt2", "scan": "gpt2"}
    (folder / "config.yaml").write_text(yaml.safe_dump(described | hooks))


def hooks_of(reads="mlp.hook_in", writes="hook_mlp_out"):
    return {"feature_input_hook": reads, "feature_output_hook": writes}


def write_layout(folder, *, thresholds):
    """A folder with the layout's tensors and nothing else, as another program would write it."""
    rng = np.random.default_rng(3)

    def f32(*shape):
        return rng.normal(size=shape).astype(np.float32)

    write_config(folder, **hooks_of())
    for i in range(L):
        encoder = {f"W_enc_{i}": f32(F, D), f"b_enc_{i}": f32(F), f"b_dec_{i}": f32(D)}
        if thresholds:
            # One of them 0, which is open strictly above it as all are.
            encoder[f"threshold_{i}"] = np.abs(f32(F)) * (np.arange(F) > 0)
        save_file(encoder, folder / f"W_enc_{i}.safetensors")
        save_file({f"W_dec_{i}": f32(F, L - i, D)}, folder / f"W_dec_{i}.safetensors")


@pytest.mark.parametrize(("thresholds", "kind"), [(False, "relu"), (True, "jumprelu")])
def test_a_folder_from_elsewhere_is_the_same_function(tmp_path, thresholds, kind):
    write_layout(tmp_path, thresholds=thresholds)
    read, origin = files.load(tmp_path)
    assert (read.cfg.kind, read.cfg.window, origin) == (kind, None, Origin("gpt2"))
    assert_same_function(read, read_layout(tmp_path), drawn_inputs())
    for source in range(L):
        stored = load_file(tmp_path / f"W_dec_{source}.safetensors")[f"W_dec_{source}"]
        for k in range(L - source):
            np.testing.assert_array_equal(read.decoder(source, source + k), stored[:, k])
    # Strictly above: at its threshold a feature is closed, and one step above it is open.
    theta_LF = np.asarray(read.theta_LF)
    assert not read.activate(theta_LF[:, None]).any()
    above_L1F = np.nextafter(theta_LF, np.float32(np.inf))[:, None]
    # One step above 0 is less than what a processor may flush to 0.
    above_L1F = np.maximum(above_L1F, np.finfo(np.float32).tiny)
    np.testing.assert_array_equal(read.activate(above_L1F), above_L1F)


@pytest.mark.parametrize(
    ("hooks", "said"),
    [
        (
            hooks_of(reads="hook_resid_pre"),
            r"config.yaml: feature_input_hook is 'hook_resid_pre'.* mlp.hook_in, .* its norm",
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
            r"it reads ln2\.hook_normalized, .* pass transcoder\.for_model\(params, cfg\)",
        ),
        (
            hooks_of(reads="hook_resid_mid"),
            {},
            {"parallel_residual": True},
            r"it reads hook_resid_mid, and .* no residual stream between attention and MLP",
        ),
        (
            hooks_of(writes="mlp.hook_out"),
            {},
            {"norm_placement": "both"},
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


def change_note(folder, change):
    file = folder / "transcoder.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def change_tensor(folder, name, change):
    file = folder / "W_enc_0.safetensors"
    tensors = load_file(file)
    save_file(tensors | {name: np.ascontiguousarray(change(tensors.get(name)))}, file)


def with_first(value):
    def change(x):
        x.flat[0] = value
        return x

    return change


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda note: note | {"format": 99}, BadInputError, "format 99 is not 2; export it again"),
        (lambda note: [note], CorruptError, r"damaged: it = \[.*give a section with the fields of"),
        (
            lambda note: {"format": 2, "config": note["config"]},
            CorruptError,
            "model_name is missing; give it a text; model_sha256 is missing; .*; copy the whole",
        ),
    ],
)
def test_another_note_is_named(folder, change, error, said):
    change_note(folder, change)
    with pytest.raises(error, match=said):
        files.load(folder)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"feature": 3}, r"config\.feature is not a field of .*; did you mean 'features'"),
        ({"window": "2"}, r"config\.window = '2' \(str\); give a whole number"),
        ({"kind": "jumprelo"}, r"config\.kind = 'jumprelo' is not .*; did you mean 'jumprelu'"),
        ({"window": 0}, "window = 0 must be at least 1"),
        ({"num_layers": 2}, "num_layers is 2, and the folder has encoders of 3 layers; copy the"),
    ],
)
def test_other_sizes_are_named(folder, fields, said):
    change_note(folder, lambda note: note | {"config": note["config"] | fields})
    with pytest.raises(CorruptError, match=said):
        files.load(folder)


@pytest.mark.parametrize(
    ("name", "change", "error", "said"),
    [
        ("W_enc_0", with_first(np.nan), CorruptError, "W_enc_0 has values that are not finite"),
        (
            "b_enc_0",
            lambda x: x[:-1],
            CorruptError,
            r"b_enc_0 is of shape \(7,\); it must be",
        ),
        ("threshold_0", with_first(-0.5), CorruptError, "thresholds must be at least 0"),
        (
            "W_skip_0",
            lambda _: np.zeros((D, D), np.float32),
            BadInputError,
            "W_skip_0 has no part in a jumprelu transcoder; give one without it",
        ),
    ],
)
def test_other_tensors_are_named(folder, name, change, error, said):
    change_tensor(folder, name, change)
    with pytest.raises(error, match=said) as raised:
        files.load(folder)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "text", "error", "said"),
    [
        ("config.yaml", "model_kind: set\n", BadInputError, "model_kind is 'set'"),
        ("transcoder.json", '{"format": 2,', CorruptError, r"transcoder\.json is not JSON"),
        (
            "W_dec_1.safetensors",
            None,
            CorruptError,
            "W_dec_1.safetensors is missing; copy",
        ),
        ("W_enc_1.safetensors", None, CorruptError, r"encoders of layers \[0, 2\]"),
        ("config.yaml", None, BadInputError, r"has no config\.yaml, so it is no transcoder"),
    ],
)
def test_a_damaged_or_missing_file_is_named(folder, name, text, error, said):
    (folder / name).unlink()
    if text:
        (folder / name).write_text(text)
    with pytest.raises(error, match=said):
        files.load(folder)


def test_features_of_threshold_zero_are_open_strictly_above_it(folder):
    change_tensor(folder, "threshold_0", with_first(0.0))
    read, _ = files.load(folder)
    assert read.theta_LF[0, 0] == 0
    pre_LXF = np.zeros((L, 3, F), np.float32)
    pre_LXF[0, :, 0] = [-1e-6, 0.0, 1e-6]
    np.testing.assert_array_equal(read.activate(pre_LXF)[0, :, 0], pre_LXF[0, :, 0].clip(0))


def test_decoders_of_another_rank_are_named(folder):
    (folder / "transcoder.json").unlink()
    save_file({"W_dec_0": np.zeros(F, np.float32)}, folder / "W_dec_0.safetensors")
    with pytest.raises(CorruptError, match="W_enc_0 or W_dec_0 is missing or misshapen"):
        files.load(folder)
