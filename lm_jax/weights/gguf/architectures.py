"""GGUF architectures: which family each is, under which names, and what its converter changed.

Conventions of the format that differ from Hugging Face's and are undone here:

  * files of `llama` and `olmo` store the rows of q and k interleaved within each head, for a
    rotation of neighbouring pairs; those of the other architectures do not;
  * norm weights of Gemma 2 and 3 have their one already added;
  * matrices of `gpt2` are stored [out, in]; `gptneox` has all of q before k before v;
  * the norms of single heads of `stablelm` are one matrix, a row for each head;
  * the frequency scaling of Llama 3.1 and later is a tensor, `rope_freqs.weight`, and so are the
    two sets of LongRoPE of Phi-3 and the pairs that turn in full layers of Gemma 4;
  * which layers of Gemma are local, the rotary base of those of Gemma 3, the attention scale of the
    27B models and activation functions are known to the program that runs the file, and not stored.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any

import numpy as np

from lm_jax.errors import BadInputError
from lm_jax.model.config import DecoderConfig
from lm_jax.model.layers import inverse_frequencies
from lm_jax.model.rope import LinearScaling, Llama3Scaling, LongRopeScaling, Rope
from lm_jax.weights.gguf import fields as gguf_fields
from lm_jax.weights.gguf import gemma4 as gguf_gemma4
from lm_jax.weights.gguf.fields import REMEDY, Fields, shortest

_ROPE_FREQS = "rope_freqs.weight"
_LONGROPE = ("rope_factors_short.weight", "rope_factors_long.weight")
_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LLAMA = _TOP | _BLOCK | _NORMS
_GEMMA2 = _LLAMA | _POST_NORMS | {"ffn_norm": "pre_feedforward_layernorm"}
_GEMMA3 = _GEMMA2 | _QK_NORMS
_PHI3 = (
    _TOP
    | _NORMS
    | {
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_GPT_NEOX = {
    "token_embd": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
    "output": "embed_out",
    "attn_norm": "input_layernorm",
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}

Tensors = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How one GGUF architecture maps onto a family.

    `names` are without block and `.weight` or `.bias`; `block` opens the names of a layer in the
    family's table. `undo`, by the name in the file, takes a tensor back to Hugging Face's layout
    and keeps its shape; matrices named in `transposed` are turned. Names of `by_head` are those of
    a tensor for each head, `{n}`, which the file has as rows of one. Tensors named in `settings`
    are read by `config` and are no weights. Names of `bare` have no suffix in the family's table.
    """

    names: Mapping[str, str]
    config: Callable[[Fields, Tensors], DecoderConfig]
    undo: Mapping[str, Callable[[np.ndarray, DecoderConfig], np.ndarray]] = dataclasses.field(
        default_factory=dict
    )
    transposed: tuple[str, ...] = ()
    by_head: Mapping[str, str] = dataclasses.field(default_factory=dict)
    settings: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    block: str = "model.layers."


def halves(w: np.ndarray, cfg: DecoderConfig) -> np.ndarray:
    """Neighbouring pairs of rows within each head as two halves."""
    pairs = w.reshape(-1, cfg.head_dim // 2, 2, *w.shape[1:])
    return pairs.swapaxes(1, 2).reshape(w.shape)


def _without_one(w: np.ndarray, cfg: DecoderConfig) -> np.ndarray:
    return w - np.float32(cfg.norm_offset)


def _by_head(w: np.ndarray, cfg: DecoderConfig) -> np.ndarray:
    """Rows of all q, all k, all v as those of q, k, v of each head."""
    parts = w.reshape(3, cfg.num_heads, cfg.head_dim, *w.shape[1:])
    return parts.swapaxes(0, 1).reshape(w.shape)


# Configs


def _llama(fields: Fields, tensors: Tensors) -> DecoderConfig:
    rope = _rope(fields)
    if _ROPE_FREQS in tensors:
        factors = gguf_fields.dequantised(tensors[_ROPE_FREQS])
        rope = dataclasses.replace(rope, scaling=_llama3_scaling(rope, factors))
    return _config(fields, tensors, family="llama", rope=rope)


def _qwen2(fields: Fields, tensors: Tensors) -> DecoderConfig:
    return _config(fields, tensors, family="qwen2", rope=_rope(fields), qkv_bias=True)


def _qwen3(fields: Fields, tensors: Tensors) -> DecoderConfig:
    return _config(fields, tensors, family="qwen3", rope=_rope(fields), qk_norm="head")


def _phi3(fields: Fields, tensors: Tensors) -> DecoderConfig:
    rope = _partial_rope(fields)
    # There without LongRoPE too.
    fields("rope.scaling.original_context_length", None)
    if any(name in tensors for name in _LONGROPE):
        rope = dataclasses.replace(rope, scaling=_longrope(fields, tensors))
    # Zero stands for no window.
    key = "attention.sliding_window"
    window = fields.number(key) if fields(key, 0) else None
    return _config(
        fields,
        tensors,
        family="phi3",
        rope=rope,
        windows=(window,) * fields.number("block_count") if window else (),
    )


def _stablelm(fields: Fields, tensors: Tensors) -> DecoderConfig:
    return _config(
        fields,
        tensors,
        family="stablelm",
        norm="layer",
        qk_norm="each_head" if "blk.0.attn_q_norm.weight" in tensors else "none",
        rope=_partial_rope(fields),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        parallel_residual=fields("use_parallel_residual", False),
    )


def _olmo(fields: Fields, tensors: Tensors) -> DecoderConfig:
    return _config(
        fields, tensors, family="olmo", norm="layer", norm_weights=False, rope=_rope(fields)
    )


def _olmo2(fields: Fields, tensors: Tensors) -> DecoderConfig:
    return _config(
        fields,
        tensors,
        family="olmo2",
        norm_placement="post",
        qk_norm="projection",
        rope=_rope(fields),
    )


def _gpt2(fields: Fields, tensors: Tensors) -> DecoderConfig:
    return _config(
        fields,
        tensors,
        family="gpt2",
        norm="layer",
        activation="gelu_tanh",
        gated_mlp=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        rope=None,
    )


def _gpt_neox(fields: Fields, tensors: Tensors) -> DecoderConfig:
    biases = "blk.0.attn_qkv.bias" in tensors
    return _config(
        fields,
        tensors,
        family="gpt_neox",
        norm="layer",
        parallel_residual=fields("use_parallel_residual", True),
        activation="gelu",
        gated_mlp=False,
        qkv_bias=biases,
        out_bias=biases,
        mlp_bias=True,
        rope=_partial_rope(fields),
    )


def _gemma2(fields: Fields, tensors: Tensors) -> DecoderConfig:
    layers, window = fields.number("block_count"), fields.number("attention.sliding_window")
    return _gemma(
        fields,
        tensors,
        family="gemma2",
        layers_of_27b=46,
        rope=_rope(fields),
        windows=tuple(None if i % 2 else window for i in range(layers)),
        score_softcap=fields.number("attn_logit_softcapping", 50.0),
        logit_softcap=fields.number("final_logit_softcapping", 30.0),
    )


def _gemma3(fields: Fields, tensors: Tensors) -> DecoderConfig:
    layers, window = fields.number("block_count"), fields.number("attention.sliding_window", None)
    # A number n makes every n-th layer see the whole past; a list says of each if it is local.
    pattern = fields("attention.sliding_window_pattern", 6)
    local = pattern if isinstance(pattern, list) else [(i + 1) % pattern for i in range(layers)]
    return _gemma(
        fields,
        tensors,
        family="gemma3_text",
        layers_of_27b=62,
        qk_norm="head",
        rope=_rope(fields, 1_000_000.0),
        local_rope=Rope(theta=fields.number("rope.freq_base_swa", 10_000.0)),
        windows=tuple(window if is_local else None for is_local in local),
        logit_softcap=fields.number("final_logit_softcapping", None),
    )


def _gemma(fields: Fields, tensors: Tensors, layers_of_27b: int, **family: Any) -> DecoderConfig:
    width, heads = fields.number("embedding_length"), fields.number("attention.head_count")
    # The 27B model, known by its number of layers, divides by the root of D / N and not of H.
    large = fields.number("block_count") == layers_of_27b
    return _config(
        fields,
        tensors,
        norm_offset=1.0,
        norm_placement="both",
        activation="gelu_tanh",
        attention_scale=(width // heads if large else fields.number("attention.key_length"))
        ** -0.5,
        embed_scale=math.sqrt(width),
        **family,
    )


def _config(fields: Fields, tensors: Tensors, **family: Any) -> DecoderConfig:
    heads, head_dim = fields.number("attention.head_count"), _head_dim(fields)
    fields.only("attention.value_length", head_dim)
    if (rope := family["rope"]) is not None:
        fields.only("rope.dimension_count", round(rope.fraction * head_dim))
    if "token_embd.weight" not in tensors:
        raise BadInputError(f"GGUF: tensor token_embd.weight is missing; {REMEDY}")
    epsilon = "layer_norm_epsilon" if family.get("norm") == "layer" else "layer_norm_rms_epsilon"
    cfg = DecoderConfig(
        num_layers=fields.number("block_count"),
        num_heads=heads,
        num_kv_heads=fields.number("attention.head_count_kv", heads),
        head_dim=head_dim,
        hidden_size=fields.number("embedding_length"),
        mlp_size=fields.number("feed_forward_length"),
        vocab_size=gguf_fields.shape(tensors["token_embd.weight"])[0],
        max_length=fields.number("context_length"),
        norm_eps=shortest(fields.number(f"attention.{epsilon}")),
        tie_embeddings="output.weight" not in tensors,
        **family,
    )
    fields.check_all_asked()
    return cfg


def _head_dim(fields: Fields) -> int:
    shared = fields.number("embedding_length") // fields.number("attention.head_count")
    return fields.number("attention.key_length", shared)


def _rope(fields: Fields, theta: float = 10_000.0) -> Rope:
    kind = fields("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        fields.refuse("rope.scaling.type", "is not supported (only 'none' and 'linear' are)")
    factor = fields.number("rope.scaling.factor", 1.0)
    scaling = LinearScaling(factor) if kind == "linear" else None
    return Rope(theta=fields.number("rope.freq_base", theta), scaling=scaling)


def _partial_rope(fields: Fields) -> Rope:
    """Rotations of the first `rope.dimension_count` coordinates of each head."""
    head_dim = _head_dim(fields)
    fraction = fields.number("rope.dimension_count", head_dim) / head_dim
    return dataclasses.replace(_rope(fields), fraction=fraction)


def _llama3_scaling(rope: Rope, factors: np.ndarray) -> Llama3Scaling:
    """The settings that every Llama 3 release shares, proved to give the stored factors."""
    scaling = Llama3Scaling(
        factor=float(factors.max()), low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192
    )
    unscaled, scaled = (
        inverse_frequencies(dataclasses.replace(rope, scaling=s), 2 * factors.size)
        for s in (None, scaling)
    )
    if rope.scaling is not None or not np.allclose(unscaled / scaled, factors, rtol=1e-4):
        raise BadInputError(
            f"GGUF: {_ROPE_FREQS} is not the frequency scaling of a Llama 3 model; {REMEDY}"
        )
    return scaling


def _longrope(fields: Fields, tensors: Tensors) -> LongRopeScaling:
    if missing := [name for name in _LONGROPE if name not in tensors]:
        raise BadInputError(f"GGUF: tensor {missing[0]} is missing; {REMEDY}")
    original_length = fields.number("rope.scaling.original_context_length")
    short, long = (
        tuple(shortest(x) for x in gguf_fields.dequantised(tensors[name])) for name in _LONGROPE
    )
    return LongRopeScaling(
        short_factor=short,
        long_factor=long,
        original_length=original_length,
        attention_factor=fields.number("rope.scaling.attn_factor"),
    )


_INTERLEAVED = dict.fromkeys(("attn_q", "attn_k"), halves)
_ONE_ADDED = {name: _without_one for name in _GEMMA3 if name.endswith("norm")}

# Mistral's models are files of `llama`.
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(_LLAMA, _llama, undo=_INTERLEAVED, settings=(_ROPE_FREQS,)),
    "qwen2": Architecture(_LLAMA, _qwen2),
    "qwen3": Architecture(_LLAMA | _QK_NORMS, _qwen3),
    "phi3": Architecture(_PHI3, _phi3, settings=_LONGROPE),
    "stablelm": Architecture(
        _LLAMA,
        _stablelm,
        by_head={f"attn_{n}_norm": f"self_attn.{n}_layernorm.norms.{{n}}" for n in "qk"},
    ),
    "olmo": Architecture(_TOP | _BLOCK, _olmo, undo=_INTERLEAVED),
    "olmo2": Architecture(_TOP | _BLOCK | _QK_NORMS | _POST_NORMS, _olmo2),
    "gemma2": Architecture(_GEMMA2, _gemma2, undo=_ONE_ADDED),
    "gemma3": Architecture(_GEMMA3, _gemma3, undo=_ONE_ADDED),
    "gemma4": Architecture(
        _GEMMA3 | gguf_gemma4.NAMES,
        gguf_gemma4.config,
        settings=(_ROPE_FREQS,),
        bare=("layer_output_scale",),
    ),
    "gpt2": Architecture(
        _GPT2,
        _gpt2,
        transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
        block="transformer.h.",
    ),
    "gptneox": Architecture(
        _GPT_NEOX, _gpt_neox, undo={"attn_qkv": _by_head}, block="gpt_neox.layers."
    ),
}
