"""Gemma 4 text: layers of two head widths, shared keys and values, an input of each layer's own.

Layers with a window and full ones differ in head width and rotation, of which full layers leave out
most pairs. The last layers may read the keys and values of the last layer of their kind before them
and have wider MLPs; full layers may take projected keys for values. Values are normed, scores are
not scaled, and every block ends as `lm_jax.model.block_end` says. Mixtures of experts are refused,
and of a checkpoint with vision and audio the text model alone is read.
"""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

from lm_jax.errors import BadInputError
from lm_jax.model.config import BlockEnd, DecoderConfig, KeyValues, LayerShape
from lm_jax.weights.families.fields import (
    ATTENTION_BIAS,
    LLAMA_FIELDS,
    read_activation,
    read_fields,
    read_rope,
    read_windows,
    refuse,
    write_activation,
    write_fields,
    write_rope,
    write_windows,
)
from lm_jax.weights.families.llama import attention_entries, embedding_entries, gated_mlp_entries
from lm_jax.weights.families.table import Entry, Family, Tables, by_stack

_FULL, _SLIDING, _ROPES = "full_attention", "sliding_attention", "rope_parameters"
_INPUTS = "layer_inputs"
# Our names of what a layer may have of its own, and theirs.
_WIDTHS = {"head_dim": "head_dim", "num_kv_heads": "num_key_value_heads"}
_FIELDS = {ours: theirs for ours, theirs in LLAMA_FIELDS.items() if ours not in _WIDTHS}
_FIELDS |= ATTENTION_BIAS | {"logit_softcap": "final_logit_softcapping"}


def read_config(hf: Any) -> DecoderConfig:
    refuse(hf, enable_moe_block=(False,), use_bidirectional_attention=(None, "vision"))
    layers = list(hf.per_layer_config)
    others = sorted((hf.per_layer_attributes or set()) - set(_WIDTHS.values()))
    if others or any(getattr(layer, "skip", None) for layer in layers):
        raise BadInputError(
            f"config.json: per_layer_config has {', '.join(others) or 'skip'}, which is not "
            f"supported (only {' and '.join(_WIDTHS.values())} are)"
        )
    inputs = hf.hidden_size_per_layer_input
    if inputs and hf.vocab_size_per_layer_input != hf.vocab_size:
        raise BadInputError(
            f"config.json: vocab_size_per_layer_input = {hf.vocab_size_per_layer_input} is not "
            f"supported (only vocab_size = {hf.vocab_size} is)"
        )
    ropes = {
        kind: read_rope(hf.rope_parameters[kind], hf.max_position_embeddings, f"{_ROPES}.{kind}")
        for kind in (_FULL, _SLIDING)
    }
    widths = read_fields(layers[0], _WIDTHS)
    return DecoderConfig(
        family="gemma4_text",
        **read_fields(hf, _FIELDS),
        **widths,
        norm_placement="both",
        qk_norm="head_and_value",
        activation=read_activation(hf.hidden_activation, "hidden_activation"),
        windows=read_windows(hf),
        layers=_read_layers(hf, layers, widths),
        block_end=BlockEnd(inputs),
        rope=ropes[_FULL],
        local_rope=ropes[_SLIDING],
        attention_scale=1.0,
        embed_scale=math.sqrt(hf.hidden_size),
    )


def _read_layers(hf: Any, layers: list[Any], widths: Mapping[str, int]) -> tuple[LayerShape, ...]:
    """Fields in which each layer differs from `widths`, from the config; empty if none does."""
    shapes = []
    for index, layer in enumerate(layers):
        kv = _key_values(hf, index)
        wider = hf.use_double_wide_mlp and isinstance(kv, int)
        own = {name: n for name, n in read_fields(layer, _WIDTHS).items() if n != widths[name]}
        shapes.append(
            LayerShape(**own, mlp_size=2 * hf.intermediate_size if wider else None, kv=kv)
        )
    return tuple(shapes) if any(shape != LayerShape() for shape in shapes) else ()


def _key_values(hf: Any, layer: int) -> KeyValues | None:
    """Where a layer has its keys and values from; None for a projection each."""
    kinds, own = hf.layer_types, hf.num_hidden_layers - hf.num_kv_shared_layers
    if layer < own:
        return "tied" if hf.attention_k_eq_v and kinds[layer] == _FULL else None
    lenders = [i for i in range(own) if kinds[i] == kinds[layer]]
    if not lenders:
        raise BadInputError(
            f"config.json: num_kv_shared_layers = {hf.num_kv_shared_layers} leaves no layer of "
            f"kind {kinds[layer]} with keys of its own; lower it"
        )
    return lenders[-1]


def write_config(cfg: DecoderConfig) -> dict[str, Any]:
    layers = [stack.cfg for stack in cfg.stacks for _ in stack.layers]
    # A layer with a window and one without; either may be missing.
    sliding, full = (
        next((c for c, w in zip(layers, cfg.layer_windows, strict=True) if bool(w) is has), cfg)
        for has in (True, False)
    )
    windows = write_windows(cfg)
    return {
        **write_fields(cfg, _FIELDS),
        **write_fields(sliding, _WIDTHS),
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.num_kv_heads,
        "attention_k_eq_v": any(c.kv == "tied" for c in layers),
        "num_kv_shared_layers": sum(isinstance(c.kv, int) for c in layers),
        "use_double_wide_mlp": any(c.mlp_size != cfg.mlp_size for c in layers),
        "hidden_activation": write_activation(cfg.activation),
        **windows | {"sliding_window": windows["sliding_window"] or 512},
        "hidden_size_per_layer_input": cfg.block_end.input_size if cfg.block_end else 0,
        "vocab_size_per_layer_input": cfg.vocab_size,
        _ROPES: {_FULL: write_rope(cfg.rope), _SLIDING: write_rope(cfg.local_rope)},
    }


def entries(cfg: DecoderConfig) -> list[Entry]:
    t = Tables(cfg)
    of_inputs = []
    if f"{_INPUTS}/tokens" in t.specs:
        of_inputs = [
            t.linear("model.embed_tokens_per_layer.weight", f"{_INPUTS}/tokens", transposed=False),
            t.linear("model.per_layer_model_projection.weight", f"{_INPUTS}/project"),
            t.same("model.per_layer_projection_norm.weight", f"{_INPUTS}/norm/scale"),
        ]
    return [*embedding_entries(t, cfg), *of_inputs, *by_stack(cfg, _block_entries)]


def _block_entries(cfg: DecoderConfig) -> list[Entry]:
    t, block = Tables(cfg), "model.layers.{l}."
    norms = {
        "input_layernorm": "ln1",
        "self_attn.q_norm": "mixer/q_norm",
        "self_attn.k_norm": "mixer/k_norm",
        "post_attention_layernorm": "ln1_post",
        "pre_feedforward_layernorm": "ln2",
        "post_feedforward_layernorm": "ln2_post",
        "post_per_layer_input_norm": "end/norm",
    }
    ends = {"per_layer_input_gate": "gate", "per_layer_projection": "out"}
    return [
        *(
            t.same(f"{block}{name}.weight", f"blocks/{ours}/scale")
            for name, ours in norms.items()
            if f"blocks/{ours}/scale" in t.specs
        ),
        *attention_entries(t, cfg, block),
        *gated_mlp_entries(t, cfg, block),
        *(
            t.linear(f"{block}{name}.weight", f"blocks/end/{ours}")
            for name, ours in ends.items()
            if f"blocks/end/{ours}" in t.specs
        ),
        t.flat(f"{block}layer_scalar", "blocks/end/scalar"),
    ]


def _unused(cfg: DecoderConfig) -> list[str]:
    """Key and value weights of layers that have those of another, as released files hold them."""
    parts = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias", "k_norm.weight")
    return [
        f"model.layers.{layer}.self_attn.{part}"
        for layer, shape in enumerate(cfg.layers)
        if isinstance(shape.kv, int)
        for part in parts
    ]


GEMMA4 = Family(
    name="gemma4_text",
    architecture="Gemma4ForCausalLM",
    read_config=read_config,
    write_config=write_config,
    entries=entries,
    unused=_unused,
)
# The text model in a checkpoint with vision and audio; its config is of the family above.
GEMMA4_MULTIMODAL = dataclasses.replace(
    GEMMA4,
    name="gemma4",
    read_config=lambda hf: read_config(hf.text_config),
    nested="model.language_model.",
    ignored=(r"model\.(vision_tower|audio_tower|embed_vision|embed_audio)\..*",),
)
