"""The DeltaNet mixer, a baseline: linear attention with the delta rule.

Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length",
section 3.3 and the defaults of its public library. With normed input x, for every head,

1. q, k, v = silu(causal depthwise convolution of a projection of x);
2. q and k are divided by their norm;
3. beta = sigmoid(projection of x);
4. o = delta rule of q, k, v with writing strengths beta (`iaj_kernels.delta_rule`);
5. out = projection of the RMS norm of o over the head's width.

There are no biases and no positional encoding. The config has N heads of width H.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from iaj_kernels.core.chunks import LOG_ZERO
from iaj_kernels.delta_rule.api import delta_rule
from lm_jax.model.config import DecoderConfig
from lm_jax.model.layers import add_axes, project
from lm_jax.model.mixers import Layer
from lm_jax.model.params import ParamSpec, ParamTree, constant
from lm_jax.parallel.kernels import shard_kernel
from protot_jax.mixers.convolution import causal_convolution, taps_spec

# Added to the squared norm of a query or key against division by zero.
LENGTH_FLOOR = 1e-6


@dataclasses.dataclass(frozen=True)
class DeltaNetMixer:
    """The delta rule in `cfg.num_heads` heads.

    Attributes:
      conv_kernel: taps of the convolutions, the current token included.
    """

    conv_kernel: int = 4

    recurrent: ClassVar[bool] = True
    separates_documents: ClassVar[bool] = True

    def log_decay(self, p: ParamTree, x_BTD: jax.Array) -> jax.Array | None:
        """Logarithm `[B, T, N]` of what each step leaves of the memory; None leaves all."""
        del p, x_BTD
        return None

    def gated(self, p: ParamTree, x_BTD: jax.Array, o_BTNH: jax.Array) -> jax.Array:
        """The normed output of the heads, before its projection."""
        del p, x_BTD
        return o_BTNH

    def spec(self, cfg: DecoderConfig) -> ParamTree:
        D, N, H = cfg.hidden_size, cfg.num_heads, cfg.head_dim
        spec: dict[str, Any] = {name: ParamSpec((D, N, H), "DNH") for name in "qkv"}
        spec |= {f"{name}_conv": taps_spec(self.conv_kernel, (N, H), "NH") for name in "qkv"}
        return spec | {
            "beta": ParamSpec((D, N), "DN"),
            "norm": {"scale": constant(1.0, (H,), "H")},
            "o": ParamSpec((N, H, D), "NHD"),
        }

    def flops(self, cfg: DecoderConfig, tokens: int, causal: str) -> tuple[int, int]:
        del causal
        D, N, H, C = cfg.hidden_size, cfg.num_heads, cfg.head_dim, self.conv_kernel
        positions = tokens * cfg.num_layers
        projections = positions * (2 * 4 * D * N * H + 2 * (D * N + 3 * C * N * H))
        return projections, positions * 6 * N * H * H

    def init_cache(self, cfg: DecoderConfig, batch: int, length: int, dtype: Any) -> Any:
        """Decoding state of constant size: a matrix per head and the convolutions' last inputs."""
        del length
        N, H = cfg.num_heads, cfg.head_dim
        inputs = jnp.zeros((batch, self.conv_kernel - 1, N, H), dtype)
        return {
            "state": jnp.zeros((batch, N, H, H), jnp.float32),
            "inputs": dict.fromkeys("qkv", inputs),
        }

    def apply(
        self, p: ParamTree, x_BTD: jax.Array, cfg: DecoderConfig, layer: Layer, cache: Any
    ) -> tuple[jax.Array, Any]:
        """Mixes any number of tokens; T = 1 with a cache decodes one token in constant time."""
        before = cache or self.init_cache(cfg, x_BTD.shape[0], 0, x_BTD.dtype)
        valid_BT, qkv, inputs = layer.valid_BT, {}, {}
        for name in "qkv":
            x_BTNH = project("BTD,DNH->BTNH", x_BTD, p[name])
            if valid_BT is not None:
                x_BTNH = jnp.where(valid_BT[..., None, None], x_BTNH, 0.0)
            x_BTNH, inputs[name] = causal_convolution(
                x_BTNH, p[f"{name}_conv"], before["inputs"][name], layer.document_BT
            )
            qkv[name] = jax.nn.silu(x_BTNH)
        beta_BTN = jax.nn.sigmoid(project("BTD,DN->BTN", x_BTD, p["beta"]))
        log_decay_BTN = self.log_decay(p, x_BTD)
        if valid_BT is not None:
            beta_BTN, log_decay_BTN = jax.tree.map(
                lambda x: jnp.where(valid_BT[..., None], x, 0.0), (beta_BTN, log_decay_BTN)
            )

        if (resets_BT := layer.resets_BT) is not None:
            if log_decay_BTN is None:
                log_decay_BTN = jnp.zeros(beta_BTN.shape, jnp.float32)
            log_decay_BTN = jnp.where(resets_BT[..., None], LOG_ZERO, log_decay_BTN)

        def rule(first, q_BTNH, k_BTNH, v_BTNH, beta_BTN, log_decay_BTN, state_BNHX):
            del first
            return delta_rule(
                q_BTNH,
                k_BTNH,
                v_BTNH,
                beta_BTN,
                log_decay=log_decay_BTN,
                initial_state=state_BNHX,
                return_state=True,
            )

        inputs_of_rule = (unit(qkv["q"]), unit(qkv["k"]), qkv["v"], beta_BTN, log_decay_BTN)
        decay_axes = "" if log_decay_BTN is None else "BTN"
        o_BTNH, state = shard_kernel(
            rule,
            (*inputs_of_rule, before["state"]),
            ("BTNH", "BTNH", "BTNH", "BTN", decay_axes, "BNHX"),
            ("BTNH", "BNHX"),
            split="BN",
        )
        o_BTNH = self.gated(p, x_BTD, rms_norm(o_BTNH, p["norm"]["scale"], cfg.norm_eps))
        out_BTD = project("BTNH,NHD->BTD", o_BTNH, p["o"])
        return out_BTD, None if cache is None else {"state": state, "inputs": inputs}

    step = apply


def unit(x_BTNH: jax.Array) -> jax.Array:
    """Vectors of length one."""
    x = x_BTNH.astype(jnp.float32)
    squared = jnp.sum(x * x, -1, keepdims=True)
    return (x * jax.lax.rsqrt(squared + LENGTH_FLOOR)).astype(x_BTNH.dtype)


def rms_norm(x_BTNH: jax.Array, scale_H: jax.Array, eps: float) -> jax.Array:
    """Vectors divided by their root mean square, times a scale per coordinate."""
    x = x_BTNH.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)
    return (x * add_axes(scale_H.astype(jnp.float32), 4)).astype(x_BTNH.dtype)
