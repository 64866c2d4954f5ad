"""The prototype mixer: tokens write to R channels and read their discounted means.

Prototype Transformer, section 3, Eq. 1 and 2. With normed input x, prototypes P, values v = V x,

1. write gate: w_j = softmax over prototypes of <x_j, P_r> / tau_w;
2. read gate: g_i = softmax over prototypes of <W x_i, P_r> / tau_r, with the same P;
3. each prototype keeps the discounted mean of what was written to it, strictly before i:
   m_ir = sum_{j<i} beta_r^(i-j) w_jr v_j / sum_{j<i} beta_r^(i-j) w_jr   (`kernels.prefix_mean`);
4. out_i = alpha U sum_r g_ir m_ir.

In the first layer the read gate is the write gate. In the first two layers a causal depthwise
convolution is averaged with the values. Where the paper and the released code differ, the
docstring of the field says which this follows and why.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from kernels.prefix_mean.api import prefix_mean
from kernels.prefix_mean.state import State
from lm_jax.model.config import DecoderConfig
from lm_jax.model.layers import project
from lm_jax.model.mixers import Layer
from lm_jax.model.params import ParamSpec, ParamTree, by_layer, constant
from lm_jax.parallel.kernels import shard_kernel
from protot_jax.convolution import causal_convolution, taps_spec
from protot_jax.frozen import FrozenPrototypes

MEMORY = frozenset({"mixer.memory"})
# The released code adds it to |tau|.
TAU_FLOOR = 1e-6

PrefixMean = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Prototypes:
    """Settings of the mixer that the paper ablates, with its defaults.

    Attributes:
      num_prototypes: R.
      low_rank: values of width max(8, D // 2), else D.
      conv_kernel: taps of the local convolution, the current token included.
      conv_layers: number of first layers that use it. Its weights exist in every layer, as in the
        released code, whose parameter count the paper states.
      shared_routing: the first layer reads with its write gate. W and tau_r exist there, unused.
      temperature: initial tau of all layers but the first.
      first_temperature: initial tau of the first layer. Logits are divided by it, so that 3 is
        flatter than 1; the paper calls it sharper.
      alpha: initial factor on the mixer's output.
      decay: initial beta of every prototype.
      mass_normalisation: false leaves out the denominator of Eq. 2 and reads the moving average
        (1 - beta) sum_{j<i} beta^(i-1-j) w_jr v_j, as the released code does, whose factor
        1 - beta cancels only in the mean. Table 18 of the paper was trained this way.
    """

    num_prototypes: int = 32
    low_rank: bool = True
    conv_kernel: int = 5
    conv_layers: int = 2
    shared_routing: bool = True
    first_temperature: float = 3.0
    temperature: float = 1.0
    alpha: float = 1.0
    decay: float = 0.9
    mass_normalisation: bool = True


@dataclasses.dataclass(frozen=True)
class PrototypeMixer(Prototypes):
    """Mixes tokens through `num_prototypes` channels.

    `prefix` computes the means, with the arguments of `kernels.prefix_mean`.
    """

    prefix: PrefixMean = prefix_mean
    recurrent: ClassVar[bool] = True
    separates_documents: ClassVar[bool] = True
    frozen_sites: ClassVar[tuple[str, ...]] = ("mixer.write", "mixer.read")

    def value_size(self, cfg: DecoderConfig) -> int:
        """E, the width of a channel."""
        return max(8, cfg.hidden_size // 2) if self.low_rank else cfg.hidden_size

    def spec(self, cfg: DecoderConfig) -> ParamTree:
        D, R, E = cfg.hidden_size, self.num_prototypes, self.value_size(cfg)
        later = (self.temperature,) * (cfg.num_layers - 1)
        temperature = by_layer((self.first_temperature, *later), (), "")
        return {
            "prototypes": ParamSpec((R, D), "RD", unit_rows),
            "read": ParamSpec((D, D), "DX"),
            "value": ParamSpec((D, E), "DE"),
            "conv": taps_spec(self.conv_kernel, (E,), "E"),
            "out": ParamSpec((E, D), "ED"),
            "write_tau": temperature,
            "read_tau": temperature
            if self.shared_routing
            else by_layer((self.temperature,) * cfg.num_layers, (), ""),
            "decay_logit": constant(math.log(self.decay / (1.0 - self.decay)), (R,), "R"),
            "alpha": constant(self.alpha, (), ""),
        }

    def unused(self, cfg: DecoderConfig) -> int:
        """Number of parameters that no output depends on."""
        idle = self.conv_kernel * self.value_size(cfg) * max(0, cfg.num_layers - self.conv_layers)
        return idle + (cfg.hidden_size**2 + 1 if self.shared_routing else 0)

    def flops(self, cfg: DecoderConfig, tokens: int, causal: str) -> tuple[int, int]:
        del causal
        D, R, E, C = cfg.hidden_size, self.num_prototypes, self.value_size(cfg), self.conv_kernel
        # The first layer reads with its write gate.
        shared = 2 * (D * R + D * D) if self.shared_routing else 0
        convolved = min(self.conv_layers, cfg.num_layers)
        projections = cfg.num_layers * 2 * (2 * D * R + D * D + 2 * D * E) - shared
        return tokens * (projections + convolved * 2 * C * E), tokens * cfg.num_layers * 5 * R * E

    def init_cache(self, cfg: DecoderConfig, batch: int, length: int, dtype: Any) -> Any:
        """Decoding state of constant size: R sums and masses, and the convolution's last values."""
        del length
        E = self.value_size(cfg)
        return {
            "state": _empty(batch, self.num_prototypes, E),
            "values": jnp.zeros((batch, self.conv_kernel - 1, E), dtype),
        }

    def apply(
        self, p: ParamTree, x_BTD: jax.Array, cfg: DecoderConfig, layer: Layer, cache: Any
    ) -> tuple[jax.Array, Any]:
        """Mixes any number of tokens; T = 1 with a cache decodes one token in constant time."""
        write_BTR, read_BTR = self.gates(p, x_BTD, layer)
        value_BTE = project("BTD,DE->BTE", x_BTD, p["value"])
        if layer.valid_BT is not None:
            value_BTE = jnp.where(layer.valid_BT[..., None], value_BTE, 0.0)
        mixed_BTE, last = self.convolved(p, value_BTE, layer, cache)
        decay_R = jax.nn.sigmoid(p["decay_logit"].astype(jnp.float32))
        scaled_BTR = read_BTR * self._scale(decay_R)[None, None]

        write_BTR, read_BTR, scaled_BTR = (
            x.astype(mixed_BTE.dtype) for x in (write_BTR, read_BTR, scaled_BTR)
        )
        before = None if cache is None else State(*cache["state"])
        cached = before is not None

        def prefix(first, write_BTR, value_BTE, decay_R, read_BTR, before, resets_BT):
            del first
            result = self.prefix(
                write_BTR,
                value_BTE,
                decay_R,
                read_BTR,
                initial_state=State(*before) if cached else None,
                return_state=cached,
                mass_normalisation=self.mass_normalisation,
                resets_BT=resets_BT,
            )
            return (result[0], tuple(result[1])) if cached else (result, None)

        state_axes = ("BRE", "BR") if cached else ""
        resets_BT = layer.resets_BT
        out_BTE, after = shard_kernel(
            prefix,
            (write_BTR, mixed_BTE, decay_R, scaled_BTR, before and tuple(before), resets_BT),
            ("BTR", "BTE", "R", "BTR", state_axes, "" if resets_BT is None else "BT"),
            ("BTE", state_axes),
            split="BE",
        )
        if layer.scope.touches(MEMORY):
            memory_BTRE = self.memory(write_BTR, mixed_BTE, decay_R, before, resets_BT)
            memory_BTRE = layer.scope("mixer.memory", memory_BTRE)
            out_BTE = jnp.einsum("BTR,BTRE->BTE", read_BTR, memory_BTRE)
        if cached:
            cache = {"state": State(*after), "values": last}
        out_BTD = project("BTE,ED->BTD", out_BTE, p["out"])
        return (p["alpha"].astype(jnp.float32) * out_BTD).astype(x_BTD.dtype), cache

    step = apply

    def gates(self, p: ParamTree, x_BTD: jax.Array, layer: Layer) -> tuple[jax.Array, jax.Array]:
        """Write and read gate `[B, T, R]` in float32, zero where a token is padding."""
        scope = layer.scope
        read_x_BTX = project("BTD,DX->BTX", x_BTD, p["read"])
        write_logits = scope("mixer.write_logits", _logits(x_BTD, p["prototypes"], p["write_tau"]))
        read_logits = _logits(read_x_BTX, p["prototypes"], p["read_tau"])
        if self.shared_routing:
            read_logits = jnp.where(jnp.equal(layer.index, 0), write_logits, read_logits)
        read_logits = scope("mixer.read_logits", read_logits)
        write_BTR = scope.edit("mixer.write", jax.nn.softmax(write_logits, axis=-1))
        read_BTR = scope.edit("mixer.read", jax.nn.softmax(read_logits, axis=-1))
        # After the edits, so that padding never writes.
        if layer.valid_BT is not None:
            write_BTR, read_BTR = (
                jnp.where(layer.valid_BT[..., None], x, 0.0) for x in (write_BTR, read_BTR)
            )
        scope.observe("mixer.write", write_BTR)
        scope.observe("mixer.read", read_BTR)
        return write_BTR, read_BTR

    def convolved(
        self, p: ParamTree, value_BTE: jax.Array, layer: Layer, cache: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Mean of values and their causal convolution in the first layers, and the last values."""
        B, _, E = value_BTE.shape
        held_BCE = jnp.zeros((B, self.conv_kernel - 1, E), value_BTE.dtype)
        if cache is not None:
            held_BCE = cache["values"]
        summed_BTE, last_BCE = causal_convolution(value_BTE, p["conv"], held_BCE, layer.document_BT)
        in_use = jnp.less(layer.index, self.conv_layers)
        return jnp.where(in_use, 0.5 * value_BTE + 0.5 * summed_BTE, value_BTE), last_BCE

    def memory(
        self,
        write_BTR: jax.Array,
        value_BTE: jax.Array,
        decay_R: jax.Array,
        state: State | None,
        resets_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Memory of each channel before each token, `[B, T, R, E]`, for recording and editing."""
        B, T, _ = write_BTR.shape

        def channel(write_BT, decay, before):
            return self.prefix(
                write_BT[..., None],
                value_BTE,
                decay[None],
                jnp.ones((B, T, 1), write_BTR.dtype),
                initial_state=before and State(*(x[:, None] for x in before)),
                mass_normalisation=self.mass_normalisation,
                resets_BT=resets_BT,
            )

        memory_BTRE = jax.vmap(channel, in_axes=(2, 0, 1), out_axes=2)(
            write_BTR, decay_R, state and tuple(state)
        )
        scale_R1 = self._scale(decay_R)[:, None].astype(memory_BTRE.dtype)
        return memory_BTRE * scale_R1[None, None]

    def freeze(self, p: ParamTree, records: Mapping[str, jax.Array]) -> FrozenPrototypes:
        """The mixer with the gates of one prompt (`lm_jax.model.frozen.FreezableMixer`).

        The weights of past tokens are the memories of values that tell every token apart, so that
        they are those of the `prefix` of this mixer.
        """
        write_LTR, read_LTR = records["mixer.write"], records["mixer.read"]
        L, T = write_LTR.shape[:2]
        one_hot_1TS = jnp.eye(T, dtype=write_LTR.dtype)[None]

        def weights(write_TR, read_TR, decay_R):
            memory_TRS = self.memory(write_TR[None], one_hot_1TS, decay_R, None)[0]
            return jnp.einsum("TR,TRS->RTS", read_TR, memory_TRS)

        decay_LR = jax.nn.sigmoid(p["decay_logit"].astype(jnp.float32))
        convolved_L11 = (jnp.arange(L) < self.conv_layers)[:, None, None]
        present_C = jnp.arange(self.conv_kernel) == self.conv_kernel - 1
        taps_LCE = jnp.where(convolved_L11, 0.5 * p["conv"], 0.0)
        taps_LCE += present_C[None, :, None] * jnp.where(convolved_L11, 0.5, 1.0)
        return FrozenPrototypes(
            pattern_LNTS=jax.vmap(weights)(write_LTR, read_LTR, decay_LR),
            value_LDE=p["value"],
            taps_LCE=taps_LCE,
            output_LED=p["alpha"][:, None, None] * p["out"],
        )

    def _scale(self, decay_R: jax.Array) -> jax.Array:
        """The factor on what a channel holds: N of Eq. 2 discounts the last write once."""
        return jnp.ones_like(decay_R) if self.mass_normalisation else (1.0 - decay_R) / decay_R


def _empty(B: int, R: int, E: int) -> State:
    return State(jnp.zeros((B, R, E), jnp.float32), jnp.zeros((B, R), jnp.float32))


def _logits(x_BTD: jax.Array, prototypes_RD: jax.Array, tau: jax.Array) -> jax.Array:
    logits_BTR = jnp.einsum("BTD,RD->BTR", x_BTD, prototypes_RD, preferred_element_type=jnp.float32)
    return logits_BTR / (jnp.abs(tau.astype(jnp.float32)) + TAU_FLOOR)


def unit_rows(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Initializer of the prototypes: Gaussian rows of norm 1."""
    rows = jax.random.normal(key, shape, jnp.float32)
    return (rows / jnp.linalg.norm(rows, axis=-1, keepdims=True)).astype(dtype)
