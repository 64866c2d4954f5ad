"""Layouts of other programs, each written by its description, against its formulas in float64."""

import json

import huggingface_hub
from huggingface_hub.utils import filter_repo_objects
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
import yaml

from lm_jax.errors import BadInputError, CorruptError, UsageError
from lm_jax.run import downloads
from sparse_jax.transcoders import files

L, D, F, X = 3, 16, 8, 6


class Drawn:
    """Arrays from one seed, in float32."""

    def __init__(self, seed=3):
        self._rng = np.random.default_rng(seed)

    def __call__(self, *shape):
        return self._rng.normal(size=shape).astype(np.float32)


def inputs():
    return Drawn(0)(L, X, D)


def wide(tensors):
    return {name: np.asarray(value, np.float64) for name, value in tensors.items()}


def close(folder, expected_LXD, kind, hooks):
    """Asserts what a folder holds, and that its outputs are these, to rounding."""
    read, _ = files.load(folder)
    assert (read.cfg.kind, read.hooks) == (kind, hooks)
    size = np.abs(expected_LXD).max()
    # Some hundred additions of float32, of terms that are a few times as large as the outputs.
    np.testing.assert_allclose(read.reconstruct(inputs()), expected_LXD, rtol=0, atol=1e-5 * size)
    return read


def jumprelu(pre, theta):
    return np.where(pre > theta, pre, 0.0)


def write_gemma_scope_1(folder):
    draw, expected = Drawn(), []
    for layer in range(L):
        place = folder / f"layer_{layer}" / "width_16k" / f"average_l0_{70 + layer}"
        place.mkdir(parents=True)
        tensors = {"W_enc": draw(D, F), "b_enc": draw(F), "W_dec": draw(F, D), "b_dec": draw(D)}
        tensors["threshold"] = np.abs(draw(F))
        np.savez(place / "params.npz", **tensors)
        t = wide(tensors)
        z = jumprelu(inputs()[layer] @ t["W_enc"] + t["b_enc"], t["threshold"])
        expected.append(z @ t["W_dec"] + t["b_dec"])
    return np.stack(expected)


def test_gemma_scope_1(tmp_path):
    """Encoders are columns there, and inputs are those before the weights of the norm."""
    expected = write_gemma_scope_1(tmp_path / "scope")
    close(tmp_path / "scope", expected, "jumprelu", ("ln2.hook_normalized", "hook_mlp_out"))


def test_of_several_transcoders_of_a_layer_one_must_be_named(tmp_path):
    expected = write_gemma_scope_1(tmp_path / "scope")
    other = tmp_path / "scope" / "layer_1" / "width_16k" / "average_l0_9"
    other.mkdir()
    first = tmp_path / "scope" / "layer_1" / "width_16k" / "average_l0_71" / "params.npz"
    (other / "params.npz").write_bytes(first.read_bytes())
    with pytest.raises(
        BadInputError, match=r"layer 1 has 2 transcoders \(layer_1/width_16k/av.*config"
    ):
        files.load(tmp_path / "scope")
    paths = [f"layer_{i}/width_16k/average_l0_{70 + i}/params.npz" for i in range(L)]
    described = (
        "model_kind: transcoder_set\nmodel_name: gemma\nfeature_input_hook: ln2.hook_normalized\n"
    )
    described += "feature_output_hook: hook_mlp_out\ntranscoders:\n"
    (tmp_path / "scope" / "config.yaml").write_text(
        described + "".join(f"- {path}\n" for path in paths)
    )
    close(tmp_path / "scope", expected, "jumprelu", ("ln2.hook_normalized", "hook_mlp_out"))
    assert files.load(tmp_path / "scope")[1].model_name == "gemma"
    before = files.identity(tmp_path / "scope")
    (other / "params.npz").unlink()
    assert files.identity(tmp_path / "scope") == before
    first.write_bytes(first.read_bytes() + b"0")
    assert files.identity(tmp_path / "scope") != before


def test_files_of_the_hub_are_read_from_its_cache_or_named(tmp_path, monkeypatch):
    write_gemma_scope_1(tmp_path / "scope")
    cached = {}
    for i in range(L):
        path = f"layer_{i}/width_16k/average_l0_{70 + i}/params.npz"
        cached["google/scope", path, "main"] = str(tmp_path / "scope" / path)
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache",
        lambda repository, name, revision=None: cached.get((repository, name, revision)),
    )
    described = (
        "model_kind: transcoder_set\nmodel_name: gemma\nfeature_input_hook: ln2.hook_normalized\n"
    )
    described += "feature_output_hook: hook_mlp_out\ntranscoders:\n"
    lines = [f"- hf://{owner}/{path}?revision={at}\n" for owner, path, at in cached]
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "config.yaml").write_text(described + "".join(lines))
    np.testing.assert_array_equal(
        files.load(folder)[0].params["encoder"], files.load(tmp_path / "scope")[0].params["encoder"]
    )
    cached.popitem()
    said = (
        r"add --download, or run hf download google/scope layer_2/.*72/params\.npz --revision main"
    )
    with pytest.raises(BadInputError, match=said):
        files.load(folder)


def test_a_path_outside_of_the_folder_is_refused(tmp_path):
    write_gemma_scope_1(tmp_path / "scope")
    (tmp_path / "set").mkdir()
    described = "model_kind: transcoder_set\nmodel_name: gemma\nfeature_input_hook: mlp.hook_in\n"
    described += "feature_output_hook: hook_mlp_out\ntranscoders:\n- ../scope/layer_0\n"
    (tmp_path / "set" / "config.yaml").write_text(described)
    with pytest.raises(BadInputError, match="is not within"):
        files.load(tmp_path / "set")


def test_pickled_arrays_are_refused(tmp_path):
    write_gemma_scope_1(tmp_path / "scope")
    file = next((tmp_path / "scope").rglob("params.npz"))
    np.savez(file, W_enc=np.array([object()], dtype=object))
    with pytest.raises(CorruptError, match="is damaged, or holds objects"):
        files.load(tmp_path / "scope")


@pytest.mark.parametrize("affine", [False, True])
def test_gemma_scope_2(tmp_path, affine):
    """Rows of its affine skip connection are inputs."""
    draw, expected = Drawn(), []
    for layer in range(L):
        end = "_affine" if affine else ""
        place = tmp_path / "scope" / f"layer_{layer}_width_16k_l0_small{end}"
        place.mkdir(parents=True)
        tensors = {"w_enc": draw(D, F), "b_enc": draw(F), "w_dec": draw(F, D), "b_dec": draw(D)}
        tensors["threshold"] = np.abs(draw(F))
        if affine:
            tensors["affine_skip_connection"] = draw(D, D)
        save_file(tensors, place / "params.safetensors")
        t, x = wide(tensors), inputs()[layer].astype(np.float64)
        y = jumprelu(x @ t["w_enc"] + t["b_enc"], t["threshold"]) @ t["w_dec"] + t["b_dec"]
        expected.append(y + (x @ t["affine_skip_connection"] if affine else 0.0))
    read = close(
        tmp_path / "scope", np.stack(expected), "jumprelu", ("mlp.hook_in", "hook_mlp_out")
    )
    assert read.cfg.window == 1 and (read.skip_LDD is not None) == affine


@pytest.mark.parametrize(
    ("place", "config", "said"),
    [
        ("resid_post_all/layer_0_width_16k_l0_small", {}, "resid_post_all has autoencoders"),
        ("gemma-scope-2b-pt-res/layer_0", {}, "gemma-scope-2b-pt-res has autoencoders of Gemma"),
        (
            "layer_0_width_16k_l0_small",
            {"hf_hook_point_in": "model.layers.0.output"},
            "hf_hook_point_in is 'model.layers.0.output', and a transcoder stands for an MLP",
        ),
    ],
)
def test_autoencoders_of_gemma_scope_are_no_transcoders(tmp_path, place, config, said):
    """Their files have the same tensors."""
    draw, folder = Drawn(), tmp_path / place
    folder.mkdir(parents=True)
    tensors = {"w_enc": draw(D, F), "b_enc": draw(F), "w_dec": draw(F, D), "b_dec": draw(D)}
    save_file(tensors | {"threshold": np.abs(draw(F))}, folder / "params.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInputError, match=said):
        files.load(tmp_path)


def test_a_cross_layer_transcoder_of_gemma_scope_2(tmp_path):
    """Its decoders are of all layers, where those before the own one are unused."""
    draw, z, t = Drawn(), [], []
    for layer in range(L):
        tensors = {"w_enc": draw(D, F), "b_enc": draw(F), "w_dec": draw(F, L, D), "b_dec": draw(D)}
        tensors["threshold"] = np.abs(draw(F))
        save_file(tensors, tmp_path / f"params_layer_{layer}.safetensors")
        t.append(wide(tensors))
        z.append(jumprelu(inputs()[layer] @ t[-1]["w_enc"] + t[-1]["b_enc"], t[-1]["threshold"]))
    expected = [
        t[to]["b_dec"] + sum(z[s] @ t[s]["w_dec"][:, to] for s in range(to + 1)) for to in range(L)
    ]
    read = close(tmp_path, np.stack(expected), "jumprelu", ("mlp.hook_in", "hook_mlp_out"))
    assert read.cfg.window is None
    # As circuit-tracer lists them.
    lines = [f"params_layer_{layer}.safetensors" for layer in range(L)]
    more = {"model_kind": "cross_layer_transcoder", "feature_input_hook": "mlp.hook_in"}
    close(listed(tmp_path, lines, **more), np.stack(expected), "jumprelu", read.hooks)
    (tmp_path / "config.yaml").unlink()
    (tmp_path / "params_layer_1.safetensors").unlink()
    with pytest.raises(CorruptError, match=r"encoders of layers \[0, 2\]"):
        files.load(tmp_path)


def sae_tensors(draw, architecture):
    tensors = {"W_enc": draw(D, F), "W_dec": draw(F, D), "b_enc": draw(F), "b_dec": draw(D)}
    if "jumprelu" in architecture:
        tensors["threshold"] = draw(F)
    if "skip" in architecture:
        tensors["W_skip"] = draw(D, D)
    return tensors


def write_saelens(folder, architecture="transcoder", **more):
    """One folder for each layer; the expected outputs."""
    draw, expected = Drawn(), []
    for layer in range(L):
        place = folder / f"any_name_{layer}"
        place.mkdir(parents=True)
        tensors = sae_tensors(draw, architecture)
        config = {
            "architecture": architecture,
            "d_in": D,
            "d_sae": F,
            "d_out": D,
            "dtype": "float32",
        }
        config |= {"normalize_activations": "none", "reshape_activations": "none"}
        config |= {"apply_b_dec_to_input": False}
        config["metadata"] = {
            "sae_lens_version": "6.5.0",
            "model_name": "gpt2-small",
            "hook_name": f"blocks.{layer}.hook_resid_mid",
            "hook_name_out": f"blocks.{layer}.hook_mlp_out",
        }
        (place / "cfg.json").write_text(json.dumps(config | more))
        save_file(tensors, place / "sae_weights.safetensors")
        t, x = wide(tensors), inputs()[layer].astype(np.float64)
        subtracts = (config | more)["apply_b_dec_to_input"]
        pre = (x - t["b_dec"] if subtracts else x) @ t["W_enc"] + t["b_enc"]
        z = np.where(pre > t.get("threshold", 0.0), np.maximum(pre, 0.0), 0.0)
        y = z @ t["W_dec"] + t["b_dec"]
        expected.append(y + (x @ t["W_skip"].T if "W_skip" in t else 0.0))
    return np.stack(expected)


@pytest.mark.parametrize("more", [{}, {"apply_b_dec_to_input": True}])
@pytest.mark.parametrize(
    "architecture",
    ["transcoder", "skip_transcoder", "jumprelu_transcoder", "jumprelu_skip_transcoder"],
)
def test_transcoders_of_saelens(tmp_path, architecture, more):
    """Thresholds below 0 close a feature that is below 0, where circuit-tracer's would be open."""
    expected = write_saelens(tmp_path / "sae", architecture, **more)
    kind = "jumprelu" if "jumprelu" in architecture else "relu"
    close(tmp_path / "sae", expected, kind, ("hook_resid_mid", "hook_mlp_out"))
    assert files.load(tmp_path / "sae")[1].model_name == "gpt2-small"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"architecture": "temporal"}, "architecture is 'temporal'; give one of transcoder, skip"),
        ({"normalize_activations": "layer_norm"}, "normalize_activations is 'layer_norm', a scale"),
        ({"architecture": "standard"}, "stands for no MLP, so that it has no graph; read it by"),
        ({"metadata": {"hook_name": "model.layers.3.mlp"}}, "is not blocks.<number>.<name>"),
        ({"architecture": "topk"}, "k is None, and topk needs the number of features"),
        ({"architecture": "topk", "k": 9}, "k is 9, and topk needs the number of features"),
        ({"activation_fn": "tanh-relu"}, "the activation is 'tanh-relu'; give one of relu or topk"),
        (
            {"model_from_pretrained_kwargs": {"fold_ln": True, "center_unembed": True}},
            "of a model with fold_ln, whose MLPs write something else",
        ),
    ],
)
def test_what_saelens_has_and_no_graph_can_use_is_named(tmp_path, more, said):
    write_saelens(tmp_path / "sae", **more)
    with pytest.raises(BadInputError, match=said):
        files.load(tmp_path / "sae")


@pytest.mark.parametrize("field", ["d_in", "d_sae"])
def test_a_size_that_is_no_number_is_named(tmp_path, field):
    write_saelens(tmp_path / "sae", **{field: "x"})
    with pytest.raises(CorruptError, match="a size is no number"):
        files.load(tmp_path / "sae")


@pytest.mark.parametrize(
    ("reads", "writes", "said"),
    [
        ("hook_resid_pre", "hook_mlp_out", "'hook_resid_pre' is no input or output of an MLP here"),
        ("attn.hook_z", "hook_mlp_out", "'attn.hook_z' is no input"),
        ("mlp.hook_in", "hook_resid_post", "'hook_resid_post' is no input or output of an MLP"),
    ],
)
def test_features_of_other_places_are_refused(tmp_path, reads, writes, said):
    write_saelens(tmp_path / "sae")
    for layer in range(L):
        file = tmp_path / "sae" / f"any_name_{layer}" / "cfg.json"
        config = json.loads(file.read_text())
        config["metadata"] |= {
            "hook_name": f"blocks.{layer}.{reads}",
            "hook_name_out": f"blocks.{layer}.{writes}",
        }
        file.write_text(json.dumps(config))
    with pytest.raises(BadInputError, match=said):
        files.load(tmp_path / "sae")


def test_the_input_of_an_mlp_before_its_norm_is_the_residual_stream(tmp_path):
    expected = write_saelens(tmp_path / "sae")
    for file in (tmp_path / "sae").rglob("cfg.json"):
        file.write_text(file.read_text().replace("hook_resid_mid", "hook_mlp_in"))
    close(tmp_path / "sae", expected, "relu", ("hook_resid_mid", "hook_mlp_out"))


def listed(folder, lines, **more):
    """A set with a list."""
    described = {"model_kind": "transcoder_set", "model_name": "m", "scan": "m"}
    described |= {"feature_input_hook": "hook_resid_mid", "feature_output_hook": "hook_mlp_out"}
    (folder / "config.yaml").write_text(yaml.safe_dump(described | {"transcoders": lines} | more))
    return folder


def test_a_list_has_the_layers_in_order_and_the_hooks_of_its_files(tmp_path):
    folder = tmp_path / "sae"
    expected = write_saelens(folder)
    names = [f"any_name_{layer}" for layer in range(L)]
    close(listed(folder, names), expected, "relu", ("hook_resid_mid", "hook_mlp_out"))
    mappings = [{"id": name, "layer": i, "filepath": name} for i, name in enumerate(names)]
    close(listed(folder, mappings), expected, "relu", ("hook_resid_mid", "hook_mlp_out"))
    for lines, said in (
        (names[::-1], r"any_name_2 is of layer 2, and stands at 0 of transcoders; list the layers"),
        (mappings[::-1], "item 0 of transcoders is of layer 2; list the layers in order"),
        ([{"id": "x"}], "must be a list with a path of each layer"),
        (names[0], "must be a list with a path of each layer"),
        (["hf://google"], "hf://google is not hf://OWNER/REPOSITORY/PATH"),
        (["hf://a/b/../../x.npz"], "is not hf://OWNER/REPOSITORY/PATH"),
    ):
        with pytest.raises(BadInputError, match=said):
            files.load(listed(folder, lines))
    other = listed(folder, names, feature_input_hook="mlp.hook_in")
    with pytest.raises(BadInputError, match=r"hooks are mlp\.hook_in and .*, and those of its"):
        files.load(other)


def test_files_of_a_snapshot_of_the_hub_are_links(tmp_path):
    """Into another folder, which a path in the list does not leave for that."""
    expected = write_saelens(tmp_path / "blobs")
    folder = tmp_path / "snapshot"
    for file in (tmp_path / "blobs").rglob("*.*"):
        link = folder / file.relative_to(tmp_path / "blobs")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file)
    names = [f"any_name_{layer}" for layer in range(L)]
    close(listed(folder, names), expected, "relu", ("hook_resid_mid", "hook_mlp_out"))


def test_the_same_files_in_another_order_are_another_transcoder(tmp_path):
    for name, order in (("first", (0, 1)), ("second", (1, 0))):
        for folder, layer in zip("ab", order, strict=True):
            place = tmp_path / name / folder / f"layer_{layer}"
            place.mkdir(parents=True)
            draw = Drawn(ord(folder))
            tensors = {"W_enc": draw(D, F), "b_enc": draw(F), "W_dec": draw(F, D), "b_dec": draw(D)}
            np.savez(place / "params.npz", **tensors, threshold=np.abs(draw(F)))
    first, second = (files.load(tmp_path / name)[0] for name in ("first", "second"))
    np.testing.assert_array_equal(first.params["encoder"], second.params["encoder"][::-1])
    assert files.identity(tmp_path / "first") != files.identity(tmp_path / "second")


def test_a_missing_layer_of_saelens_is_named(tmp_path):
    write_saelens(tmp_path / "sae")
    (tmp_path / "sae" / "any_name_1" / "sae_weights.safetensors").unlink()
    with pytest.raises(
        BadInputError, match=r"transcoders of layers \[0, 2\], and a graph needs all"
    ):
        files.load(tmp_path / "sae")


@pytest.mark.parametrize("skip", [False, True])
def test_sparsify(tmp_path, skip):
    """Of the k largest, those below 0 are left out; outputs are those of the MLP module."""
    draw, expected, k = Drawn(), [], 5
    for layer in range(L):
        place = tmp_path / "run" / f"layers.{layer}.mlp"
        place.mkdir(parents=True)
        tensors = {"encoder.weight": draw(F, D), "encoder.bias": draw(F), "W_dec": draw(F, D)}
        tensors["b_dec"] = draw(D)
        if skip:
            tensors["W_skip"] = draw(D, D)
        save_file(tensors, place / "sae.safetensors")
        config = {
            "activation": "topk",
            "k": k,
            "d_in": D,
            "transcode": True,
            "skip_connection": skip,
        }
        (place / "cfg.json").write_text(json.dumps(config))
        t, x = wide(tensors), inputs()[layer].astype(np.float64)
        pre = np.maximum(x @ t["encoder.weight"].T + t["encoder.bias"], 0.0)
        least = np.sort(pre, axis=1)[:, -k:].min(1, keepdims=True)
        y = np.where(pre >= least, pre, 0.0) @ t["W_dec"] + t["b_dec"]
        expected.append(y + (x @ t["W_skip"].T if skip else 0.0))
    read = close(tmp_path / "run", np.stack(expected), "topk", ("mlp.hook_in", "mlp.hook_out"))
    assert not read.signed and (np.asarray(read.encode(inputs())) < 0).sum() == 0
    config = json.loads((place / "cfg.json").read_text())
    (place / "cfg.json").write_text(json.dumps(config | {"transcode": False}))
    with pytest.raises(BadInputError, match="it is no transcoder of an MLP"):
        files.load(tmp_path / "run")
    (place / "cfg.json").write_text(json.dumps(config | {"signed": True}))
    with pytest.raises(BadInputError, match="signed is True, which is not read here"):
        files.load(tmp_path / "run")
    # circuit-tracer's TopK is another one.
    with pytest.raises(UsageError, match="keeps features below 0, which this one leaves out"):
        files.save(tmp_path / "copy", read, files.Origin("m"))


def test_clt_forge(tmp_path):
    """Inputs and outputs were scaled, and biases of an output are summed over its sources."""
    draw, pairs = Drawn(), L * (L + 1) // 2
    tensors = {
        "W_enc": draw(L, D, F),
        "b_enc": draw(L, F),
        "W_dec": draw(pairs, F, D),
        "b_dec": draw(pairs, D),
        "log_threshold": draw(L, F),
        "feature_count": np.zeros((L, F), np.int64),
        "layer_mask": np.ones((L, L), bool),
        "estimated_norm_scaling_factor_in": 1 + np.abs(draw(L)),
        "estimated_norm_scaling_factor_out": 1 + np.abs(draw(L)),
    }
    save_file(tensors, tmp_path / "clt_weights.safetensors")
    (tmp_path / "clt_cfg.json").write_text(json.dumps({"model_name": "gpt2"}))
    t = wide(tensors)
    scale_in, scale_out = (t[f"estimated_norm_scaling_factor_{end}"] for end in ("in", "out"))
    z = [
        jumprelu(
            scale_in[s] * inputs()[s] @ t["W_enc"][s] + t["b_enc"][s], np.exp(t["log_threshold"][s])
        )
        for s in range(L)
    ]
    number = {pair: i for i, pair in enumerate((s, to) for s in range(L) for to in range(s, L))}
    expected = [
        sum(z[s] @ t["W_dec"][number[s, to]] + t["b_dec"][number[s, to]] for s in range(to + 1))
        / scale_out[to]
        for to in range(L)
    ]
    close(tmp_path, np.stack(expected), "jumprelu", ("ln2.hook_normalized", "hook_mlp_out"))
    assert files.load(tmp_path)[1].model_name == "gpt2"
    save_file(tensors | {"W_gate": draw(F)}, tmp_path / "clt_weights.safetensors")
    with pytest.raises(BadInputError, match="W_gate has no part in a transcoder of CLT-Forge"):
        files.load(tmp_path)
    (tmp_path / "clt_cfg.json").write_text(json.dumps({"activation_fn": "topk", "k": 2}))
    with pytest.raises(BadInputError, match="activation_fn is 'topk'; give one of jumprelu"):
        files.load(tmp_path)
    (tmp_path / "clt_cfg.json").write_text("{}")
    (tmp_path / "clt_weights.safetensors").rename(tmp_path / "rank0_clt_weights.safetensors")
    with pytest.raises(BadInputError, match="a file for each process of its training; save it"):
        files.load(tmp_path)


def test_decoders_of_the_own_layer_alone_of_clt_forge(tmp_path):
    draw = Drawn()
    tensors = {"W_enc": draw(L, D, F), "b_enc": draw(L, F), "log_threshold": draw(L, F)}
    tensors |= {"W_dec": draw(L, F, D), "b_dec": draw(L, D)}
    tensors |= {
        f"estimated_norm_scaling_factor_{end}": np.ones(L, np.float32) for end in ("in", "out")
    }
    save_file(tensors, tmp_path / "clt_weights.safetensors")
    (tmp_path / "clt_cfg.json").write_text(json.dumps({"cross_layer_decoders": False}))
    t = wide(tensors)
    expected = [
        jumprelu(inputs()[s] @ t["W_enc"][s] + t["b_enc"][s], np.exp(t["log_threshold"][s]))
        @ t["W_dec"][s]
        + t["b_dec"][s]
        for s in range(L)
    ]
    read = close(tmp_path, np.stack(expected), "jumprelu", ("ln2.hook_normalized", "hook_mlp_out"))
    assert read.cfg.window == 1


def test_what_is_no_transcoder_is_named(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(BadInputError, match=r"has no config\.yaml, so it is no transcoder"):
        files.load(tmp_path)


def test_identities_are_of_tensors_and_settings(tmp_path):
    write_saelens(tmp_path / "sae")
    first = files.identity(tmp_path / "sae")
    file = tmp_path / "sae" / "any_name_1" / "cfg.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "bfloat16"}))
    second = files.identity(tmp_path / "sae")
    assert second.weights == first.weights and second.config != first.config
    weights = tmp_path / "sae" / "any_name_2" / "sae_weights.safetensors"
    save_file({n: x + 1 for n, x in load_file(weights).items()}, weights)
    assert files.identity(tmp_path / "sae").weights != first.weights


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the hub, in place of the user's."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    return folder


def test_a_repository_of_the_hub_and_a_folder_in_one_are_read_from_the_cache(tmp_path, cache):
    snapshot = cache / "models--org--sets" / "snapshots" / ("1" * 40)
    write_saelens(snapshot / "width_16k")
    refs = cache / "models--org--sets" / "refs"
    refs.mkdir()
    (refs / "main").write_text("1" * 40)
    expected = write_saelens(tmp_path / "sae")
    for name in ("org/sets/width_16k", "org/sets/width_16k@main", "org/sets"):
        close(name, expected, "relu", ("hook_resid_mid", "hook_mlp_out"))
        assert files.identity(name) == files.identity(tmp_path / "sae")


@pytest.mark.parametrize("name", ["org/other", "org/sets/missing", "org/sets@v2"])
def test_a_repository_that_is_nowhere_is_named_with_what_fetches_it(
    tmp_path, cache, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    (cache / "models--org--sets" / "snapshots" / ("1" * 40)).mkdir(parents=True)
    with pytest.raises(
        BadInputError, match=f"{name} is no folder here, and not in .* add --download"
    ):
        files.load(name)


def test_only_tensors_and_settings_of_a_repository_are_downloaded(tmp_path, cache, monkeypatch):
    """Of one whose list names files of another, nothing but the list."""
    asked, real = [], huggingface_hub.snapshot_download

    def snapshot_download(repository, *, local_files_only, **options):
        assert not local_files_only
        asked.append((repository, options["revision"], options["allow_patterns"]))
        folder = cache / f"models--{repository.replace('/', '--')}" / "snapshots" / ("2" * 40)
        if not folder.exists():
            write_saelens(folder / "all")
            (folder.parents[1] / "refs").mkdir()
            (folder.parents[1] / "refs" / "main").write_text("2" * 40)
        return real(repository, local_files_only=True, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    with downloads.allowed(True):
        # It may hold many sizes, which nobody asked for.
        with pytest.raises(BadInputError, match=r"has no config\.yaml, .* ORG/NAME/FOLDER"):
            files.load("org/sets")
        files.load("org/sets/all")
    assert asked[0][2] == ["config.yaml"]
    wanted = ["cfg.json", "a/sae_weights.safetensors", "layer_0/params.npz", "config.yaml"]
    wanted = [f"all/{name}" for name in wanted]
    others = ["all/sae.pt", "pytorch_model.bin", "all/train.py", "all/ae.pkl", "b/cfg.json"]
    chosen = filter_repo_objects(wanted + others, allow_patterns=asked[-1][2])
    assert list(chosen) == wanted
