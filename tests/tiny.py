"""The decoder that tests train and decode with: two layers of width 16."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

import lm_jax

DECODER = lm_jax.DecoderConfig(
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    hidden_size=16,
    mlp_size=24,
    vocab_size=40,
    max_length=64,
)

# Run op by op, every operation is a program of its own to compile.
forward = jax.jit(lm_jax.forward, static_argnames=("cfg", "mixer", "unroll"))

# Learned positions, layer norm, biases, a plain MLP: all that differs from Llama's block.
GPT2: dict[str, Any] = {
    "rope": None,
    "norm": "layer",
    "gated_mlp": False,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "activation": "gelu_tanh",
}


def decoder(**changes: Any) -> lm_jax.DecoderConfig:
    """`DECODER` with other fields."""
    return dataclasses.replace(DECODER, **changes)


# Two query heads for each key, and widths of which no two are equal.
GROUPED = decoder(
    num_heads=4, num_kv_heads=2, head_dim=6, hidden_size=20, mlp_size=28, max_length=32
)


def edit_json(path: Path, **changes: Any) -> None:
    """Replaces fields of a JSON file, such as a model's config.json."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
