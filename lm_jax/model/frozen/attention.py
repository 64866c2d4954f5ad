"""Attention with its pattern held: stored, or computed again where it is needed.

Patterns of a long prompt are larger than all else together: 26 layers of 8 heads at 6,000 tokens
have 7.5 billion entries. `RecomputedAttention` holds queries and keys instead and forms the rows of
some queries at a time.
"""

from collections.abc import Mapping
import dataclasses
from typing import ClassVar

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from iaj_kernels.attention.rows import softmax
from iaj_kernels.attention.visibility import visibility
from lm_jax.model.config import DecoderConfig
from lm_jax.model.layers import softcap
from lm_jax.model.params import ParamTree

# Queries whose rows are formed at a time.
_QUERIES = 256


class _Maps:
    """What attention does besides its pattern; fields are those of the classes below."""

    value_LDKH: jax.Array
    output_LNHD: jax.Array
    value_bias_LKH: jax.Array | None
    output_bias_LD: jax.Array | None

    def _summed(self, value_XSNH: jax.Array) -> jax.Array:
        """Sums of values `[X, T, N, H]`, weighted by the pattern."""
        raise NotImplementedError

    def _transposed(self, u_XTNH: jax.Array) -> jax.Array:
        """Sums over queries `[X, S, N, H]`, weighted by the pattern."""
        raise NotImplementedError

    def _mass(self) -> jax.Array:
        """Sum of the weights of each query `[N, T]`."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        return self.output_LNHD.shape[-3] * self.output_LNHD.shape[-2]

    def values(self, h_XSD: jax.Array) -> jax.Array:
        return jnp.einsum("XSD,DKH->XSKH", h_XSD, self.value_LDKH)

    def mix(self, value_XSKH: jax.Array) -> jax.Array:
        z_XTNH = self._summed(self._of_heads(value_XSKH))
        return jnp.einsum("XTNH,NHD->XTD", z_XTNH, self.output_LNHD)

    def _of_heads(self, value_XSKH: jax.Array) -> jax.Array:
        """Values `[X, S, N, H]` as the query heads read them."""
        return jnp.repeat(value_XSKH, self.output_LNHD.shape[0] // value_XSKH.shape[2], axis=2)

    def cotangents(self, c_XTD: jax.Array) -> jax.Array:
        return jnp.einsum("XTD,NHD->XTNH", c_XTD, self.output_LNHD)

    def transpose(self, u_XTNH: jax.Array) -> jax.Array:
        w_XSNH = self._transposed(u_XTNH)
        X, S, N, H = w_XSNH.shape
        K = self.value_LDKH.shape[1]
        w_XSKH = w_XSNH.reshape(X, S, K, N // K, H).sum(3)
        return jnp.einsum("XSKH,DKH->XSD", w_XSKH, self.value_LDKH)

    def head_shares(self, value_XSKH: jax.Array, u_XTNH: jax.Array) -> jax.Array:
        return (self._summed(self._of_heads(value_XSKH)) * u_XTNH).sum((1, 3))

    def constant(self, norm_bias_D: jax.Array) -> jax.Array:
        value_KH = jnp.einsum("D,DKH->KH", norm_bias_D, self.value_LDKH)
        if self.value_bias_LKH is not None:
            value_KH = value_KH + self.value_bias_LKH
        groups = self.output_LNHD.shape[0] // value_KH.shape[0]
        value_NH = jnp.repeat(value_KH, groups, axis=0)
        output_TD = jnp.einsum("NT,NH,NHD->TD", self._mass(), value_NH, self.output_LNHD)
        return output_TD if self.output_bias_LD is None else output_TD + self.output_bias_LD[None]


def _products(value_XSKH: jax.Array, u_XTNH: jax.Array) -> jax.Array:
    """Products of values and derivatives `[X, N, T, S]`."""
    X, T, N, H = u_XTNH.shape
    K = value_XSKH.shape[2]
    u_XTKGH = u_XTNH.reshape(X, T, K, N // K, H)
    products = jnp.einsum("XTKGH,XSKH->XKGTS", u_XTKGH, value_XSKH)
    return products.reshape(X, N, T, -1)


@struct.dataclass
class FrozenAttention(_Maps):
    """Attention whose pattern is stored.

    Attributes:
      pattern_LNTS: attention weights, gated where the model is.
      value_LDKH, output_LNHD: weights of values and attention outputs.
      value_bias_LKH, output_bias_LD: biases of the two; None without any.
    """

    pattern_LNTS: jax.Array
    value_LDKH: jax.Array
    output_LNHD: jax.Array
    value_bias_LKH: jax.Array | None = None
    output_bias_LD: jax.Array | None = None

    @property
    def pattern_shape(self) -> tuple[int, ...]:
        return self.pattern_LNTS.shape

    def first(self, positions: int) -> "FrozenAttention":
        pattern_LNTS = self.pattern_LNTS[..., :positions, :positions]
        return dataclasses.replace(self, pattern_LNTS=pattern_LNTS)

    def _summed(self, value_XSNH: jax.Array) -> jax.Array:
        return jnp.einsum("NTS,XSNH->XTNH", self.pattern_LNTS, value_XSNH)

    def _transposed(self, u_XTNH: jax.Array) -> jax.Array:
        return jnp.einsum("XTNH,NTS->XSNH", u_XTNH, self.pattern_LNTS)

    def _mass(self) -> jax.Array:
        # Rows of gated patterns need not sum to one.
        return self.pattern_LNTS.sum(-1)

    def shares(self, value_XSKH: jax.Array, u_XTNH: jax.Array) -> jax.Array:
        return _products(value_XSKH, u_XTNH) * self.pattern_LNTS[None]

    def pair_shares(
        self, value_XSKH: jax.Array, u_XTNH: jax.Array, pairs_3P: jax.Array
    ) -> jax.Array:
        """`shares` `[X, P]` of some entries alone, by head, query and key position."""
        head_P, query_P, key_P = pairs_3P
        groups = u_XTNH.shape[2] // value_XSKH.shape[2]
        value_XPH = value_XSKH[:, key_P, head_P // groups]
        product_XP = (u_XTNH[:, query_P, head_P] * value_XPH).sum(-1)
        return product_XP * self.pattern_LNTS[head_P, query_P, key_P][None]


@struct.dataclass
class RecomputedAttention(_Maps):
    """Causal softmax attention whose pattern is computed again from queries and keys.

    Attributes:
      query_LTNH, key_LSKH: queries and keys as scored.
      value_LDKH, output_LNHD: weights of values and attention outputs.
      value_bias_LKH, output_bias_LD: biases of the two; None without any.
      window_L: keys that a query sees, itself included; None where all layers see all.
      scale: factor of the scores.
      cap: soft cap of the scores, or None.
    """

    query_LTNH: jax.Array
    key_LSKH: jax.Array
    value_LDKH: jax.Array
    output_LNHD: jax.Array
    value_bias_LKH: jax.Array | None
    output_bias_LD: jax.Array | None
    window_L: jax.Array | None
    scale: float = struct.field(pytree_node=False)
    cap: float | None = struct.field(pytree_node=False)

    @property
    def pattern_shape(self) -> tuple[int, ...]:
        *layers, T, N, _ = self.query_LTNH.shape
        return (*layers, N, T, T)

    def first(self, positions: int) -> "RecomputedAttention":
        query_LTNH, key_LSKH = (x[..., :positions, :, :] for x in (self.query_LTNH, self.key_LSKH))
        return dataclasses.replace(self, query_LTNH=query_LTNH, key_LSKH=key_LSKH)

    def _summed(self, value_XSNH: jax.Array) -> jax.Array:
        def some(_: None, each: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
            return None, jnp.einsum("NCS,XSNH->XCNH", self._pattern(*each), value_XSNH)

        _, z_ZXCNH = jax.lax.scan(some, None, self._queries())
        z_XZCNH = z_ZXCNH.swapaxes(0, 1)
        X, _, _, N, H = z_XZCNH.shape
        return z_XZCNH.reshape(X, -1, N, H)[:, : self.query_LTNH.shape[0]]

    def _transposed(self, u_XTNH: jax.Array) -> jax.Array:
        def some(
            w_XSNH: jax.Array, each: tuple[jax.Array, tuple[jax.Array, jax.Array]]
        ) -> tuple[jax.Array, None]:
            u_XCNH, queries = each
            return w_XSNH + jnp.einsum("XCNH,NCS->XSNH", u_XCNH, self._pattern(*queries)), None

        parts = _parts(u_XTNH.swapaxes(0, 1)).swapaxes(1, 2), self._queries()
        return jax.lax.scan(some, jnp.zeros_like(u_XTNH), parts)[0]

    def _mass(self) -> jax.Array:
        T, N, _ = self.query_LTNH.shape
        return jnp.ones((N, T), self.query_LTNH.dtype)

    def shares(self, value_XSKH: jax.Array, u_XTNH: jax.Array) -> jax.Array:
        _, pattern_ZNCS = jax.lax.scan(
            lambda _, each: (None, self._pattern(*each)), None, self._queries()
        )
        N, S = pattern_ZNCS.shape[1], pattern_ZNCS.shape[3]
        pattern_NTS = pattern_ZNCS.swapaxes(0, 1).reshape(N, -1, S)[:, :S]
        return _products(value_XSKH, u_XTNH) * pattern_NTS[None]

    def _queries(self) -> tuple[jax.Array, jax.Array]:
        """Queries in parts of C, filled up by zeros, and the first place of each part."""
        query_ZCNH = _parts(self.query_LTNH)
        return query_ZCNH, jnp.arange(len(query_ZCNH)) * query_ZCNH.shape[1]

    def _pattern(self, query_CNH: jax.Array, start: jax.Array) -> jax.Array:
        """Weights `[N, C, S]` of some queries of one layer."""
        C, N, H = query_CNH.shape
        S, K, _ = self.key_LSKH.shape
        query_CKGH = query_CNH.reshape(C, K, N // K, H)
        scores_KGCS = jnp.einsum("CKGH,SKH->KGCS", query_CKGH, self.key_LSKH)
        scores_NCS = softcap(scores_KGCS.reshape(N, C, S) * self.scale, self.cap)
        visible = visibility(
            "frozen attention",
            *(1, C, S),
            causal=True,
            window=self.window_L,
            segment_ids=None,
            start=start,
        )
        return softmax(jnp.where(visible.mask_BTS(C, S), scores_NCS, -jnp.inf))


def _parts(x_TNH: jax.Array) -> jax.Array:
    """Positions in parts `[Z, C, ...]`, filled up by zeros."""
    T = len(x_TNH)
    C = min(T, _QUERIES)
    more = [(0, -T % C)] + [(0, 0)] * (x_TNH.ndim - 1)
    return jnp.pad(x_TNH, more).reshape(-1, C, *x_TNH.shape[1:])


@dataclasses.dataclass(frozen=True)
class Recomputing:
    """A `FreezableMixer` for causal softmax attention: patterns are computed again.

    Attributes:
      cfg: configuration of the decoder.
    """

    cfg: DecoderConfig
    frozen_sites: ClassVar[tuple[str, ...]] = ("attn.rot_q", "attn.rot_k")

    def freeze(self, p: ParamTree, records: Mapping[str, jax.Array]) -> RecomputedAttention:
        """Attention of one prompt.

        Args:
          p: parameters of all layers.
          records: the frozen sites of one prompt, without the axis B.
        """
        windows = self.cfg.layer_windows
        largest = np.iinfo(np.int32).max
        window_L = np.array([w or largest for w in windows], np.int32)
        return RecomputedAttention(
            query_LTNH=records["attn.rot_q"],
            key_LSKH=records["attn.rot_k"],
            value_LDKH=p["v"],
            output_LNHD=p["o"],
            value_bias_LKH=p.get("v_bias"),
            output_bias_LD=p.get("o_bias"),
            window_L=jnp.asarray(window_L) if any(windows) else None,
            scale=self.cfg.scale,
            cap=self.cfg.score_softcap,
        )
