"""The prototype mixer: tokens write to R channels and read their discounted means.

Prototype Transformer, section 3, Eq. 1 and 2. With normed input x, prototypes P, values v = V x,

1. write gate: w_j = softmax over prototypes of <x_j, P_r> / tau_w;
2. read gate: g_i = softmax over prototypes of <W x_i, P_r> / tau_r, with the same P;
3. each prototype keeps the discounted mean of what was written to it, strictly before i:
   m_ir = sum_{j<i} beta_r^(i-j) w_jr v_j / sum_{j<i} beta_r^(i-j) w_jr
   (`iaj_kernels.prefix_mean`);
4. out_i = alpha U sum_r g_ir m_ir.

Options that the released code has and keeps off are fields too, off by default: other gates, hidden
prototypes, rotary positions (`protot_jax.mixers.rotary`), and N heads. A head has R / N prototypes,
gates that sum to 1 among them, its own part of x, of W x and of the values, and its own alpha,
divided by sqrt(N).

In the first layer the read gate is the write gate. In the first two layers a causal depthwise
convolution is averaged with the values. Where the paper and the released code differ, the
docstring of the field says which this follows and why.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from iaj_kernels.prefix_mean.api import prefix_mean
from iaj_kernels.prefix_mean.state import State, empty_state
from lm_jax.errors import UsageError
from lm_jax.model.config import DecoderConfig
from lm_jax.model.layers import project
from lm_jax.model.mixers import Layer, RopeTables
from lm_jax.model.params import ParamSpec, ParamTree, by_layer, constant
from lm_jax.parallel.kernels import shard_kernel
from protot_jax.mixers.config import Prototypes
from protot_jax.mixers.convolution import causal_convolution, taps_spec
from protot_jax.mixers.frozen import FrozenPrototypes
from protot_jax.mixers.rotary import places, tables, turned
from protot_jax.mixers.routing import gates, hide

MEMORY = frozenset({"mixer.memory"})
# The released code adds it to |tau|.
TAU_FLOOR = 1e-6

PrefixMean = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class PrototypeMixer(Prototypes):
    """Mixes tokens through `num_prototypes` channels.

    `prefix` computes the means, with the arguments of `iaj_kernels.prefix_mean`.
    """

    prefix: PrefixMean = prefix_mean
    recurrent: ClassVar[bool] = True
    separates_documents: ClassVar[bool] = True
    frozen_sites: ClassVar[tuple[str, ...]] = ("mixer.write", "mixer.read")

    def value_size(self, cfg: DecoderConfig) -> int:
        """E, the width of a channel; a head has E / N of it.

        Raises:
          UsageError: heads do not divide it, or the width of the model, or what is turned has an
            odd width.
        """
        E = max(8, cfg.hidden_size // 2) if self.low_rank else cfg.hidden_size
        if E % self.heads or cfg.hidden_size % self.heads:
            raise UsageError(
                f"prototypes.heads = {self.heads} must divide the width {cfg.hidden_size} and the "
                f"width of the values, {E}"
            )
        for name, width in (("queries", cfg.hidden_size), ("values", E)):
            if getattr(self, f"rotary_{name}") and width // self.heads % 2:
                raise UsageError(
                    f"prototypes.rotary_{name} turns pairs of coordinates, and a head has "
                    f"{width // self.heads}: choose another hidden_size or another number of heads"
                )
        return E

    def spec(self, cfg: DecoderConfig) -> ParamTree:
        D, R, E = cfg.hidden_size, self.num_prototypes, self.value_size(cfg)
        later = (self.temperature,) * (cfg.num_layers - 1)
        temperature = by_layer((self.first_temperature, *later), (), "")
        return {
            "prototypes": ParamSpec((R, D // self.heads), "RD", unit_rows),
            "read": ParamSpec((D, D), "DX"),
            "value": ParamSpec((D, E), "DE"),
            "conv": taps_spec(self.conv_kernel, (E,), "E"),
            "out": ParamSpec((E, D), "ED"),
            "write_tau": temperature,
            "read_tau": temperature
            if self.shared_routing
            else by_layer((self.temperature,) * cfg.num_layers, (), ""),
            "decay_logit": constant(math.log(self.decay / (1.0 - self.decay)), (R,), "R"),
            "alpha": constant(self.alpha, *(((), "") if self.heads == 1 else ((self.heads,), "N"))),
        }

    def unused(self, cfg: DecoderConfig) -> int:
        """Number of parameters that no output depends on."""
        idle = self.conv_kernel * self.value_size(cfg) * max(0, cfg.num_layers - self.conv_layers)
        return idle + (cfg.hidden_size**2 + 1 if self.shared_routing else 0)

    def flops(self, cfg: DecoderConfig, tokens: int, causal: str) -> tuple[int, int]:
        del causal
        D, R, E, C = cfg.hidden_size, self.num_prototypes, self.value_size(cfg), self.conv_kernel
        # A head meets its own prototypes alone.
        R //= self.heads
        # The first layer reads with its write gate.
        shared = 2 * (D * R + D * D) if self.shared_routing else 0
        convolved = min(self.conv_layers, cfg.num_layers)
        projections = cfg.num_layers * 2 * (2 * D * R + D * D + 2 * D * E) - shared
        return tokens * (projections + convolved * 2 * C * E), tokens * cfg.num_layers * 5 * R * E

    def init_cache(self, cfg: DecoderConfig, batch: int, length: int, dtype: Any) -> Any:
        """Decoding state of constant size: R sums and masses, and the convolution's last values.

        With rotary positions also the number of tokens.
        """
        del length
        E = self.value_size(cfg)
        held = {
            "state": empty_state(batch, self.num_prototypes, E // self.heads),
            "values": jnp.zeros((batch, self.conv_kernel - 1, E), dtype),
        }
        return held | ({"tokens": jnp.zeros((batch,), jnp.int32)} if self._counts else {})

    def apply(
        self, p: ParamTree, x_BTD: jax.Array, cfg: DecoderConfig, layer: Layer, cache: Any
    ) -> tuple[jax.Array, Any]:
        """Mixes any number of tokens; T = 1 with a cache decodes one token in constant time."""
        query_turn, value_turn, tokens = self._turns(cfg, layer, cache)
        write_BTR, read_BTR = self.gates(p, x_BTD, layer, query_turn)
        value_BTE = project("BTD,DE->BTE", x_BTD, p["value"])
        if layer.valid_BT is not None:
            value_BTE = jnp.where(layer.valid_BT[..., None], value_BTE, 0.0)
        mixed_BTE, last = self.convolved(p, value_BTE, layer, cache)
        mixed_BTE = self._turned(mixed_BTE, value_turn)
        decay_R = jax.nn.sigmoid(p["decay_logit"].astype(jnp.float32))
        scaled_BTR = read_BTR * self._scale(decay_R)[None, None]

        write_BTR, read_BTR, scaled_BTR = (
            x.astype(mixed_BTE.dtype) for x in (write_BTR, read_BTR, scaled_BTR)
        )
        before = None if cache is None else State(*cache["state"])
        resets_BT = layer.resets_BT
        of_heads = self._of_heads(write_BTR, mixed_BTE, decay_R, scaled_BTR, before)
        parts = [self._means(*own, resets_BT=resets_BT) for own in of_heads]
        out_BTE = jnp.concatenate([part for part, _ in parts], 2)
        out_BTE = self._turned(out_BTE, value_turn, back=True)
        if layer.scope.touches(MEMORY):
            of_heads = self._of_heads(write_BTR, mixed_BTE, decay_R, before)
            memory_BTRE = jnp.concatenate(
                [self.memory(*own, resets_BT=resets_BT) for own in of_heads], 2
            )
            if value_turn is not None:
                memory_BTRE = turned(memory_BTRE, value_turn, back=True)
            memory_BTRE = layer.scope("mixer.memory", memory_BTRE)
            out_BTE = self._read(read_BTR, memory_BTRE)
        if cache is not None:
            after = jax.tree.map(lambda *own: jnp.concatenate(own, 1), *(s for _, s in parts))
            cache = {"state": State(*after), "values": last, **tokens}
        alpha = p["alpha"].astype(jnp.float32)
        if self.heads > 1:
            scale_E = jnp.repeat(alpha, out_BTE.shape[2] // self.heads) / math.sqrt(self.heads)
            out_BTE, alpha = (out_BTE * scale_E[None, None]).astype(out_BTE.dtype), 1.0
        out_BTD = project("BTE,ED->BTD", out_BTE, p["out"])
        return (alpha * out_BTD).astype(x_BTD.dtype), cache

    step = apply

    def _of_heads(self, *arrays: Any) -> Iterator[tuple[Any, ...]]:
        """The parts of each head: of the last axis of an array, and of the second of a state."""

        def split(x: Any) -> list[Any]:
            if x is None:
                return [None] * self.heads
            if isinstance(x, State):
                total, mass = (jnp.split(each, self.heads, 1) for each in x)
                return list(map(State, total, mass))
            return jnp.split(x, self.heads, x.ndim - 1)

        return zip(*map(split, arrays), strict=True)

    def _read(self, read_BTR: jax.Array, memory_BTRE: jax.Array) -> jax.Array:
        B, T, _, E = memory_BTRE.shape
        read_BTNR = read_BTR.reshape(B, T, self.heads, -1)
        memory_BTNRE = memory_BTRE.reshape(B, T, self.heads, -1, E)
        return jnp.einsum("BTNR,BTNRE->BTNE", read_BTNR, memory_BTNRE).reshape(B, T, -1)

    def _means(
        self,
        write_BTR: jax.Array,
        value_BTE: jax.Array,
        decay_R: jax.Array,
        read_BTR: jax.Array,
        before: State | None,
        resets_BT: jax.Array | None,
    ) -> tuple[jax.Array, Any]:
        """What the tokens read of one head, and with a state the state after them."""
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
        return shard_kernel(
            prefix,
            (write_BTR, value_BTE, decay_R, read_BTR, before and tuple(before), resets_BT),
            ("BTR", "BTE", "R", "BTR", state_axes, "" if resets_BT is None else "BT"),
            ("BTE", state_axes),
            split="BE",
        )

    @property
    def _counts(self) -> bool:
        """Whether anything depends on the places of tokens."""
        return self.rotary_queries or self.rotary_values

    def _turns(
        self, cfg: DecoderConfig, layer: Layer, cache: Any
    ) -> tuple[RopeTables | None, RopeTables | None, dict[str, jax.Array]]:
        """The turns of a head's queries and values, None where they have none, and the count."""
        if not self._counts:
            return None, None, {}
        place_BT, tokens_B = places(layer, None if cache is None else cache["tokens"])
        query_turn, value_turn = (
            tables(place_BT, width // self.heads, self.rotary_theta) if rotary else None
            for rotary, width in (
                (self.rotary_queries, cfg.hidden_size),
                (self.rotary_values, self.value_size(cfg)),
            )
        )
        return query_turn, value_turn, {"tokens": tokens_B}

    def _turned(
        self, x_BTE: jax.Array, turn: RopeTables | None, *, back: bool = False
    ) -> jax.Array:
        if turn is None:
            return x_BTE
        x_BTNE = x_BTE.reshape(*x_BTE.shape[:2], self.heads, -1)
        return turned(x_BTNE, turn, back=back).reshape(x_BTE.shape)

    def gates(
        self, p: ParamTree, x_BTD: jax.Array, layer: Layer, turn: RopeTables | None
    ) -> tuple[jax.Array, jax.Array]:
        """Write and read gate `[B, T, R]` in float32, zero where a token is padding.

        `turn` has the angles of the tokens' queries (`rotary.tables`); None without rotary queries.
        """
        scope = layer.scope
        read_x_BTX = project("BTD,DX->BTX", x_BTD, p["read"])
        read_x_BTX = self._turned(read_x_BTX, turn)
        write_logits = scope("mixer.write_logits", _logits(x_BTD, p["prototypes"], p["write_tau"]))
        read_logits = _logits(read_x_BTX, p["prototypes"], p["read_tau"])
        if self.shared_routing:
            read_logits = jnp.where(jnp.equal(layer.index, 0), write_logits, read_logits)
        read_logits = scope("mixer.read_logits", read_logits)
        write_BTR = scope.edit("mixer.write", self._gate(write_logits, layer))
        read_BTR = scope.edit("mixer.read", self._gate(read_logits, layer))
        # After the edits, so that padding never writes.
        if layer.valid_BT is not None:
            write_BTR, read_BTR = (
                jnp.where(layer.valid_BT[..., None], x, 0.0) for x in (write_BTR, read_BTR)
            )
        scope.observe("mixer.write", write_BTR)
        scope.observe("mixer.read", read_BTR)
        return write_BTR, read_BTR

    def _gate(self, logits_BTR: jax.Array, layer: Layer) -> jax.Array:
        logits_BTR = hide(logits_BTR, self.prototype_dropout, layer.rng, heads=self.heads)
        return gates(logits_BTR, self.routing, heads=self.heads, top_k=self.top_k)

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

        Raises:
          UsageError: there are several heads.
        """
        if self.heads > 1:
            raise UsageError(
                f"prototypes.heads = {self.heads}: predictions are attributed to the prototypes of "
                "models with one head alone"
            )
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
        turns_L2TF = None
        if self.rotary_values:
            place_1T = jnp.arange(T)[None]
            turns_21TF = jnp.stack(tables(place_1T, p["value"].shape[2], self.rotary_theta))
            turns_L2TF = jnp.broadcast_to(turns_21TF[:, 0], (L, 2, *turns_21TF.shape[2:]))
        return FrozenPrototypes(
            pattern_LNTS=jax.vmap(weights)(write_LTR, read_LTR, decay_LR),
            value_LDE=p["value"],
            taps_LCE=taps_LCE,
            output_LED=p["alpha"][:, None, None] * p["out"],
            turns_L2TF=turns_L2TF,
        )

    def _scale(self, decay_R: jax.Array) -> jax.Array:
        """The factor on what a channel holds: N of Eq. 2 discounts the last write once."""
        return jnp.ones_like(decay_R) if self.mass_normalisation else (1.0 - decay_R) / decay_R


def _logits(x_BTD: jax.Array, prototypes_RD: jax.Array, tau: jax.Array) -> jax.Array:
    """Logits of all prototypes, each of whose rows has the width of a head."""
    f32, heads = jnp.float32, x_BTD.shape[2] // prototypes_RD.shape[1]
    if heads == 1:
        logits_BTR = jnp.einsum("BTD,RD->BTR", x_BTD, prototypes_RD, preferred_element_type=f32)
    else:
        x_BTND = x_BTD.reshape(*x_BTD.shape[:2], heads, -1)
        prototypes_NRD = prototypes_RD.reshape(heads, -1, prototypes_RD.shape[1])
        logits_BTNR = jnp.einsum(
            "BTND,NRD->BTNR", x_BTND, prototypes_NRD, preferred_element_type=f32
        )
        logits_BTR = logits_BTNR.reshape(*x_BTD.shape[:2], -1)
    return logits_BTR / (jnp.abs(tau.astype(jnp.float32)) + TAU_FLOOR)


def unit_rows(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Initializer of the prototypes: Gaussian rows of norm 1."""
    rows = jax.random.normal(key, shape, jnp.float32)
    return (rows / jnp.linalg.norm(rows, axis=-1, keepdims=True)).astype(dtype)
