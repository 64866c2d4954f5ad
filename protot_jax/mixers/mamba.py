"""The Mamba-1 mixer, a baseline: a selective state space with input-dependent step sizes.

Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", section 3.4.
With normed input x and inner width I = expand D,

1. a, z = two projections of x to width I;
2. u = silu(causal depthwise convolution of a, plus a bias);
3. delta = softplus(low-rank projection of u, plus a bias), B and C = projections of u;
4. y = selective scan of u with delta, A, B, C and the skip D (`iaj_kernels.selective_scan`);
5. out = projection of y * silu(z).

The block has no MLP (`mlp_size=0`), although the Prototype Transformer's paper says so: its count
of 6,724,352 parameters is without one.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from iaj_kernels.core.chunks import LOG_ZERO
from iaj_kernels.selective_scan.api import selective_scan
from lm_jax.model.config import DecoderConfig
from lm_jax.model.layers import add_axes, project
from lm_jax.model.mixers import Layer
from lm_jax.model.params import Initializer, ParamSpec, ParamTree, constant
from lm_jax.parallel.kernels import shard_kernel
from protot_jax.mixers.convolution import causal_convolution, taps_spec, uniform

# Range of a channel's initial step size, as in the released Mamba.
SHORTEST_STEP, LONGEST_STEP = 1e-3, 1e-1


@dataclasses.dataclass(frozen=True)
class MambaMixer:
    """A selective state space; letters as in `iaj_kernels.selective_scan`; X is the rank of delta.

    Attributes:
      state_size: J, the size of a channel's state.
      expand: I / D.
      conv_kernel: taps of the convolution, the current token included.
      dt_rank: X, the rank of the projection to step sizes; None is ceil(D / 16).
    """

    state_size: int = 16
    expand: int = 2
    conv_kernel: int = 4
    dt_rank: int | None = None

    recurrent: ClassVar[bool] = True
    separates_documents: ClassVar[bool] = True

    def inner_size(self, cfg: DecoderConfig) -> int:
        """The number of channels, I."""
        return self.expand * cfg.hidden_size

    def rank(self, cfg: DecoderConfig) -> int:
        """The rank X, from `dt_rank` or by default."""
        return math.ceil(cfg.hidden_size / 16) if self.dt_rank is None else self.dt_rank

    def spec(self, cfg: DecoderConfig) -> ParamTree:
        D, J, X = cfg.hidden_size, self.state_size, self.rank(cfg)
        inner = self.inner_size(cfg)
        # As in GPT-2, divided by the root of the number of residual branches.
        branches = cfg.num_layers * (2 if cfg.mlp_size else 1)
        return {
            "in": ParamSpec((D, inner), "DI", fan_in()),
            "gate": ParamSpec((D, inner), "DI", fan_in()),
            "conv": taps_spec(self.conv_kernel, (inner,), "I"),
            "conv_bias": ParamSpec((inner,), "I", uniform(self.conv_kernel**-0.5)),
            "step_down": ParamSpec((inner, X), "IX", fan_in()),
            "step_up": ParamSpec((X, inner), "XI", uniform(X**-0.5)),
            "step_bias": ParamSpec((inner,), "I", step_sizes),
            "B": ParamSpec((inner, J), "IJ", fan_in()),
            "C": ParamSpec((inner, J), "IJ", fan_in()),
            "A_log": ParamSpec((inner, J), "IJ", log_count),
            "D": constant(1.0, (inner,), "I"),
            "out": ParamSpec((inner, D), "ID", fan_in(1 / branches)),
        }

    def flops(self, cfg: DecoderConfig, tokens: int, causal: str) -> tuple[int, int]:
        del causal
        D, J, X, C = cfg.hidden_size, self.state_size, self.rank(cfg), self.conv_kernel
        channels = tokens * cfg.num_layers * self.inner_size(cfg)
        return channels * (2 * 3 * D + 2 * (C + 2 * X + 2 * J)), channels * 6 * J

    def init_cache(self, cfg: DecoderConfig, batch: int, length: int, dtype: Any) -> Any:
        """Decoding state of constant size: channel states and the convolution's last inputs."""
        del length
        inner = self.inner_size(cfg)
        return {
            "state": jnp.zeros((batch, inner, self.state_size), jnp.float32),
            "inputs": jnp.zeros((batch, self.conv_kernel - 1, inner), dtype),
        }

    def apply(
        self, p: ParamTree, x_BTD: jax.Array, cfg: DecoderConfig, layer: Layer, cache: Any
    ) -> tuple[jax.Array, Any]:
        """Mixes any number of tokens; T = 1 with a cache decodes one token in constant time."""
        before = cache or self.init_cache(cfg, x_BTD.shape[0], 0, x_BTD.dtype)
        a_BTI = project("BTD,DI->BTI", x_BTD, p["in"])
        z_BTI = project("BTD,DI->BTI", x_BTD, p["gate"])
        if layer.valid_BT is not None:
            a_BTI = jnp.where(layer.valid_BT[..., None], a_BTI, 0.0)
        a_BTI, inputs = causal_convolution(a_BTI, p["conv"], before["inputs"], layer.document_BT)
        u_BTI = jax.nn.silu(a_BTI + add_axes(p["conv_bias"], 3))

        step_BTX = project("BTI,IX->BTX", u_BTI, p["step_down"])
        step_BTI = project("BTX,XI->BTI", step_BTX, p["step_up"])
        delta_BTI = jax.nn.softplus(step_BTI.astype(jnp.float32) + _float32(p["step_bias"], 3))
        # With a step of size zero padding leaves the state unchanged.
        if layer.valid_BT is not None:
            delta_BTI = jnp.where(layer.valid_BT[..., None], delta_BTI, 0.0)

        A_IJ, D_I = -jnp.exp(_float32(p["A_log"], 2)), _float32(p["D"], 1)
        scanned_BTI, skip_BTI = u_BTI, None
        if (resets_BT := layer.resets_BT) is not None:
            skip_BTI, D_I = (D_I[None, None] * u_BTI).astype(u_BTI.dtype), None
            scanned_BTI, delta_BTI = emptying(u_BTI, delta_BTI, A_IJ, resets_BT)

        def scan(first, u_BTI, delta_BTI, A_IJ, B_BTJ, C_BTJ, D_I, state_BIJ):
            del first
            return selective_scan(
                u_BTI,
                delta_BTI,
                A_IJ,
                B_BTJ,
                C_BTJ,
                D_I,
                initial_state=state_BIJ,
                return_state=True,
            )

        y_BTI, state = shard_kernel(
            scan,
            (
                scanned_BTI,
                delta_BTI,
                A_IJ,
                project("BTI,IJ->BTJ", u_BTI, p["B"]),
                project("BTI,IJ->BTJ", u_BTI, p["C"]),
                D_I,
                before["state"],
            ),
            ("BTI", "BTI", "IJ", "BTJ", "BTJ", "" if D_I is None else "I", "BIJ"),
            ("BTI", "BIJ"),
            split="BI",
        )
        if skip_BTI is not None:
            y_BTI += skip_BTI
        out_BTD = project("BTI,ID->BTD", y_BTI * jax.nn.silu(z_BTI), p["out"])
        return out_BTD, None if cache is None else {"state": state, "inputs": inputs}

    step = apply


def emptying(
    u_BTI: jax.Array, delta_BTI: jax.Array, A_IJ: jax.Array, resets_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Inputs and step sizes with which the scan empties its state before some steps.

    There the step is so long that every decay exp(delta A) is 0, and the input so much smaller that
    the step writes what it wrote, delta B u.
    """
    longest_I = jax.lax.stop_gradient(LOG_ZERO / jnp.max(A_IJ, axis=1))
    resets_BT1 = resets_BT[..., None]
    smaller_BTI = (delta_BTI * u_BTI / longest_I[None, None]).astype(u_BTI.dtype)
    return (
        jnp.where(resets_BT1, smaller_BTI, u_BTI),
        jnp.where(resets_BT1, longest_I[None, None], delta_BTI),
    )


def _float32(x: jax.Array, ndim: int) -> jax.Array:
    return add_axes(x.astype(jnp.float32), ndim)


def fan_in(variance: float = 1.0) -> Initializer:
    """Uniform within sqrt(variance / rows); at variance 1 the default of torch's Linear."""
    return jax.nn.initializers.variance_scaling(variance / 3, "fan_in", "uniform")


def step_sizes(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Initial biases whose softplus is log-uniform between the shortest and the longest step."""
    low, high = math.log(SHORTEST_STEP), math.log(LONGEST_STEP)
    step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, low, high))
    # The inverse of softplus, log(exp(step) - 1), without cancellation.
    return (step + jnp.log(-jnp.expm1(-step))).astype(dtype)


def log_count(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """log(1..J) in every channel, so that A = -(1..J): the real part of S4D's initialisation."""
    del key
    return jnp.broadcast_to(jnp.log(jnp.arange(1.0, shape[-1] + 1))[None], shape).astype(dtype)
