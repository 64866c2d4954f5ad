"""Mixers of slots, newer relatives of ProtoT: gated slot attention, and Raven's top-k write.

Every head has M slots, each a key and a value (`iaj_kernels.gated_slots`). With normed input x,

1. q, k, v = projections of x;
2. logarithms of the decays alpha, a number per slot; slot m keeps alpha_m of what it holds and
   takes 1 - alpha_m of k and v;
3. o = values of the slots, weighted by the softmax over slots of scale <q, keys>;
4. out = projection of the RMS norm of o over the head's width, as `protot_jax.mixers.deltanet`, so
   that these mixers differ from it in their memory.

There are no convolutions, no biases and no positional encoding. The config has N heads of width H.
ProtoT writes to all its channels by one softmax and reads them by another; here a slot is read by
its own key.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from iaj_kernels.gated_slots.api import gated_slots
from iaj_kernels.gated_slots.config import Slots
from lm_jax.model.config import DecoderConfig
from lm_jax.model.layers import add_axes, project
from lm_jax.model.mixers import Layer
from lm_jax.model.params import ParamSpec, ParamTree, constant
from lm_jax.parallel.kernels import shard_kernel
from protot_jax.mixers.deltanet import rms_norm
from protot_jax.mixers.gated_deltanet import step_log_decay, step_spec


@dataclasses.dataclass(frozen=True)
class SlotMixer(abc.ABC):
    """What mixers of slots share; `heads` and `log_decay` are those of a subclass.

    Attributes:
      num_slots: M, the slots of a head.
    """

    num_slots: int = 64

    recurrent: ClassVar[bool] = True
    separates_documents: ClassVar[bool] = True

    def spec(self, cfg: DecoderConfig) -> ParamTree:
        D, N, H = cfg.hidden_size, cfg.num_heads, cfg.head_dim
        spec: dict[str, Any] = {name: ParamSpec((D, N, H), "DNH") for name in "qkv"}
        return spec | {
            "slots": ParamSpec((D, N, self.num_slots), "DNM"),
            "norm": {"scale": constant(1.0, (H,), "H")},
            "o": ParamSpec((N, H, D), "NHD"),
        }

    def flops(self, cfg: DecoderConfig, tokens: int, causal: str) -> tuple[int, int]:
        del causal
        D, N, H, M = cfg.hidden_size, cfg.num_heads, cfg.head_dim, self.num_slots
        positions = tokens * cfg.num_layers
        # Of keys and values: decay, write, add, and a product to read.
        return positions * 2 * (4 * D * N * H + D * N * M), positions * 2 * 5 * N * M * H

    def init_cache(self, cfg: DecoderConfig, batch: int, length: int, dtype: Any) -> Any:
        """Decoding state of constant size: the slots."""
        del length, dtype
        slots_BNMH = jnp.zeros((batch, cfg.num_heads, self.num_slots, cfg.head_dim), jnp.float32)
        return {"state": Slots(slots_BNMH, slots_BNMH)}

    @abc.abstractmethod
    def scale(self, cfg: DecoderConfig) -> float:
        """Factor of the scores."""

    @abc.abstractmethod
    def heads(self, p: ParamTree, x_BTD: jax.Array, cfg: DecoderConfig) -> dict[str, jax.Array]:
        """Queries, keys and values `[B, T, N, H]` by name."""

    @abc.abstractmethod
    def log_decay(self, p: ParamTree, x_BTD: jax.Array) -> jax.Array:
        """Logarithm `[B, T, N, M]`, float32, of what a step leaves of each slot."""

    def apply(
        self, p: ParamTree, x_BTD: jax.Array, cfg: DecoderConfig, layer: Layer, cache: Any
    ) -> tuple[jax.Array, Any]:
        """Mixes any number of tokens; T = 1 with a cache decodes one token in constant time."""
        before = cache or self.init_cache(cfg, x_BTD.shape[0], 0, x_BTD.dtype)
        heads = self.heads(p, x_BTD, cfg)
        log_decay_BTNM = self.log_decay(p, x_BTD)
        if layer.valid_BT is not None:
            log_decay_BTNM = jnp.where(layer.valid_BT[..., None, None], log_decay_BTNM, 0.0)

        def slots(first, q_BTNH, k_BTNH, v_BTNH, log_decay_BTNM, state, resets_BT):
            del first
            out_BTNH, after = gated_slots(
                q_BTNH,
                k_BTNH,
                v_BTNH,
                log_decay_BTNM,
                scale=self.scale(cfg),
                initial_state=Slots(*state),
                return_state=True,
                resets_BT=resets_BT,
            )
            return out_BTNH, tuple(after)

        state_axes, resets_BT = ("BNMH", "BNMH"), layer.resets_BT
        o_BTNH, state = shard_kernel(
            slots,
            (heads["q"], heads["k"], heads["v"], log_decay_BTNM, tuple(before["state"]), resets_BT),
            (
                *("BTNH", "BTNH", "BTNH", "BTNM", state_axes),
                "" if resets_BT is None else "BT",
            ),
            ("BTNH", state_axes),
            split="BN",
        )
        o_BTNH = rms_norm(o_BTNH, p["norm"]["scale"], cfg.norm_eps)
        out_BTD = project("BTNH,NHD->BTD", o_BTNH, p["o"])
        return out_BTD, None if cache is None else {"state": Slots(*state)}

    step = apply


@dataclasses.dataclass(frozen=True)
class GatedSlotMixer(SlotMixer):
    """Gated slot attention (Zhang et al. 2024, section 3; its public configs).

    q, k and v are silu of their projections, scores have the factor 1, and

        alpha = sigmoid(projection of x)^(1 / damping)

    Attributes:
      damping: damping of the decays; the larger, the slower slots forget at the start.
    """

    damping: float = 8.0

    def scale(self, cfg: DecoderConfig) -> float:
        del cfg
        return 1.0

    def heads(self, p: ParamTree, x_BTD: jax.Array, cfg: DecoderConfig) -> dict[str, jax.Array]:
        del cfg
        return {name: jax.nn.silu(project("BTD,DNH->BTNH", x_BTD, p[name])) for name in "qkv"}

    def log_decay(self, p: ParamTree, x_BTD: jax.Array) -> jax.Array:
        logits_BTNM = project("BTD,DNM->BTNM", x_BTD, p["slots"]).astype(jnp.float32)
        return jax.nn.log_sigmoid(logits_BTNM) / self.damping


@dataclasses.dataclass(frozen=True)
class RavenMixer(SlotMixer):
    """Raven: a router that writes to a few slots and leaves the others to the bit.

    Afzal, Bick et al. 2026 (goombalab/raven and its description): with the K largest entries of a
    router, and zero elsewhere,

        r = top K of sigmoid(projection of x), divided by their sum
        alpha = exp(a r),   a = -exp(A) softplus(projection of x + bias), a number per head

    q and k are divided by their root mean square and scaled, v is a projection, and scores have the
    factor 1 / sqrt(H). The step a is Mamba-2's, with its initial values. The description prints
    alpha and 1 - alpha swapped in one place, which would erase the slots that are not chosen.

    Attributes:
      written: K; None is an eighth of the slots, as 32 of the 256 that were published, at least 1.
    """

    written: int | None = None

    def top(self) -> int:
        """The number K, from `written` or by default."""
        return max(1, self.num_slots // 8) if self.written is None else self.written

    def spec(self, cfg: DecoderConfig) -> ParamTree:
        D, N, H = cfg.hidden_size, cfg.num_heads, cfg.head_dim
        return {
            **super().spec(cfg),
            **{f"{name}_norm": {"scale": constant(1.0, (H,), "H")} for name in "qk"},
            **step_spec(D, N),
        }

    def flops(self, cfg: DecoderConfig, tokens: int, causal: str) -> tuple[int, int]:
        projections, memory = super().flops(cfg, tokens, causal)
        steps = tokens * cfg.num_layers * 2 * cfg.hidden_size * cfg.num_heads
        return projections + steps, memory

    def scale(self, cfg: DecoderConfig) -> float:
        return cfg.head_dim**-0.5

    def heads(self, p: ParamTree, x_BTD: jax.Array, cfg: DecoderConfig) -> dict[str, jax.Array]:
        heads = {name: project("BTD,DNH->BTNH", x_BTD, p[name]) for name in "qkv"}
        for name in "qk":
            heads[name] = rms_norm(heads[name], p[f"{name}_norm"]["scale"], cfg.norm_eps)
        return heads

    def log_decay(self, p: ParamTree, x_BTD: jax.Array) -> jax.Array:
        logits_BTNM = project("BTD,DNM->BTNM", x_BTD, p["slots"]).astype(jnp.float32)
        kept_BTNM = jnp.where(
            among_largest(logits_BTNM, self.top()), jax.nn.sigmoid(logits_BTNM), 0.0
        )
        # A router whose entries all underflow writes nothing.
        sum_BTN1 = jnp.maximum(jnp.sum(kept_BTNM, -1, keepdims=True), jnp.finfo(jnp.float32).tiny)
        route_BTNM = kept_BTNM / sum_BTN1
        return step_log_decay(p, x_BTD)[..., None] * route_BTNM


def among_largest(x: jax.Array, count: int) -> jax.Array:
    """Whether an entry is one of the `count` largest of the last axis; of equal ones the first."""
    _, places = jax.lax.top_k(jax.lax.stop_gradient(x), count)
    entries = add_axes(jnp.arange(x.shape[-1]), x.ndim + 1)
    return jnp.any(places[..., None] == entries, -2)
