"""Random models of every family as GGUF files, as the converter of llama.cpp writes them."""

import dataclasses

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

import lm_jax
from lm_jax.errors import BadInputError
from tests import tiny

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
    "gemma4_text": gguf.MODEL_ARCH.GEMMA4,
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "gpt_neox": gguf.MODEL_ARCH.GPTNEOX,
}


def random_params(cfg):
    """Every weight random, norms included, so that no convention about them goes unseen."""
    leaves = lm_jax.params.by_path(tiny.params(cfg))
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
    if cfg.family in ("gemma2", "gemma3_text") and name.endswith("norm.weight"):
        return w + 1
    if cfg.family == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return w.T
    if cfg.family == "gpt_neox" and "query_key_value" in name:
        return q_before_k_before_v(w, cfg.num_heads)
    return w


def gemma4_fields(cfg):
    """What the file of a Gemma 4 says of its layers."""
    layers = [stack.cfg for stack in cfg.stacks for _ in stack.layers]
    local = [bool(window) for window in cfg.layer_windows]
    full, near = layers[local.index(False)], layers[local.index(True)]
    fields = {
        "feed_forward_length": [layer.mlp_size for layer in layers],
        "attention.head_count_kv": [layer.num_kv_heads for layer in layers],
        "attention.sliding_window_pattern": local,
        "attention.shared_kv_layers": sum(isinstance(layer.kv, int) for layer in layers),
        "embedding_length_per_layer_input": cfg.block_end.input_size,
        "rope.freq_base_swa": cfg.local_rope.theta,
    }
    for suffix, layer in (("", full), ("_swa", near)):
        fields |= {f"attention.{of}_length{suffix}": layer.head_dim for of in ("key", "value")}
        fields[f"rope.dimension_count{suffix}"] = layer.head_dim
    if cfg.logit_softcap:
        fields["final_logit_softcapping"] = cfg.logit_softcap
    pairs = full.head_dim // 2
    turning = int(cfg.rope.scaling.rotated * pairs)
    return fields, {"rope_freqs.weight": np.float32([1] * turning + [1e30] * (pairs - turning))}


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
            suffixed = f"{name}.weight" if name.endswith("layer_scalar") else name
            stored = names.get_name(suffixed, try_suffixes=(".weight", ".bias"))
            self.tensors[stored] = converted(name, w, cfg)
        if cfg.family == "gemma4_text":
            fields, tensors = gemma4_fields(cfg)
            self.fields |= fields
            self.tensors |= tensors

    def write(self, path, quant=None, split=None, *, kind="gpt2", pre="gpt-2", added=0):
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
        if kind is not None:
            writer.add_tokenizer_model(kind)
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        tokens = [*(chr(ord("P") + i) for i in range(47)), "ab"]
        writer.add_token_list([*tokens, *(f"<added_{i}>" for i in range(added))])
        types = [gguf.TokenType.NORMAL] * 48 + [gguf.TokenType.CONTROL] * added
        writer.add_token_types(types)
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
    """Loading is refused in one sentence that has these words."""
    with pytest.raises(BadInputError) as caught:
        lm_jax.load_pretrained(path)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)
