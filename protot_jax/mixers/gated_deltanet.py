"""The Gated DeltaNet mixer, a newer relative of DeltaNet: its memory also decays.

Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule", section
3. As `protot_jax.mixers.deltanet`, and for every head

1. the memory is multiplied by alpha = exp(-exp(A) softplus(projection of x + bias)), the decay of
   Mamba-2 and with its initial values, before each step of the delta rule;
2. the norm of the output is multiplied by silu(projection of x).

The published models have values twice as wide as keys; here keys and values have the width H of the
config, so that the memory is a square matrix as DeltaNet's.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lm_jax.model.config import DecoderConfig
from lm_jax.model.layers import add_axes, project
from lm_jax.model.params import ParamSpec, ParamTree
from protot_jax.mixers.deltanet import DeltaNetMixer
from protot_jax.mixers.mamba import step_sizes

# Range of exp(A) at the start, as in Mamba-2.
SLOWEST, FASTEST = 1.0, 16.0


@dataclasses.dataclass(frozen=True)
class GatedDeltaNetMixer(DeltaNetMixer):
    """The gated delta rule in `cfg.num_heads` heads."""

    def spec(self, cfg: DecoderConfig) -> ParamTree:
        D, N, H = cfg.hidden_size, cfg.num_heads, cfg.head_dim
        return {
            **super().spec(cfg),
            **step_spec(D, N),
            "gate": ParamSpec((D, N, H), "DNH"),
        }

    def flops(self, cfg: DecoderConfig, tokens: int, causal: str) -> tuple[int, int]:
        projections, memory = super().flops(cfg, tokens, causal)
        D, N, H = cfg.hidden_size, cfg.num_heads, cfg.head_dim
        positions = tokens * cfg.num_layers
        return projections + positions * 2 * (D * N * H + D * N), memory + positions * N * H * H

    def log_decay(self, p: ParamTree, x_BTD: jax.Array) -> jax.Array:
        """Logarithm `[B, T, N]`, float32, of what each step leaves of the memory."""
        return step_log_decay(p, x_BTD)

    def gated(self, p: ParamTree, x_BTD: jax.Array, o_BTNH: jax.Array) -> jax.Array:
        """The normed output of the heads times their gate."""
        return o_BTNH * jax.nn.silu(project("BTD,DNH->BTNH", x_BTD, p["gate"]))


def step_spec(D: int, N: int) -> dict[str, ParamSpec]:
    """The parameters of `step_log_decay`."""
    return {
        "step": ParamSpec((D, N), "DN"),
        "step_bias": ParamSpec((N,), "N", step_sizes),
        "A_log": ParamSpec((N,), "N", log_rates),
    }


def step_log_decay(p: ParamTree, x_BTD: jax.Array) -> jax.Array:
    """-exp(A) softplus(projection of x + bias), float32 `[B, T, N]`, the decay of Mamba-2."""
    step_BTN = project("BTD,DN->BTN", x_BTD, p["step"]).astype(jnp.float32)
    bias_11N, log_11N = (
        add_axes(p[name].astype(jnp.float32), 3) for name in ("step_bias", "A_log")
    )
    return -jnp.exp(log_11N) * jax.nn.softplus(step_BTN + bias_11N)


def log_rates(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Logarithms of rates that are uniform between the slowest and the fastest."""
    rates = jax.random.uniform(key, shape, jnp.float32, SLOWEST, FASTEST)
    return jnp.log(rates).astype(dtype)
