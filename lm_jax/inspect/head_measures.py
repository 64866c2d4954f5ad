"""What each attention head does on a text: where it looks, how much it writes, what it copies.

    records = model.forward(tokens_1T, record=dict.fromkeys(sites(cfg), keep)).records
    found = measure(params, cfg, records, tokens_T, count)

Measures are sums over queries, so that texts can be added up; the first token has nowhere else to
look and is left out:

    first        weight on the first token
    previous     weight on the token before, which for the second token is the first
    self         weight on the token itself
    duplicate    weight on earlier places of the same token
    induction    weight on what followed those places
    entropy      entropy of the weights over that of equal ones on the keys that the layer sees
    written      norm of what the head adds to the residual stream over the norm of the stream

Weights are those behind the gates of a sparse model, which need not sum to one; entropy is of the
weights divided by their sum, 0 where all gates are closed. `equal` has what the first five would be
of a head that gives all keys that it sees one weight.
"""

from collections.abc import Mapping
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.model.config import DecoderConfig
from lm_jax.model.frozen import centre, norm_weight
from lm_jax.model.layers import unembedding
from lm_jax.model.params import ParamTree

WEIGHTS = ("first", "previous", "self", "duplicate", "induction")
MEASURES = (*WEIGHTS, "entropy", "written")
# Rows of the vocabulary at a time.
_ROWS = 8_192


def sites(cfg: DecoderConfig) -> tuple[str, ...]:
    """The sites that `measure` reads of a forward pass."""
    after = ("ln1_post.scale",) if "ln1_post" in cfg.norm_names else ()
    return ("attn.pattern", "attn.z", "resid_pre", *after)


@struct.dataclass
class HeadMeasures:
    """One text by head.

    Attributes:
      sums: sums over the queries by name of a measure, each `[L, N]`.
      equal: the same of equal weights, by name in `WEIGHTS`, each `[L]`.
      queries: number of queries.
      repeated: number of queries whose token was there before, over which duplicate and induction
        are summed.
      query_LN: query at which the head writes most.
      norm_LN: norm of what it adds there over that of the stream.
      weight_LNS: weights of the keys there.
      added_LND: vector that it adds to the stream there.
    """

    sums: Mapping[str, jax.Array]
    equal: Mapping[str, jax.Array]
    queries: jax.Array
    repeated: jax.Array
    query_LN: jax.Array
    norm_LN: jax.Array
    weight_LNS: jax.Array
    added_LND: jax.Array


def measure(
    params: ParamTree,
    cfg: DecoderConfig,
    records: Mapping[str, jax.Array],
    tokens_T: jax.Array,
    count: jax.Array | int,
) -> HeadMeasures:
    """The measures of one text.

    Args:
      params: parameters of the decoder.
      cfg: configuration of the decoder.
      records: `sites` of a forward pass on the text alone, with its axis B of length 1.
      tokens_T: ids, filled up at the end.
      count: number of ids that count.
    """
    pattern_LNTS, z_LTNH, stream_LTD, *after = (
        records[name][:, 0].astype(jnp.float32) for name in sites(cfg)
    )
    T = len(tokens_T)
    at_T = jnp.arange(T)
    counted_T = (at_T >= 1) & (at_T < count)
    same_TS = (tokens_T[:, None] == tokens_T[None]) & (at_T[None] < at_T[:, None])
    # Places that follow an earlier one of the query's token, of which the query may be one.
    after_TS = jnp.pad(same_TS[:, :-1], ((0, 0), (1, 0)))
    seen_TS = {
        "first": jnp.zeros((T, T), bool).at[:, 0].set(True),
        "previous": jnp.eye(T, k=-1, dtype=bool),
        "self": jnp.eye(T, dtype=bool),
        "duplicate": same_TS,
        "induction": after_TS,
    }
    sums = {
        name: jnp.einsum("LNTS,TS,T->LN", pattern_LNTS, mask_TS, counted_T)
        for name, mask_TS in seen_TS.items()
    }
    window_L11 = np.array([w or T for w in cfg.layer_windows])[:, None, None]
    distance_1TS = (at_T[:, None] - at_T[None])[None]
    visible_LTS = (distance_1TS >= 0) & (distance_1TS < window_L11)
    keys_LT = visible_LTS.sum(-1)
    equal = {
        name: jnp.einsum("LTS,TS,LT->L", visible_LTS, mask_TS, counted_T[None] / keys_LT)
        for name, mask_TS in seen_TS.items()
    }
    share_LNT = _entropy(pattern_LNTS) / jnp.log(jnp.maximum(keys_LT, 2))[:, None]
    sums["entropy"] = jnp.einsum("LNT,T->LN", share_LNT, counted_T)
    output_LNHD = params["blocks"]["mixer"]["o"].astype(jnp.float32)
    divisor_LT = jnp.ones(stream_LTD.shape[:2])
    if after:
        # What a head adds passes a norm, whose divisor is of all heads together.
        output_LNHD = centre(output_LNHD, cfg.norm == "layer")
        weight = norm_weight(params["blocks"].get("ln1_post"), cfg)
        output_LNHD *= jnp.broadcast_to(weight, stream_LTD[:, 0].shape)[:, None, None]
        divisor_LT = after[0][..., 0]
    squares_LNHG = jnp.einsum("LNHD,LNGD->LNHG", output_LNHD, output_LNHD)
    norm_LNT = jnp.sqrt(
        jnp.maximum(jnp.einsum("LTNH,LNHG,LTNG->LNT", z_LTNH, squares_LNHG, z_LTNH), 0.0)
    )
    # Padding may be a token whose stream is 0.
    size_LT = jnp.where(counted_T[None], divisor_LT * jnp.linalg.norm(stream_LTD, axis=-1), 1.0)
    norm_LNT = jnp.where(counted_T[None, None], norm_LNT / size_LT[:, None], 0.0)
    sums["written"] = jnp.einsum("LNT,T->LN", norm_LNT, counted_T)
    best_LN = jnp.where(counted_T[None, None], norm_LNT, -1.0).argmax(-1)
    layer_L1, head_1N = jnp.arange(len(best_LN))[:, None], jnp.arange(best_LN.shape[1])[None]
    return HeadMeasures(
        sums=sums,
        equal=equal,
        queries=counted_T.sum(),
        repeated=(same_TS.any(1) & counted_T).sum(),
        query_LN=best_LN,
        norm_LN=norm_LNT[layer_L1, head_1N, best_LN],
        weight_LNS=pattern_LNTS[layer_L1, head_1N, best_LN],
        added_LND=jnp.einsum("LNH,LNHD->LND", z_LTNH[layer_L1, best_LN, head_1N], output_LNHD)
        / divisor_LT[layer_L1, best_LN][..., None],
    )


def _entropy(pattern_LNTS: jax.Array) -> jax.Array:
    """Entropy of the weights of each query, divided by their sum; 0 without any."""
    total = pattern_LNTS.sum(-1, keepdims=True)
    share = pattern_LNTS / jnp.where(total > 0, total, 1.0)
    return -(share * jnp.log(jnp.where(share > 0, share, 1.0))).sum(-1)


def promoted(
    params: ParamTree,
    cfg: DecoderConfig,
    added_LND: jax.Array,
    count: int,
    *,
    tokens: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Ids that additions to the stream raise most, and those that they lower most `[L, N, count]`.

    The last norm's weights are applied, and its mean taken out where it takes it out; its divisor
    changes no order.

    Args:
      params: parameters of the decoder.
      cfg: configuration of the decoder.
      added_LND: the additions.
      count: number of ids.
      tokens: number of the first rows of the embedding that are tokens; None for all.
    """
    weight_VD = unembedding(params, cfg).astype(jnp.float32)[:tokens]
    added_LND = centre(added_LND, cfg.norm == "layer")
    added_LND = added_LND * norm_weight(params.get("final"), cfg)[None, None]

    def of_layer(added_ND: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_NV = added_ND @ weight_VD.T
        return jax.lax.top_k(logits_NV, count)[1], jax.lax.top_k(-logits_NV, count)[1]

    return jax.lax.map(of_layer, added_LND)


def copying(params: ParamTree, cfg: DecoderConfig) -> np.ndarray:
    """Copying score of each head `[L, N]`, from -1 to 1 (Elhage et al. 2021).

    Sum of the eigenvalues of the circuit from tokens to logits through values and output, over the
    sum of their absolute values: 1 for a head that raises the tokens that it looks at. Weights of
    norms are in it, their divisors and biases are not.
    """
    blocks: Any = params["blocks"]
    embed_VD, weight_VD = params["embed"]["tokens"], unembedding(params, cfg)
    square_DD = np.zeros((cfg.hidden_size, cfg.hidden_size))
    for start in range(0, len(embed_VD), _ROWS):
        some = slice(start, start + _ROWS)
        square_DD += np.asarray(weight_VD[some], np.float64).T @ np.asarray(
            embed_VD[some], np.float64
        )
    if "ln1" in cfg.norm_names:
        square_DD = _centred(square_DD, cfg)

    before, final_D = (
        np.asarray(norm_weight(norm, cfg), np.float64)
        for norm in (blocks.get("ln1"), params.get("final"))
    )
    before_LD = np.broadcast_to(before, (cfg.num_layers, cfg.hidden_size))
    after_LD = np.broadcast_to(
        np.asarray(norm_weight(blocks.get("ln1_post"), cfg), np.float64), before_LD.shape
    )
    value_LDKH, output_LNHD = (np.asarray(blocks["mixer"][name], np.float64) for name in "vo")
    groups = cfg.num_heads // cfg.num_kv_heads
    scores = np.zeros((cfg.num_layers, cfg.num_heads))
    for layer, head in np.ndindex(scores.shape):
        value_DH = value_LDKH[layer, :, head // groups]
        output_HD = output_LNHD[layer, head]
        if "ln1_post" in cfg.norm_names:
            output_HD = _centred(output_HD, cfg) * after_LD[layer]
        output_HD = _centred(output_HD, cfg) * final_D
        small_HH = output_HD @ square_DD @ (before_LD[layer][:, None] * value_DH)
        values = np.linalg.eigvals(small_HH)
        total = np.abs(values).sum()
        scores[layer, head] = values.real.sum() / total if total else 0.0
    return scores


def _centred(x_XD: np.ndarray, cfg: DecoderConfig) -> np.ndarray:
    """Rows minus their means where norms take the mean out."""
    return x_XD - x_XD.mean(-1, keepdims=True) if cfg.norm == "layer" else x_XD
