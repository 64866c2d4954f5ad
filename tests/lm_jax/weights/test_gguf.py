"""GGUF files as the converter of llama.cpp writes them load as their source model."""

import dataclasses
import types

from gguf.constants import GGMLQuantizationType as Quant
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from iaj import convert
import lm_jax
from lm_jax.errors import BadInputError
from lm_jax.model.layers import inverse_frequencies
from lm_jax.model.rope import ProportionalScaling
from lm_jax.weights.gguf import gemma4 as gguf_gemma4
from lm_jax.weights.load import resolve
from tests.lm_jax.weights.gguf_files import (
    GEMMA3,
    LLAMA,
    OTHERS,
    QWEN2,
    File,
    file_of,
    random_params,
    refused,
)
from tools import make_goldens

ONE_OF_SIX = ProportionalScaling(rotated=1 / 6)

# The same model by two ways


@pytest.mark.parametrize("name", ["llama_mqa", "gemma4", "gemma4_tied_kv"])
def test_a_golden_model_is_the_one_that_is_compared_with_torch(tmp_path, name):
    folder = make_goldens.GOLDEN / name
    golden = lm_jax.load_pretrained(folder)
    path = File(golden.cfg, load_file(folder / "model.safetensors")).write(tmp_path / "m.gguf")
    model = lm_jax.load_pretrained(path)
    want = golden.cfg
    if name == "gemma4_tied_kv":
        # Of six pairs 1.5 should turn, which is one.
        want = dataclasses.replace(want, rope=dataclasses.replace(want.rope, scaling=ONE_OF_SIX))
    assert model.cfg == want
    jax.tree.map(np.testing.assert_array_equal, model.params, golden.params)


@pytest.mark.parametrize(
    "cfg",
    [
        LLAMA,
        dataclasses.replace(LLAMA, tie_embeddings=True, num_kv_heads=4),
        GEMMA3,
        dataclasses.replace(GEMMA3, num_kv_heads=2, logit_softcap=1.5, tie_embeddings=False),
        *OTHERS.values(),
    ],
    ids=["llama gqa", "llama mha tied", "gemma3 mqa", "gemma3 gqa untied softcap", *OTHERS],
)
def test_a_file_of_a_model_is_that_model(tmp_path, cfg):
    params = random_params(cfg)
    if cfg.family == "stablelm" and cfg.parallel_residual:
        # One norm for both.
        params["blocks"]["ln2"] = params["blocks"]["ln1"]
    file = file_of(cfg, params, tmp_path / "folder")
    if cfg.logit_softcap is not None:
        file.fields["final_logit_softcapping"] = cfg.logit_softcap
    model = lm_jax.load_pretrained(file.write(tmp_path / "m.gguf"))
    assert model.cfg == cfg
    assert model.tokenizer.vocab_size == 48
    want = lm_jax.params.by_path(params)
    for name, leaf in lm_jax.params.by_path(model.params).items():
        if cfg.norm_offset and name.endswith("scale"):
            # Gemma's norms are stored plus one, which costs the last bit.
            want[name] = np.float32(want[name]) + np.float32(1) - np.float32(1)
        np.testing.assert_array_equal(leaf, want[name])


@pytest.mark.parametrize(
    ("quant", "levels"), [(Quant.Q8_0, 127), (Quant.Q4_0, 8), (Quant.F16, 2**10)]
)
def test_quantised_weights_are_within_half_a_step(tmp_path, quant, levels):
    params = random_params(LLAMA)
    path = file_of(LLAMA, params, tmp_path / "folder").write(tmp_path / "m.gguf", quant)
    model = lm_jax.load_pretrained(path)
    for name in ("blocks/mixer/q", "blocks/mixer/k", "blocks/mlp/down", "embed/tokens"):
        exact, stored = (
            np.asarray(lm_jax.params.by_path(p)[name], np.float64) for p in (params, model.params)
        )
        # Blocks of 32 weights share a step, largest / levels, itself rounded to float16.
        step = abs(exact).max() / levels
        # The end of Q4_0's scale opposite the largest weight is one step short.
        steps = (1.0 if quant == Quant.Q4_0 else 0.5) + levels * 2**-11
        assert 0 < abs(stored - exact).max() < steps * step, name


def test_more_rows_than_are_dequantised_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("lm_jax.weights.gguf.fields._ROWS", 10)
    params = random_params(LLAMA)
    path = file_of(LLAMA, params, tmp_path / "folder").write(tmp_path / "m.gguf", Quant.Q8_0)
    in_parts = lm_jax.load_pretrained(path)
    monkeypatch.setattr("lm_jax.weights.gguf.fields._ROWS", 1000)
    whole = lm_jax.load_pretrained(path)
    jax.tree.map(np.testing.assert_array_equal, in_parts.params, whole.params)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_frequency_factors_of_llama_3(tmp_path, factor):
    scaling = lm_jax.Llama3Scaling(factor, 1.0, 4.0, 8192)
    cfg = dataclasses.replace(
        LLAMA, head_dim=64, max_length=2**14, rope=lm_jax.Rope(theta=5e5, scaling=scaling)
    )
    file = file_of(cfg, random_params(cfg), tmp_path / "folder")
    # As the converter computes them, frequency by frequency.
    factors = []
    for i in range(32):
        wavelength = 2 * np.pi * 5e5 ** (2 * i / 64)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    ramp = next(i for i, f in enumerate(factors) if 1.0 < f < factor)
    file.tensors["rope_freqs.weight"] = np.float32(factors)
    assert lm_jax.load_pretrained(file.write(tmp_path / "m.gguf")).cfg == cfg
    file.tensors["rope_freqs.weight"][ramp] *= 1.01
    refused(file.write(tmp_path / "m.gguf"), "rope_freqs.weight is not the frequency scaling")


def test_factors_of_longrope(tmp_path):
    scaling = lm_jax.LongRopeScaling((1.0, 1.1), (1.3, 7.7), 8, attention_factor=1.25)
    # transformers counts the pairs of Phi-3 by the width of the model over its heads.
    rope = lm_jax.Rope(fraction=0.5, scaling=scaling)
    cfg = dataclasses.replace(OTHERS["phi3"], head_dim=8, rope=rope, windows=())
    file = file_of(cfg, random_params(cfg), tmp_path / "folder")
    file.fields |= {"rope.scaling.original_context_length": 8, "rope.scaling.attn_factor": 1.25}
    file.tensors["rope_factors_short.weight"] = np.float32(scaling.short_factor)
    file.tensors["rope_factors_long.weight"] = np.float32(scaling.long_factor)
    assert lm_jax.load_pretrained(file.write(tmp_path / "m.gguf")).cfg == cfg
    del file.tensors["rope_factors_short.weight"]
    refused(file.write(tmp_path / "m.gguf"), "rope_factors_short.weight is missing")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("attention.shared_kv_layers", 5, ("leaves layer 2 no layer of its kind",)),
        ("attention.sliding_window_pattern", 6, ("must say of 6 layers if local",)),
        ("feed_forward_length", [20, 20], ("one positive number, or 6 of them",)),
        ("rope.dimension_count_swa", 4, ("rope.dimension_count_swa = 4", "only 8 is")),
        ("expert_count", 8, ("expert_count", "not known")),
    ],
)
def test_what_a_file_of_gemma_4_may_not_say(tmp_path, key, value, words):
    folder = make_goldens.GOLDEN / "gemma4"
    golden = lm_jax.load_pretrained(folder)
    file = File(golden.cfg, load_file(folder / "model.safetensors"))
    file.fields[key] = value
    refused(file.write(tmp_path / "m.gguf"), *words)


@pytest.mark.parametrize(("turning", "pairs"), [(15, 22), (64, 256), (1, 6), (31, 39), (8, 8)])
def test_as_many_pairs_of_gemma_4_turn_as_the_file_says(turning, pairs):
    divisors = np.float32([1] * turning + [1e30] * (pairs - turning))
    stored = types.SimpleNamespace(
        data=divisors, tensor_type=Quant.F32, shape=divisors.shape, name="rope_freqs.weight"
    )
    scaling = gguf_gemma4._scaling({"rope_freqs.weight": stored}, pairs)
    rope = lm_jax.Rope(theta=1e6, scaling=scaling)
    assert np.count_nonzero(inverse_frequencies(rope, 2 * pairs)) == turning


def test_pairs_of_gemma_4_turn_from_the_first(tmp_path):
    folder = make_goldens.GOLDEN / "gemma4"
    golden = lm_jax.load_pretrained(folder)
    file = File(golden.cfg, load_file(folder / "model.safetensors"))
    file.tensors["rope_freqs.weight"] = np.float32([1, 1e30, 1, 1, 1, 1, 1, 1])
    refused(file.write(tmp_path / "m.gguf"), "does not say which of 8 pairs turn")


def test_linear_scaling_and_a_stored_pattern_of_windows(tmp_path):
    cfg = dataclasses.replace(
        GEMMA3,
        rope=lm_jax.Rope(theta=1e6, scaling=lm_jax.LinearScaling(8.0)),
        local_rope=lm_jax.Rope(theta=500.0),
        windows=(3, None, 3, None, 3, None, 3),
    )
    file = file_of(cfg, random_params(cfg), tmp_path / "folder")
    file.fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    file.fields |= {"rope.freq_base_swa": 500.0, "attention.sliding_window_pattern": 2}
    assert lm_jax.load_pretrained(file.write(tmp_path / "m.gguf")).cfg == cfg
    file.fields["attention.sliding_window_pattern"] = [i % 2 == 0 for i in range(7)]
    assert lm_jax.load_pretrained(file.write(tmp_path / "m.gguf")).cfg == cfg


# The real files


def fields_of(name):
    from lm_jax.text.gguf_reader import open_gguf

    reader = open_gguf(resolve(name))
    return {key: field.contents() for key, field in reader.fields.items()}, reader.tensors


@pytest.mark.real("gemma3_270m")
def test_the_real_gemma_file_keeps_the_conventions():
    fields, tensors = fields_of("gemma3_270m")
    by_name = {tensor.name: tensor.data for tensor in tensors if tensor.tensor_type == Quant.F32}
    assert not any(key.startswith("gemma3.rope.scaling") for key in fields)
    assert "gemma3.rope.freq_base_swa" not in fields
    assert "gemma3.attention.sliding_window_pattern" not in fields
    assert fields["gemma3.attention.sliding_window"] == 512
    assert fields["general.architecture"] == "gemma3"
    # Stored plus one: as they are, the weights of q_norm and k_norm are around one and above.
    for layer in range(18):
        for name in ("attn_q_norm", "attn_k_norm"):
            assert by_name[f"blk.{layer}.{name}.weight"].mean() > 0.5


@pytest.mark.real("smollm2")
def test_the_real_smollm2_file():
    fields, tensors = fields_of("smollm2")
    assert sorted({t.tensor_type.name for t in tensors}) == ["F32", "Q4_1", "Q8_0"]
    assert fields["llama.attention.head_count"] == 9


# Tokenizers


@pytest.mark.parametrize(
    ("kind", "pre", "reason"),
    [
        ("gpt2", "default", "tokenizer.ggml.pre = 'default' is not supported"),
        ("gpt2", "no-such-rule", "tokenizer.ggml.pre = 'no-such-rule' is not supported"),
        ("gpt2", None, "it has no field tokenizer.ggml.pre"),
        ("plamo2", None, "tokenizer.ggml.model = 'plamo2' is not supported"),
        (None, None, "it has no field tokenizer.ggml.model"),
    ],
)
def test_weights_of_a_file_load_without_a_known_tokenizer(kind, pre, reason, tmp_path, caplog):
    params = random_params(QWEN2)
    path = file_of(QWEN2, params, tmp_path / "folder").write(
        tmp_path / "m.gguf", kind=kind, pre=pre
    )
    model = lm_jax.load_pretrained(path)
    assert model.cfg == QWEN2 and model.tokenizer is None
    jax.tree.map(np.testing.assert_array_equal, model.params, params)
    assert reason in caplog.text and "Tokenizer.from_folder(FOLDER)" in caplog.text

    # As the warning says: the converted folder takes that of another.
    convert.convert(path, tmp_path / "out")
    gpt2 = lm_jax.load_pretrained(
        file_of(QWEN2, params, tmp_path / "again").write(tmp_path / "g.gguf")
    )
    gpt2.tokenizer.save(tmp_path / "out")
    assert lm_jax.load_pretrained(tmp_path / "out").tokenizer.sha256 == gpt2.tokenizer.sha256


def test_tokens_of_a_file_without_a_row_are_refused_in_a_text(tmp_path):
    file = file_of(LLAMA, random_params(LLAMA), tmp_path / "folder")
    path = file.write(tmp_path / "m.gguf", added=1)
    convert.convert(path, tmp_path / "out")
    for source in (path, tmp_path / "out"):
        tokenizer = lm_jax.load_pretrained(source).tokenizer
        assert tokenizer.vocab_size == 48 and tokenizer.encode("ab") == [47]
        with pytest.raises(BadInputError, match="the token '<added_0>' has the id 48"):
            tokenizer.encode("ab<added_0>")
    refused(file.write(tmp_path / "many.gguf", added=300), "ids up to 347", "48 rows")
