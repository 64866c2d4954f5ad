"""GGUF files as the converter of llama.cpp writes them load as their source model."""

import dataclasses

import gguf
from gguf.constants import GGMLQuantizationType as Quant
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import lm_jax
from lm_jax.errors import BadInputError
from lm_jax.weights.load import resolve
from tools import make_goldens

SIZE = {
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "hidden_size": 32,
    "mlp_size": 64,
    "vocab_size": 48,
    "max_length": 32,
}
LLAMA = lm_jax.DecoderConfig(**SIZE)
GEMMA3 = lm_jax.DecoderConfig(
    **SIZE | {"num_layers": 7, "num_kv_heads": 1},
    family="gemma3_text",
    norm_offset=1.0,
    norm_placement="both",
    qk_norm="head",
    activation="gelu_tanh",
    rope=lm_jax.Rope(theta=1e6),
    local_rope=lm_jax.Rope(theta=1e4),
    windows=(3, 3, 3, 3, 3, None, 3),
    attention_scale=16**-0.5,
    embed_scale=32**0.5,
    tie_embeddings=True,
)
QWEN2 = dataclasses.replace(LLAMA, family="qwen2", qkv_bias=True)
LAYER = {"norm": "layer", "gated_mlp": False, "qkv_bias": True, "out_bias": True, "mlp_bias": True}
GPT2 = dataclasses.replace(
    LLAMA,
    **LAYER,
    family="gpt2",
    head_dim=8,
    num_kv_heads=4,
    activation="gelu_tanh",
    rope=None,
    tie_embeddings=True,
)
GPT_NEOX = dataclasses.replace(
    LLAMA,
    **LAYER,
    family="gpt_neox",
    head_dim=8,
    num_kv_heads=4,
    parallel_residual=True,
    activation="gelu",
    rope=lm_jax.Rope(fraction=0.25),
)
STABLELM = dataclasses.replace(
    LLAMA,
    family="stablelm",
    head_dim=8,
    norm="layer",
    qkv_bias=True,
    rope=lm_jax.Rope(fraction=0.25),
)
GEMMA2 = dataclasses.replace(
    GEMMA3,
    num_layers=3,
    family="gemma2",
    qk_norm="none",
    rope=lm_jax.Rope(),
    local_rope=None,
    windows=(3, None, 3),
    score_softcap=50.0,
    logit_softcap=30.0,
)
OTHERS = {
    "qwen2": QWEN2,
    "qwen3": dataclasses.replace(LLAMA, family="qwen3", qk_norm="head"),
    "phi3": dataclasses.replace(
        LLAMA, family="phi3", rope=lm_jax.Rope(fraction=0.25), windows=(5, 5)
    ),
    "stablelm": STABLELM,
    "stablelm parallel": dataclasses.replace(STABLELM, parallel_residual=True, qkv_bias=False),
    "stablelm head norms": dataclasses.replace(STABLELM, qk_norm="each_head"),
    "olmo": dataclasses.replace(
        LLAMA, family="olmo", head_dim=8, norm="layer", norm_weights=False, tie_embeddings=True
    ),
    "olmo2": dataclasses.replace(
        LLAMA, family="olmo2", norm_placement="post", qk_norm="projection"
    ),
    "gemma2": GEMMA2,
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
    "gpt_neox sequential": dataclasses.replace(
        GPT_NEOX, parallel_residual=False, qkv_bias=False, out_bias=False
    ),
}
KINDS = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "stablelm": gguf.MODEL_ARCH.STABLELM,
    "olmo": gguf.MODEL_ARCH.OLMO,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "gpt_neox": gguf.MODEL_ARCH.GPTNEOX,
}


def random_params(cfg):
    """Every weight random, norms included, so that no convention about them goes unseen."""
    leaves = lm_jax.params.by_path(lm_jax.init_params(jax.random.key(0), cfg))
    rng = np.random.default_rng(0)
    return lm_jax.params.tree_from_paths(
        {name: leaf + 0.3 * rng.normal(size=leaf.shape) for name, leaf in leaves.items()}
    )


def permuted(w, num_heads):
    """The converter's order of q and k of a llama: halves of a head become neighbours."""
    return w.reshape(num_heads, 2, w.shape[0] // num_heads // 2, -1).swapaxes(1, 2).reshape(w.shape)


def q_before_k_before_v(w, num_heads):
    """The converter's order of a GPT-NeoX, of matrices and biases: not by head."""
    by_head = w.reshape(num_heads, 3, len(w) // num_heads // 3, *w.shape[1:])
    return np.concatenate([by_head[:, i].reshape(-1, *w.shape[1:]) for i in range(3)])


def with_stacked_heads(tensors):
    """The norms of single heads of a StableLM as the converter has them: rows of one matrix."""
    rows = {}
    for name in [name for name in tensors if ".norms." in name]:
        norm, head = name.removesuffix(".weight").split(".norms.")
        rows.setdefault(f"{norm}.weight", {})[int(head)] = tensors.pop(name)
    return tensors | {name: np.stack([of[n] for n in range(len(of))]) for name, of in rows.items()}


def converted(name, w, cfg):
    """A tensor of a Hugging Face folder as the converter stores it."""
    if cfg.family in ("llama", "olmo") and name.endswith(("q_proj.weight", "k_proj.weight")):
        return permuted(w, cfg.num_heads if "q_proj" in name else cfg.num_kv_heads)
    if cfg.family.startswith("gemma") and name.endswith("norm.weight"):
        return w + 1
    if cfg.family == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return w.T
    if cfg.family == "gpt_neox" and "query_key_value" in name:
        return q_before_k_before_v(w, cfg.num_heads)
    return w


class File:
    """A GGUF file in the making: `fields` and `tensors` may be changed before `write`."""

    def __init__(self, cfg, tensors):
        self.kind = KINDS[cfg.family]
        self.fields = {
            "block_count": cfg.num_layers,
            "context_length": cfg.max_length,
            "embedding_length": cfg.hidden_size,
            "feed_forward_length": cfg.mlp_size,
            "attention.head_count": cfg.num_heads,
            "attention.head_count_kv": cfg.num_kv_heads,
            "attention.key_length": cfg.head_dim,
            "attention.value_length": cfg.head_dim,
            f"attention.layer_norm_{'rms_' * (cfg.norm == 'rms')}epsilon": cfg.norm_eps,
        }
        if cfg.rope is not None:
            self.fields["rope.freq_base"] = cfg.rope.theta
            self.fields["rope.dimension_count"] = cfg.rotary_width(cfg.rope)
        if any(cfg.layer_windows):
            self.fields["attention.sliding_window"] = cfg.layer_windows[0]
        if cfg.family in ("stablelm", "gpt_neox"):
            self.fields["use_parallel_residual"] = cfg.parallel_residual
        if cfg.family == "gemma2":
            self.fields["attn_logit_softcapping"] = cfg.score_softcap
            self.fields["final_logit_softcapping"] = cfg.logit_softcap
        names = gguf.get_tensor_name_map(self.kind, cfg.num_layers)
        self.tensors = {}
        for name, w in with_stacked_heads(tensors).items():
            stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
            self.tensors[stored] = converted(name, w, cfg)

    def write(self, path, quant=None, split=None):
        writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[self.kind])
        for key, value in self.fields.items():
            add = {
                str: writer.add_string,
                bool: writer.add_bool,
                int: writer.add_uint32,
                float: writer.add_float32,
                list: writer.add_array,
            }[type(value)]
            add(f"{writer.arch}.{key}", value)
        if split is not None:
            writer.add_uint16("split.count", split)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([*(chr(ord("P") + i) for i in range(47)), "ab"])
        writer.add_token_types([gguf.TokenType.NORMAL] * 48)
        writer.add_token_merges(["a b"])
        for name, w in self.tensors.items():
            if quant is None or w.ndim == 1:
                writer.add_tensor(name, w.astype(np.float32))
            else:
                writer.add_tensor(name, gguf.quants.quantize(w, quant), raw_dtype=quant)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def file_of(cfg, params, folder):
    lm_jax.save_pretrained(folder, cfg, params)
    return File(cfg, load_file(folder / "model.safetensors"))


def refused(path, *words):
    with pytest.raises(BadInputError) as caught:
        lm_jax.load_pretrained(path)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


# The same model by two ways


def test_a_golden_model_is_the_one_that_is_compared_with_torch(tmp_path):
    folder = make_goldens.GOLDEN / "llama_mqa"
    golden = lm_jax.load_pretrained(folder)
    path = File(golden.cfg, load_file(folder / "model.safetensors")).write(tmp_path / "m.gguf")
    model = lm_jax.load_pretrained(path)
    assert model.cfg == golden.cfg
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
    monkeypatch.setattr("lm_jax.weights.gguf_fields._ROWS", 10)
    params = random_params(LLAMA)
    path = file_of(LLAMA, params, tmp_path / "folder").write(tmp_path / "m.gguf", Quant.Q8_0)
    in_parts = lm_jax.load_pretrained(path)
    monkeypatch.setattr("lm_jax.weights.gguf_fields._ROWS", 1000)
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


# Refusals


@pytest.fixture
def file(tmp_path):
    cfg = dataclasses.replace(LLAMA, num_layers=1)
    return file_of(cfg, random_params(cfg), tmp_path / "folder")


def test_an_architecture_that_is_not_supported(file, tmp_path):
    file.kind = gguf.MODEL_ARCH.GEMMA
    refused(file.write(tmp_path / "m.gguf"), "'gemma' is not supported", "did you mean 'gemma")


@pytest.mark.parametrize(
    "field", ["block_count", "embedding_length", "attention.layer_norm_rms_epsilon"]
)
def test_a_missing_field(file, tmp_path, field):
    del file.fields[field]
    refused(file.write(tmp_path / "m.gguf"), "m.gguf", f"llama.{field} is missing")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"rope.scaling.type": "yarn"},
            ("llama.rope.scaling.type = 'yarn'", "'none' and 'linear'"),
        ),
        ({"rope.dimension_count": 8}, ("llama.rope.dimension_count = 8", "only 16 is")),
        ({"attention.value_length": 8}, ("llama.attention.value_length = 8",)),
        ({"attention.head_count": [4, 2]}, ("one positive number for all layers",)),
        ({"block_count": 10**9}, ("llama.block_count = 1000000000 is absurd", "12 tensors")),
        ({"block_count": 0}, ("llama.block_count = 0",)),
        ({"expert_count": 8, "expert_used_count": 2}, ("expert_count, expert_used_count", "known")),
        ({"attention.scale": 0.1}, ("attention.scale", "might change the model")),
        ({"block_count": 2}, ("missing model.layers.1.mlp.up_proj.weight",)),
    ],
)
def test_a_field_that_cannot_be_used(file, tmp_path, fields, words):
    file.fields |= fields
    refused(file.write(tmp_path / "m.gguf"), *words)


def test_tensors_that_are_missing_unknown_or_not_finite(file, tmp_path):
    file.tensors["blk.0.attn_q.bias"] = np.ones(64, np.float32)
    w = file.tensors.pop("blk.0.ffn_up.weight")
    refused(
        file.write(tmp_path / "m.gguf"),
        "2 differences",
        "missing model.layers.0.mlp.up_proj.weight",
        "unused model.layers.0.self_attn.q_proj.bias",
    )
    del file.tensors["blk.0.attn_q.bias"]
    w[0, 0] = np.nan
    file.tensors["blk.0.ffn_up.weight"] = w
    refused(file.write(tmp_path / "m.gguf"), "NaN or infinite", "model.layers.0.mlp.up_proj.weight")
    del file.tensors["token_embd.weight"]
    refused(file.write(tmp_path / "m.gguf"), "token_embd.weight is missing")


def test_a_quantisation_that_the_package_cannot_undo(file, tmp_path, monkeypatch):
    def none(data, kind):
        raise NotImplementedError

    path = file.write(tmp_path / "m.gguf", Quant.Q8_0)
    monkeypatch.setattr("gguf.quants.dequantize", none)
    refused(path, "quantised as Q8_0", "another quantisation")


def test_a_part_of_a_split_file(file, tmp_path):
    refused(file.write(tmp_path / "m.gguf", split=3), "one part of a split", "--merge")


@pytest.mark.parametrize("size", [0, 3, 20, 300, 2000, -50])
def test_a_truncated_file(file, tmp_path, size):
    path = file.write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:size])
    refused(path, str(path), "fetch it again")


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
