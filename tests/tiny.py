"""The decoder that tests train and decode with: two layers of width 16."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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


def params(cfg: lm_jax.DecoderConfig, seed: int = 0) -> dict[str, Any]:
    """Parameters as those of `lm_jax.init_params`, with other random numbers.

    NumPy draws them. For every shape that jax draws it compiles a program, which takes several
    times as long as compiling the model.
    """
    rng = np.random.default_rng(seed)
    key = jax.random.key(0)

    def draw(spec: lm_jax.params.ParamSpec) -> jax.Array:
        def init(key: jax.Array) -> jax.Array:
            return spec.init(key, spec.shape, jnp.float32)

        if "random_bits" not in str(jax.make_jaxpr(init)(key)):
            return init(key)
        return jnp.asarray(0.02 * rng.standard_normal(spec.shape), jnp.float32)

    return lm_jax.params.tree_map(draw, lm_jax.param_spec(cfg))


def edit_json(path: Path, **changes: Any) -> None:
    """Replaces fields of a JSON file, such as a model's config.json."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
