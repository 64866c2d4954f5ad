"""Gemma 4 text in GGUF: layers of two head widths, which the file describes one by one.

Unlike files of earlier Gemmas, norm weights are as Hugging Face has them, and the pattern of local
layers is stored. A number may be a list of one for each layer. `attention.key_length` and
`rope.freq_base` are those of full layers, `..._swa` those of layers with a window. Which pairs of a
full layer turn is the tensor `rope_freqs.weight`: divisors of the frequencies, 1 where a pair turns
and 1e30 where it does not. A layer without `attn_v` has its keys for values.
"""

from collections.abc import Mapping
import math
from typing import Any

from lm_jax.errors import BadInputError
from lm_jax.model.config import BlockEnd, DecoderConfig, KeyValues, LayerShape
from lm_jax.model.rope import ProportionalScaling, Rope
from lm_jax.weights.gguf import fields as gguf_fields
from lm_jax.weights.gguf.fields import REMEDY, Fields, shortest

# Beside those of Gemma 3.
NAMES = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale": "layer_scalar",
}
_ROPE_FREQS = "rope_freqs.weight"
# A pair whose frequency is divided by so much never turns.
_STILL = 1e29


def config(fields: Fields, tensors: Mapping[str, Any]) -> DecoderConfig:
    """The decoder of a file.

    Raises:
      BadInputError: a field is missing or cannot be used, or is not known; a tensor is missing.
    """
    if "token_embd.weight" not in tensors:
        raise BadInputError(f"GGUF: tensor token_embd.weight is missing; {REMEDY}")
    layers = fields.number("block_count")
    local = fields("attention.sliding_window_pattern")
    if not isinstance(local, list) or len(local) != layers:
        fields.refuse("attention.sliding_window_pattern", f"must say of {layers} layers if local")
    widths = {
        kind: fields.number(f"attention.key_length{suffix}")
        for kind, suffix in ((True, "_swa"), (False, ""))
    }
    for kind, suffix in ((True, "_swa"), (False, "")):
        fields.only(f"attention.value_length{suffix}", widths[kind])
        fields.only(f"rope.dimension_count{suffix}", widths[kind])
    head_dims = [widths[bool(is_local)] for is_local in local]
    heads = fields.number("attention.head_count")
    kv_heads = _by_layer(fields, "attention.head_count_kv", layers)
    mlp_sizes = _by_layer(fields, "feed_forward_length", layers)
    window = fields.number("attention.sliding_window")
    width, inputs = fields.number("embedding_length"), "embedding_length_per_layer_input"
    shapes = tuple(
        LayerShape(
            head_dim=_other(head_dims, layer),
            num_kv_heads=_other(kv_heads, layer),
            mlp_size=_other(mlp_sizes, layer),
            kv=kv,
        )
        for layer, kv in enumerate(_key_values(fields, local, tensors))
    )
    cfg = DecoderConfig(
        family="gemma4_text",
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads[0],
        head_dim=head_dims[0],
        hidden_size=width,
        mlp_size=mlp_sizes[0],
        vocab_size=gguf_fields.shape(tensors["token_embd.weight"])[0],
        max_length=fields.number("context_length"),
        norm_eps=shortest(fields.number("attention.layer_norm_rms_epsilon")),
        norm_placement="both",
        qk_norm="head_and_value",
        activation="gelu_tanh",
        qkv_bias="blk.0.attn_q.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        windows=tuple(window if is_local else None for is_local in local),
        layers=shapes if any(shape != LayerShape() for shape in shapes) else (),
        block_end=BlockEnd(fields.number(inputs) if fields(inputs, 0) else 0),
        rope=Rope(
            theta=fields.number("rope.freq_base"), scaling=_scaling(tensors, widths[False] // 2)
        ),
        local_rope=Rope(theta=fields.number("rope.freq_base_swa", 10_000.0)),
        attention_scale=1.0,
        embed_scale=math.sqrt(width),
        logit_softcap=fields.number("final_logit_softcapping", None),
        tie_embeddings="output.weight" not in tensors,
    )
    fields.check_all_asked()
    return cfg


def _by_layer(fields: Fields, key: str, layers: int) -> list[int]:
    """A number of each layer."""
    values = fields(key)
    if not isinstance(values, list):
        return [fields.number(key)] * layers
    if len(values) != layers or not all(isinstance(n, int) and n > 0 for n in values):
        fields.refuse(key, f"must be one positive number, or {layers} of them")
    return values


def _other(values: list[int], layer: int) -> int | None:
    """The layer's value where it differs from the first layer's, else None."""
    return None if values[layer] == values[0] else values[layer]


def _key_values(
    fields: Fields, local: list[Any], tensors: Mapping[str, Any]
) -> list[KeyValues | None]:
    """Where each layer has its keys and values from."""
    shared = fields("attention.shared_kv_layers", 0)
    own = len(local) - shared if isinstance(shared, int) else -1
    found: list[KeyValues | None] = []
    for layer, is_local in enumerate(local):
        if layer < own:
            tied = f"blk.{layer}.attn_v.weight" not in tensors
            found.append("tied" if tied else None)
            continue
        lenders = [i for i in range(max(own, 0)) if bool(local[i]) == bool(is_local)]
        if not lenders:
            fields.refuse(
                "attention.shared_kv_layers", f"leaves layer {layer} no layer of its kind to read"
            )
        found.append(lenders[-1])
    return found


def _scaling(tensors: Mapping[str, Any], pairs: int) -> ProportionalScaling | None:
    """How many pairs of a full layer turn; None where the file does not say, and all do."""
    if _ROPE_FREQS not in tensors:
        return None
    divisors = gguf_fields.dequantised(tensors[_ROPE_FREQS])
    turning = int((divisors == 1).sum())
    if divisors.shape != (pairs,) or not (
        turning > 0 and (divisors[:turning] == 1).all() and (divisors[turning:] > _STILL).all()
    ):
        raise BadInputError(
            f"GGUF: {_ROPE_FREQS} does not say which of {pairs} pairs turn, 1 for those that do "
            f"and 1e30 for the rest; {REMEDY}"
        )
    rotated = turning / pairs
    if int(rotated * pairs) < turning:
        # The share is rounded down, and so is the number of pairs that it is of.
        rotated = math.nextafter(rotated, 1.0)
    return ProportionalScaling(rotated=rotated)
