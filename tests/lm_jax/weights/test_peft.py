"""Adapters in the layout of PEFT: over every family as computed by hand in float64, both ways."""

import json
import re

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import lm_jax
from lm_jax.errors import BadInputError
from lm_jax.model import lora
from lm_jax.model import params as params_lib
from lm_jax.weights import peft
from lm_jax.weights.peft import load_peft, save_peft
from tests.lm_jax.weights.test_hub import MAIN, put
from tools import make_goldens

U = 2.0**-24
# The matrices of a block that are linear layers, by their names in transformers.
LINEAR = re.compile(r".*\.(\d+)\.(\w+\.\w*(?:_proj|_attn|_fc|_value|dense|_h|_4h))\.weight")
A, B = "base_model.model.{}.lora_A.weight", "base_model.model.{}.lora_B.weight"


def linear(case):
    """The linear layers of a golden case: name to matrix, [out, in] as torch's layers have it."""
    stored = load_file(make_goldens.GOLDEN / case / "model.safetensors")
    turned = case.startswith("gpt2")
    chosen = {name: w for name, w in stored.items() if LINEAR.fullmatch(name)}
    return {n.removesuffix(".weight"): w.T if turned else w for n, w in chosen.items()}


def write(folder, case, *, rank=3, only=lambda module: True, **settings):
    """A PEFT folder of random numbers as that package writes it; returns its tensors."""
    rng, tensors = np.random.default_rng(1), {}
    for module, w in linear(case).items():
        if (r := rank(module) if callable(rank) else rank) and only(module):
            tensors[A.format(module)] = rng.standard_normal((r, w.shape[1]), np.float32)
            tensors[B.format(module)] = rng.standard_normal((w.shape[0], r), np.float32)
    names = sorted({module.rpartition(".")[2] for module in linear(case)})
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": names}
    config |= {"lora_dropout": 0.1, "task_type": "CAUSAL_LM", "peft_version": "0.21.2"}
    folder.mkdir(exist_ok=True)
    (folder / peft.CONFIG).write_text(json.dumps(config | settings))
    save_file(tensors, folder / peft.WEIGHTS, metadata={"format": "pt"})
    return tensors


def assert_merged(folder, case, base, tensors, strength, scratch):
    """Merged and saved, each matrix is W + strength B A; what has no adapter did not change."""
    adapters, settings = load_peft(folder, base)
    lm_jax.save_pretrained(scratch, base.cfg, lora.merge(base.params, adapters, settings))
    merged = load_file(scratch / "model.safetensors")
    original = load_file(make_goldens.GOLDEN / case / "model.safetensors")
    for name, got in merged.items():
        module = name.removesuffix(".weight")
        if A.format(module) not in tensors:
            np.testing.assert_array_equal(got, original[name], err_msg=name)
            continue
        a, b = (tensors[each.format(module)].astype(np.float64) for each in (A, B))
        s, got = strength(module), got.T if case.startswith("gpt2") else got
        w = linear(case)[module].astype(np.float64)
        # One rounding in every product and sum, of the strength and of the factor put into B.
        bound = (len(a) + 4) * U * (np.abs(w) + s * np.abs(b) @ np.abs(a))
        assert np.all(np.abs(got - (w + s * b @ a)) <= bound), name
        assert not np.array_equal(got, w)


@pytest.fixture
def base():
    return lm_jax.load_pretrained(make_goldens.GOLDEN / "llama_gqa")


@pytest.mark.parametrize("case", sorted(make_goldens.CASES))
def test_merged_is_the_weight_plus_b_a_in_every_family(case, tmp_path):
    base = lm_jax.load_pretrained(make_goldens.GOLDEN / case)
    tensors = write(tmp_path / "adapter", case)
    # Every matrix that our adapters can be of is in one of them.
    everything = lora.adapter_spec(lm_jax.param_spec(base.cfg), lora.LoraConfig())
    adapters, settings = load_peft(tmp_path / "adapter", base)
    assert params_lib.by_path(adapters).keys() == dict(params_lib.leaves(everything)).keys()
    assert (settings.rank, settings.alpha) == (3, 6.0)
    assert_merged(tmp_path / "adapter", case, base, tensors, lambda module: 2.0, tmp_path / "out")


@pytest.mark.parametrize("case", sorted(make_goldens.CASES))
@pytest.mark.parametrize("targets", [("mixer/*", "mlp/*"), ("q", "mlp/down")])
def test_what_is_written_is_read_back(case, targets, tmp_path):
    base = lm_jax.load_pretrained(make_goldens.GOLDEN / case)
    settings = lora.LoraConfig(rank=2, alpha=5.0, targets=targets)
    spec = lora.adapter_spec(lm_jax.param_spec(base.cfg), settings)
    keys = iter(jax.random.split(jax.random.key(0), 100))
    leaves = {path: jax.random.normal(next(keys), s.shape) for path, s in params_lib.leaves(spec)}
    save_peft(tmp_path / "one", base, params_lib.tree_from_paths(leaves), settings)
    again, read = load_peft(tmp_path / "one", base)
    assert read.strength == settings.strength
    back = params_lib.by_path(again)
    for path in {path.rpartition("/")[0] for path in back}:
        down, up = (np.asarray(back[f"{path}/{n}"], np.float64) for n in ("down", "up"))
        got = [np.tensordot(d, u, axes=1) for d, u in zip(down, up, strict=True)]
        if f"{path}/down" not in leaves:
            # Another weight of the same module.
            assert not np.any(got), path
            continue
        down, up = (np.asarray(leaves[f"{path}/{n}"], np.float64) for n in ("down", "up"))
        want = [np.tensordot(d, u, axes=1) for d, u in zip(down, up, strict=True)]
        np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-13)
    # Once more, and not a bit changes: weights that share their A do so in the file.
    save_peft(tmp_path / "two", base, again, read)
    third, _ = load_peft(tmp_path / "two", base)
    first, second = params_lib.by_path(again), params_lib.by_path(third)
    assert first.keys() == second.keys()
    for path, leaf in first.items():
        np.testing.assert_array_equal(second[path], leaf)


def test_the_written_folder_is_what_peft_expects(tmp_path):
    base = lm_jax.load_pretrained(make_goldens.GOLDEN / "gpt2")
    settings = lora.LoraConfig(rank=2, alpha=5.0, targets=("q", "k", "mlp/*"))
    spec = lora.adapter_spec(lm_jax.param_spec(base.cfg), settings)
    save_peft(tmp_path / "a", base, params_lib.init(jax.random.key(0), spec), settings)
    config = json.loads((tmp_path / "a" / peft.CONFIG).read_text())
    assert config["target_modules"] == ["attn.c_attn", "mlp.c_fc", "mlp.c_proj"]
    assert (config["r"], config["lora_alpha"], config["fan_in_fan_out"]) == (2, 5, True)
    assert config["rank_pattern"] == {"attn.c_attn": 4}
    assert config["alpha_pattern"] == {"attn.c_attn": 10}
    assert config["base_model_name_or_path"] is None
    shapes = {n: a.shape for n, a in load_file(tmp_path / "a" / peft.WEIGHTS).items()}
    assert len(shapes) == 2 * 3 * 3
    assert shapes[A.format("transformer.h.2.attn.c_attn")] == (4, 24)
    assert shapes[B.format("transformer.h.2.attn.c_attn")] == (72, 4)
    with pytest.raises(BadInputError, match="exists"):
        save_peft(tmp_path / "a", base, params_lib.init(jax.random.key(0), spec), settings)


# Settings of PEFT, by its own rules

CHOICES = [
    # A rank and a strength by module, the first pattern that fits; the key ends the name.
    (
        {
            "rank_pattern": {"q_proj": 5, "1.mlp.up_proj": 1},
            "alpha_pattern": {r"\d.mlp.up_proj": 4},
        },
        lambda m: 5 if m.endswith("q_proj") else 1 if m.endswith("1.mlp.up_proj") else 3,
        lambda m: (
            (4 if "up_proj" in m else 6)
            / (5 if m.endswith("q_proj") else 1 if m.endswith("1.mlp.up_proj") else 3)
        ),
    ),
    ({"use_rslora": True}, 3, lambda m: 6 / np.sqrt(3)),
    (
        {"target_modules": r".*\.[02]\..*v_proj"},
        lambda m: 3 * ("v_proj" in m and ".1." not in m),
        2,
    ),
    (
        {"target_modules": ["up_proj", "model.layers.1.self_attn.q_proj", "proj"]},
        lambda m: 3 * (m.endswith(("up_proj", "1.self_attn.q_proj"))),
        2,
    ),
    ({"exclude_modules": ["mlp.up_proj"]}, lambda m: 3 * (not m.endswith("mlp.up_proj")), 2),
    ({"layers_to_transform": 0}, lambda m: 3 * (".0." in m), 2),
    (
        {"layers_to_transform": [0, 2], "layers_pattern": "layers"},
        lambda m: 3 * (".1." not in m),
        2,
    ),
    ({"init_lora_weights": "gaussian", "fan_in_fan_out": True, "modules_to_save": []}, 3, 2),
]


@pytest.mark.parametrize(("settings", "rank", "strength"), CHOICES)
def test_settings_mean_what_they_mean_in_peft(settings, rank, strength, base, tmp_path):
    tensors = write(tmp_path / "adapter", "llama_gqa", rank=rank, **settings)
    by_module = strength if callable(strength) else lambda module: strength
    places = tmp_path / "adapter", "llama_gqa", base, tensors
    assert_merged(*places, by_module, tmp_path / "out")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
        ({"use_dora": True, "bias": "all"}, "bias = 'all', use_dora = True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = ['lm_head']"),
        ({"r": 0, "lora_alpha": "8"}, "r = 0, lora_alpha = '8'"),
        ({"target_modules": None}, "target_modules = None"),
        ({"target_modules": ["c_attn"]}, "name no matrix in the blocks of the base"),
    ],
)
def test_settings_that_are_not_supported(settings, words, base, tmp_path):
    write(tmp_path / "adapter", "llama_gqa", **settings)
    with pytest.raises(BadInputError) as caught:
        load_peft(tmp_path / "adapter", base)
    assert words in str(caught.value) and "\n" not in str(caught.value)


# Tensors


def test_every_difference_is_listed_at_once(base, tmp_path):
    tensors = write(tmp_path / "adapter", "llama_gqa")
    first, second, third = (f"model.layers.{n}.mlp.down_proj" for n in range(3))
    del tensors[A.format(first)]
    tensors[B.format(second)] = tensors[B.format(second)][:, :2].copy()
    tensors[A.format(third)][1, 2] = np.nan
    tensors["base_model.model.lm_head.lora_A.weight"] = np.ones((3, 24), np.float32)
    save_file(tensors, tmp_path / "adapter" / peft.WEIGHTS)
    with pytest.raises(BadInputError) as caught:
        load_peft(tmp_path / "adapter", base)
    for words in (
        "4 differences",
        f"missing {A.format(first)}",
        f"{B.format(second)} has shape (24, 2), not (24, 3)",
        f"NaN or infinite numbers in {A.format(third)}",
        "unknown base_model.model.lm_head.lora_A.weight (3, 24)",
    ):
        assert words in str(caught.value)


def test_narrow_floats_are_read(base, tmp_path):
    tensors = write(tmp_path / "adapter", "llama_gqa")
    narrow = {name: a.astype(np.float16) for name, a in tensors.items()}
    save_file(narrow, tmp_path / "adapter" / peft.WEIGHTS)
    places = tmp_path / "adapter", "llama_gqa", base, narrow
    assert_merged(*places, lambda module: 2.0, tmp_path / "out")


def test_files_that_are_no_adapter(base, tmp_path):
    write(tmp_path / "adapter", "llama_gqa")
    file = tmp_path / "adapter" / peft.WEIGHTS
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(BadInputError, match="truncated or damaged"):
        load_peft(tmp_path / "adapter", base)
    file.unlink()
    with pytest.raises(BadInputError, match="is not there"):
        load_peft(tmp_path / "adapter", base)
    (tmp_path / "adapter" / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(BadInputError, match="pickled, which is never loaded"):
        load_peft(tmp_path / "adapter", base)
    with pytest.raises(BadInputError, match=r"adapter_config\.json is missing"):
        load_peft(make_goldens.GOLDEN / "llama_gqa", base)


# The base


def test_an_adapter_of_another_base_is_refused(base, tmp_path, monkeypatch):
    write(tmp_path / "adapter", "llama_gqa")
    other = lm_jax.load_pretrained(make_goldens.GOLDEN / "llama_mqa")
    with pytest.raises(BadInputError, match=r"k_proj.* has shape"):
        load_peft(tmp_path / "adapter", other)
    save_peft(tmp_path / "ours", base, *load_peft(tmp_path / "adapter", base))
    changed = dict(base.params) | {"final": {"scale": 2 * base.params["final"]["scale"]}}
    lm_jax.save_pretrained(tmp_path / "changed", base.cfg, changed)
    with pytest.raises(BadInputError, match="was trained on a base with weights"):
        load_peft(tmp_path / "ours", lm_jax.load_pretrained(tmp_path / "changed"))


def test_a_snapshot_of_the_hub_is_named_and_its_name_compared(tmp_path):
    snapshots = (
        put(tmp_path, make_goldens.GOLDEN / "llama_gqa", MAIN, "main", name)
        for name in ("org/name", "org/other")
    )
    base, other = map(lm_jax.load_pretrained, snapshots)
    write(tmp_path / "adapter", "llama_gqa", base_model_name_or_path="Org/Name")
    save_peft(tmp_path / "ours", base, *load_peft(tmp_path / "adapter", base))
    config = json.loads((tmp_path / "ours" / peft.CONFIG).read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/name", MAIN)
    for folder in ("adapter", "ours"):
        with pytest.raises(BadInputError, match="but the base is 'org/other'"):
            load_peft(tmp_path / folder, other)
