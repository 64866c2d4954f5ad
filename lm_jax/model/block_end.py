"""The end of Gemma 4's blocks: an input of the layer's own, and a learned scalar.

    inputs_l = (norm(project_l(x0) / sqrt(D)) + sqrt(J) tokens_l[token]) / sqrt(2)
    x = x + norm(out(act(gate(x)) * inputs_l))
    x = scalar * x

x0 is the embedding after its scale, x the residual stream after the MLP. `inputs_l`, of width J,
are the per-layer embeddings of the model; without them (`BlockEnd.input_size` 0) the scalar is all.
The arithmetic is that of `transformers` 5.23 (`Gemma4TextModel`).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from lm_jax.model import layers
from lm_jax.model.config import DecoderConfig
from lm_jax.model.params import ParamSpec, ParamTree, constant
from lm_jax.model.sites import Scope


def spec(cfg: DecoderConfig) -> dict[str, Any]:
    """The parameters of one block's end; none without one."""
    if cfg.block_end is None:
        return {}
    D, J = cfg.hidden_size, cfg.block_end.input_size
    parts: dict[str, Any] = {"scalar": constant(1.0, (), "")}
    if J:
        parts |= {
            "gate": ParamSpec((D, J), "DJ"),
            "out": ParamSpec((J, D), "JD"),
            "norm": layers.norm_spec(cfg),
        }
    return {"end": parts}


def inputs_spec(cfg: DecoderConfig) -> dict[str, Any]:
    """The parameters of the inputs of all layers; none where layers have none."""
    if cfg.block_end is None or not cfg.block_end.input_size:
        return {}
    D, L, J = cfg.hidden_size, cfg.num_layers, cfg.block_end.input_size
    return {
        "layer_inputs": {
            "tokens": ParamSpec((cfg.vocab_size, L, J), "VLJ"),
            "project": ParamSpec((D, L, J), "DLJ"),
            "norm": {"scale": constant(1.0 - cfg.norm_offset, (J,), "J")},
        }
    }


@jax.named_scope("layer_inputs")
def inputs(
    params: ParamTree, tokens_BT: jax.Array, x_BTD: jax.Array, cfg: DecoderConfig, scope: Scope
) -> jax.Array | None:
    """The inputs of all layers `[L, B, T, J]`, from the token ids and their embedding; or None."""
    if "layer_inputs" not in params:
        return None
    p = params["layer_inputs"]
    own_BTLJ = layers.rows(p["tokens"], tokens_BT)
    # The factor is rounded to the weights' dtype first, as that of the embedding is.
    own_BTLJ = own_BTLJ * jnp.asarray(math.sqrt(own_BTLJ.shape[-1]), own_BTLJ.dtype)
    read_BTLJ = layers.project("BTD,DLJ->BTLJ", x_BTD, p["project"]) * cfg.hidden_size**-0.5
    read_BTLJ = layers.norm(p["norm"], read_BTLJ, cfg, scope, "layer_inputs")
    return jnp.moveaxis((read_BTLJ + own_BTLJ) * 2.0**-0.5, 2, 0)


@jax.named_scope("block_end")
def apply(
    scope: Scope, p: ParamTree, x_BTD: jax.Array, input_BTJ: jax.Array | None, cfg: DecoderConfig
) -> jax.Array:
    """The residual stream that leaves the block."""
    if input_BTJ is not None:
        input_BTJ = scope("layer_input", input_BTJ)
        gate_BTJ = layers.project("BTD,DJ->BTJ", x_BTD, p["gate"])
        h_BTJ = layers.ACTIVATIONS[cfg.activation](gate_BTJ) * input_BTJ
        out_BTD = layers.project("BTJ,JD->BTD", h_BTJ, p["out"])
        out_BTD = layers.norm(p.get("norm", {}), out_BTD, cfg, scope, "layer_input")
        x_BTD = x_BTD + scope("layer_input.out", out_BTD)
    return x_BTD * p["scalar"]
